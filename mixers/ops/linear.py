"""Linear attention with decay: linear attention, RetNet, GLA, Mamba2.

    S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T,    o_t = scale * S_t^T q_t

g is one number per head (Mamba2 as state-space duality, arXiv 2405.21060, section 6; RetNet, arXiv 2307.08621, eq. 7), one
per key channel (GLA, arXiv 2312.06635, eq. 3) or none. ``recurrent_linear_attention`` is the specification,
``chunk_linear_attention`` computes the same a chunk at a time. With D the decay between two tokens of a chunk,

    O  = diag(entry) Q S + (D * Q K^T) V,    S' = whole S + (diag(exit) K)^T V.    (1)
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
from mixers.ops._vector_decay import VectorDecayAttention


def chunk_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    segment_ids: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Linear attention in chunks; equal to ``recurrent_linear_attention`` up to rounding, for any T >= 1.

    Gates, state and arithmetic are float32 (float64 if any input is); bfloat16 inputs are converted on the way in.
    Gradients reach every floating-point argument; there is no second derivative (use the recurrent form).

    Args:
        q: queries (B,T,H,K).
        k: keys (B,T,H,K).
        v: values (B,T,H,V).
        g: finite log decay <= 0, of the head (B,T,H) or of each key channel (B,T,H,K); None for no decay.
        scale: factor on the output.
        initial_state: (B,H,K,V), the state before the first token; it belongs to the first column's document.
        segment_ids: integers (B,T), non-decreasing; the state restarts from zero where they change.
        chunk_size: most tokens per chunk; a shorter sequence is one chunk of its own length.

    Returns:
        (B,T,H,V) in the dtype of q, and the state after the last token (B,H,K,V), of the last column's document.

    Raises:
        ValueError: shapes that do not fit together, T = 0 or chunk_size < 1.
    """
    _check(q, k, v, g, initial_state, segment_ids)
    form = VectorDecayAttention if g is not None and g.ndim == 4 else _ScalarDecayAttention
    with torch.autocast(q.device.type, enabled=False):
        o, state = form.apply(q, k, v, g, initial_state, segment_ids, chunk_size)
        return (o if scale == 1.0 else o * scale), state


