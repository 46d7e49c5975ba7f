"""sLSTM: by hand == recurrent == an unstabilised loop, in values and gradients; what must hold under stress."""

import functools
import itertools

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from mixers.ops.slstm import init_slstm_state, recurrent_slstm, slstm
from tests.ops.oracles import assert_close, documents

NAMES = "y last C n draw dR dy dC dn"


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def oracle(raw, recurrent, *, initial_state, segment_ids=None):
    """c = sigmoid(f) c + e^i tanh(z), n likewise, y = sigmoid(o) c / n, without a stabiliser, one head at a time."""
    batch, steps, heads, _, width = raw.shape
    rows, states = [], []
    for b, h in itertools.product(range(batch), range(heads)):
        y, size = initial_state[0][b, h], initial_state[3][b, h].exp()
        c, n = size * initial_state[1][b, h], size * initial_state[2][b, h]
        for t in range(steps):
            if segment_ids is not None and t > 0 and segment_ids[b, t] != segment_ids[b, t - 1]:
                y, c, n = (torch.zeros_like(x) for x in (y, c, n))
            i, f, z, o = (raw[b, t, h, gate] + y @ recurrent[h, :, gate] for gate in range(4))
            c = f.sigmoid() * c + i.exp() * z.tanh()
            n = f.sigmoid() * n + i.exp()
            y = o.sigmoid() * c / n
            rows.append(y)
        states.append(torch.stack((y, c, n, torch.zeros_like(y))))
    y_BTHV = torch.stack(rows).view(batch, heads, steps, width).transpose(1, 2)
    return y_BTHV, torch.stack(states).view(batch, heads, 4, width).unbind(2)


def make_inputs(batch=2, steps=9, heads=2, width=3, *, seed=0) -> list[Tensor]:
    """raw, R, y, c, n, m in float64."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    cells = (batch, heads, width)
    state = [randn(*cells), randn(*cells), randn(*cells).exp(), randn(*cells)]
    return [2 * randn(batch, steps, heads, 4, width), 0.5 * randn(heads, width, 4, width), *state]


def value_and_gradients(cell, inputs: list[Tensor], dtype=torch.float64, **options) -> list[Tensor]:
    """y, the final y, and c and n times e^m; the gradients of all inputs but m for fixed random cotangents of these."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs[:5]]
    y, (last, c, n, m) = cell(*leaves[:2], initial_state=(*leaves[2:], inputs[5].to(dtype)), **options)
    outputs = [y, last, c * m.detach().exp(), n * m.detach().exp()]
    generator = torch.Generator().manual_seed(9)
    cotangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, cotangents)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 9, 30])
def test_by_hand_equals_recurrent_equals_oracle(steps, packed):
    inputs, segments = make_inputs(steps=steps), documents(2, steps) if packed else None
    expected = value_and_gradients(oracle, inputs, segment_ids=segments)
    assert_close(value_and_gradients(recurrent_slstm, inputs, segment_ids=segments), expected, 1e-11, NAMES)
    assert_close(value_and_gradients(slstm, inputs, segment_ids=segments), expected, 1e-11, NAMES)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_derivatives(packed):
    *inputs, m = make_inputs(1, 4, 1, 2)
    segments = torch.tensor([[4, 4, 7, 7]]) if packed else None

    def outputs(raw, recurrent, y, c, n):
        y, (last, c, n, after) = slstm(raw, recurrent, initial_state=(y, c, n, m), segment_ids=segments)
        return y, last, c * after.exp(), n * after.exp()

    assert torch.autograd.gradcheck(outputs, [x.requires_grad_() for x in inputs])


def test_the_start_is_as_good_as_no_state():
    raw, recurrent, *_ = make_inputs()
    zeros = torch.zeros(2, 2, 3, dtype=torch.float64)
    expected, (_, _, n, _) = oracle(raw, recurrent, initial_state=(zeros,) * 4)
    for cell in (slstm, recurrent_slstm):
        y, after = cell(raw, recurrent)
        assert_close([y, after[2] * after[3].exp()], [expected, n], 1e-12, "y n")
        again, _ = cell(raw, recurrent, initial_state=init_slstm_state(2, 2, 3, dtype=torch.float64))
        assert torch.equal(again, y)


