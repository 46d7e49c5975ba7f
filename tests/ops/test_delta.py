"""The delta rule: chunked == recurrent == oracle, in values and gradients; what must hold under stress."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

from mixers.ops.delta import chunk_delta_rule, recurrent_delta_rule
from tests.ops import oracles
from tests.ops.oracles import assert_close, documents

LENGTHS = (1, 3, 17, 63, 64, 65, 130, 200)
NAMES = "o state dq dk dv dbeta dg dinitial"


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_inputs(
    batch=2, steps=17, heads=2, key_dim=6, value_dim=5, *, gates=True, seed=0, strongest=2.0
) -> list[Tensor]:
    """q, k, v, beta, g (or None) and an initial state in float64: unit keys, beta in (0, 2), -strongest < g < 0."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q = F.normalize(randn(batch, steps, heads, key_dim), dim=-1)
    k = F.normalize(randn(batch, steps, heads, key_dim) + 0.5, dim=-1)
    v = randn(batch, steps, heads, value_dim)
    beta = 2 * torch.sigmoid(randn(batch, steps, heads))
    g = -strongest * torch.sigmoid(randn(batch, steps, heads) - 1) if gates else None
    return [q, k, v, beta, g, randn(batch, heads, key_dim, value_dim)]


def value_and_gradients(rule, inputs: list[Tensor | None], dtype=torch.float64, seed=9, **options) -> list[Tensor]:
    """Output, final state and the gradients of all inputs for fixed random cotangents of both."""
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in inputs]
    o, state = rule(*leaves[:5], initial_state=leaves[5], **options)
    generator = torch.Generator().manual_seed(seed)
    cotangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (o, state)]
    gradients = torch.autograd.grad([o, state], [x for x in leaves if x is not None], cotangents)
    return [o, state, *gradients]


def names_for(inputs: list[Tensor | None]) -> str:
    """The names of what ``value_and_gradients`` returns."""
    return NAMES if inputs[4] is not None else NAMES.replace("dg ", "")


@functools.cache
def recurrent_result(steps: int, gates: bool, packed: bool) -> list[Tensor]:
    inputs = make_inputs(steps=steps, gates=gates)
    segments = documents(2, steps) if packed else None
    return value_and_gradients(recurrent_delta_rule, inputs, segment_ids=segments, scale=0.7)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("steps", [1, 3, 17])
def test_recurrent_equals_oracle(steps, gates, packed):
    inputs = make_inputs(steps=steps, gates=gates)
    segments = documents(2, steps) if packed else None
    expected = value_and_gradients(oracles.delta_rule, inputs, segment_ids=segments, scale=0.7)
    assert_close(recurrent_result(steps, gates, packed), expected, 1e-12, names_for(inputs))


@pytest.mark.parametrize("chunk_size", [1, 16, 64])
@pytest.mark.parametrize("steps", LENGTHS)
def test_chunk_equals_recurrent(steps, chunk_size):
    for gates, packed in itertools.product((False, True), repeat=2):
        inputs = make_inputs(steps=steps, gates=gates)
        segments = documents(2, steps) if packed else None
        actual = value_and_gradients(chunk_delta_rule, inputs, segment_ids=segments, scale=0.7, chunk_size=chunk_size)
        assert_close(actual, recurrent_result(steps, gates, packed), 1e-12, names_for(inputs))


@pytest.mark.parametrize("widths", [(2, 40), (40, 2), (1, 1)])
def test_any_widths(widths):
    inputs = make_inputs(1, 10, 1, *widths)
    actual = value_and_gradients(chunk_delta_rule, inputs, chunk_size=4)
    assert_close(actual, value_and_gradients(recurrent_delta_rule, inputs), 1e-12, NAMES)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rule", [functools.partial(chunk_delta_rule, chunk_size=2), recurrent_delta_rule])