def recurrent_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear attention token by token: the specification and, with T = 1, the decoding step.

    Arguments, dtypes, result and errors are those of ``chunk_linear_attention``. Differentiable any number of times.
    """
    _check(q, k, v, g, initial_state, segment_ids)
    (batch, steps, heads, key_dim), value_dim = q.shape, v.shape[-1]
    dtype = compute_dtype(q, k, v, g, initial_state)
    state = q.new_zeros(batch, heads, key_dim, value_dim, dtype=dtype) if initial_state is None else initial_state
    state = state.to(dtype)
    outputs = []
    with torch.autocast(q.device.type, enabled=False):
        decay = None if g is None else g.to(dtype).exp()
        if decay is not None:
            decay = decay[..., None] if decay.ndim == 4 else decay[..., None, None]
        for t in range(steps):
            if segment_ids is not None and t > 0:
                same = segment_ids[:, t] == segment_ids[:, t - 1]
                state = torch.where(same[:, None, None, None], state, 0.0)
            if decay is not None:
                state = state * decay[:, t]
            state = torch.addcmul(state, k[:, t, :, :, None].to(dtype), v[:, t, :, None].to(dtype))
            outputs.append(q[:, t, :, None].to(dtype) @ state)
        o = torch.cat(outputs, dim=2).transpose(1, 2)
        return (o if scale == 1.0 else o * scale).to(q.dtype), state


def _check(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial_state: Tensor | None, segment_ids: Tensor | None
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
            "g": (g, q.shape if g is not None and g.ndim == 4 else q.shape[:3]),
            "initial_state": (initial_state, (batch, heads, key_dim, v.shape[-1])),
            "segment_ids": (segment_ids, (batch, steps)),
        },
    )


# ---- in chunk layout: P = N * B * H matrices, G = B * H per chunk; mesa.py builds on these too -----------------------


def chunk_states(k_PCK: Tensor, v_PCV: Tensor, decay: ChunkDecay, n_chunks: int, initial_GKV: Tensor | None) -> Tensor:
    """States (N + 1, G, K, V): [n] enters chunk n, the last one leaves the sequence."""
    matrices, _, key_dim = k_PCK.shape
    value_dim = v_PCV.shape[-1]
    states_NGKV = k_PCK.new_empty(n_chunks + 1, matrices // n_chunks, key_dim, value_dim)
    states_NGKV[0] = 0.0 if initial_GKV is None else initial_GKV
    leaving_PCK = k_PCK * decay.exit if decay.decays else k_PCK
    torch.bmm(leaving_PCK.mT, v_PCV, out=states_NGKV[1:].view(matrices, key_dim, value_dim))
    states = states_NGKV.unbind(0)
    for n in range(n_chunks):
        if decay.decays:
            states[n + 1].addcmul_(states[n], decay.whole[n])
        else:
            states[n + 1].add_(states[n])
    return states_NGKV


def chunk_read(q_PCK: Tensor, scores_PCC: Tensor, v_PCV: Tensor, entered_PKV: Tensor, decay: ChunkDecay) -> Tensor:
    """Equation (1), left: O (P,C,V) from decayed scores and the states that enter."""
    o_PCV = torch.bmm(q_PCK, entered_PKV)
    if decay.decays:
        o_PCV.mul_(decay.entry)
    return torch.baddbmm(o_PCV, scores_PCC, v_PCV, out=o_PCV)


class LinearGradients:
    """Gradients of equation (1) in chunk layout, for an upstream gradient of O and of the final state.

    dq_PCK (whole only with ``queries``), dk_PCK, dv_PCV, dinitial_GKV and, with ``gates``, dg_PC.
    """

    def __init__(
        self,
        q_PCK: Tensor,
        k_PCK: Tensor,
        v_PCV: Tensor,
        scores_PCC: Tensor,
        states_NGKV: Tensor,
        decay: ChunkDecay,
        do_PCV: Tensor,
        dfinal_GKV: Tensor | None,
        *,
        gates: bool,
        queries: bool = True,
    ):
        n_chunks, matrices = states_NGKV.shape[0] - 1, q_PCK.shape[0]
        entered_PKV = states_NGKV[:-1].view(matrices, *states_NGKV.shape[2:])
        dstates_NGKV = torch.empty_like(states_NGKV)
        dstates_NGKV[-1] = 0.0 if dfinal_GKV is None else dfinal_GKV
        reading_PCK = q_PCK * decay.entry if decay.decays else q_PCK
        torch.bmm(reading_PCK.mT, do_PCV, out=dstates_NGKV[:-1].view_as(entered_PKV))
        dstates = dstates_NGKV.unbind(0)
        for n in reversed(range(n_chunks)):
            if decay.decays:
                dstates[n].addcmul_(dstates[n + 1], decay.whole[n])
            else:
                dstates[n].add_(dstates[n + 1])
        dleft_PKV = dstates_NGKV[1:].view_as(entered_PKV)
        dscores_PCC = torch.bmm(do_PCV, v_PCV.mT)
        self.dq_PCK = torch.bmm(do_PCV, entered_PKV.mT)
        self.dk_PCK = torch.bmm(v_PCV, dleft_PKV.mT)
        if decay.decays:
            self.dq_PCK.mul_(decay.entry)
            self.dk_PCK.mul_(decay.exit)
        self.dg_PC = None
        if gates:
            # Every decayed product is exp(b_i - b_j) x: its share is product times cotangent, plus at i, minus at j. The
            # pairs j = i cancel and are left out, or their rounding errors would drown the rest under strong decay.
            pairs_PCC = dscores_PCC * scores_PCC
            pairs_PCC.diagonal(dim1=-2, dim2=-1).zero_()
            at_PC = pairs_PCC.sum(-1).sub_(pairs_PCC.sum(-2)).add_((q_PCK * self.dq_PCK).sum(-1))
            exits_PC = (k_PCK * self.dk_PCK).sum(-1)
            whole_P = (entered_PKV * dleft_PKV).sum((-1, -2)).mul_(decay.whole.flatten())
            self.dg_PC = log_decay_gradient(at_PC, exits_PC, whole_P)
        self.dv_PCV = torch.bmm(k_PCK * decay.exit if decay.decays else k_PCK, dleft_PKV)
        torch.baddbmm(self.dv_PCV, scores_PCC.mT, do_PCV, out=self.dv_PCV)
        dscores_PCC.mul_(decay.within)
        if queries:
            torch.baddbmm(self.dq_PCK, dscores_PCC, k_PCK, out=self.dq_PCK)
        torch.baddbmm(self.dk_PCK, dscores_PCC.mT, q_PCK, out=self.dk_PCK)
        self.dinitial_GKV = dstates_NGKV[0]


class _ScalarDecayAttention(torch.autograd.Function):
    """Equation (1) and its derivative by hand, for one decay per head or none.

    Autograd through a loop that updates the state in place costs time that grows faster than T.
    """

    @staticmethod
    def forward(ctx: Any, q, k, v, g, initial_state, segment_ids, chunk_size):  # type: ignore[override]
        (batch, steps, heads, key_dim), value_dim = q.shape, v.shape[-1]
        n_chunks, length = chunk_lengths(steps, chunk_size)
        shape_NBHC, matrices = (n_chunks, batch, heads, length), n_chunks * batch * heads
        dtype = compute_dtype(q, k, v, g, initial_state)

        def chunks(x: Tensor) -> Tensor:
            out = torch.empty((*shape_NBHC, x.shape[-1]), dtype=dtype, device=q.device)
            return to_chunks(x, out).view(matrices, length, x.shape[-1])

        q_PCK, k_PCK, v_PCV = chunks(q), chunks(k), chunks(v)
        decay = chunk_decay(g, segment_ids, shape_NBHC=shape_NBHC, dtype=dtype, device=q.device)
        scores_PCC = torch.bmm(q_PCK, k_PCK.mT).mul_(decay.within)
        initial_GKV = None if initial_state is None else initial_state.reshape(-1, key_dim, value_dim)
        states_NGKV = chunk_states(k_PCK, v_PCV, decay, n_chunks, initial_GKV)
        entered_PKV = states_NGKV[:-1].view(matrices, key_dim, value_dim)
        o_PCV = chunk_read(q_PCK, scores_PCC, v_PCV, entered_PKV, decay)
        ctx.save_for_backward(q_PCK, k_PCK, v_PCV, scores_PCC, states_NGKV, *decay)
        ctx.shape_NBHC, ctx.steps = shape_NBHC, steps
        ctx.dtypes = [None if x is None else x.dtype for x in (q, k, v, g, initial_state)]
        ctx.set_materialize_grads(False)
        o = from_chunks(o_PCV.view(*shape_NBHC, value_dim), steps, q.dtype)
        return o, states_NGKV[-1].view(batch, heads, key_dim, value_dim).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do, dfinal):  # type: ignore[override]
        q_PCK, k_PCK, v_PCV, scores_PCC, states_NGKV, *factors = ctx.saved_tensors  # looked at once: see checkpointing
        shape_NBHC, (q_dtype, k_dtype, v_dtype, g_dtype, state_dtype) = ctx.shape_NBHC, ctx.dtypes
        do_PCV = torch.empty_like(v_PCV)
        if do is None:
            do_PCV.zero_()
        else:
            to_chunks(do, do_PCV.view(*shape_NBHC, -1))
        dfinal_GKV = None if dfinal is None else dfinal.reshape(states_NGKV.shape[1:])
        with torch.autocast(do_PCV.device.type, enabled=False):
            grads = LinearGradients(
                q_PCK,
                k_PCK,
                v_PCV,
                scores_PCC,
                states_NGKV,
                ChunkDecay(*factors),
                do_PCV,
                dfinal_GKV,
                gates=g_dtype is not None,
            )

        def back(x_PCX: Tensor, dtype: torch.dtype) -> Tensor:
            return from_chunks(x_PCX.view(*shape_NBHC, *x_PCX.shape[2:]), ctx.steps, dtype)

        return (
            back(grads.dq_PCK, q_dtype),
            back(grads.dk_PCK, k_dtype),
            back(grads.dv_PCV, v_dtype),
            None if grads.dg_PC is None else back(grads.dg_PC, g_dtype),
            None if state_dtype is None else grads.dinitial_GKV.unflatten(0, shape_NBHC[1:3]).to(state_dtype),
            None,
            None,
        )