@pytest.mark.parametrize("cell", [slstm, recurrent_slstm])
def test_split_with_carried_state_equals_whole(cell):
    inputs = make_inputs(steps=20)

    def split(raw, recurrent, initial_state):
        state, outputs = initial_state, []
        for first, last in ((0, 1), (1, 12), (12, 20)):
            y, state = cell(raw[:, first:last], recurrent, initial_state=state)
            outputs.append(y)
        return torch.cat(outputs, dim=1), state

    assert_close(value_and_gradients(split, inputs), value_and_gradients(cell, inputs), 1e-12, NAMES)


@pytest.mark.parametrize("gate, value", [(0, 50.0), (0, -50.0), (0, -1e3), (1, 50.0), (1, -50.0), (1, -1e3)])
def test_finite_with_gates_far_out(gate, value):
    inputs = [x.float() for x in make_inputs(1, 200, 2, 4)[:2]]
    inputs[0][:, :, :, gate] = value
    leaves = [x.requires_grad_() for x in inputs]
    y, state = slstm(*leaves)
    gradients = torch.autograd.grad(y.sum() + state[1].sum(), leaves)
    assert all(x.isfinite().all() for x in (y, *state, *gradients))


def test_bfloat16_inputs_and_autocast_are_computed_in_float32():
    raw, recurrent = (x.bfloat16() for x in make_inputs()[:2])
    expected, _ = recurrent_slstm(raw.double(), recurrent.double())
    for cell in (slstm, recurrent_slstm):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, state = cell(raw, recurrent)
        assert y.dtype == torch.bfloat16 and all(x.dtype == torch.float32 for x in state)
        assert_close([y], [expected], 4e-3, "y")
        assert_close([state[0]], [expected[:, -1]], 1e-5, "y")


@pytest.mark.parametrize("cell", [slstm, recurrent_slstm])
def test_inputs_and_passed_state_are_unchanged(cell):
    inputs, segments = make_inputs(), documents(2, 9)
    copies = [x.clone() for x in inputs]
    value_and_gradients(cell, inputs, segment_ids=segments)
    _, state = cell(*inputs[:2], initial_state=tuple(inputs[2:]), segment_ids=segments)
    for x in state:
        x.fill_(7.0)
    assert all(torch.equal(x, copy) for x, copy in zip(inputs, copies, strict=True))


def test_any_result_alone_has_a_gradient():
    leaves = [x.requires_grad_() for x in make_inputs()[:2]]
    for pick in range(4):

        def gradients(cell, pick=pick):
            y, state = cell(*leaves)
            return list(torch.autograd.grad((y, *state[:3])[pick].sum(), leaves))

        assert_close(gradients(slstm), gradients(recurrent_slstm), 1e-12, "raw R")


def test_backward_can_run_again():
    leaves = [x.requires_grad_() for x in make_inputs()[:2]]
    y, _ = slstm(*leaves)
    first = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    again = torch.autograd.grad(y.sum(), leaves)
    anew, _ = torch.utils.checkpoint.checkpoint(slstm, *leaves, use_reentrant=False)
    anew = torch.autograd.grad(anew.sum(), leaves)
    for gradients in (again, anew):
        assert all(torch.equal(a, e) for a, e in zip(gradients, first, strict=True))


@pytest.mark.parametrize("name", ["raw", "recurrent", "c of initial_state", "segment_ids"])
def test_wrong_shapes_are_named(name):
    raw, recurrent, y, c, n, m = make_inputs()
    arguments = {"raw": raw, "recurrent": recurrent, "initial_state": (y, c, n, m), "segment_ids": documents(2, 9)}
    if name == "raw":
        arguments["raw"] = raw[:, :, :, :3]
    elif name in arguments:
        arguments[name] = arguments[name][:1]
    else:
        arguments["initial_state"] = (y, c[:1], n, m)
    for cell in (slstm, recurrent_slstm):
        with pytest.raises(ValueError, match=name):
            cell(**arguments)


def test_a_compiled_layer_calls_it_as_it_is():
    leaves = [x.requires_grad_() for x in make_inputs()[:2]]
    layer = functools.partial(slstm, segment_ids=documents(2, 9))
    compiled = torch.compile(lambda *x: layer(*x)[0] * 2, backend="aot_eager")
    expected = torch.autograd.grad((layer(*leaves)[0] * 2).sum(), leaves)
    assert_close(list(torch.autograd.grad(compiled(*leaves).sum(), leaves)), list(expected), 1e-12, "raw R")
    torch._dynamo.reset()
