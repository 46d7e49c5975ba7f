"""The (gated) delta rule: DeltaNet and Gated DeltaNet.

    S <- e^{g_t} S;    S <- S + beta_t k_t (v_t - S^T k_t)^T;    o_t = scale * S^T q_t

The state decays first and the error is taken against the decayed state (Gated DeltaNet, arXiv 2412.06464, eq. 10;
without g DeltaNet, arXiv 2406.06484). ``recurrent_delta_rule`` is the specification, ``chunk_delta_rule`` computes the
same a chunk at a time.

Chunk form. With D the decay between two tokens (``ChunkDecay.within``) and w_j = beta_j k_j what token j writes along,
the errors e_i = v_i - S_{i-1}^T k_i (decayed) of one chunk solve a unit triangular system,

    (I + A) E = V - diag(entry) K S,    A = tril(D * K W^T, -1),    (1)
    O  = diag(entry) Q S + P E,         P = tril(D * Q W^T),        (2)
    S' = whole S + (diag(exit) W)^T E.                              (3)

This is the WY form of the papers with beta moved from the rows of the system to what is written: the unknowns are then
the errors themselves, and d beta_j = k_j . dw_j. (I + A)^{-1} is formed once per chunk and used in both directions.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mixers.ops._chunks import (
    ChunkDecay,
    by_chunk,
    chunk_decay,
    chunk_lengths,
    compute_dtype,
    from_chunks,
    reverse_cumulative_sum,
    to_chunks,
    unit_lower_inverse,
)


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    segment_ids: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """The delta rule in chunks; equal to ``recurrent_delta_rule`` up to rounding, for any T >= 1.

    Gates, state and arithmetic are float32 (float64 if any input is); bfloat16 inputs are converted on the way in.
    Gradients reach every floating-point argument; there is no second derivative (use the recurrent form).

    Args:
        q: queries (B,T,H,K).
        k: keys (B,T,H,K). They should have unit length: with beta < 2 the state then cannot grow without bound.
        v: values (B,T,H,V).
        beta: writing strength (B,T,H), in (0, 1), or (0, 2) for negative eigenvalues.
        g: finite log decay <= 0 (B,T,H); None for no decay.
        scale: factor on the output.
        initial_state: (B,H,K,V), the state before the first token; it belongs to the first column's document.
        segment_ids: integers (B,T), non-decreasing; the state restarts from zero where they change.
        chunk_size: most tokens per chunk; a shorter sequence is one chunk of its own length.

    Returns:
        (B,T,H,V) in the dtype of q, and the state after the last token (B,H,K,V), of the last column's document.

    Raises:
        ValueError: shapes that do not fit together, T = 0 or chunk_size < 1.
    """
    _check(q, k, v, beta, g, initial_state, segment_ids)
    with torch.autocast(q.device.type, enabled=False):
        o, state = _ChunkDeltaRule.apply(q, k, v, beta, g, initial_state, segment_ids, chunk_size)
        return (o if scale == 1.0 else o * scale), state


def recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The delta rule token by token: the specification and, with T = 1, the decoding step.

    Arguments, dtypes, result and errors are those of ``chunk_delta_rule``. Differentiable any number of times.
    """
    _check(q, k, v, beta, g, initial_state, segment_ids)
    (batch, steps, heads, key_dim), value_dim = q.shape, v.shape[-1]
    dtype = compute_dtype(q, k, v, beta, g, initial_state)
    state = q.new_zeros(batch, heads, key_dim, value_dim, dtype=dtype) if initial_state is None else initial_state
    state = state.to(dtype)
    outputs = []
    with torch.autocast(q.device.type, enabled=False):
        write_BTHK = k.to(dtype) * beta.to(dtype)[..., None]
        decay_BTH = None if g is None else g.to(dtype).exp()
        for t in range(steps):
            if segment_ids is not None and t > 0:
                same = segment_ids[:, t] == segment_ids[:, t - 1]
                state = torch.where(same[:, None, None, None], state, 0.0)
            if decay_BTH is not None:
                state = state * decay_BTH[:, t, :, None, None]
            error_BH1V = v[:, t, :, None].to(dtype) - k[:, t, :, None].to(dtype) @ state
            state = state + write_BTHK[:, t, :, :, None] * error_BH1V
            outputs.append(q[:, t, :, None].to(dtype) @ state)
        o = torch.cat(outputs, dim=2).transpose(1, 2)
        return (o if scale == 1.0 else o * scale).to(q.dtype), state


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    segment_ids: Tensor | None,
) -> None:
    if q.ndim != 4 or q.shape[1] < 1:
        raise ValueError(f"q must be (B,T,H,K) with T >= 1, got {tuple(q.shape)}")
    batch, steps, heads, key_dim = q.shape
    expected = {"k": (k, q.shape), "v": (v, (batch, steps, heads, v.shape[-1])), "beta": (beta, q.shape[:3])}
    if g is not None:
        expected["g"] = (g, q.shape[:3])
    if initial_state is not None:
        expected["initial_state"] = (initial_state, (batch, heads, key_dim, v.shape[-1]))
    if segment_ids is not None:
        expected["segment_ids"] = (segment_ids, (batch, steps))
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {tuple(shape)} for q {tuple(q.shape)}, got {tuple(tensor.shape)}")


