"""Attention with the short convolution of the linear family: the same function in three forms, documents apart, counted."""

from __future__ import annotations

import pytest
import torch

from mixers.base import Context
from mixers.parts import rotary
from mixers.swa import SlidingWindowConfig
from mixers.transformer import TransformerConfig

SIZE = {"d_model": 16, "n_heads": 2, "head_dim": 8}
CASES = [
    TransformerConfig(**SIZE, conv_on="qk"),
    TransformerConfig(**SIZE, conv_on="qkv", conv_width=3, qk_norm=True),
    SlidingWindowConfig(**SIZE, conv_on="qkv", window=5),
]


def layer(config):
    config.check("mixer")
    made = config.build(0, 1).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.4, generator=generator)
    return made


def inputs(steps, batch=2):
    return torch.randn(batch, steps, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("config", CASES, ids=str)
def test_pieces_and_single_tokens_are_the_whole(config):
    made, x = layer(config), inputs(13)
    whole, _ = made(x)
    for cuts in ((1,) * 13, (4, 6, 3), (1, 12)):
        state, parts = made.init_state(2, 13, x.device, x.dtype), []
        for piece in x.split(cuts, dim=1):
            y, state = made(piece, state)
            parts.append(y)
        same(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("config", CASES, ids=str)
def test_no_document_sees_another(config):
    made, x = layer(config), inputs(11, batch=1)
    segments = torch.tensor([[0] * 4 + [1] * 7])
    together, _ = made(x, None, Context(segment_ids=segments))
    same(together, torch.cat([made(piece)[0] for piece in x.split((4, 7), dim=1)], dim=1))


def test_the_convolution_is_that_of_the_formula():
    """y_t = silu(sum_j c_j x_{t-j}) on queries and keys, before they are turned; values as they are."""
    made, x = layer(CASES[0]), inputs(6, batch=1)
    q, k, v = made.qkv(x).chunk(3, dim=-1)
    qk = torch.cat((q, k), dim=-1)
    taps = made.conv.taps_JD
    mixed = torch.stack([sum(taps[j] * qk[:, t - j] for j in range(4) if t >= j) for t in range(6)], dim=1)
    q, k = (z.unflatten(-1, (2, 8)) for z in torch.nn.functional.silu(mixed).chunk(2, dim=-1))
    q, k = rotary(q, torch.arange(6)), rotary(k, torch.arange(6))
    scores = torch.einsum("bthk,bshk->bhts", q, k) / 8**0.5
    scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    o = torch.einsum("bhts,bshk->bthk", scores.softmax(-1), v.unflatten(-1, (2, 8)))
    same(made(x)[0], made.out(o.flatten(2)))


@pytest.mark.parametrize("config", CASES, ids=str)
def test_is_counted(config):
    made = layer(config)
    assert sum(p.numel() for p in made.parameters()) == config.n_parameters()
    state = made.init_state(1, 20, torch.device("cpu"), torch.float32)
    _, state = made.float()(inputs(20, batch=1).float(), state)
    kept = sum(v.numel() * v.element_size() for v in state.values() if v.is_floating_point())
    assert kept == made.state_bytes(20, torch.float32)
    bare = type(config)(**{**config.__dict__, "conv_on": "none"})
    more = made.cell_flops_per_token(20) - bare.build(0, 1).cell_flops_per_token(20)
    assert more == 2 * config.conv_width * config.conv_channels()
    assert config.accessories()["short convolution"].startswith(f"width {config.conv_width} on q, k")


@pytest.mark.parametrize(("field", "value"), [("conv_on", "kv"), ("conv_width", 0)])
def test_bad_values_are_named(field, value):
    with pytest.raises(ValueError, match=f"mixer.{field}={value}: must be"):
        TransformerConfig(**{**SIZE, field: value}).check("mixer")