def test_gradients_are_derivatives(rule, packed):
    inputs = [x.requires_grad_() for x in make_inputs(1, 5, 1, 2, 3)]
    segments = torch.tensor([[4, 4, 4, 7, 7]]) if packed else None

    def outputs(q, k, v, beta, g, state):
        return rule(q, k, v, beta, g, initial_state=state, segment_ids=segments, scale=0.7)

    assert torch.autograd.gradcheck(outputs, inputs)


def test_float32_is_accurate_enough():
    inputs = make_inputs(1, 200, 2, 32, 32)
    expected = value_and_gradients(recurrent_delta_rule, inputs)
    assert_close(value_and_gradients(chunk_delta_rule, inputs, torch.float32), expected, 1e-5, NAMES)
    assert_close(value_and_gradients(recurrent_delta_rule, inputs, torch.float32), expected, 1e-5, NAMES)


def test_weak_decay_keeps_its_precision_after_strong_decay():
    # cumulative log decays reach -1600, where neighbouring float32 numbers are 1e-4 apart
    inputs = make_inputs(1, 64, 2, 8, 8)
    inputs[4][:, :32] = -50.0
    expected = value_and_gradients(recurrent_delta_rule, inputs)
    assert_close(
        value_and_gradients(chunk_delta_rule, inputs, torch.float32)[:-1],
        expected[:-1],
        2e-6,
        NAMES.removesuffix(" dinitial"),
    )


def test_gate_gradient_is_accurate_under_strong_decay():
    # what one token does to another is e^-8 of what it does to itself, which must leave no rounding error in dg
    inputs = make_inputs(1, 64, 2, 16, 16)
    inputs[4].fill_(-8.0)
    expected = value_and_gradients(recurrent_delta_rule, inputs)[6]
    assert_close([value_and_gradients(chunk_delta_rule, inputs, torch.float32)[6]], [expected], 2e-6, "dg")


def test_bfloat16_inputs_are_computed_in_float32():
    inputs = [x.bfloat16() for x in make_inputs(1, 70, 2, 16, 16)]
    expected = value_and_gradients(recurrent_delta_rule, [x.double() for x in inputs])
    leaves = [x.clone().requires_grad_() for x in inputs[:5]]
    o, state = chunk_delta_rule(*leaves, initial_state=inputs[5].float())
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert_close([o, state], expected[:2], 4e-3, "o state")
    assert_close([state], expected[1:2], 1e-5, "state")
    assert all(x.dtype == torch.bfloat16 for x in torch.autograd.grad(o.sum(), leaves))


@pytest.mark.parametrize("rule", [chunk_delta_rule, recurrent_delta_rule])
def test_autocast_changes_nothing(rule):
    inputs = [x.float() for x in make_inputs(1, 20, 2, 8, 8)]

    def under_autocast(*arguments, **options):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return rule(*arguments, **options)

    actual = value_and_gradients(under_autocast, inputs, torch.float32)
    expected = value_and_gradients(rule, inputs, torch.float32)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("rule", [functools.partial(chunk_delta_rule, chunk_size=16), recurrent_delta_rule])
@pytest.mark.parametrize("packed", [False, True])
def test_split_with_carried_state_equals_whole(rule, packed):
    inputs = make_inputs(steps=90)
    segments = documents(2, 90) if packed else None
    expected = value_and_gradients(rule, inputs, segment_ids=segments)

    def split(q, k, v, beta, g, initial_state, segment_ids):
        state, outputs = initial_state, []
        for first, last in ((0, 1), (1, 38), (38, 40), (40, 90)):
            part = [x[:, first:last] for x in (q, k, v, beta, g)]
            if segment_ids is None:
                o, state = rule(*part, initial_state=state)
            else:
                # the carried state belongs to the document of the part's first column: drop it where that is a new one
                if first > 0:
                    same = segment_ids[:, first] == segment_ids[:, first - 1]
                    state = state * same[:, None, None, None]
                o, state = rule(*part, initial_state=state, segment_ids=segment_ids[:, first:last])
            outputs.append(o)
        return torch.cat(outputs, dim=1), state

    assert_close(value_and_gradients(split, inputs, segment_ids=segments), expected, 1e-12, NAMES)


