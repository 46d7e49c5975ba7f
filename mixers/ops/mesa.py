"""The Mesa layer: at every token, the linear map that fits all earlier key-value pairs best (MesaNet, arXiv 2506.05233).

    G_t = e^{g_t} G_{t-1} + beta_t k_t v_t^T,    H_t = e^{g_t} H_{t-1} + beta_t k_t k_t^T      (eq. 5-7)
    x_t = (H_t + diag(lambda))^{-1} q_t,         o_t = G_t^T x_t                                (eq. 8)

``recurrent_mesa`` solves densely at each token: the specification. ``chunk_mesa`` solves by conjugate gradients for all
tokens of a chunk at once. lambda does not decay.

The two states are one linear attention with the values [v | k]. So is the derivative: with e the gradient of o and
y = (H + Lambda)^{-1} G e a second solve (implicit differentiation, Appendix D), the gradients of k, v, beta, g and of the
initial states are those of linear attention with queries x, values [v | k] and upstream gradients [e | -y].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mixers.ops._chunks import (
    ChunkDecay,
    check_shapes,
    chunk_decay,
    chunk_lengths,
    compute_dtype,
    from_chunks,
    to_chunks,
)
from mixers.ops._solve import Operator, solve
from mixers.ops.linear import LinearGradients, chunk_read, chunk_states

SOLVERS = ("cg", "pcg")
MesaState = tuple[Tensor, Tensor]
"""G (B,H,K,V) and H (B,H,K,K)."""


def chunk_mesa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    lam: Tensor,
    *,
    cg_steps: int = 30,
    tol: float | None = None,
    solver: str = "cg",
    initial_state: MesaState | None = None,
    segment_ids: Tensor | None = None,
    chunk_size: int = 32,
) -> tuple[Tensor, MesaState]:
    """The Mesa layer in chunks.

    States and solver are float32 (float64 if any input is). Gradients reach every floating-point argument; they take the
    solution as converged, so with few steps they are those of the exact layer at the x that was found.

    Args:
        q: queries (B,T,H,K).
        k: keys (B,T,H,K), of unit length.
        v: values (B,T,H,V).
        beta: input gate (B,T,H), in (0, 1).
        g: finite log decay <= 0 (B,T,H); None for no decay.
        lam: lambda > 0 (H,K).
        cg_steps: steps of the solver, or the most of them if ``tol`` is set; 0 takes x = q, which is gated linear
            attention.
        tol: stop a token's solve once |residual| <= tol |q|. (The paper's epsilon refers to the residual at the start.)
        solver: ``cg``, the paper's; ``pcg`` preconditions it with the inverse of a chunk's mean of H + Lambda.
        initial_state: G and H before the first token; they belong to the first column's document.
        segment_ids: integers (B,T), non-decreasing; the states restart from zero where they change.
        chunk_size: most tokens per chunk.

    Returns:
        (B,T,H,V) in the dtype of q, and (G, H) after the last token, of the last column's document.

    Raises:
        ValueError: shapes that do not fit together, an unknown solver, negative steps or tolerance.
    """
    o, final_g, final_h, _ = _run(q, k, v, beta, g, lam, cg_steps, tol, solver, initial_state, segment_ids, chunk_size)
    return o, (final_g, final_h)


@torch.no_grad()
def steps_taken(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    lam: Tensor,
    *,
    cg_steps: int = 30,
    tol: float | None = None,
    solver: str = "cg",
    initial_state: MesaState | None = None,
    segment_ids: Tensor | None = None,
    chunk_size: int = 32,
) -> Tensor:
    """How many solver steps each token takes in ``chunk_mesa`` with the same arguments: (B,T,H) int64."""
    return _run(q, k, v, beta, g, lam, cg_steps, tol, solver, initial_state, segment_ids, chunk_size)[3]


def _run(q, k, v, beta, g, lam, cg_steps, tol, solver, initial_state, segment_ids, chunk_size):  # type: ignore
    _check(q, k, v, beta, g, lam, initial_state, segment_ids)
    if solver not in SOLVERS:
        raise ValueError(f"solver={solver}: must be one of {', '.join(SOLVERS)}")
    if cg_steps < 0 or (tol is not None and tol < 0):
        raise ValueError(f"cg_steps={cg_steps} and tol={tol} must not be negative")
    g0, h0 = (None, None) if initial_state is None else initial_state
    with torch.autocast(q.device.type, enabled=False):
        return _ChunkMesa.apply(q, k, v, beta, g, lam, g0, h0, segment_ids, cg_steps, tol, solver, chunk_size)


def recurrent_mesa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    lam: Tensor,
    *,
    initial_state: MesaState | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, MesaState]:
    """The Mesa layer token by token with an exact dense solve: the specification. Differentiable any number of times.

    Arguments, dtypes, result and errors are those of ``chunk_mesa``. An initial H counts by its symmetric part.
    """
    _check(q, k, v, beta, g, lam, initial_state, segment_ids)
    (batch, steps, heads, key_dim), value_dim = q.shape, v.shape[-1]
    dtype = compute_dtype(q, k, v, beta, g, lam, *(initial_state or ()))
    g_state, h_state = initial_state or (
        q.new_zeros(batch, heads, key_dim, value_dim),
        q.new_zeros(batch, heads, key_dim, key_dim),
    )
    g_state, h_state = g_state.to(dtype), h_state.to(dtype)
    outputs = []
    with torch.autocast(q.device.type, enabled=False):
        write_BTHK = k.to(dtype) * beta.to(dtype)[..., None]
        for t in range(steps):
            if segment_ids is not None and t > 0:
                same = (segment_ids[:, t] == segment_ids[:, t - 1])[:, None, None, None]
                g_state, h_state = torch.where(same, g_state, 0.0), torch.where(same, h_state, 0.0)
            if g is not None:
                decay = g[:, t, :, None, None].to(dtype).exp()
                g_state, h_state = g_state * decay, h_state * decay
            write = write_BTHK[:, t, :, :, None]
            g_state = torch.addcmul(g_state, write, v[:, t, :, None].to(dtype))
            h_state = torch.addcmul(h_state, write, k[:, t, :, None].to(dtype))
            system = (h_state + h_state.mT) / 2 + torch.diag_embed(lam.to(dtype))
            x_BHK1 = torch.linalg.solve(system, q[:, t, :, :, None].to(dtype))
            outputs.append(x_BHK1.mT @ g_state)
        return torch.cat(outputs, dim=2).transpose(1, 2).to(q.dtype), (g_state, h_state)


def _check(q, k, v, beta, g, lam, initial_state, segment_ids) -> None:  # type: ignore[no-untyped-def]
    if q.ndim != 4 or q.shape[1] < 1:
        raise ValueError(f"q must be (B,T,H,K) with T >= 1, got {tuple(q.shape)}")
    (batch, steps, heads, key_dim), value_dim = q.shape, v.shape[-1]
    expected = {
        "k": (k, q.shape),
        "v": (v, (batch, steps, heads, value_dim)),
        "beta": (beta, q.shape[:3]),
        "g": (g, q.shape[:3]),
        "lam": (lam, (heads, key_dim)),
        "segment_ids": (segment_ids, (batch, steps)),
    }
    if initial_state is not None:
        expected["initial_state[0]"] = (initial_state[0], (batch, heads, key_dim, value_dim))
        expected["initial_state[1]"] = (initial_state[1], (batch, heads, key_dim, key_dim))
    check_shapes("q", q, expected)


class _Problem(NamedTuple):
    """Inputs in chunk layout, the states that enter each chunk, and the operator that is solved with."""

    q_PCK: Tensor
    writes_PCK: Tensor  # beta k
    values_PCX: Tensor  # [v | k]
    beta_PC1: Tensor
    decay: ChunkDecay
    states_NGKX: Tensor  # [G | H], N + 1 of them
    operator: Operator

    @property
    def entered_PKX(self) -> Tensor:
        return self.states_NGKX[:-1].flatten(0, 1)


def _problem(inputs: list[Tensor | None], shape_NBHC: tuple[int, int, int, int]) -> _Problem:
    q, k, v, beta, g, lam, g0, h0, segment_ids = inputs
    assert q is not None and k is not None and v is not None and beta is not None and lam is not None
    (n_chunks, batch, heads, length), (key_dim, value_dim) = shape_NBHC, (q.shape[-1], v.shape[-1])
    matrices = n_chunks * batch * heads
    dtype = compute_dtype(q, k, v, beta, g, lam, g0, h0)

    def new(*shape: int) -> Tensor:
        return torch.empty(*shape_NBHC, *shape, dtype=dtype, device=q.device)

    q_PCK = to_chunks(q, new(key_dim)).view(matrices, length, key_dim)
    values = new(value_dim + key_dim)
    to_chunks(v, values[..., :value_dim])
    to_chunks(k, values[..., value_dim:])
    values_PCX = values.view(matrices, length, -1)
    k_PCK = values_PCX[..., value_dim:].contiguous()
    beta_PC1 = to_chunks(beta, new()).view(matrices, length, 1)
    decay = chunk_decay(g, segment_ids, shape_NBHC=shape_NBHC, dtype=dtype, device=q.device)
    writes_PCK = k_PCK * beta_PC1
    initial = None
    if g0 is not None and h0 is not None:
        initial = torch.cat((g0.to(dtype), (h0 + h0.mT).to(dtype) / 2), dim=-1).flatten(0, 1)
    states_NGKX = chunk_states(writes_PCK, values_PCX, decay, n_chunks, initial)
    operator = Operator(
        states_NGKX[:-1].flatten(0, 1)[..., value_dim:].contiguous(),
        decay.entry if decay.decays else torch.ones_like(beta_PC1),
        k_PCK,
        k_PCK.mT.contiguous(),
        decay.within * beta_PC1.mT,
        lam.to(dtype).repeat(n_chunks * batch, 1)[:, None],
    )
    return _Problem(q_PCK, writes_PCK, values_PCX, beta_PC1, decay, states_NGKX, operator)


class _ChunkMesa(torch.autograd.Function):
    """Forward by one solve, backward by a second one. Kept between them: the inputs, x and (pcg) the preconditioner."""

    @staticmethod
    def forward(ctx: Any, q, k, v, beta, g, lam, g0, h0, segment_ids, cg_steps, tol, solver, chunk_size):  # type: ignore
        (batch, steps, heads, _), value_dim = q.shape, v.shape[-1]
        n_chunks, length = chunk_lengths(steps, chunk_size)
        shape_NBHC = (n_chunks, batch, heads, length)
        inputs = [q, k, v, beta, g, lam, g0, h0, segment_ids]
        problem = _problem(inputs, shape_NBHC)
        inverse = problem.operator.inverse_of_mean() if solver == "pcg" and cg_steps else None
        if cg_steps:
            x_PCK, taken_PC = solve(problem.operator, problem.q_PCK, steps=cg_steps, tol=tol, inverse_PKK=inverse)
        else:
            x_PCK, taken_PC = problem.q_PCK, torch.zeros(problem.q_PCK.shape[:2], dtype=torch.int64, device=q.device)
        scores_PCC = torch.bmm(x_PCK, problem.writes_PCK.mT).mul_(problem.decay.within)
        v_PCV, entered_PKV = problem.values_PCX[..., :value_dim], problem.entered_PKX[..., :value_dim]
        o_PCV = chunk_read(x_PCK, scores_PCC, v_PCV, entered_PKV, problem.decay)
        ctx.save_for_backward(*inputs, x_PCK, inverse)
        ctx.shape_NBHC, ctx.steps, ctx.cg_steps, ctx.tol = shape_NBHC, steps, cg_steps, tol
        ctx.set_materialize_grads(False)
        o = from_chunks(o_PCV.view(*shape_NBHC, value_dim), steps, q.dtype)
        final = problem.states_NGKX[-1].unflatten(0, (batch, heads))
        taken = from_chunks(taken_PC.view(shape_NBHC), steps, torch.int64)
        ctx.mark_non_differentiable(taken)
        return o, final[..., :value_dim].clone(), final[..., value_dim:].clone(), taken

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do, dfinal_g, dfinal_h, _):  # type: ignore[override]
        *inputs, x_PCK, inverse = ctx.saved_tensors  # looked at once: see checkpointing
        with torch.autocast(x_PCK.device.type, enabled=False):
            return (*_backward(ctx, inputs, x_PCK, inverse, do, dfinal_g, dfinal_h), *(None,) * 5)


def _backward(ctx, inputs, x_PCK, inverse, do, dfinal_g, dfinal_h):  # type: ignore[no-untyped-def]
    """Gradients of q, k, v, beta, g, lambda and the initial states."""
    q, k, v, beta, g, lam, g0, h0, _ = inputs
    shape_NBHC, value_dim = ctx.shape_NBHC, v.shape[-1]
    problem = _problem(inputs, shape_NBHC)
    decay, values_PCX = problem.decay, problem.values_PCX
    upstream_PCX = torch.empty_like(values_PCX)  # [e | -y]
    e_PCV, minus_y_PCK = upstream_PCX[..., :value_dim], upstream_PCX[..., value_dim:]
    if do is None:
        e_PCV.zero_()
    else:
        to_chunks(do, upstream_PCX.view(*shape_NBHC, -1)[..., :value_dim])
    # the gradient of x, through o = G^T x
    scores_PCC = torch.bmm(e_PCV, values_PCX[..., :value_dim].mT).mul_(decay.within)
    entered_PVK = problem.entered_PKX[..., :value_dim].mT
    dx_PCK = chunk_read(e_PCV, scores_PCC, problem.writes_PCK, entered_PVK, decay)
    if ctx.cg_steps:
        y_PCK, _ = solve(problem.operator, dx_PCK, steps=ctx.cg_steps, tol=ctx.tol, inverse_PKK=inverse)
        torch.neg(y_PCK, out=minus_y_PCK)
        dlam = -(x_PCK * y_PCK).sum(1).unflatten(0, shape_NBHC[:3]).sum((0, 1)).to(lam.dtype)
    else:  # x = q: H is not read
        y_PCK, dlam = dx_PCK, torch.zeros_like(lam)
        minus_y_PCK.zero_()
    dfinal = None
    if dfinal_g is not None or dfinal_h is not None:
        dfinal = torch.zeros_like(problem.states_NGKX[-1])
        for part, given in ((dfinal[..., :value_dim], dfinal_g), (dfinal[..., value_dim:], dfinal_h)):
            if given is not None:
                part.copy_(given.reshape(part.shape))
    torch.bmm(x_PCK, problem.writes_PCK.mT, out=scores_PCC).mul_(decay.within)
    grads = LinearGradients(
        x_PCK,
        problem.writes_PCK,
        values_PCX,
        scores_PCC,
        problem.states_NGKX,
        decay,
        upstream_PCX,
        dfinal,
        gates=g is not None,
        queries=False,
    )
    k_PCK = problem.operator.k_PCK
    dk_PCK = torch.addcmul(grads.dv_PCV[..., value_dim:], grads.dk_PCK, problem.beta_PC1)
    dbeta_PC = (grads.dk_PCK * k_PCK).sum(-1)

    def back(x_PCX: Tensor, dtype: torch.dtype) -> Tensor:
        return from_chunks(x_PCX.reshape(*shape_NBHC, *x_PCX.shape[2:]), ctx.steps, dtype)

    dg0 = dh0 = None
    if g0 is not None:
        dinitial = grads.dinitial_GKV.unflatten(0, shape_NBHC[1:3])
        dh0 = dinitial[..., value_dim:]
        dg0, dh0 = dinitial[..., :value_dim].to(g0.dtype), ((dh0 + dh0.mT) / 2).to(h0.dtype)
    return (
        back(y_PCK, q.dtype),
        back(dk_PCK, k.dtype),
        back(grads.dv_PCV[..., :value_dim], v.dtype),
        back(dbeta_PC, beta.dtype),
        None if grads.dg_PC is None else back(grads.dg_PC, g.dtype),
        dlam,
        dg0,
        dh0,
    )
