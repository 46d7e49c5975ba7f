"""Mamba2's state-space duality cell (arXiv 2405.21060, section 6): keys and queries are shared by a group of heads.

    S_t = e^{dt_t A} S_{t-1} + dt_t B_t x_t^T,    y_t = S_t^T C_t

It is linear attention with q = C, k = dt B, v = x, g = dt A. Here the step goes to x instead of B, so that B and C stay
one for all R heads of a group: what reads and writes the state is one product with R heads side by side, and C B^T is
formed once.
"""

from __future__ import annotations

from typing import Any

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
    log_decay_gradient,
    to_chunks,
)
from mixers.ops.linear import recurrent_linear_attention


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    initial_state: Tensor | None = None,
    segment_ids: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """The cell in chunks; equal to ``recurrent_ssd`` up to rounding, for any T >= 1.

    Args:
        x: values (B,T,H,V).
        dt: step >= 0 (B,T,H), after softplus.
        A: rate < 0 (H,).
        B: keys (B,T,G,K); G divides H, and neighbouring heads share a group.
        C: queries (B,T,G,K).
        initial_state: (B,H,K,V), the state before the first token; it belongs to the first column's document.
        segment_ids: integers (B,T), non-decreasing; the state restarts from zero where they change.
        chunk_size: most tokens per chunk.

    Returns:
        (B,T,H,V) in the dtype of x, and the state after the last token (B,H,K,V), of the last column's document.

    Raises:
        ValueError: shapes that do not fit together, or T = 0.
    """
    _check(x, dt, A, B, C, initial_state, segment_ids)
    with torch.autocast(x.device.type, enabled=False):
        g_BTH = dt * A.to(dt.dtype)
        values = x.to(torch.promote_types(x.dtype, dt.dtype)) * dt[..., None]  # the step is a gate: it stays wide
        y_BTHV, state = _GroupedAttention.apply(C, B, values, g_BTH, initial_state, segment_ids, chunk_size)
        return y_BTHV.to(x.dtype), state


