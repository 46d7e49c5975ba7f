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
    check_shapes,
    chunk_decay,
    chunk_lengths,
    compute_dtype,
    from_chunks,
    log_decay_gradient,
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
            state = torch.addcmul(state, write_BTHK[:, t, :, :, None], error_BH1V)
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
    check_shapes(
        "q",
        q,
        {
            "k": (k, q.shape),
            "v": (v, (batch, steps, heads, v.shape[-1])),
            "beta": (beta, q.shape[:3]),
            "g": (g, q.shape[:3]),
            "initial_state": (initial_state, (batch, heads, key_dim, v.shape[-1])),
            "segment_ids": (segment_ids, (batch, steps)),
        },
    )


class _Saved(NamedTuple):
    """What the backward of a chunked delta rule reads; 2 runs over (keys, queries), the two readers of the state."""

    reads_2PCK: Tensor  # keys and queries
    writes_PCK: Tensor  # W
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

        reads_2PCK, errors_PCV = new(2, matrices, length, key_dim), new(matrices, length, value_dim)
        to_chunks(k, reads_2PCK[0].view(*shape_NBHC, key_dim))
        to_chunks(q, reads_2PCK[1].view(*shape_NBHC, key_dim))
        to_chunks(v, errors_PCV.view(*shape_NBHC, value_dim))  # becomes the errors in the loop below
        beta_PC1 = to_chunks(beta, new(*shape_NBHC)).view(matrices, length, 1)
        decay = chunk_decay(g, segment_ids, shape_NBHC=shape_NBHC, dtype=dtype, device=q.device)

        writes_PCK = reads_2PCK[0] * beta_PC1
        scores_2PCC = new(2, matrices, length, length)
        torch.bmm(reads_2PCK[0], writes_PCK.mT, out=scores_2PCC[0])
        torch.bmm(reads_2PCK[1], writes_PCK.mT, out=scores_2PCC[1])
        scores_2PCC.mul_(decay.within)
        inverse_PCC = unit_lower_inverse(scores_2PCC[0])

        states_NGKV = new(n_chunks + 1, group, key_dim, value_dim)  # [n] enters chunk n
        states_NGKV[0] = 0.0 if initial_state is None else initial_state.reshape(group, key_dim, value_dim)
        states, work_GCV = states_NGKV.unbind(0), new(group, length, value_dim)
        keys, writes, errors, inverses = (
            by_chunk(x, n_chunks) for x in (reads_2PCK[0], writes_PCK, errors_PCV, inverse_PCC)
        )
        decays = decay.decays
        if decays:
            entry, leave = by_chunk(decay.entry, n_chunks), by_chunk(decay.exit, n_chunks)
        for n in range(n_chunks):
            torch.bmm(keys[n], states[n], out=work_GCV)
            if decays:
                work_GCV.mul_(entry[n])
            torch.sub(errors[n], work_GCV, out=work_GCV)
            torch.bmm(inverses[n], work_GCV, out=errors[n])
            written, kept = errors[n], states[n]
            if decays:
                written = torch.mul(written, leave[n], out=work_GCV)
                kept = torch.mul(kept, decay.whole[n], out=states[n + 1])
            torch.baddbmm(kept, writes[n].mT, written, out=states[n + 1])
        entered_PKV = states_NGKV[:-1].view(matrices, key_dim, value_dim)
        o_PCV = torch.bmm(reads_2PCK[1], entered_PKV)
        if decays:
            o_PCV.mul_(decay.entry)
        torch.baddbmm(o_PCV, scores_2PCC[1], errors_PCV, out=o_PCV)

        saved = _Saved(reads_2PCK, writes_PCK, beta_PC1, scores_2PCC, inverse_PCC, errors_PCV, entered_PKV)
        ctx.save_for_backward(*saved, *decay)
        ctx.shape_NBHC, ctx.steps, ctx.has_gates = shape_NBHC, steps, g is not None
        ctx.dtypes = [None if x is None else x.dtype for x in (q, k, v, beta, g, initial_state)]
        ctx.set_materialize_grads(False)
        o = from_chunks(o_PCV.view(*shape_NBHC, value_dim), steps, q.dtype)
        return o, states_NGKV[-1].view(batch, heads, key_dim, value_dim).clone()

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
    largest = max(x.numel() for x in (saved.reads_2PCK, saved.scores_2PCC, saved.errors_PCV, saved.entered_PKV))
    scratch = saved.errors_PCV.new_empty(largest)
    decays = decay.decays
    group, state_shape = matrices // n_chunks, saved.entered_PKV.shape[1:]
    dstates_NGKV = saved.errors_PCV.new_empty(n_chunks + 1, group, *state_shape)
    dstates_NGKV[-1] = 0.0 if dfinal is None else dfinal.reshape(group, *state_shape)
    dread_PCV = _product(dresults_2PCV[1], decay.entry, scratch) if decays else dresults_2PCV[1]
    torch.bmm(saved.reads_2PCK[1].mT, dread_PCV, out=dstates_NGKV[:-1].view_as(saved.entered_PKV))
    derrors_PCV = torch.bmm(saved.scores_2PCC[1].mT, dresults_2PCV[1])
    dstates = dstates_NGKV.unbind(0)
    derrors, dresiduals = (by_chunk(x, n_chunks) for x in (derrors_PCV, dresults_2PCV[0]))
    keys, writes, inverses = (by_chunk(x, n_chunks) for x in (saved.reads_2PCK[0], saved.writes_PCK, saved.inverse_PCC))
    if decays:
        entry, leave = by_chunk(decay.entry, n_chunks), by_chunk(decay.exit, n_chunks)
    work_GCV = torch.empty_like(derrors[0])
    for n in reversed(range(n_chunks)):
        torch.bmm(writes[n], dstates[n + 1], out=work_GCV)
        if decays:
            work_GCV.mul_(leave[n])
        derrors[n].add_(work_GCV)
        torch.bmm(inverses[n].mT, derrors[n], out=dresiduals[n])
        dread = dresiduals[n]
        if decays:
            dread = torch.mul(dread, entry[n], out=work_GCV)
            dstates[n].addcmul_(dstates[n + 1], decay.whole[n])
        else:
            dstates[n].add_(dstates[n + 1])
        torch.baddbmm(dstates[n], keys[n].mT, dread, alpha=-1, out=dstates[n])
    dleft_PKV = dstates_NGKV[1:].view_as(saved.entered_PKV)

    # keys (with the minus of (1)) and queries read the state and the errors in the same way
    dscores_2PCC, dreads_2PCK = torch.empty_like(saved.scores_2PCC), torch.empty_like(saved.reads_2PCK)
    for reader, sign in ((0, -1), (1, 1)):
        out = dscores_2PCC[reader]
        torch.baddbmm(out, dresults_2PCV[reader], saved.errors_PCV.mT, beta=0, alpha=sign, out=out)
        out = dreads_2PCK[reader]
        torch.baddbmm(out, dresults_2PCV[reader], saved.entered_PKV.mT, beta=0, alpha=sign, out=out)
    dwrites_PCK = torch.bmm(saved.errors_PCV, dleft_PKV.mT)
    if decays:
        dreads_2PCK.mul_(decay.entry)
        dwrites_PCK.mul_(decay.exit)
    dg_PC = None
    if has_gates:
        dg_PC = _log_decay_gradient(saved, dscores_2PCC, dreads_2PCK, dwrites_PCK, dleft_PKV, decay.whole, scratch)
    dscores_2PCC.mul_(decay.within)
    dscores_2PCC[0].tril_(-1)
    for reader in (0, 1):
        out = dreads_2PCK[reader]
        torch.baddbmm(out, dscores_2PCC[reader], saved.writes_PCK, out=out)
        torch.baddbmm(dwrites_PCK, dscores_2PCC[reader].mT, saved.reads_2PCK[reader], out=dwrites_PCK)
    dbeta_PC = _product(saved.reads_2PCK[0], dwrites_PCK, scratch).sum(-1)
    dreads_2PCK[0].addcmul_(dwrites_PCK, saved.beta_PC1)
    return dreads_2PCK[1], dreads_2PCK[0], dresults_2PCV[0], dbeta_PC, dg_PC, dstates_NGKV[0]