class _Saved(NamedTuple):
    """What the backward of a chunked delta rule reads; 2 runs over (keys, queries), the two readers of the state."""

    reads_2PCK: Tensor  # keys and queries
    entering_2PCK: Tensor  # diag(entry) of them
    writes_PCK: Tensor  # W
    leaving_PCK: Tensor  # diag(exit) W
    beta_PC1: Tensor
    scores_2PCC: Tensor  # A, with a diagonal and more that is never read, and P
    inverse_PCC: Tensor  # (I + A)^{-1}
    errors_PCV: Tensor  # E
    entered_PKV: Tensor  # S, the state that enters each chunk


class _ChunkDeltaRule(torch.autograd.Function):
    """Equations (1)-(3) and their derivative, written by hand.

    Autograd through a loop that updates the state in place costs time that grows faster than T. In the suffixes
    P = N * B * H runs over the matrices of all chunks, G = B * H over those of one.
    """

    @staticmethod
    def forward(ctx, q, k, v, beta, g, initial_state, segment_ids, chunk_size):
        (batch, steps, heads, key_dim), value_dim = q.shape, v.shape[-1]
        n_chunks, length = chunk_lengths(steps, chunk_size)
        shape_NBHC = (n_chunks, batch, heads, length)
        matrices, group = n_chunks * batch * heads, batch * heads
        dtype = compute_dtype(q, k, v, beta, g, initial_state)

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=q.device)

        reads_2PCK, v_PCV = new(2, matrices, length, key_dim), new(matrices, length, value_dim)
        to_chunks(k, reads_2PCK[0].view(*shape_NBHC, key_dim))
        to_chunks(q, reads_2PCK[1].view(*shape_NBHC, key_dim))
        to_chunks(v, v_PCV.view(*shape_NBHC, value_dim))
        beta_PC1 = to_chunks(beta, new(*shape_NBHC)).view(matrices, length, 1)
        decay = chunk_decay(g, segment_ids, shape_NBHC=shape_NBHC, dtype=dtype, device=q.device)

        writes_PCK = reads_2PCK[0] * beta_PC1
        scores_2PCC = new(2, matrices, length, length)
        torch.bmm(reads_2PCK[0], writes_PCK.mT, out=scores_2PCC[0])
        torch.bmm(reads_2PCK[1], writes_PCK.mT, out=scores_2PCC[1])
        scores_2PCC.mul_(decay.within)
        inverse_PCC = unit_lower_inverse(scores_2PCC[0])
        entering_2PCK = reads_2PCK if decay.entry is None else reads_2PCK * decay.entry
        leaving_PCK = writes_PCK if decay.exit is None else writes_PCK * decay.exit

        # Out of place, although in place saves copies: compilers pay for every write into a view of a common buffer.
        if initial_state is None:
            state_GKV = torch.zeros(group, key_dim, value_dim, dtype=dtype, device=q.device)
        else:
            state_GKV = initial_state.reshape(group, key_dim, value_dim).to(dtype)
        states, errors = [], []
        keys, values, leaving, inverses = (
            by_chunk(x, n_chunks) for x in (entering_2PCK[0], v_PCV, leaving_PCK, inverse_PCC)
        )
        for n in range(n_chunks):
            states.append(state_GKV)
            errors.append(torch.bmm(inverses[n], torch.baddbmm(values[n], keys[n], state_GKV, alpha=-1)))
            kept = state_GKV if decay.whole is None else state_GKV * decay.whole[n]
            state_GKV = torch.baddbmm(kept, leaving[n].mT, errors[n])
        entered_PKV, errors_PCV = torch.cat(states), torch.cat(errors)
        o_PCV = torch.bmm(entering_2PCK[1], entered_PKV)
        torch.baddbmm(o_PCV, scores_2PCC[1], errors_PCV, out=o_PCV)

        saved = _Saved(
            reads_2PCK,
            entering_2PCK,
            writes_PCK,
            leaving_PCK,
            beta_PC1,
            scores_2PCC,
            inverse_PCC,
            errors_PCV,
            entered_PKV,
        )
        ctx.save_for_backward(*saved, *decay)
        ctx.shape_NBHC, ctx.steps, ctx.has_gates = shape_NBHC, steps, g is not None
        ctx.dtypes = [None if x is None else x.dtype for x in (q, k, v, beta, g, initial_state)]
        ctx.set_materialize_grads(False)
        o = from_chunks(o_PCV.view(*shape_NBHC, value_dim), steps, q.dtype)
        return o, state_GKV.view(batch, heads, key_dim, value_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dfinal):
        tensors = ctx.saved_tensors  # once: activation checkpointing recomputes them at each look
        saved = _Saved(*tensors[: len(_Saved._fields)])
        decay = ChunkDecay(*tensors[len(_Saved._fields) :])
        with torch.autocast(saved.errors_PCV.device.type, enabled=False):
            dq, dk, dv, dbeta, dg, dinitial_GKV = _backward(saved, decay, ctx.shape_NBHC, do, dfinal, ctx.has_gates)

        def back(x_PCX: Tensor, dtype: torch.dtype) -> Tensor:
            return from_chunks(x_PCX.view(*ctx.shape_NBHC, *x_PCX.shape[2:]), ctx.steps, dtype)

        q_dtype, k_dtype, v_dtype, beta_dtype, g_dtype, state_dtype = ctx.dtypes
        return (
            back(dq, q_dtype),
            back(dk, k_dtype),
            back(dv, v_dtype),
            back(dbeta, beta_dtype),
            None if dg is None else back(dg, g_dtype),
            None if state_dtype is None else dinitial_GKV.unflatten(0, ctx.shape_NBHC[1:3]).to(state_dtype),
            None,
            None,
        )


