"""The Mesa layer: conjugate gradients == dense solves, in values and gradients of everything; stable where H is not."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evals.peers import fla_naive
from mixers.ops.linear import recurrent_linear_attention
from mixers.ops.mesa import chunk_mesa, recurrent_mesa, steps_taken
from tests.ops.oracles import assert_close, documents

NAMES = "o G H dq dk dv dbeta dg dlam dG0 dH0"
SOLVERS = ("cg", "pcg")


def make_inputs(steps=17, batch=2, heads=2, key_dim=6, value_dim=5, *, seed=0, slow=False, correlated=0.0):
    """q, k, v, beta, g, lam and the initial states G and H in float64."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    common = correlated * randn(1, 1, heads, key_dim)
    q = F.normalize(randn(batch, steps, heads, key_dim) + common, dim=-1)
    k = F.normalize(randn(batch, steps, heads, key_dim) + common, dim=-1)
    v, beta = randn(batch, steps, heads, value_dim), torch.sigmoid(randn(batch, steps, heads))
    g = F.logsigmoid(randn(batch, steps, heads) + (6.0 if slow else 1.0))
    lam = 0.25 + F.softplus(randn(heads, key_dim))
    root = randn(batch, heads, key_dim, key_dim)
    return [q, k, v, beta, g, lam, randn(batch, heads, key_dim, value_dim), root @ root.mT]


def value_and_gradients(rule, inputs, dtype=torch.float64, size=1.0, **options) -> list[Tensor]:
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    o, (g_state, h_state) = rule(*leaves[:6], initial_state=(leaves[6], leaves[7]), **options)
    h_state = (h_state + h_state.mT) / 2  # only the symmetric part of H counts
    generator, results = torch.Generator().manual_seed(9), [o, g_state, h_state]
    cotangents = [size * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in results]
    return [*results, *torch.autograd.grad(results, leaves, cotangents)]


def test_recurrent_is_the_least_squares_map():
    """Against the problem that the layer solves, in one token's own words (eq. 4): weights decay, lambda does not."""
    q, k, v, beta, g, lam, _, _ = make_inputs(12)
    o, _ = recurrent_mesa(q, k, v, beta, g, lam)
    for b, t, h in ((0, 11, 0), (1, 5, 1)):
        weight = (g[b, : t + 1, h].flip(0).cumsum(0).flip(0) - g[b, : t + 1, h]).exp() * beta[b, : t + 1, h]
        keys = torch.cat((weight.sqrt()[:, None] * k[b, : t + 1, h], torch.diag(lam[h].sqrt())))
        values = torch.cat((weight.sqrt()[:, None] * v[b, : t + 1, h], torch.zeros(6, 5, dtype=v.dtype)))
        # weight_i = beta_i exp(sum_{s > i} g_s)
        phi = torch.linalg.lstsq(keys, values).solution
        assert_close([o[b, t, h]], [q[b, t, h] @ phi], 1e-10, "o")


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("steps", [1, 3, 17, 64, 65, 130])
def test_chunk_equals_recurrent(steps, solver):
    for packed in (False, True):
        inputs = make_inputs(steps)
        segments = documents(2, steps) if packed else None
        expected = value_and_gradients(recurrent_mesa, inputs, segment_ids=segments)
        for chunk_size in (16, 64):
            rule = functools.partial(chunk_mesa, solver=solver, chunk_size=chunk_size)
            actual = value_and_gradients(rule, inputs, segment_ids=segments)
            assert_close(actual, expected, 1e-10, NAMES)


@pytest.mark.parametrize("solver", SOLVERS)
def test_gradients_are_derivatives(solver):
    inputs = [x.requires_grad_() for x in make_inputs(5, 1, 1, 3, 2)]
    segments = torch.tensor([[4, 4, 4, 7, 7]])

    def outputs(*x, rule):
        o, (g_state, h_state) = rule(*x[:6], initial_state=(x[6], (x[7] + x[7].mT) / 2), segment_ids=segments)
        return o, g_state, h_state

    chunk = functools.partial(chunk_mesa, solver=solver, chunk_size=2)
    assert torch.autograd.gradcheck(functools.partial(outputs, rule=chunk), inputs)
    assert torch.autograd.gradcheck(functools.partial(outputs, rule=recurrent_mesa), inputs)


