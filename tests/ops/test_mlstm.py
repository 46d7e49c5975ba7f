"""mLSTM: chunked == recurrent == an unstabilised loop, in values and gradients; what must hold under stress."""

import functools
import itertools

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from mixers.ops.mlstm import NOTHING, chunk_mlstm, recurrent_mlstm
from tests.ops.oracles import assert_close, documents

LENGTHS = (1, 3, 17, 63, 64, 65, 130)
NAMES = "h C n dq dk dv di df dC dn"


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def oracle(q, k, v, i, f, *, initial_state, segment_ids=None):
    """C = sigmoid(f) C + e^i k v^T, h = C^T q / max(|n.q|, 1), without a stabiliser, one head at a time; m is 0."""
    batch, steps, heads, key_dim = q.shape
    rows, matrices, normalisers = [], [], []
    for b, h in itertools.product(range(batch), range(heads)):
        size = initial_state[2][b, h].exp()
        matrix, normaliser = size * initial_state[0][b, h], size * initial_state[1][b, h]
        for t in range(steps):
            if segment_ids is not None and t > 0 and segment_ids[b, t] != segment_ids[b, t - 1]:
                matrix, normaliser = torch.zeros_like(matrix), torch.zeros_like(normaliser)
            forget, written = f[b, t, h].sigmoid(), i[b, t, h].exp() * k[b, t, h]
            matrix = forget * matrix + torch.outer(written, v[b, t, h])
            normaliser = forget * normaliser + written
            query = q[b, t, h] / key_dim**0.5
            rows.append((query @ matrix) / (query @ normaliser).abs().clamp(min=1.0))
        matrices.append(matrix)
        normalisers.append(normaliser)
    h_BTHV = torch.stack(rows).view(batch, heads, steps, -1).transpose(1, 2)
    c = torch.stack(matrices).view(batch, heads, key_dim, -1)
    return h_BTHV, (c, torch.stack(normalisers).view(batch, heads, -1), q.new_zeros(batch, heads))


def make_inputs(batch=2, steps=17, heads=2, key_dim=6, value_dim=5, *, seed=0) -> list[Tensor]:
    """q, k, v, i, f, C, n, m in float64. Denominators lie on both sides of their bound and keep away from zero."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = randn(batch, steps, heads, key_dim) + 0.7, randn(batch, steps, heads, key_dim) + 0.7
    v, i, f = (
        randn(batch, steps, heads, value_dim),
        2 * randn(batch, steps, heads) - 1,
        2 * randn(batch, steps, heads) + 2,
    )
    return [
        q,
        k,
        v,
        i,
        f,
        randn(batch, heads, key_dim, value_dim),
        randn(batch, heads, key_dim) + 1,
        randn(batch, heads),
    ]


def value_and_gradients(rule, inputs: list[Tensor], dtype=torch.float64, **options) -> list[Tensor]:
    """h and the final C and n times e^m, and the gradients of all inputs but m for fixed random cotangents of these."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs[:7]]
    state = (leaves[5], leaves[6], inputs[7].to(dtype))
    h, (c, n, m) = rule(*leaves[:5], initial_state=state, **options)
    size = m.detach().exp()
    outputs = [h, c * size[..., None, None], n * size[..., None]]
    generator = torch.Generator().manual_seed(9)
    cotangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, cotangents)]


@functools.cache
def recurrent_result(steps: int, packed: bool) -> list[Tensor]:
    segments = documents(2, steps) if packed else None
    return value_and_gradients(recurrent_mlstm, make_inputs(steps=steps), segment_ids=segments)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("steps", [1, 3, 17])
def test_recurrent_equals_oracle(steps, packed):
    expected = value_and_gradients(
        oracle, make_inputs(steps=steps), segment_ids=documents(2, steps) if packed else None
    )
    assert_close(recurrent_result(steps, packed), expected, 1e-12, NAMES)


def test_the_cases_have_denominators_on_both_sides_of_the_bound():
    inputs = make_inputs(steps=130)
    sizes = []
    for steps in range(1, 130, 5):
        _, (_, n, m) = recurrent_mlstm(*(x[:, :steps] for x in inputs[:5]), initial_state=tuple(inputs[5:]))
        sizes.append(((n * inputs[0][:, steps - 1]).sum(-1) / 6**0.5 * m.exp()).abs())
    above = torch.stack(sizes) > 1
    assert 0.2 < above.double().mean() < 0.98


@pytest.mark.parametrize("chunk_size", [1, 16, 64])
@pytest.mark.parametrize("steps", LENGTHS)
def test_chunk_equals_recurrent(steps, chunk_size):
    for packed in (False, True):
        segments = documents(2, steps) if packed else None
        actual = value_and_gradients(chunk_mlstm, make_inputs(steps=steps), segment_ids=segments, chunk_size=chunk_size)
        assert_close(actual, recurrent_result(steps, packed), 1e-11, NAMES)


