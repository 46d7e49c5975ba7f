"""Native layers against other people's plain-torch layers with the same weights: second opinions on the whole layer."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from evals.peers import fla_naive
from mixers.deltanet import DeltaNetConfig
from mixers.gated_deltanet import GatedDeltaNetConfig
from mixers.gla import GatedLinearAttentionConfig
from mixers.linear import LinearConfig
from mixers.mamba2_native import Mamba2NativeConfig
from mixers.retnet import RetNetConfig
from tests.contract.cases import close

transformers = pytest.importorskip("transformers")
no_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is not None, reason="transformers takes fla's CUDA kernels where triton is"
)


def randomised(layer, seed=0):
    """Weights of unit scale everywhere, so that every parameter matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "log" in name:  # rates between e^-1 and e^1
                parameter.uniform_(-1, 1, generator=generator)
            else:
                fan = parameter.shape[-1] if parameter.ndim > 1 else 1
                parameter.normal_(0, fan**-0.5, generator=generator)
    return layer


def x(width, steps=70):
    return torch.randn(2, steps, width, generator=torch.Generator().manual_seed(1))


def taps(conv_weight):
    """(D,1,J) with the oldest tap first, as ours (J,D)."""
    return conv_weight[:, 0].flip(1).T


@no_triton
@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2(groups):
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Config, Mamba2Mixer

    theirs = randomised(
        Mamba2Mixer(
            Mamba2Config(
                hidden_size=32, num_heads=4, head_dim=16, state_size=8, n_groups=groups, expand=2, chunk_size=16
            ),
            layer_idx=0,
        )
    )
    ours = Mamba2NativeConfig(d_model=32, n_heads=2, head_dim=16, d_state=8, ssm_head_dim=16, n_groups=groups).build(
        0, 1
    )
    with torch.no_grad():
        maps, step = theirs.in_proj.weight.split((64 + 64 + 2 * groups * 8, 4))
        ours.maps.weight.copy_(maps)
        ours.step.weight.copy_(step)
        ours.conv.taps_JD.copy_(taps(theirs.conv1d.weight))
        ours.conv.bias_D.copy_(theirs.conv1d.bias)
        ours.a_log_H.copy_(theirs.A_log)
        ours.step_bias_H.copy_(theirs.dt_bias)
        ours.skip_H.copy_(theirs.D)
        ours.norm_gain_D.copy_(theirs.norm.weight)
        ours.out.weight.copy_(theirs.out_proj.weight)
    close(ours(x(32))[0], theirs(x(32)), 1e-5)


@no_triton
def test_gated_deltanet():
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextConfig, Qwen3NextGatedDeltaNet

    config = Qwen3NextConfig(
        hidden_size=32,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=12,
        linear_value_head_dim=24,
        num_hidden_layers=2,
        rms_norm_eps=1e-5,
    )
    theirs = randomised(Qwen3NextGatedDeltaNet(config, layer_idx=0))
    ours = GatedDeltaNetConfig(
        d_model=32,
        n_heads=2,
        head_dim=16,
        expand_k=0.75,
        expand_v=1.5,
        conv_on="qkv",
        output_gate="silu",
        decay="mamba",
    ).build(0, 1)
    with torch.no_grad():
        by_head = theirs.in_proj_qkvz.weight.view(2, 12 + 12 + 24 + 24, 32)
        q, k, v, z = (part.flatten(0, 1) for part in by_head.split((12, 12, 24, 24), dim=1))
        ours.qkv.weight.copy_(torch.cat((q, k, v)))
        ours.out_gate.weight.copy_(z)
        beta, decay = theirs.in_proj_ba.weight.view(2, 2, 32).unbind(1)
        ours.gate.weight.copy_(torch.cat((decay, beta)))
        ours.conv.taps_JD.copy_(taps(theirs.conv1d.weight))
        ours.a_log_H.copy_(theirs.A_log)
        ours.dt_bias_H.copy_(theirs.dt_bias)
        ours.norm.weight.copy_(theirs.norm.weight)
        ours.out.weight.copy_(theirs.out_proj.weight)
    close(ours(x(32))[0], theirs(x(32)), 1e-5)


def heads(tensor, count):
    return tensor.unflatten(-1, (count, -1))


def head_norm(o, gain):
    return o * (o.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain


FRAME = {"d_model": 32, "n_heads": 2, "head_dim": 16}


def projections(layer, steps=64):
    """The input, and q, k, v of a layer without convolution as heads."""
    c = layer.config
    keys = c.n_heads * c.key_dim
    inputs = x(32, steps)
    q, k, v = torch.nn.functional.linear(inputs, layer.qkv.weight).split((keys, keys, c.n_heads * c.value_dim), dim=-1)
    return inputs, *(heads(y, 2) for y in (q, k, v))


def finished(layer, inputs, o):
    """Norm, output gate and output map, spelled out."""
    o = head_norm(o, layer.norm.weight).flatten(2)
    if layer.out_gate is not None:
        gate = inputs @ layer.out_gate.weight.T
        o = o * gate * gate.sigmoid()
    return o @ layer.out.weight.T


def naive(module):
    loaded = fla_naive(module)
    if loaded is None:
        pytest.skip("fla-core is not installed")
    return loaded


def test_gla_with_vector_decay_against_flas_recurrence():
    config = GatedLinearAttentionConfig(
        **FRAME, expand_k=0.5, conv_on="none", qk_norm="none", output_gate="silu", decay="vector"
    )
    layer = randomised(config.build(0, 1))
    inputs, q, k, v = projections(layer)
    gates = inputs @ layer.gate_down.weight.T @ layer.gate_up.weight.T + layer.gate_up.bias
    g = heads(torch.nn.functional.logsigmoid(gates) / 16, 2)
    o, _ = naive("gla").naive_recurrent_gla(q, k, v, g)
    close(layer(inputs)[0], finished(layer, inputs, o), 1e-5)


def test_retnet_against_flas_parallel_form():
    config = RetNetConfig(**FRAME, expand_v=2.0, positions="none")
    layer = randomised(config.build(0, 1))
    inputs, q, k, v = projections(layer)
    o = naive("retention").naive_retention(*(y.transpose(1, 2) for y in (q, k, v)))
    o = (o[0] if isinstance(o, tuple) else o).transpose(1, 2)
    close(layer(inputs)[0], finished(layer, inputs, o), 1e-5)


def test_linear_attention_against_flas_chunks():
    layer = randomised(LinearConfig(**FRAME, conv_on="none", qk_norm="none").build(0, 1))
    inputs, q, k, v = projections(layer)
    o = naive("linear_attn").naive_chunk_linear_attn(q, k, v, normalize=False)
    close(layer(inputs)[0], finished(layer, inputs, o[0] if isinstance(o, tuple) else o), 1e-5)


def test_deltanet_against_flas_recurrence():
    layer = randomised(DeltaNetConfig(**FRAME, conv_on="none", beta_bias=None).build(0, 1))
    inputs, q, k, v = projections(layer)
    q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
    beta = (inputs @ layer.gate.weight.T).sigmoid()
    o, _ = naive("delta_rule").delta_rule_recurrence(*(y.transpose(1, 2) for y in (q, k, v, beta)))
    close(layer(inputs)[0], finished(layer, inputs, o.transpose(1, 2)), 1e-5)