def test_only_the_symmetric_part_of_an_initial_h_counts():
    inputs = make_inputs(20)
    tilted = [*inputs[:7], inputs[7] + torch.randn(inputs[7].shape, generator=torch.Generator().manual_seed(1)).triu(1)]
    assert not torch.equal(tilted[7], tilted[7].mT)
    expected = value_and_gradients(recurrent_mesa, tilted)
    assert_close(value_and_gradients(chunk_mesa, tilted), expected, 1e-10, NAMES)
    straight = [*inputs[:7], (tilted[7] + tilted[7].mT) / 2]
    assert_close(value_and_gradients(chunk_mesa, straight), expected, 1e-10, NAMES)


def test_no_gates_and_no_initial_state():
    q, k, v, beta, _, lam, _, _ = make_inputs(40)
    assert_close([chunk_mesa(q, k, v, beta, None, lam)[0]], [recurrent_mesa(q, k, v, beta, None, lam)[0]], 1e-10, "o")


def test_zero_steps_are_gated_linear_attention():
    inputs = make_inputs(70)
    actual = value_and_gradients(functools.partial(chunk_mesa, cg_steps=0), inputs)

    def linear(q, k, v, beta, g, lam, *, initial_state):
        o, g_state = recurrent_linear_attention(q, k * beta[..., None], v, g, initial_state=initial_state[0])
        _, h_state = recurrent_linear_attention(q, k * beta[..., None], k, g, initial_state=initial_state[1])
        return o, (g_state, h_state + 0 * lam.sum())

    expected = value_and_gradients(linear, inputs)
    assert_close(actual, expected, 1e-11, NAMES)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("slow", [False, True])
def test_float32_against_the_dense_solve(solver, slow):
    inputs = make_inputs(200, 1, 2, 32, 32, slow=slow, correlated=0.5)
    expected = value_and_gradients(recurrent_mesa, inputs)
    rule = functools.partial(chunk_mesa, solver=solver, cg_steps=60)  # the random initial H is ill-conditioned
    assert_close(value_and_gradients(rule, inputs, torch.float32), expected, 2e-4, NAMES)


@pytest.mark.parametrize("solver", SOLVERS)
def test_small_upstream_gradients_keep_their_digits(solver):
    inputs = make_inputs(130, 1, 2, 16, 16, slow=True)
    for tol in (None, 1e-5):
        rule = functools.partial(chunk_mesa, solver=solver, tol=tol)
        large = value_and_gradients(rule, inputs, torch.float32)
        small = value_and_gradients(rule, inputs, torch.float32, size=1e-6)
        assert_close([1e6 * x for x in small[3:]], large[3:], 1e-3, " ".join(NAMES.split()[3:]))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("steps_and_tol", [(30, None), (60, 1e-6)], ids=str)
def test_stable_on_one_repeated_token_with_gamma_near_one(solver, steps_and_tol):
    q, k, v, _, _, _, _, _ = (
        x[:, :1] if x.ndim == 4 and x.shape[1] == 2048 else x for x in make_inputs(2048, 1, 2, 16, 16)
    )
    q, k, v = (x.expand(1, 2048, 2, 16).float().contiguous().requires_grad_() for x in (q, k, v))
    beta, g = torch.full((1, 2048, 2), 0.9), torch.full((1, 2048, 2), -1e-6)
    lam = torch.full((2, 16), 0.25)
    cg_steps, tol = steps_and_tol
    o, _ = chunk_mesa(q, k, v, beta, g, lam, solver=solver, cg_steps=cg_steps, tol=tol)
    gradients = torch.autograd.grad(o.sum(), (q, k, v))
    assert all(x.isfinite().all() for x in (o, *gradients))
    exact = recurrent_mesa(*(x.detach().double() for x in (q, k, v, beta, g, lam)))[0]
    # H + Lambda has a condition number of 7000 there: float32 cannot know the answer better than to about 1e-3
    assert_close([o[:, -1]], [exact[:, -1]], 1e-2, "o")


@pytest.mark.parametrize("solver", SOLVERS)
def test_tolerance_is_met_and_met_early(solver):
    inputs = [x.float() for x in make_inputs(300, 1, 2, 32, 32, slow=True, correlated=0.5)]
    q, k, v, beta, g, lam, *_ = inputs
    exact = recurrent_mesa(*(x.double() for x in inputs[:6]))[0]
    taken, errors = [], []
    for tol in (1e-2, 1e-3, 1e-5):
        options = {"solver": solver, "tol": tol, "cg_steps": 60}
        steps = steps_taken(q, k, v, beta, g, lam, **options)
        assert steps.shape == (1, 300, 2) and int(steps.max()) < 60
        taken.append(float(steps.float().mean()))
        o = chunk_mesa(q, k, v, beta, g, lam, **options)[0]
        errors.append(float((o - exact).norm() / exact.norm()))
    assert taken == sorted(taken) and errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-4