def test_both_forms_carry_the_same_stabiliser():
    inputs, segments = make_inputs(steps=70), documents(2, 70)
    for options in ({}, {"segment_ids": segments}, {"initial_state": tuple(inputs[5:])}):
        states = [rule(*inputs[:5], **options)[1] for rule in (chunk_mlstm, recurrent_mlstm)]
        assert_close(list(states[0]), list(states[1]), 1e-12, "C n m")


@pytest.mark.parametrize("widths", [(2, 40), (40, 2), (1, 1)])
def test_any_widths(widths):
    inputs = make_inputs(1, 10, 1, *widths)
    actual = value_and_gradients(functools.partial(chunk_mlstm, chunk_size=4), inputs)
    assert_close(actual, value_and_gradients(recurrent_mlstm, inputs), 1e-11, NAMES)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rule", [functools.partial(chunk_mlstm, chunk_size=2), recurrent_mlstm])
def test_gradients_are_derivatives(rule, packed):
    """Of what does not depend on the stabiliser, which the derivative holds constant."""
    inputs = [x.requires_grad_() for x in make_inputs(1, 5, 1, 2, 3)[:7]]
    segments = torch.tensor([[4, 4, 4, 7, 7]]) if packed else None
    start = torch.full((1, 1), 0.3, dtype=torch.float64)

    def outputs(q, k, v, i, f, c, n):
        h, (c, n, m) = rule(q, k, v, i, f, initial_state=(c, n, start), segment_ids=segments)
        return h, c * m.exp()[..., None, None], n * m.exp()[..., None]

    assert torch.autograd.gradcheck(outputs, inputs)


def test_h_does_not_depend_on_the_stabiliser_it_starts_from():
    q, k, v, i, f, c, n, m = make_inputs(steps=40)
    expected = value_and_gradients(chunk_mlstm, [q, k, v, i, f, c, n, m])
    shifted = [q, k, v, i, f, c * torch.exp(m - 3)[..., None, None], n * torch.exp(m - 3)[..., None], 0 * m + 3]
    assert_close(value_and_gradients(chunk_mlstm, shifted)[:8], expected[:8], 1e-11, "h C n dq dk dv di df")
    nothing = chunk_mlstm(q, k, v, i, f)[0]
    for start in (0.0, NOTHING, float("-inf")):
        state = (0 * c, 0 * n, torch.full_like(m, start))
        for rule in (chunk_mlstm, recurrent_mlstm):
            assert_close([rule(q, k, v, i, f, initial_state=state)[0]], [nothing], 1e-12, "h")


def test_float32_is_accurate_enough():
    inputs = make_inputs(1, 200, 2, 32, 32)
    expected = value_and_gradients(recurrent_mlstm, inputs)
    assert_close(value_and_gradients(chunk_mlstm, inputs, torch.float32), expected, 1e-4, NAMES)
    assert_close(value_and_gradients(recurrent_mlstm, inputs, torch.float32), expected, 1e-4, NAMES)


def test_weak_gates_keep_their_precision_after_strong_ones():
    # sums of log forget gates reach -1600, where neighbouring float32 numbers are 1e-4 apart
    inputs = make_inputs(1, 64, 2, 8, 8)
    inputs[4][:, :32] = -50.0
    expected = value_and_gradients(recurrent_mlstm, inputs)
    actual = value_and_gradients(chunk_mlstm, inputs, torch.float32)
    assert_close(actual[:8], expected[:8], 1e-5, "h C n dq dk dv di df")


def test_bfloat16_inputs_are_computed_in_float32():
    inputs = [x.bfloat16() for x in make_inputs(1, 70, 2, 16, 16)]
    state = tuple(x.float() for x in inputs[5:])
    expected, (c, n, _) = recurrent_mlstm(
        *(x.double() for x in inputs[:5]), initial_state=tuple(x.double() for x in state)
    )
    leaves = [x.clone().requires_grad_() for x in inputs[:5]]
    h, after = chunk_mlstm(*leaves, initial_state=state)
    assert h.dtype == torch.bfloat16 and all(x.dtype == torch.float32 for x in after)
    assert_close([h], [expected], 4e-3, "h")
    assert_close(list(after[:2]), [c, n], 1e-5, "C n")
    assert all(x.dtype == torch.bfloat16 for x in torch.autograd.grad(h.sum(), leaves))


