"""Switches of the linear family do what they say, spelled out in plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mixers.deltanet import DeltaNetConfig
from mixers.gated_deltanet import GatedDeltaNetConfig
from mixers.gla import GatedLinearAttentionConfig
from mixers.linear import LinearConfig
from mixers.mamba2 import Mamba2Config
from mixers.mamba2_native import Mamba2NativeConfig
from mixers.mesa import MesaConfig
from mixers.retnet import RetNetConfig
from mixers.xlstm import XlstmConfig
from runs.identity import code_hashes
from tests.contract.cases import close, config, inputs

SIZE = {"d_model": 16, "n_heads": 2, "head_dim": 8}
BARE = {**SIZE, "conv_on": "none", "head_norm": "none"}


def layer(made, seed=0):
    """Random weights in float64."""
    built = made.build(0, 1).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return built


def projected(built, x):
    """q, k, v as (B,T,H,.) of a layer without convolution, with unit q and k if its config says so."""
    q, k, v = (y.unflatten(-1, (2, 8)) for y in built.qkv(x).split(16, dim=-1))
    if built.config.qk_norm == "l2":
        q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
    return q, k, v


def test_elu_and_normaliser_are_the_originals():
    built = layer(LinearConfig(**BARE, feature_map="elu1", normaliser=True))
    x = inputs(2, 12)
    q, k, v = projected(built, x)
    weights = torch.einsum("bthk,bshk->bhts", F.elu(q) + 1, F.elu(k) + 1).tril()
    o = torch.einsum("bhts,bshv->bthv", weights / weights.sum(-1, keepdim=True), v)
    close(built(x)[0], built.out(o.flatten(2)), 1e-12)


def test_plain_linear_attention_is_a_masked_product():
    built = layer(LinearConfig(**BARE))
    x = inputs(2, 12)
    q, k, v = projected(built, x)
    o = torch.einsum("bhts,bshv->bthv", torch.einsum("bthk,bshk->bhts", q, k).tril() * 8**-0.5, v)
    close(built(x)[0], built.out(o.flatten(2)), 1e-12)


def test_negative_eigenvalues_double_beta():
    """With beta = 2 a key is reflected: what was written for it is turned round, not erased."""
    x = inputs(1, 1).expand(-1, 3, -1)
    built = layer(DeltaNetConfig(**BARE, negative_eigenvalues=True))
    with torch.no_grad():
        built.gate.weight.zero_()
        built.gate.bias.fill_(50.0)
    q, k, v = projected(built, x)
    expected = []
    state = torch.zeros(2, 8, 8, dtype=x.dtype)
    for t in range(3):
        error = v[0, t] - (k[0, t][:, None] @ state)[:, 0]
        state = state + 2 * k[0, t][:, :, None] * error[:, None]
        expected.append(((q[0, t][:, None] @ state)[:, 0] * 8**-0.5).flatten())
    close(built(x)[0][0], built.out(torch.stack(expected)), 1e-9)


def test_rotary_positions_are_relative():
    """RetNet by its parallel form, with angles of t - s and decays gamma^(t - s)."""
    built = layer(RetNetConfig(**{**SIZE, "expand_v": 1.0, "head_norm": "none", "output_gate": "none"}))
    x = inputs(1, 20)
    q, k, v = projected(built, x)
    angle = torch.arange(20, dtype=x.dtype)[:, None] * 10_000.0 ** (-torch.arange(4, dtype=x.dtype) / 4)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    q, k = (torch.complex(y[0, ..., :4], y[0, ..., 4:]) * turn for y in (q, k))
    scores = torch.einsum("thk,shk->hts", q, k.conj()).real
    gap = (torch.arange(20)[:, None] - torch.arange(20)).double()
    gamma = 1 - 2.0 ** -(5 + torch.arange(2, dtype=x.dtype))
    weights = (scores * gamma[:, None, None] ** gap * 8**-0.5).tril()
    o = torch.einsum("hts,shv->thv", weights, v[0])
    close(built(x)[0][0], built.out(o.flatten(1)), 1e-12)


def test_matched_rules_are_the_table_of_the_comparison():
    """Mamba2 decays, GLA also weighs its input: token by token, by hand."""
    x = inputs(1, 6)
    for made in (Mamba2Config(**BARE), GatedLinearAttentionConfig(**BARE)):
        built = layer(made)
        q, k, v = projected(built, x)
        gates = built.gate(x).unflatten(-1, (made.gates, 2)).sigmoid()
        state, rows = torch.zeros(2, 8, 8, dtype=x.dtype), []
        for t in range(6):
            beta = gates[0, t, 1] if made.gates == 2 else torch.ones(2, dtype=x.dtype)
            state = gates[0, t, 0][:, None, None] * state + (beta[:, None] * k[0, t])[:, :, None] * v[0, t][:, None]
            rows.append(((q[0, t][:, None] @ state)[:, 0] * 8**-0.5).flatten())
        close(built(x)[0][0], built.out(torch.stack(rows)), 1e-12)


SWITCHES = {
    LinearConfig: [{"feature_map": "elu1"}, {"expand_k": 2.0}, {"expand_v": 0.5}, {"conv_on": "qkv"}],
    Mamba2Config: [{"output_gate": "silu"}, {"output_gate": "sigmoid"}, {"positions": "rotary"}],
    GatedLinearAttentionConfig: [{"decay": "vector"}, {"head_norm": "layer"}, {"head_norm": "none"}],
    DeltaNetConfig: [{"negative_eigenvalues": True}, {"conv_on": "none"}, {"conv_width": 2}],
    GatedDeltaNetConfig: [{"decay": "mamba"}, {"negative_eigenvalues": True}],
    XlstmConfig: [{"gate_cap": 1.0}, {"qk_norm": "l2"}],
    Mamba2NativeConfig: [{"n_groups": 2}, {"expand": 1.0}],
}


@pytest.mark.parametrize(
    "made, change", [(made, change) for made, changes in SWITCHES.items() for change in changes], ids=str
)
def test_every_switch_changes_the_function_and_is_counted(made, change):
    size = {**SIZE, "d_state": 8, "ssm_head_dim": 8} if made is Mamba2NativeConfig else SIZE
    x = inputs(2, 20)
    base, changed = made(**size), made(**{**size, **change})
    changed.check("mixer")
    results = [layer(c)(x)[0] for c in (base, changed)]
    assert not torch.allclose(*results, rtol=1e-3, atol=1e-4)
    assert sum(p.numel() for p in layer(changed).parameters()) == changed.n_parameters()


@pytest.mark.parametrize(
    "made, change, key",
    [
        (LinearConfig, {"normaliser": True}, "normaliser"),
        (LinearConfig, {"feature_map": "relu"}, "feature_map"),
        (LinearConfig, {"positions": "learned"}, "positions"),
        (LinearConfig, {"expand_k": 0.125, "positions": "rotary"}, "positions"),
        (Mamba2Config, {"output_gate": "tanh"}, "output_gate"),
        (GatedLinearAttentionConfig, {"decay": "matrix"}, "decay"),
        (GatedLinearAttentionConfig, {"gate_temperature": 0.0}, "gate_temperature"),
        (DeltaNetConfig, {"qk_norm": "none"}, "qk_norm"),
        (RetNetConfig, {"fastest_power": 0.0}, "fastest_power"),
        (MesaConfig, {"head_norm": "batch"}, "head_norm"),
        (Mamba2NativeConfig, {"ssm_head_dim": 7}, "ssm_head_dim"),
        (Mamba2NativeConfig, {"ssm_head_dim": 16, "n_groups": 3}, "n_groups"),
    ],
    ids=str,
)
def test_bad_values_are_named(made, change, key):
    with pytest.raises(ValueError, match=f"mixer.{key}="):
        made(**{**SIZE, **change}).check("mixer")


def test_code_hash_of_a_hybrid_follows_its_parts():
    hybrid = config("hawk_mesa").mixer
    assert hybrid.kinds() == {"hybrid", "hawk", "mesa"}
    assert code_hashes(*hybrid.kinds())["mixer"] != code_hashes("hybrid", "hawk")["mixer"]
