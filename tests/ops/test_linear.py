"""Linear attention, with no, scalar and vector decay: chunked == recurrent == oracle, in values and gradients."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

from mixers.ops.linear import chunk_linear_attention, recurrent_linear_attention
from tests.ops.oracles import assert_close, documents

LENGTHS = (1, 3, 17, 63, 64, 65, 130, 200)
DECAYS = ("none", "scalar", "vector")
NAMES = "o state dq dk dv dg dinitial"


def make_inputs(steps=17, decay="scalar", batch=2, heads=2, key_dim=6, value_dim=5, *, seed=0, strongest=2.0):
    """q, k, v, g (or None) and an initial state in float64."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = (randn(batch, steps, heads, width) for width in (key_dim, key_dim, value_dim))
    shape = {"none": None, "scalar": (batch, steps, heads), "vector": (batch, steps, heads, key_dim)}[decay]
    g = None if shape is None else -strongest * torch.sigmoid(randn(*shape) - 1)
    return [q, k, v, g, randn(batch, heads, key_dim, value_dim)]


def oracle(q, k, v, g, *, scale=1.0, initial_state=None, segment_ids=None):
    """All pairs of tokens: the sum over s <= t of (q_t * decay from s to t) . k_s v_s, one pair at a time."""
    batch, steps, heads, key_dim = q.shape
    rows = torch.zeros(batch, steps, heads, v.shape[-1], dtype=q.dtype)
    log = torch.zeros_like(q) if g is None else (g if g.ndim == 4 else g[..., None].expand(q.shape))
    for b, t, h in itertools.product(range(batch), range(steps), range(heads)):
        total, decay = 0.0, torch.zeros(key_dim, dtype=q.dtype)
        for s in range(t, -1, -1):
            if segment_ids is not None and segment_ids[b, s] != segment_ids[b, t]:
                break
            total = total + ((q[b, t, h] * decay.exp()) @ k[b, s, h]) * v[b, s, h]
            decay = decay + log[b, s, h]
        else:
            total = total + (q[b, t, h] * decay.exp()) @ initial_state[b, h]
        rows[b, t, h] = scale * total
    return rows


def value_and_gradients(rule, inputs, dtype=torch.float64, **options) -> list[Tensor]:
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in inputs]
    o, state = rule(*leaves[:4], initial_state=leaves[4], **options)
    generator = torch.Generator().manual_seed(9)
    cotangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (o, state)]
    return [o, state, *torch.autograd.grad([o, state], [x for x in leaves if x is not None], cotangents)]


def names(inputs):
    return NAMES if inputs[3] is not None else NAMES.replace("dg ", "")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
def test_recurrent_equals_oracle(decay, packed):
    inputs = make_inputs(12, decay)
    segments = documents(2, 12) if packed else None
    options = {"scale": 0.7, "segment_ids": segments}
    o, _ = recurrent_linear_attention(*inputs[:4], initial_state=inputs[4], **options)
    assert_close([o], [oracle(*inputs[:4], initial_state=inputs[4], **options)], 1e-12, "o")


@pytest.mark.parametrize("chunk_size", [1, 16, 64])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("steps", LENGTHS)
def test_chunk_equals_recurrent(steps, decay, chunk_size):
    for packed in (False, True):
        inputs = make_inputs(steps, decay)
        options = {"scale": 0.7, "segment_ids": documents(2, steps) if packed else None}
        expected = value_and_gradients(recurrent_linear_attention, inputs, **options)
        actual = value_and_gradients(chunk_linear_attention, inputs, chunk_size=chunk_size, **options)
        assert_close(actual, expected, 1e-11, names(inputs))


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("rule", [functools.partial(chunk_linear_attention, chunk_size=2), recurrent_linear_attention])
def test_gradients_are_derivatives(rule, decay):
    inputs = [None if x is None else x.requires_grad_() for x in make_inputs(5, decay, 1, 1, 2, 3)]

    def outputs(*leaves):
        q, k, v, *g, state = leaves
        return rule(q, k, v, *g, initial_state=state, segment_ids=torch.tensor([[4, 4, 4, 7, 7]]))

    assert torch.autograd.gradcheck(outputs, [x for x in inputs if x is not None])


@pytest.mark.parametrize("decay", DECAYS)
def test_float32_is_accurate_enough_also_under_strong_decay(decay):
    for strongest in (2.0, 16.0, 100.0):
        inputs = make_inputs(130, decay, 1, 2, 16, 16, strongest=strongest)
        if inputs[3] is not None:
            inputs[3][:, 60:70] = 0.0
        expected = value_and_gradients(recurrent_linear_attention, inputs)
        actual = value_and_gradients(chunk_linear_attention, inputs, torch.float32)
        if strongest == 100.0:  # nothing of the initial state is left
            actual, expected = actual[:-1], expected[:-1]
        assert_close(actual, expected, 1e-5, " ".join(names(inputs).split()[: len(actual)]))


@pytest.mark.parametrize("decay", ["scalar", "vector"])
def test_gate_gradient_is_accurate_under_strong_decay(decay):
    # what one token does to another is e^-8 of what it does to itself, which must leave no rounding error in dg
    inputs = make_inputs(64, decay, 1, 2, 16, 16)
    inputs[3].fill_(-8.0)
    expected = value_and_gradients(recurrent_linear_attention, inputs)[5]
    actual = value_and_gradients(chunk_linear_attention, inputs, torch.float32)[5]
    assert_close([actual], [expected], 2e-6, "dg")