@pytest.mark.parametrize("rule", [chunk_mlstm, recurrent_mlstm])
def test_autocast_changes_nothing(rule):
    inputs = [x.float() for x in make_inputs(1, 20, 2, 8, 8)]

    def under_autocast(*arguments, **options):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return rule(*arguments, **options)

    actual = value_and_gradients(under_autocast, inputs, torch.float32)
    expected = value_and_gradients(rule, inputs, torch.float32)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("rule", [functools.partial(chunk_mlstm, chunk_size=16), recurrent_mlstm])
@pytest.mark.parametrize("packed", [False, True])
def test_split_with_carried_state_equals_whole(rule, packed):
    inputs, segments = make_inputs(steps=90), documents(2, 90) if packed else None
    expected = value_and_gradients(rule, inputs, segment_ids=segments)

    def split(*tensors, initial_state, segment_ids):
        state, outputs = initial_state, []
        for first, last in ((0, 1), (1, 38), (38, 40), (40, 90)):
            options = {}
            if segment_ids is not None:
                # the carried state belongs to the document of the part's first column: drop it where that is a new one
                if first > 0:
                    same = (segment_ids[:, first] == segment_ids[:, first - 1])[:, None]
                    state = (state[0] * same[..., None, None], state[1] * same[..., None], state[2])
                options = {"segment_ids": segment_ids[:, first:last]}
            h, state = rule(*(x[:, first:last] for x in tensors), initial_state=state, **options)
            outputs.append(h)
        return torch.cat(outputs, dim=1), state

    assert_close(value_and_gradients(split, inputs, segment_ids=segments), expected, 1e-11, NAMES)


@pytest.mark.parametrize("chunk_size", [4, 64])
def test_packed_documents_equal_documents_apart(chunk_size):
    inputs, borders = make_inputs(1, 40), [0, 3, 4, 16, 33, 40]
    lengths = torch.tensor(borders).diff()
    segments = torch.arange(len(lengths)).repeat_interleave(lengths)[None]
    inputs[3][:, 0], inputs[3][:, 3:16] = 600.0, -200.0  # a maximum over the earlier document would drown the writes

    def apart(*tensors, initial_state):
        outputs, state = [], initial_state
        for first, last in itertools.pairwise(borders):
            state = initial_state if first == 0 else None
            h, state = recurrent_mlstm(*(x[:, first:last] for x in tensors), initial_state=state)
            outputs.append(h)
        return torch.cat(outputs, dim=1), state

    actual = value_and_gradients(functools.partial(chunk_mlstm, chunk_size=chunk_size), inputs, segment_ids=segments)
    expected = value_and_gradients(apart, inputs)
    assert_close(actual, expected, 1e-11, NAMES)
    assert_close([actual[0][:, 3:16]], [expected[0][:, 3:16]], 1e-11, "h")


def test_the_past_does_not_see_the_future():
    inputs = make_inputs(steps=50)[:5]
    h, _ = chunk_mlstm(*inputs, chunk_size=16)
    for x in inputs:
        x[:, 30:] = x[:, 30:].flip(1) * 0.5
    changed, _ = chunk_mlstm(*inputs, chunk_size=16)
    assert torch.equal(h[:, :30], changed[:, :30])
    assert not torch.allclose(h[:, 30:], changed[:, 30:])


@pytest.mark.parametrize("rule", [chunk_mlstm, recurrent_mlstm])
@pytest.mark.parametrize("steps", [1, 30])
def test_inputs_and_passed_state_are_unchanged(rule, steps):
    inputs, segments = make_inputs(steps=steps), documents(2, steps)
    copies = [x.clone() for x in inputs]
    value_and_gradients(rule, inputs)
    _, state = rule(*inputs[:5], initial_state=tuple(inputs[5:]), segment_ids=segments)
    for x in state:
        x.fill_(7.0)
    assert all(torch.equal(x, copy) for x, copy in zip(inputs, copies, strict=True))
    assert torch.equal(segments, documents(2, steps))


def test_any_result_alone_has_a_gradient():
    inputs = [x.requires_grad_() for x in make_inputs(steps=20)[:7]]
    m = torch.zeros(2, 2, dtype=torch.float64)

    def gradients(rule, pick):
        h, (c, n, _) = rule(*inputs[:5], initial_state=(*inputs[5:], m))
        found = torch.autograd.grad((h, c, n)[pick].sum(), inputs, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]

    for pick in range(3):
        chunked = gradients(functools.partial(chunk_mlstm, chunk_size=8), pick)
        assert_close(chunked, gradients(recurrent_mlstm, pick), 1e-11, "q k v i f C n")