def recurrent_ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    initial_state: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The cell token by token: the specification and, with T = 1, the decoding step. Arguments and results of ``ssd``."""
    _check(x, dt, A, B, C, initial_state, segment_ids)
    keys, queries = (m.repeat_interleave(x.shape[2] // B.shape[2], dim=2) for m in (B, C))
    y_BTHV, state = recurrent_linear_attention(
        queries.to(dt.dtype),
        keys.to(dt.dtype) * dt[..., None],
        x,
        dt * A.to(dt.dtype),
        initial_state=initial_state,
        segment_ids=segment_ids,
    )
    return y_BTHV.to(x.dtype), state


def _check(x, dt, A, B, C, initial_state, segment_ids) -> None:  # type: ignore[no-untyped-def]
    if x.ndim != 4 or x.shape[1] < 1:
        raise ValueError(f"x must be (B,T,H,V) with T >= 1, got {tuple(x.shape)}")
    batch, steps, heads, width = x.shape
    if B.ndim != 4 or heads % B.shape[2]:
        raise ValueError(f"B must be (B,T,G,K) with G a divisor of H={heads}, got {tuple(B.shape)}")
    expected = {
        "dt": (dt, (batch, steps, heads)),
        "A": (A, (heads,)),
        "B": (B, (batch, steps, *B.shape[2:])),
        "C": (C, tuple(B.shape)),
        "initial_state": (initial_state, (batch, heads, B.shape[3], width)),
        "segment_ids": (segment_ids, (batch, steps)),
    }
    check_shapes("x", x, expected)


class _Decay:
    """Factors of ``ChunkDecay`` for the R heads of a group side by side: P = N * B * G matrices."""

    def __init__(self, by_head: ChunkDecay, n_chunks: int, groups: int, ratio: int):
        length = by_head.within.shape[-1]
        self.within_PRCC = by_head.within.view(-1, ratio, length, length)

        def beside(x: Tensor) -> Tensor:  # (N*B*H, C, 1) -> (P, C, R, 1)
            return x.view(-1, ratio, length).mT[..., None].contiguous()

        self.entry_PCR1, self.exit_PCR1 = beside(by_head.entry), beside(by_head.exit)
        self.whole_NX1R1 = by_head.whole.view(n_chunks, -1, 1, ratio, 1)  # X = B * G


class _GroupedAttention(torch.autograd.Function):
    """q, k (B,T,G,K); v (B,T,H,V); g (B,T,H); initial state (B,H,K,V)."""

    @staticmethod
    def forward(ctx: Any, q, k, v, g, initial_state, segment_ids, chunk_size):  # type: ignore[override]
        (batch, steps, groups, key_dim), (heads, width) = q.shape, v.shape[2:]
        ratio = heads // groups
        n_chunks, length = chunk_lengths(steps, chunk_size)
        dtype = compute_dtype(q, k, v, g, initial_state)

        def chunks(x: Tensor) -> Tensor:
            out = torch.empty(n_chunks, batch, groups, length, x.shape[-1], dtype=dtype, device=q.device)
            return to_chunks(x, out).view(-1, length, x.shape[-1])

        q_PCK, k_PCK, v_PCX = chunks(q), chunks(k), chunks(v.reshape(batch, steps, groups, ratio * width))
        shape_NBHC = (n_chunks, batch, heads, length)
        by_head = chunk_decay(g, segment_ids, shape_NBHC=shape_NBHC, dtype=dtype, device=q.device)
        decay = _Decay(by_head, n_chunks, groups, ratio)
        v_PCRV = v_PCX.unflatten(-1, (ratio, width))
        states = v.new_empty(n_chunks + 1, batch * groups, key_dim, ratio, width, dtype=dtype)
        states[0] = 0.0 if initial_state is None else _beside(initial_state, groups)
        leaving_PCX = (v_PCRV * decay.exit_PCR1).flatten(2)
        torch.bmm(k_PCK.mT, leaving_PCX, out=states[1:].view(-1, key_dim, ratio * width))
        for n in range(n_chunks):
            states[n + 1].addcmul_(states[n], decay.whole_NX1R1[n])
        scores_PRCC = torch.bmm(q_PCK, k_PCK.mT)[:, None] * decay.within_PRCC
        o_PCX = torch.bmm(q_PCK, states[:-1].view(-1, key_dim, ratio * width))
        o_PCRV = o_PCX.unflatten(-1, (ratio, width)).mul_(decay.entry_PCR1)
        for r in range(ratio):
            o_PCRV[:, :, r] += torch.bmm(scores_PRCC[:, r], v_PCRV[:, :, r])
        ctx.save_for_backward(q_PCK, k_PCK, v_PCX, scores_PRCC, states, *by_head)
        ctx.sizes = n_chunks, batch, groups, ratio, length, steps
        ctx.dtypes = [None if x is None else x.dtype for x in (q, k, v, g, initial_state)]
        ctx.set_materialize_grads(False)
        o = from_chunks(o_PCX.view(n_chunks, batch, groups, length, -1), steps, v.dtype)
        return o.view(batch, steps, heads, width), _apart(states[-1], batch).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do, dfinal):  # type: ignore[override]
        q_PCK, k_PCK, v_PCX, scores_PRCC, states, *by_head = ctx.saved_tensors  # looked at once: see checkpointing
        n_chunks, batch, groups, ratio, length, steps = ctx.sizes
        q_dtype, k_dtype, v_dtype, g_dtype, state_dtype = ctx.dtypes
        decay = _Decay(ChunkDecay(*by_head), n_chunks, groups, ratio)
        key_dim, width = q_PCK.shape[-1], v_PCX.shape[-1] // ratio
        do_PCX = torch.empty_like(v_PCX)
        if do is None:
            do_PCX.zero_()
        else:
            to_chunks(do.reshape(batch, steps, groups, -1), do_PCX.view(n_chunks, batch, groups, length, -1))
        do_PCRV, v_PCRV = (x.unflatten(-1, (ratio, width)) for x in (do_PCX, v_PCX))
        reading_PCX = (do_PCRV * decay.entry_PCR1).flatten(2)
        dstates = torch.empty_like(states)
        dstates[-1] = 0.0 if dfinal is None else _beside(dfinal, groups)
        torch.bmm(q_PCK.mT, reading_PCX, out=dstates[:-1].view(-1, key_dim, ratio * width))
        for n in reversed(range(n_chunks)):
            dstates[n].addcmul_(dstates[n + 1], decay.whole_NX1R1[n])
        entered_PKX = states[:-1].view(-1, key_dim, ratio * width)
        dleft_PKX = dstates[1:].view(-1, key_dim, ratio * width)

        dv_PCX = torch.bmm(k_PCK, dleft_PKX)
        dv_PCRV = dv_PCX.unflatten(-1, (ratio, width)).mul_(decay.exit_PCR1)
        exits_PCR = (dv_PCRV * v_PCRV).sum(-1)
        at_PCR = (torch.bmm(q_PCK, entered_PKX).mul_(reading_PCX)).unflatten(-1, (ratio, width)).sum(-1)
        dscores_PCC = torch.zeros_like(scores_PRCC[:, 0])
        for r in range(ratio):
            dproduct_PCC = torch.bmm(do_PCRV[:, :, r], v_PCRV[:, :, r].mT)
            dv_PCRV[:, :, r] += torch.bmm(scores_PRCC[:, r].mT, do_PCRV[:, :, r])
            dscores_PCC.addcmul_(dproduct_PCC, decay.within_PRCC[:, r])
            # shares in the log decay: plus at the later, minus at the earlier token; a token with itself has none
            pairs_PCC = dproduct_PCC.mul_(scores_PRCC[:, r])
            pairs_PCC.diagonal(dim1=-2, dim2=-1).zero_()
            at_PCR[:, :, r] += pairs_PCC.sum(-1).sub_(pairs_PCC.sum(-2))
        dq_PCK = torch.baddbmm(torch.bmm(reading_PCX, entered_PKX.mT), dscores_PCC, k_PCK)
        leaving_PCX = (v_PCRV * decay.exit_PCR1).flatten(2)
        dk_PCK = torch.baddbmm(torch.bmm(leaving_PCX, dleft_PKX.mT), dscores_PCC.mT, q_PCK)
        whole_NXR = (states[:-1] * dstates[1:]).sum((2, 4)) * decay.whole_NX1R1[:, :, 0, :, 0]
        by_row = at_PCR.mT.reshape(-1, length), exits_PCR.mT.reshape(-1, length)
        dg = log_decay_gradient(*by_row, whole_NXR.reshape(-1))

        def back(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
            return from_chunks(x.view(n_chunks, batch, heads, length, *x.shape[2:]), steps, dtype)

        return (
            back(dq_PCK, groups, q_dtype),
            back(dk_PCK, groups, k_dtype),
            back(dv_PCX, groups, v_dtype).view(batch, steps, groups * ratio, width),
            back(dg, groups * ratio, g_dtype),
            None if state_dtype is None else _apart(dstates[0], batch).to(state_dtype),
            None,
            None,
        )


def _beside(state_BHKV: Tensor, groups: int) -> Tensor:
    """(B,H,K,V) -> (B*G, K, R, V)."""
    return state_BHKV.unflatten(1, (groups, -1)).transpose(2, 3).flatten(0, 1)


def _apart(state_XKRV: Tensor, batch: int) -> Tensor:
    """The inverse of ``_beside``."""
    return state_XKRV.unflatten(0, (batch, -1)).transpose(2, 3).flatten(1, 2)