@pytest.mark.parametrize("decay", DECAYS)
def test_bfloat16_inputs_are_computed_in_float32(decay):
    inputs = [None if x is None else x.bfloat16() for x in make_inputs(70, decay, 1, 2, 16, 16)]
    wide = [None if x is None else x.double() for x in inputs]
    expected = recurrent_linear_attention(*wide[:4], initial_state=wide[4])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, state = chunk_linear_attention(*inputs[:4], initial_state=inputs[4].float())
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert_close([o, state], list(expected), 4e-3, "o state")
    assert_close([state], [expected[1]], 1e-5, "state")


@pytest.mark.parametrize("decay", DECAYS)
def test_split_with_carried_state_equals_whole(decay):
    inputs = make_inputs(90, decay)
    whole = value_and_gradients(chunk_linear_attention, inputs)

    def split(q, k, v, g, *, initial_state):
        state, outputs = initial_state, []
        for first, last in ((0, 1), (1, 38), (38, 40), (40, 90)):
            part = [None if x is None else x[:, first:last] for x in (q, k, v, g)]
            o, state = chunk_linear_attention(*part, initial_state=state, chunk_size=16)
            outputs.append(o)
        return torch.cat(outputs, dim=1), state

    assert_close(value_and_gradients(split, inputs), whole, 1e-12, names(inputs))


@pytest.mark.parametrize("decay", DECAYS)
def test_inputs_are_unchanged_and_backward_can_run_again(decay):
    inputs = make_inputs(20, decay)
    copies = [None if x is None else x.clone() for x in inputs]
    leaves = [None if x is None else x.requires_grad_() for x in inputs]

    def rule(*x):
        return chunk_linear_attention(*x[:4], initial_state=x[4], chunk_size=8)

    outputs, given = rule(*leaves), [x for x in leaves if x is not None]
    first = torch.autograd.grad([x.sum() for x in outputs], given, retain_graph=True)
    again = torch.autograd.grad([x.sum() for x in outputs], given)
    anew = torch.utils.checkpoint.checkpoint(rule, *leaves, use_reentrant=False)
    anew = torch.autograd.grad([x.sum() for x in anew], given)
    for gradients in (again, anew):
        assert all(torch.equal(a, e) for a, e in zip(gradients, first, strict=True))
    assert all(x is None or torch.equal(x, copy) for x, copy in zip(inputs, copies, strict=True))
    assert outputs[1].data_ptr() != inputs[4].data_ptr()


@pytest.mark.parametrize("pick", [0, 1])
@pytest.mark.parametrize("decay", DECAYS)
def test_either_result_alone_has_a_gradient(decay, pick):
    given = [x for x in make_inputs(20, decay) if x is not None]
    given = [x.requires_grad_() for x in given]
    gradients = []
    for rule in (chunk_linear_attention, recurrent_linear_attention):
        result = rule(*given[:-1], initial_state=given[-1])[pick].sum()
        got = torch.autograd.grad(result, given, allow_unused=True)
        gradients.append([torch.zeros_like(x) if g is None else g for x, g in zip(given, got, strict=True)])
    for a, e in zip(*gradients, strict=True):
        assert (a - e).norm() <= 1e-12 * max(1.0, float(e.norm()))


@pytest.mark.parametrize("decay", DECAYS)
def test_gates_far_out_and_zero_keys(decay):
    inputs = make_inputs(130, decay, 1, 2, 8, 8)
    if inputs[3] is not None:
        inputs[3].copy_(
            F.logsigmoid(
                torch.where(torch.arange(130) % 3 == 0, 50.0, -50.0)
                .view(1, 130, 1, *[1] * (inputs[3].ndim - 3))
                .double()
            ).expand_as(inputs[3])
        )
    inputs[1][:, ::5] = 0
    expected = value_and_gradients(recurrent_linear_attention, inputs)
    actual = value_and_gradients(chunk_linear_attention, inputs, torch.float32)
    assert all(x.isfinite().all() for x in actual)
    assert_close(actual[:5], expected[:5], 1e-5, "o state dq dk dv")


@pytest.mark.parametrize("name", ["k", "v", "g", "initial_state", "segment_ids"])
def test_wrong_shapes_are_named(name):
    q, k, v, g, state = make_inputs(4)
    arguments = {"k": k, "v": v, "g": g, "initial_state": state, "segment_ids": documents(2, 4)}
    arguments[name] = arguments[name][:1]
    for rule in (chunk_linear_attention, recurrent_linear_attention):
        with pytest.raises(ValueError, match=name):
            rule(q, **arguments)


@pytest.mark.parametrize("decay", DECAYS)
def test_compiles_in_one_piece(decay):
    given = [x.requires_grad_() for x in make_inputs(10, decay, 1, 1, 4, 4) if x is not None]

    def layer(*x):
        return chunk_linear_attention(*x[:-1], initial_state=x[-1], segment_ids=documents(1, 10), chunk_size=5)

    results = []
    for function in (layer, torch.compile(layer, backend="aot_eager")):
        o, state = function(*given)
        results.append([o, state, *torch.autograd.grad(o.square().sum() + state.sum(), given)])
    for a, e in zip(*results, strict=True):
        assert_close([a], [e], 1e-12, "x")
