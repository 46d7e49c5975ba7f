"""The linear scan: fast == recurrent == a loop over single channels, in values and gradients; what must hold under stress."""

import functools
import itertools

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from mixers.ops.scan import linear_scan, recurrent_scan
from tests.ops.oracles import assert_close, documents

NAMES = "h state dlog_a du dinitial"


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def oracle(log_a: Tensor, u: Tensor, *, initial_state: Tensor, segment_ids: Tensor | None = None) -> tuple:
    """h_t = e^{log_a_t} h_{t-1} + u_t, one number at a time."""
    batch, steps, width = u.shape
    columns = []
    for b, d in itertools.product(range(batch), range(width)):
        h = initial_state[b, d]
        for t in range(steps):
            if segment_ids is not None and t > 0 and segment_ids[b, t] != segment_ids[b, t - 1]:
                h = torch.zeros_like(h)
            h = torch.exp(log_a[b, t, d]) * h + u[b, t, d]
            columns.append(h)
    h_BTD = torch.stack(columns).view(batch, width, steps).transpose(1, 2)
    return h_BTD, h_BTD[:, -1]


def make_inputs(batch=2, steps=17, width=3, *, seed=0, strongest=2.0) -> list[Tensor]:
    """log_a in (-strongest, 0), u and an initial state, in float64."""
    generator = torch.Generator().manual_seed(seed)
    log_a = -strongest * torch.rand(batch, steps, width, generator=generator, dtype=torch.float64)
    u = torch.randn(batch, steps, width, generator=generator, dtype=torch.float64)
    return [log_a, u, torch.randn(batch, width, generator=generator, dtype=torch.float64)]


