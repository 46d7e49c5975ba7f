"""Hawk equals the recurrent block of transformers' RecurrentGemma, and what its config promises."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mixers.base import Context
from mixers.hawk import STEEPEST, Hawk, HawkConfig, _BoundedSqrt
from tests.ops.oracles import assert_close

WIDTHS = {"d_model": 16, "n_heads": 2, "head_dim": 8}


def layer(seed: int = 0, **fields) -> Hawk:
    """A layer whose every parameter is drawn, biases too."""
    built = HawkConfig(**WIDTHS, **fields).build(0, 2).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(0, 0.4, generator=generator)
        built.lambda_D.sub_(3.0)
    return built


def peer_of(hawk: Hawk):
    """The reference block with the layer's weights."""
    modeling = pytest.importorskip("transformers.models.recurrent_gemma.modeling_recurrent_gemma")
    c = hawk.config
    config = modeling.RecurrentGemmaConfig(
        hidden_size=c.d_model, lru_width=c.width, num_attention_heads=c.n_heads, conv1d_width=c.conv_width
    )
    peer = modeling.RecurrentGemmaRecurrentBlock(config, 0).double()
    gate, through = hawk.branches.weight.chunk(2), hawk.branches.bias.chunk(2)
    recurrence, into = hawk.gates_HKG.chunk(2, dim=-1)
    copies = {
        "linear_y.weight": gate[0],
        "linear_x.weight": gate[1],
        "linear_y.bias": through[0],
        "linear_x.bias": through[1],
        "linear_out.weight": hawk.out.weight,
        "linear_out.bias": hawk.out.bias,
        "conv_1d.weight": hawk.conv.taps_JD.flip(0).T[:, None],
        "conv_1d.bias": hawk.conv.bias_D,
        "rg_lru.recurrent_param": hawk.lambda_D,
        "rg_lru.recurrent_gate_weight": recurrence,
        "rg_lru.recurrent_gate_bias": hawk.recurrence_bias_D.view(c.n_heads, -1),
        "rg_lru.input_gate_weight": into,
        "rg_lru.input_gate_bias": hawk.input_bias_D.view(c.n_heads, -1),
    }
    peer.load_state_dict(copies)
    return peer


def inputs(steps: int, seed: int = 1) -> Tensor:
    return torch.randn(2, steps, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("expand", [1.25, 1.0])
def test_equals_the_reference_block(expand):
    hawk, x = layer(expand=expand), inputs(21)
    peer, positions = peer_of(hawk), torch.arange(21)[None].expand(2, -1)
    results = []
    for form in (lambda x: peer(x, positions, None, use_cache=False)[0], lambda x: hawk(x)[0]):
        leaf = x.clone().requires_grad_()
        y = form(leaf)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaf)])
    # the reference keeps its state in float32
    assert_close(results[1], results[0], 2e-6, "y dx")


def test_equals_the_reference_recurrence_at_document_borders():
    hawk, u = layer(), torch.randn(2, 12, 20, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0]])
    log_a, into = hawk._gated(u, positions == 0)
    segments = (positions == 0).long().cumsum(1)
    from mixers.ops.scan import linear_scan

    actual, _ = linear_scan(log_a, into, segment_ids=segments)
    assert_close([actual], [peer_of(hawk).rg_lru(u, positions)], 2e-6, "h")


@pytest.mark.parametrize("cut", [1, 7])
def test_a_split_does_not_make_a_first_token(cut):
    """The factor of the first token is 1; the first token of a later call is an ordinary one."""
    hawk, x = layer(), inputs(20)
    state, parts = hawk.init_state(2, 20, torch.device("cpu"), torch.float64), []
    for part in (x[:, :cut], x[:, cut:]):
        y, state = hawk(part, state)
        parts.append(y)
    assert_close([torch.cat(parts, dim=1)], [hawk(x)[0]], 1e-12, "y")
    again = hawk(x[:, cut:])[0]
    assert not torch.allclose(again[:, 0], parts[1][:, 0])
    fresh = Context(segment_ids=torch.tensor([[0] * cut + [1] * (20 - cut)] * 2))
    assert_close([hawk(x, None, fresh)[0][:, cut:]], [again], 1e-12, "y")


@pytest.mark.parametrize("decay_init, power", [("code", 1.0), ("paper", 8.0)])
def test_decays_start_in_their_range(decay_init, power):
    hawk = HawkConfig(d_model=1024, n_heads=8, head_dim=128, decay_init=decay_init).build(0, 1)
    hawk.init_parameters(torch.Generator().manual_seed(0))
    decay = torch.exp(-power * F.softplus(hawk.lambda_D.double()))
    assert 0.9 <= decay.min() < 0.91 and 0.998 < decay.max() <= 0.999
    assert decay.square().mean().item() == pytest.approx((0.9**2 + 0.999**2) / 2, abs=3e-3)


def test_square_root_has_a_bounded_derivative():
    x = torch.tensor([0.0, 1e-12, 0.25, 1.0], dtype=torch.float64, requires_grad=True)
    y = _BoundedSqrt.apply(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, x.sqrt())
    assert dx.tolist() == pytest.approx([STEEPEST, STEEPEST, 1.0, 0.5])


def test_parameters_are_close_to_four_squares_of_the_width():
    """3.75 d^2 of maps and 3.125 d^2 / heads of gates (Hawk as MesaNet matches it)."""
    d, heads = 1024, 8
    config = HawkConfig(d_model=d, n_heads=heads, head_dim=128)
    width = 1.25 * d
    vectors = 2 * width + d + 5 * width + 2 * width + width
    assert config.n_parameters() == 3.75 * d**2 + 3.125 * d**2 / heads + vectors
    assert config.n_parameters() / d**2 == pytest.approx(4.14, abs=0.02)
    assert math.isclose(config.build(0, 1).state_bytes(2048, torch.float32), 4 * 4 * width)


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"expand": 1.3}, "expand"),
        ({"conv_width": 0}, "conv_width"),
        ({"decay_scale": 0.0}, "decay_scale"),
        ({"decay_init": "x"}, "decay_init"),
        ({"decay_low": 0.9995}, "decay_low"),
    ],
)
def test_values_that_cannot_work_are_named(fields, name):
    with pytest.raises(ValueError, match=f"mixer.{name}="):
        HawkConfig(**WIDTHS, **fields).check("mixer")