def _backward(
    saved: _Saved,
    decay: ChunkDecay,
    shape_NBHC: tuple[int, int, int, int],
    do: Tensor | None,
    dfinal: Tensor | None,
    has_gates: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of q, k, v, beta, g in chunk layout, and of the initial state (G,K,V)."""
    n_chunks, (matrices, length, value_dim) = shape_NBHC[0], saved.errors_PCV.shape
    dresults_2PCV = saved.errors_PCV.new_empty(2, matrices, length, value_dim)  # of (1)'s right-hand side, and of O
    if do is None:
        dresults_2PCV[1].zero_()
    else:
        to_chunks(do, dresults_2PCV[1].view(*shape_NBHC, value_dim))
    through_q = by_chunk(torch.bmm(saved.entering_2PCK[1].mT, dresults_2PCV[1]), n_chunks)
    through_p = by_chunk(torch.bmm(saved.scores_2PCC[1].mT, dresults_2PCV[1]), n_chunks)
    dstate_GKV = torch.zeros_like(through_q[0])
    if dfinal is not None:
        dstate_GKV = dfinal.reshape(dstate_GKV.shape)
    dleft, dresiduals = [], []
    keys, leaving, inverses = (
        by_chunk(x, n_chunks) for x in (saved.entering_2PCK[0], saved.leaving_PCK, saved.inverse_PCC)
    )
    for n in reversed(range(n_chunks)):
        dleft.append(dstate_GKV)
        dresiduals.append(torch.bmm(inverses[n].mT, torch.baddbmm(through_p[n], leaving[n], dstate_GKV)))
        dkept = dstate_GKV if decay.whole is None else dstate_GKV * decay.whole[n]
        dstate_GKV = torch.baddbmm(through_q[n] + dkept, keys[n].mT, dresiduals[-1], alpha=-1)
    dleft_PKV = torch.cat(dleft[::-1])
    torch.cat(dresiduals[::-1], out=dresults_2PCV[0])

    # keys (with the minus of (1)) and queries read the state and the errors in the same way
    dscores_2PCC, dreads_2PCK = torch.empty_like(saved.scores_2PCC), torch.empty_like(saved.reads_2PCK)
    for reader, sign in ((0, -1), (1, 1)):
        out = dscores_2PCC[reader]
        torch.baddbmm(out, dresults_2PCV[reader], saved.errors_PCV.mT, beta=0, alpha=sign, out=out)
        out = dreads_2PCK[reader]
        torch.baddbmm(out, dresults_2PCV[reader], saved.entered_PKV.mT, beta=0, alpha=sign, out=out)
    dwrites_PCK = torch.bmm(saved.errors_PCV, dleft_PKV.mT)
    if decay.entry is not None:
        dreads_2PCK.mul_(decay.entry)
        dwrites_PCK.mul_(decay.exit)
    dg_PC = None
    if has_gates:
        dg_PC = _log_decay_gradient(saved, dscores_2PCC, dreads_2PCK, dwrites_PCK, dleft_PKV, decay.whole)
    dscores_2PCC.mul_(decay.within)
    dscores_2PCC[0].tril_(-1)
    for reader in (0, 1):
        out = dreads_2PCK[reader]
        torch.baddbmm(out, dscores_2PCC[reader], saved.writes_PCK, out=out)
        torch.baddbmm(dwrites_PCK, dscores_2PCC[reader].mT, saved.reads_2PCK[reader], out=dwrites_PCK)
    dbeta_PC = (saved.reads_2PCK[0] * dwrites_PCK).sum(-1)
    dreads_2PCK[0].addcmul_(dwrites_PCK, saved.beta_PC1)
    return dreads_2PCK[1], dreads_2PCK[0], dresults_2PCV[0], dbeta_PC, dg_PC, dstate_GKV


def _log_decay_gradient(
    saved: _Saved, dscores_2PCC: Tensor, dreads_2PCK: Tensor, dwrites_PCK: Tensor, dleft_PKV: Tensor, whole: Tensor
) -> Tensor:
    """dg (P,C), from the cotangents of the undecayed scores and of what passed the entering and leaving state.

    Every decayed product is exp(b_i - b_j) x, so its share in the cotangent of the cumulative log decay b is product
    times cotangent: plus at i, minus at j. The pairs j = i cancel and are left out, or their rounding errors would
    drown the rest under strong decay.
    """
    pairs_2PCC = dscores_2PCC * saved.scores_2PCC
    pairs_2PCC.diagonal(dim1=-2, dim2=-1).zero_()
    exits_PC = (saved.writes_PCK * dwrites_PCK).sum(-1)
    db_PC = (saved.reads_2PCK * dreads_2PCK).sum((0, -1)).sub_(exits_PC)
    db_PC.add_(pairs_2PCC.sum((0, -1))).sub_(pairs_2PCC.sum((0, -2)))
    kept_P = (saved.entered_PKV * dleft_PKV).sum((-1, -2)) * whole.flatten()
    db_PC[:, -1] += exits_PC.sum(-1) + kept_P
    return reverse_cumulative_sum(db_PC)
