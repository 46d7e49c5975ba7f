"""Mamba2's cell with keys and queries shared in groups: chunked == recurrent == linear attention with copied keys."""

import functools

import pytest
import torch

from mixers.ops.linear import recurrent_linear_attention
from mixers.ops.ssd import recurrent_ssd, ssd
from tests.ops.oracles import assert_close, documents

NAMES = "y state dx ddt dA dB dC dinitial"


def make_inputs(steps=17, heads=4, groups=2, key_dim=6, value_dim=5, batch=2):
    """x, dt, A, B, C and an initial state in float64."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, dt = randn(batch, steps, heads, value_dim), torch.nn.functional.softplus(randn(batch, steps, heads))
    keys, queries = (randn(batch, steps, groups, key_dim) for _ in range(2))
    return [x, dt, -randn(heads).exp(), keys, queries, randn(batch, heads, key_dim, value_dim)]


def value_and_gradients(rule, inputs, dtype=torch.float64, **options):
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    y, state = rule(*leaves[:5], initial_state=leaves[5], **options)
    generator = torch.Generator().manual_seed(9)
    cotangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (y, state)]
    return [y, state, *torch.autograd.grad([y, state], leaves, cotangents)]


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_recurrent_is_linear_attention_with_copied_keys(groups):
    x, dt, rate, keys, queries, state = make_inputs(groups=groups)
    k, q = (m.repeat_interleave(4 // groups, dim=2) for m in (keys, queries))
    expected = recurrent_linear_attention(q, k * dt[..., None], x, dt * rate, initial_state=state)
    assert_close(list(recurrent_ssd(x, dt, rate, keys, queries, initial_state=state)), list(expected), 1e-12, "y state")


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("steps", [1, 3, 64, 65, 130])
def test_chunk_equals_recurrent(steps, groups):
    for packed in (False, True):
        inputs = make_inputs(steps, groups=groups)
        segments = documents(2, steps) if packed else None
        expected = value_and_gradients(recurrent_ssd, inputs, segment_ids=segments)
        for chunk_size in (1, 16, 64):
            actual = value_and_gradients(ssd, inputs, segment_ids=segments, chunk_size=chunk_size)
            assert_close(actual, expected, 1e-11, NAMES)


def test_gradients_are_derivatives():
    inputs = [x.requires_grad_() for x in make_inputs(5, 2, 1, 2, 3, 1)]
    segments = torch.tensor([[4, 4, 4, 7, 7]])
    for rule in (functools.partial(ssd, chunk_size=2), recurrent_ssd):
        assert torch.autograd.gradcheck(
            lambda *x, rule=rule: rule(*x[:5], initial_state=x[5], segment_ids=segments), inputs
        )


def test_float32_and_bfloat16():
    inputs = make_inputs(130, key_dim=16, value_dim=16)
    expected = value_and_gradients(recurrent_ssd, inputs)
    assert_close(value_and_gradients(ssd, inputs, torch.float32), expected, 1e-5, NAMES)
    x, dt, rate, keys, queries, state = inputs
    half = [m.bfloat16() for m in (x, keys, queries)]
    y, final = ssd(half[0], dt.float(), rate.float(), half[1], half[2], initial_state=state.float())
    wide = [m.double() for m in half]
    want = recurrent_ssd(wide[0], dt.float().double(), rate.float().double(), wide[1], wide[2], initial_state=state)
    assert (y.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    assert_close([y, final], list(want), 4e-3, "y state")


def test_gate_gradient_is_accurate_under_strong_decay():
    # what one token does to another is e^-8 of what it does to itself, which must leave no rounding error in dA
    inputs = make_inputs(64, key_dim=16, value_dim=16)
    inputs[1].fill_(1.0)
    inputs[2].fill_(-8.0)
    expected = value_and_gradients(recurrent_ssd, inputs)[4]
    assert_close([value_and_gradients(ssd, inputs, torch.float32)[4]], [expected], 1e-5, "dA")


def test_split_with_carried_state_equals_whole_and_inputs_stay():
    inputs = make_inputs(90)
    copies = [x.clone() for x in inputs]
    x, dt, rate, keys, queries, state = inputs
    whole, final = ssd(x, dt, rate, keys, queries, initial_state=state)
    parts = []
    for first, last in ((0, 1), (1, 38), (38, 40), (40, 90)):
        cut = slice(first, last)
        y, state = ssd(x[:, cut], dt[:, cut], rate, keys[:, cut], queries[:, cut], initial_state=state)
        parts.append(y)
    assert_close([torch.cat(parts, dim=1), state], [whole, final], 1e-12, "y state")
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


@pytest.mark.parametrize("index, name", [(1, "dt"), (2, "A"), (3, "B"), (4, "C"), (5, "initial_state")])
def test_wrong_shapes_are_named(index, name):
    inputs = make_inputs(4)
    inputs[index] = inputs[index][:1]
    for rule in (ssd, recurrent_ssd):
        with pytest.raises(ValueError, match=rf"\b{name} must be"):
            rule(*inputs[:5], initial_state=inputs[5])
    inputs = make_inputs(4)
    inputs[3] = inputs[4] = torch.zeros(2, 4, 3, 6)
    with pytest.raises(ValueError, match="divisor"):
        ssd(*inputs[:5])