def _log_decay_gradient(
    saved: _Saved,
    dscores_2PCC: Tensor,
    dreads_2PCK: Tensor,
    dwrites_PCK: Tensor,
    dleft_PKV: Tensor,
    whole: Tensor,
    scratch: Tensor,
) -> Tensor:
    """dg (P,C), from the cotangents of the undecayed scores and of what passed the entering and leaving state.

    Every decayed product is exp(b_i - b_j) x, so its share in the cotangent of the cumulative log decay b is product
    times cotangent: plus at i, minus at j. The pairs j = i cancel and are left out, or their rounding errors would
    drown the rest under strong decay.
    """
    pairs_2PCC = _product(dscores_2PCC, saved.scores_2PCC, scratch)
    pairs_2PCC.diagonal(dim1=-2, dim2=-1).zero_()
    at_PC = pairs_2PCC.sum((0, -1)).sub_(pairs_2PCC.sum((0, -2)))
    at_PC.add_(_product(saved.reads_2PCK, dreads_2PCK, scratch).sum((0, -1)))
    exits_PC = _product(saved.writes_PCK, dwrites_PCK, scratch).sum(-1)
    whole_P = _product(saved.entered_PKV, dleft_PKV, scratch).sum((-1, -2)).mul_(whole.flatten())
    return log_decay_gradient(at_PC, exits_PC, whole_P)


def _product(x: Tensor, y: Tensor, scratch: Tensor) -> Tensor:
    """x * y in memory that is used over and over: fresh pages cost more than the product."""
    return torch.mul(x, y, out=scratch[: x.numel()].view(x.shape))