@pytest.mark.parametrize("chunk_size", [4, 64])
def test_packed_documents_equal_documents_apart(chunk_size):
    inputs = make_inputs(1, 40)
    borders = [0, 3, 4, 16, 33, 40]
    lengths = torch.tensor(borders).diff()
    segments = torch.arange(len(lengths)).repeat_interleave(lengths)[None]

    def apart(q, k, v, beta, g, initial_state):
        outputs, state = [], initial_state
        for first, last in itertools.pairwise(borders):
            o, state = recurrent_delta_rule(
                *(x[:, first:last] for x in (q, k, v, beta, g)), initial_state=state if first == 0 else None
            )
            outputs.append(o)
        return torch.cat(outputs, dim=1), state

    actual = value_and_gradients(chunk_delta_rule, inputs, segment_ids=segments, chunk_size=chunk_size)
    assert_close(actual, value_and_gradients(apart, inputs), 1e-12, NAMES)


def test_the_past_does_not_see_the_future():
    inputs = make_inputs(steps=50)
    o, _ = chunk_delta_rule(*inputs[:5], chunk_size=16)
    for x in inputs[:5]:
        x[:, 30:] = x[:, 30:].flip(1) * 0.5
    changed, _ = chunk_delta_rule(*inputs[:5], chunk_size=16)
    assert torch.equal(o[:, :30], changed[:, :30])
    assert not torch.allclose(o[:, 30:], changed[:, 30:])


@pytest.mark.parametrize("rule", [chunk_delta_rule, recurrent_delta_rule])
@pytest.mark.parametrize("steps", [1, 30])
def test_inputs_and_passed_state_are_unchanged(rule, steps):
    inputs = make_inputs(steps=steps)
    copies = [x.clone() for x in inputs]
    segments = documents(2, steps)
    value_and_gradients(rule, inputs)
    _, state = rule(*inputs[:5], initial_state=inputs[5], segment_ids=segments)
    assert all(torch.equal(x, copy) for x, copy in zip(inputs, copies, strict=True))
    assert torch.equal(segments, documents(2, steps))
    assert state.data_ptr() != inputs[5].data_ptr()


def test_either_result_alone_has_a_gradient():
    inputs = [x.requires_grad_() for x in make_inputs(steps=20)]
    for pick in (0, 1):
        expected = torch.autograd.grad(
            recurrent_delta_rule(*inputs[:5], initial_state=inputs[5])[pick].sum(), inputs, allow_unused=True
        )
        actual = torch.autograd.grad(
            chunk_delta_rule(*inputs[:5], initial_state=inputs[5], chunk_size=8)[pick].sum(), inputs, allow_unused=True
        )
        zeros = [torch.zeros_like(x) if e is None else e for x, e in zip(inputs, expected, strict=True)]
        assert_close(list(actual), zeros, 1e-12, "q k v beta g initial")


def test_backward_can_run_again():
    """After the first run (retain_graph), and on tensors that activation checkpointing computes anew."""
    inputs = [x.requires_grad_() for x in make_inputs(steps=20)]

    def rule(q, k, v, beta, g, state):
        return chunk_delta_rule(q, k, v, beta, g, initial_state=state, chunk_size=8)

    outputs = rule(*inputs)
    first = torch.autograd.grad([x.sum() for x in outputs], inputs, retain_graph=True)
    again = torch.autograd.grad([x.sum() for x in outputs], inputs)
    anew = torch.utils.checkpoint.checkpoint(rule, *inputs, use_reentrant=False)
    anew = torch.autograd.grad([x.sum() for x in anew], inputs)
    for gradients in (again, anew):
        assert all(torch.equal(a, e) for a, e in zip(gradients, first, strict=True))


def test_initial_state_may_be_left_out():
    q, k, v, beta, g, state = make_inputs(steps=20)
    for rule in (chunk_delta_rule, recurrent_delta_rule):
        expected = rule(q, k, v, beta, g, initial_state=torch.zeros_like(state))
        assert_close(list(rule(q, k, v, beta, g)), list(expected), 1e-12, "o state")