def test_backward_can_run_again():
    """After the first run (retain_graph), and on tensors that activation checkpointing computes anew."""
    inputs = [x.requires_grad_() for x in make_inputs(steps=20)[:5]]

    def rule(*tensors):
        h, (c, n, _) = chunk_mlstm(*tensors, chunk_size=8)
        return h, c, n

    outputs = rule(*inputs)
    first = torch.autograd.grad([x.sum() for x in outputs], inputs, retain_graph=True)
    again = torch.autograd.grad([x.sum() for x in outputs], inputs)
    anew = torch.utils.checkpoint.checkpoint(rule, *inputs, use_reentrant=False)
    anew = torch.autograd.grad([x.sum() for x in anew], inputs)
    for gradients in (again, anew):
        assert all(torch.equal(a, e) for a, e in zip(gradients, first, strict=True))


def test_second_derivative_is_refused_not_wrong():
    inputs = [x.requires_grad_() for x in make_inputs(steps=4)[:5]]
    (dq,) = torch.autograd.grad(chunk_mlstm(*inputs)[0].square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def stressed(case: str) -> list[Tensor]:
    steps = 2048 if case == "one repeated token" else 130
    inputs = make_inputs(1, steps, 2, 8, 8)
    _, k, _, i, f, *_ = inputs
    signs = torch.where(torch.arange(steps) % 3 == 0, 50.0, -50.0)[None, :, None].double()
    if case == "gates at +-50":
        i.copy_(signs.roll(1, 1).expand_as(i))
        f.copy_(signs.expand_as(f))
    elif case.startswith("gate "):
        (i if case[5] == "i" else f).fill_(float(case[7:]))
    elif case == "zero keys":
        k.zero_()
    elif case == "one repeated token":
        for x in inputs[:5]:
            x.copy_(x[:, :1].expand_as(x).clone())
    elif case == "nothing is written":
        i.fill_(NOTHING)
    return inputs


CASES = ["gates at +-50", "gate i 50", "gate i -50", "gate i -10", "gate f 50", "gate f -50", "zero keys"]


@pytest.mark.parametrize("case", [*CASES, "one repeated token", "nothing is written", "gate i -300", "gate f -1e5"])
def test_stress(case):
    inputs = stressed(case)
    expected = value_and_gradients(functools.partial(chunk_mlstm, chunk_size=16), inputs)
    assert all(x.isfinite().all() for x in expected)
    if case in CASES:
        assert_close(expected, value_and_gradients(recurrent_mlstm, inputs), 1e-10, NAMES)
    leaves = [x.float().requires_grad_() for x in inputs[:7]]
    for start in (0.0, -1e30):
        m = torch.full((1, 2), start)
        h, (c, n, m) = chunk_mlstm(*leaves[:5], initial_state=(*leaves[5:], m))
        gradients = torch.autograd.grad(h.sum() + c.sum() + n.sum(), leaves)
        assert all(x.isfinite().all() for x in (h, c, n, m, *gradients))
    if case not in ("gate i 50", "gates at +-50"):  # a final state times e^50, next to which nothing else is seen
        actual = value_and_gradients(chunk_mlstm, inputs, torch.float32)
        assert_close(actual[:1], expected[:1], 1e-4, "h")
        largest = max(x.norm() for x in expected[3:])
        assert all((a - e).norm() <= 1e-4 * largest for a, e in zip(actual[3:], expected[3:], strict=True))


def test_tiny_cotangents_keep_their_relative_precision():
    leaves = [x.float().requires_grad_() for x in make_inputs(1, 100, 2, 16, 16)[:5]]

    def gradients(size):
        return [x / size for x in torch.autograd.grad((chunk_mlstm(*leaves)[0] * size).sum(), leaves)]

    assert_close(gradients(1e-6), gradients(1.0), 1e-5, "q k v i f")


@pytest.mark.parametrize("name", ["k", "v", "i", "f", "n of initial_state", "segment_ids"])
def test_wrong_shapes_are_named(name):
    q, k, v, i, f, c, n, m = make_inputs(steps=4)
    arguments = {"k": k, "v": v, "i": i, "f": f, "initial_state": (c, n, m), "segment_ids": documents(2, 4)}
    if name in arguments:
        arguments[name] = arguments[name][:1]
    else:
        arguments["initial_state"] = (c, n[:1], m)
    for rule in (chunk_mlstm, recurrent_mlstm):
        with pytest.raises(ValueError, match=name):
            rule(q, **arguments)


def test_compiles_in_one_piece():
    inputs = [x.requires_grad_() for x in make_inputs(1, 10, 1, 4, 4)[:5]]
    layer = functools.partial(chunk_mlstm, segment_ids=documents(1, 10), chunk_size=5)
    results = []
    for function in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        h, (c, n, m) = function(*inputs)
        results.append([h, c, n, m, *torch.autograd.grad(h.square().sum() + c.sum() + n.sum(), inputs)])
    assert_close(results[1], results[0], 1e-12, "h C n m dq dk dv di df")
    torch._dynamo.reset()