def value_and_gradients(scan, inputs: list[Tensor], dtype=torch.float64, **options) -> list[Tensor]:
    """Output, final state and the gradients of all inputs for fixed random cotangents of both."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    h, state = scan(*leaves[:2], initial_state=leaves[2], **options)
    generator = torch.Generator().manual_seed(9)
    cotangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (h, state)]
    return [h, state, *torch.autograd.grad([h, state], leaves, cotangents)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 17, 64, 65, 130])
def test_fast_equals_recurrent_equals_oracle(steps, packed):
    inputs, segments = make_inputs(steps=steps), documents(2, steps) if packed else None
    expected = value_and_gradients(oracle, inputs, segment_ids=segments)
    assert_close(value_and_gradients(recurrent_scan, inputs, segment_ids=segments), expected, 1e-13, NAMES)
    assert_close(value_and_gradients(linear_scan, inputs, segment_ids=segments), expected, 1e-13, NAMES)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scan", [linear_scan, recurrent_scan])
def test_gradients_are_derivatives(scan, packed):
    inputs = [x.requires_grad_() for x in make_inputs(1, 9, 2)]
    segments = torch.tensor([[4, 4, 4, 7, 7, 7, 7, 9, 9]]) if packed else None
    assert torch.autograd.gradcheck(lambda a, u, h: scan(a, u, initial_state=h, segment_ids=segments), inputs)


def test_float32_is_accurate_enough_over_long_memories():
    inputs = make_inputs(1, 2000, 4, strongest=1e-3)
    expected = value_and_gradients(recurrent_scan, inputs)
    assert_close(value_and_gradients(linear_scan, inputs, torch.float32), expected, 1e-5, NAMES)


def test_bfloat16_inputs_are_computed_in_float32():
    log_a, u, state = (x.bfloat16() for x in make_inputs(1, 70, 4))
    expected = recurrent_scan(log_a.double(), u.double(), initial_state=state.double())
    log_a, u = log_a.requires_grad_(), u.requires_grad_()
    h, after = linear_scan(log_a, u, initial_state=state)
    assert (h.dtype, after.dtype) == (torch.bfloat16, torch.float32)
    assert_close([h, after], list(expected), 4e-3, "h state")
    assert_close([after], [expected[1]], 1e-6, "state")
    assert all(x.dtype == torch.bfloat16 for x in torch.autograd.grad(h.sum(), [log_a, u]))


@pytest.mark.parametrize("scan", [linear_scan, recurrent_scan])
def test_autocast_changes_nothing(scan):
    inputs = [x.float() for x in make_inputs(1, 20, 4)]

    def under_autocast(*arguments, **options):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return scan(*arguments, **options)

    actual = value_and_gradients(under_autocast, inputs, torch.float32)
    expected = value_and_gradients(scan, inputs, torch.float32)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_split_with_carried_state_equals_whole():
    inputs = make_inputs(steps=90)

    def split(log_a, u, initial_state):
        state, outputs = initial_state, []
        for first, last in ((0, 1), (1, 38), (38, 40), (40, 90)):
            h, state = linear_scan(log_a[:, first:last], u[:, first:last], initial_state=state)
            outputs.append(h)
        return torch.cat(outputs, dim=1), state

    assert_close(value_and_gradients(split, inputs), value_and_gradients(linear_scan, inputs), 1e-13, NAMES)


def test_packed_documents_equal_documents_apart():
    inputs, borders = make_inputs(1, 40), [0, 3, 4, 16, 33, 40]
    lengths = torch.tensor(borders).diff()
    segments = torch.arange(len(lengths)).repeat_interleave(lengths)[None]

    def apart(log_a, u, initial_state):
        outputs, state = [], initial_state
        for first, last in itertools.pairwise(borders):
            state = state if first == 0 else None
            h, state = recurrent_scan(log_a[:, first:last], u[:, first:last], initial_state=state)
            outputs.append(h)
        return torch.cat(outputs, dim=1), state

    actual = value_and_gradients(linear_scan, inputs, segment_ids=segments)
    assert_close(actual, value_and_gradients(apart, inputs), 1e-13, NAMES)


@pytest.mark.parametrize("log_a", [0.0, -1e-9, -5.0, -50.0, -1e4, float("-inf")])
def test_stress(log_a):
    inputs = make_inputs(1, 2048, 2)
    inputs[0].fill_(log_a)
    inputs[1].copy_(inputs[1][:, :1].expand_as(inputs[1]).clone())
    expected = value_and_gradients(recurrent_scan, inputs)
    actual = value_and_gradients(linear_scan, inputs, torch.float32)
    assert all(x.isfinite().all() for x in actual)
    assert_close(actual, expected, 1e-5, NAMES)


def test_tiny_cotangents_keep_their_relative_precision():
    leaves = [x.float().requires_grad_() for x in make_inputs(1, 100, 4)]

    def gradients(size):
        h, state = linear_scan(*leaves[:2], initial_state=leaves[2])
        return [x / size for x in torch.autograd.grad((h * size).sum() + (state * size).sum(), leaves)]

    assert_close(gradients(1e-6), gradients(1.0), 1e-6, "log_a u initial")


@pytest.mark.parametrize("scan", [linear_scan, recurrent_scan])
@pytest.mark.parametrize("steps", [1, 30])
def test_inputs_and_passed_state_are_unchanged(scan, steps):
    inputs, segments = make_inputs(steps=steps), documents(2, steps)
    copies = [x.clone() for x in inputs]
    value_and_gradients(scan, inputs, segment_ids=segments)
    _, state = scan(*inputs[:2], initial_state=inputs[2])
    state.fill_(7.0)
    assert all(torch.equal(x, copy) for x, copy in zip(inputs, copies, strict=True))
    assert torch.equal(segments, documents(2, steps))


def test_either_result_alone_has_a_gradient_and_the_state_may_be_left_out():
    log_a, u, _ = make_inputs(steps=20)
    leaves = [log_a.requires_grad_(), u.requires_grad_()]
    for pick in (0, 1):
        want = torch.autograd.grad(recurrent_scan(*leaves)[pick].sum(), leaves)
        got = torch.autograd.grad(linear_scan(*leaves)[pick].sum(), leaves)
        assert_close(list(got), list(want), 1e-13, "log_a u")


def test_backward_can_run_again():
    """After the first run (retain_graph), and on tensors that activation checkpointing computes anew."""
    inputs = [x.requires_grad_() for x in make_inputs(steps=20)]

    def scan(log_a, u, state):
        return linear_scan(log_a, u, initial_state=state)

    outputs = scan(*inputs)
    first = torch.autograd.grad([x.sum() for x in outputs], inputs, retain_graph=True)
    again = torch.autograd.grad([x.sum() for x in outputs], inputs)
    anew = torch.utils.checkpoint.checkpoint(scan, *inputs, use_reentrant=False)
    anew = torch.autograd.grad([x.sum() for x in anew], inputs)
    for gradients in (again, anew):
        assert all(torch.equal(a, e) for a, e in zip(gradients, first, strict=True))


@pytest.mark.parametrize("name", ["log_a", "initial_state", "segment_ids"])
def test_wrong_shapes_are_named(name):
    log_a, u, state = make_inputs(steps=4)
    arguments = {"log_a": log_a, "u": u, "initial_state": state, "segment_ids": documents(2, 4)}
    arguments[name] = arguments[name][:1]
    for scan in (linear_scan, recurrent_scan):
        with pytest.raises(ValueError, match=name):
            scan(**arguments)


def test_compiles_in_one_piece():
    inputs, segments = [x.requires_grad_() for x in make_inputs(1, 30, 2)], documents(1, 30)
    layer = functools.partial(linear_scan, segment_ids=segments)
    results = []
    for function in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        h, state = function(*inputs[:2], initial_state=inputs[2])
        results.append([h, state, *torch.autograd.grad(h.square().sum() + state.sum(), inputs)])
    assert_close(results[1], results[0], 1e-12, NAMES)
    torch._dynamo.reset()