def test_second_derivative_is_refused_not_wrong():
    inputs = [x.requires_grad_() for x in make_inputs(steps=4)]
    o, _ = chunk_delta_rule(*inputs[:5])
    (dq,) = torch.autograd.grad(o.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def stressed(case: str) -> list[Tensor]:
    steps = 2048 if case == "one repeated token" else 130
    inputs = make_inputs(1, steps, 2, 8, 8)
    q, k, v, beta, g, _ = inputs
    if case == "no decay":
        g.zero_()
    elif case == "g = -5":
        g.fill_(-5.0)
    elif case == "gates at +-50":
        signs = torch.where(torch.arange(steps) % 3 == 0, 50.0, -50.0)[None, :, None].expand_as(g).double()
        g.copy_(F.logsigmoid(signs))
        beta.copy_(torch.sigmoid(-signs))
    elif case.startswith("identical keys"):
        k.copy_(k[:, :1].expand_as(k).clone())
        beta.fill_(float(case.split()[-1]))
        g.zero_()
    elif case == "zero keys":
        k.zero_()
    elif case == "one repeated token":
        for x in (q, k, v, beta, g):
            x.copy_(x[:, :1].expand_as(x).clone())
    return inputs


@pytest.mark.parametrize(
    "case",
    [
        "no decay",
        "g = -5",
        "gates at +-50",
        "identical keys 0.99",
        "identical keys 1.99",
        "zero keys",
        "one repeated token",
    ],
)
def test_stress(case):
    inputs = stressed(case)
    expected = value_and_gradients(functools.partial(chunk_delta_rule, chunk_size=16), inputs)
    if case != "one repeated token":  # 2048 tokens one at a time: slow, and equal on the shorter cases
        assert_close(expected, value_and_gradients(recurrent_delta_rule, inputs), 1e-10, NAMES)
    actual = value_and_gradients(chunk_delta_rule, inputs, torch.float32)
    assert all(x.isfinite().all() for x in actual)
    # dg is a difference of what cancels where decays are e^-50: compare it with the size of the largest gradient
    assert_close(actual[:6], expected[:6], 1e-4, "o state dq dk dv dbeta")
    assert (actual[6] - expected[6]).norm() <= 1e-4 * max(x.norm() for x in expected[2:])


def test_tiny_cotangents_keep_their_relative_precision():
    inputs = make_inputs(1, 100, 2, 16, 16)
    leaves = [x.float().requires_grad_() for x in inputs]

    def gradients(size):
        o, state = chunk_delta_rule(*leaves[:5], initial_state=leaves[5])
        return [x / size for x in torch.autograd.grad((o * size).sum() + (state * size).sum(), leaves)]

    assert_close(gradients(1e-6), gradients(1.0), 1e-5, "q k v beta g initial")


@pytest.mark.parametrize("name", ["k", "v", "beta", "g", "initial_state", "segment_ids"])
def test_wrong_shapes_are_named(name):
    q, k, v, beta, g, state = make_inputs(steps=4)
    arguments = {"k": k, "v": v, "beta": beta, "g": g, "initial_state": state, "segment_ids": documents(2, 4)}
    arguments[name] = arguments[name][:1]
    for rule in (chunk_delta_rule, recurrent_delta_rule):
        with pytest.raises(ValueError, match=name):
            rule(q, **arguments)


def test_compiles_in_one_piece():
    inputs = [x.requires_grad_() for x in make_inputs(1, 10, 1, 4, 4)]
    segments = documents(1, 10)

    def layer(q, k, v, beta, g, state):
        return chunk_delta_rule(q, k, v, beta, g, initial_state=state, segment_ids=segments, chunk_size=5)

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for function in (layer, compiled):
        o, state = function(*inputs)
        results.append([o, state, *torch.autograd.grad(o.square().sum() + state.sum(), inputs)])
    assert_close(results[1], results[0], 1e-12, NAMES)