def test_preconditioning_takes_fewer_steps_at_equal_residual():
    q, k, v, beta, g, lam, *_ = (x.float() for x in make_inputs(512, 1, 2, 32, 32, slow=True, correlated=1.0))
    plain, better = (
        steps_taken(q, k, v, beta, g, lam, tol=1e-5, cg_steps=100, solver=s, chunk_size=64).float().mean()
        for s in SOLVERS
    )
    assert better < plain / 2


def test_too_few_steps_are_worse_and_more_are_better():
    inputs = make_inputs(200, 1, 2, 32, 32, slow=True)
    exact = recurrent_mesa(*inputs[:6])[0]
    errors = [float((chunk_mesa(*inputs[:6], cg_steps=n)[0] - exact).norm()) for n in (0, 1, 3, 10, 30)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-6 * errors[0]


@pytest.mark.parametrize("solver", SOLVERS)
def test_split_with_carried_state_equals_whole(solver):
    inputs = make_inputs(90)
    rule = functools.partial(chunk_mesa, solver=solver)

    def split(*x, initial_state):
        state, outputs = initial_state, []
        for first, last in ((0, 1), (1, 38), (38, 40), (40, 90)):
            o, state = rule(*(y[:, first:last] for y in x[:5]), x[5], initial_state=state)
            outputs.append(o)
        return torch.cat(outputs, dim=1), state

    assert_close(value_and_gradients(split, inputs), value_and_gradients(rule, inputs), 1e-10, NAMES)


@pytest.mark.parametrize("solver", SOLVERS)
def test_zero_queries_and_inputs_unchanged(solver):
    inputs = make_inputs(40)
    inputs[0][:, ::3] = 0
    copies = [x.clone() for x in inputs]
    actual = value_and_gradients(functools.partial(chunk_mesa, solver=solver), inputs)
    assert all(x.isfinite().all() for x in actual)
    assert all(torch.equal(x, copy) for x, copy in zip(inputs, copies, strict=True))


def test_bfloat16_inputs_and_autocast():
    inputs = [x.bfloat16() for x in make_inputs(70, 1, 2, 16, 16)[:6]]
    expected = recurrent_mesa(*(x.double() for x in inputs))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, (g_state, h_state) = chunk_mesa(*inputs)
    assert (o.dtype, g_state.dtype, h_state.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert_close([o, g_state, h_state], [expected[0], *expected[1]], 5e-3, "o G H")


def test_second_opinion():
    """fla's plain-torch code: the dense solve and its conjugate gradients."""
    naive = fla_naive("mesa_net")
    if naive is None:
        pytest.skip("fla-core is not installed")
    q, k, v, beta, g, lam, *_ = (x.float() for x in make_inputs(128, 1, 2, 16, 16))
    o = chunk_mesa(q, k, v, beta, g, lam)[0]
    assert_close([o], [naive.naive_mesa_net_exact(q, k, v, g, lam, beta)[0]], 2e-4, "o")
    # their guards of 1e-5 in the divisions are not small against a converged residual: 4e-4 from the dense solve
    assert_close([o], [naive.naive_mesa_net_CG(q, k, v, g, lam, beta, 64, max_CG_iteration=30)[0]], 2e-3, "o")


@pytest.mark.parametrize(
    "options, word", [({"solver": "lu"}, "solver"), ({"cg_steps": -1}, "cg_steps"), ({"tol": -1.0}, "tol")]
)
def test_wrong_options_are_named(options, word):
    with pytest.raises(ValueError, match=word):
        chunk_mesa(*make_inputs(4)[:6], **options)


@pytest.mark.parametrize("index, name", [(1, "k"), (2, "v"), (3, "beta"), (4, "g"), (5, "lam")])
def test_wrong_shapes_are_named(index, name):
    inputs = make_inputs(4)[:6]
    inputs[index] = inputs[index][:1]
    for rule in (chunk_mesa, recurrent_mesa):
        with pytest.raises(ValueError, match=name):
            rule(*inputs)
