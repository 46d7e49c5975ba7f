"""mLSTM: the matrix memory of xLSTM with an exponential input gate (arXiv 2405.04517, eqs. 19 to 27).

    C_t = f C_{t-1} + i k_t v_t^T,   n_t = f n_{t-1} + i k_t,   f = sigmoid(f_t),  i = exp(i_t)
    h_t = C_t^T q / max(|n_t . q|, 1),   q = q_t / sqrt(K)

exp(i_t) overflows, so C and n are kept divided by e^m with m_t = max(log f + m_{t-1}, i_t), which turns the 1 into e^-m.
h does not depend on m (but for denominators below e^-30 of what stands in them), which the derivative holds constant.
``recurrent_mlstm`` is the specification, ``chunk_mlstm`` computes the same a chunk at a time.

Chunk form. With F the log forget gates summed from the start, s_j = i_j - F_j and M_i = max_{j <= i} s_j, the stabiliser is
m_i = F_i + M_i, and every factor is one exponential of a difference that is not positive: from token j to token i
exp(s_j - M_i), from the state that enters a chunk exp(M_before - M_i), to the state that leaves it exp(s_j - M_last). With a
column of ones beside V the numerator and the denominator are one linear attention with these factors.

The normaliser has its share in the gradients of q, k, i and f. Libraries that drop it are right only where a norm of h
follows which makes the scale of h irrelevant.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mixers.ops._chunks import ChunkDecay, check_shapes, chunk_lengths, compute_dtype, from_chunks, to_chunks
from mixers.ops.linear import LinearGradients, chunk_read, chunk_states

MlstmState = tuple[Tensor, Tensor, Tensor]
"""C (B,H,K,V), n (B,H,K), m (B,H)."""

NOTHING = -1e30  # the logarithm of zero, but finite: differences of it are no NaN
_STRONGEST = -1e6  # log forget gates below are this: sums over T keep their digits
_HIGHEST = 30.0  # in e^-m: a denominator of exactly zero needs a bound that is not; e^-30 is far below rounding
_LOWEST = {torch.float32: -80.0, torch.float64: -700.0}  # m is not below: e^-m must not overflow


def chunk_mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    initial_state: MlstmState | None = None,
    segment_ids: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, MlstmState]:
    """mLSTM in chunks; equal to ``recurrent_mlstm`` up to rounding, for any T >= 1.

    Gates, state and arithmetic are float32 (float64 if any input is); bfloat16 inputs are converted on the way in.
    Gradients reach every floating-point argument but m; there is no second derivative (use the recurrent form). Where
    the denominator crosses zero h is badly conditioned: float32 is good to 1e-3 there.

    Args:
        q: queries (B,T,H,K); scaled by 1 / sqrt(K) here.
        k: keys (B,T,H,K).
        v: values (B,T,H,V).
        i: input gate (B,T,H) before the exponential.
        f: forget gate (B,T,H) before the sigmoid.
        initial_state: (C, n, m) before the first token; it belongs to the first column's document.
        segment_ids: integers (B,T), non-decreasing; the state restarts from zero where they change.
        chunk_size: most tokens per chunk; a shorter sequence is one chunk of its own length.

    Returns:
        h (B,T,H,V) in the dtype of q, and (C, n, m) after the last token, of the last column's document.

    Raises:
        ValueError: shapes that do not fit together, T = 0 or chunk_size < 1.
    """
    _check(q, k, v, i, f, initial_state, segment_ids)
    c, n, m = (None, None, None) if initial_state is None else initial_state
    dtype = compute_dtype(q, k, v, i, f, c)
    with torch.autocast(q.device.type, enabled=False):
        log_f = F.logsigmoid(f.to(dtype))
        h, c, n, m = _ChunkMlstm.apply(q, k, v, i, log_f, c, n, m, segment_ids, chunk_size)
        return h, (c, n, m)


def recurrent_mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    initial_state: MlstmState | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, MlstmState]:
    """mLSTM token by token: the specification and, with T = 1, the decoding step.

    Arguments, dtypes, result and errors are those of ``chunk_mlstm``. Differentiable any number of times.
    """
    _check(q, k, v, i, f, initial_state, segment_ids)
    (batch, steps, heads, key_dim), value_dim = q.shape, v.shape[-1]
    if initial_state is None:
        c, n = q.new_zeros(batch, heads, key_dim, value_dim), q.new_zeros(batch, heads, key_dim)
        m = q.new_full((batch, heads), NOTHING, dtype=torch.float32)
        dtype = compute_dtype(q, k, v, i, f)
    else:
        c, n, m = initial_state
        dtype = compute_dtype(q, k, v, i, f, c)
    c, n, m = c.to(dtype), n.to(dtype), m.detach().to(dtype)
    outputs = []
    with torch.autocast(q.device.type, enabled=False):
        q_BTHK, k_BTHK, v_BTHV = q.to(dtype) * key_dim**-0.5, k.to(dtype), v.to(dtype)
        log_i, log_f = i.to(dtype), F.logsigmoid(f.to(dtype))
        for t in range(steps):
            if segment_ids is not None and t > 0:
                same_B1 = (segment_ids[:, t] == segment_ids[:, t - 1])[:, None]
                c = torch.where(same_B1[..., None, None], c, 0.0)
                n = torch.where(same_B1[..., None], n, 0.0)
                m = torch.where(same_B1, m, NOTHING)
            kept = log_f[:, t] + m
            m = torch.maximum(kept, log_i[:, t]).clamp(min=_LOWEST[dtype]).detach()
            forget, write = (kept - m).exp(), (log_i[:, t] - m).exp()
            written = write[..., None] * k_BTHK[:, t]
            c = forget[..., None, None] * c + written[..., None] * v_BTHV[:, t, :, None]
            n = forget[..., None] * n + written
            read = (q_BTHK[:, t, :, None] @ torch.cat((c, n[..., None]), dim=-1))[:, :, 0]
            outputs.append(
                read[..., :-1] / torch.maximum(read[..., -1:].abs(), (-m.clamp(max=_HIGHEST)).exp()[..., None])
            )
        return torch.stack(outputs, dim=1).to(q.dtype), (c, n, m)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    initial_state: MlstmState | None,
    segment_ids: Tensor | None,
) -> None:
    if q.ndim != 4 or q.shape[1] < 1:
        raise ValueError(f"q must be (B,T,H,K) with T >= 1, got {tuple(q.shape)}")
    batch, steps, heads, key_dim = q.shape
    expected: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "k": (k, q.shape),
        "v": (v, (batch, steps, heads, v.shape[-1])),
        "i": (i, q.shape[:3]),
        "f": (f, q.shape[:3]),
        "segment_ids": (segment_ids, (batch, steps)),
    }
    if initial_state is not None:
        shapes = (batch, heads, key_dim, v.shape[-1]), (batch, heads, key_dim), (batch, heads)
        for letter, tensor, shape in zip("Cnm", initial_state, shapes, strict=True):
            expected[f"{letter} of initial_state"] = (tensor, shape)
    check_shapes("q", q, expected)


class _Gates(NamedTuple):
    """The factors of all chunks (``ChunkDecay``, with the input gate in ``within`` and ``exit``), e^-m and the last m."""

    decay: ChunkDecay
    bound_PC1: Tensor
    m_BH: Tensor


def _gates(
    i_BTH: Tensor,
    log_f_BTH: Tensor,
    m_BH: Tensor | None,
    segment_ids_BT: Tensor | None,
    shape_NBHC: tuple[int, int, int, int],
    dtype: torch.dtype,
) -> _Gates:
    """Sums and maxima in float64: F may reach thousands, where float32 resolves only 1e-4."""
    n_chunks, batch, heads, length = shape_NBHC
    steps = i_BTH.shape[1]
    missing = n_chunks * length - steps

    def padded(x_BTH: Tensor, value: float) -> Tensor:
        return F.pad(x_BTH.double().transpose(1, 2), (0, missing), value=value)

    def chunks(x_BHT: Tensor) -> Tensor:
        return x_BHT.unflatten(-1, (n_chunks, length)).movedim(-2, 0).contiguous()

    sum_BHT = _sums(padded(log_f_BTH, 0.0).clamp(min=_STRONGEST).unflatten(-1, (n_chunks, length)))
    s_BHT = padded(i_BTH, NOTHING).clamp(min=NOTHING) - sum_BHT
    initial_BH1 = s_BHT.new_full((batch, heads, 1), NOTHING)
    if m_BH is not None:
        initial_BH1 = m_BH[..., None].double().clamp(min=NOTHING)
    segments_BT = None
    if segment_ids_BT is not None:  # padding belongs to the last document, so that the final state is that document's
        segments_BT = torch.cat((segment_ids_BT, segment_ids_BT[:, -1:].expand(-1, missing)), dim=1)
    highest_BHT = _highest(s_BHT, initial_BH1, segments_BT)
    highest_BHT = torch.maximum(highest_BHT, _LOWEST[dtype] - sum_BHT)
    m_BHT = sum_BHT + highest_BHT

    s, highest = chunks(s_BHT), chunks(highest_BHT)
    entering_NBH1 = torch.cat((initial_BH1.movedim(-1, 0)[..., None], highest[:-1, ..., -1:]))
    entry = (entering_NBH1 - highest).exp_().to(dtype)
    exit_ = (s - highest[..., -1:]).clamp_(max=0).exp_().to(dtype)
    within = _exp_of_differences(s, highest, dtype)
    if segments_BT is not None:
        segments = segments_BT.unflatten(-1, (n_chunks, length)).transpose(0, 1)[:, :, None]  # (N,B,1,C)
        before = torch.cat((segments[:1, ..., :1], segments[:-1, ..., -1:]))
        within.mul_(segments[..., :, None] == segments[..., None, :])
        entry = entry * (segments == before)
        exit_ = exit_ * (segments == segments[..., -1:])
    matrices = n_chunks * batch * heads
    decay = ChunkDecay(
        within.view(matrices, length, length),
        entry.reshape(matrices, length, 1),
        exit_.reshape(matrices, length, 1),
        entry[..., -1].reshape(n_chunks, batch * heads, 1, 1),
    )
    bound_PC1 = chunks((-m_BHT.clamp(max=_HIGHEST)).exp().to(dtype)).view(matrices, length, 1)
    return _Gates(decay, bound_PC1, m_BHT[..., steps - 1].to(dtype))


def _sums(log_f_BHNC: Tensor) -> Tensor:
    """Cumulative sums (B,H,T). As triangular products: unlike ``cumsum`` they are deterministic on CUDA."""
    n_chunks, length = log_f_BHNC.shape[-2:]
    ones = log_f_BHNC.new_ones(max(n_chunks, length), max(n_chunks, length))
    sum_BHNC = log_f_BHNC @ ones[:length, :length].triu()
    before_BHN = sum_BHNC[..., -1] @ ones[:n_chunks, :n_chunks].triu(1)
    return (sum_BHNC + before_BHN[..., None]).flatten(2)


def _highest(s_BHT: Tensor, initial_BH1: Tensor, segments_BT: Tensor | None) -> Tensor:
    """M: the maximum of s over all tokens so far, of the same document; the state counts in the first one."""
    if segments_BT is None:
        return torch.maximum(s_BHT.cummax(-1).values, initial_BH1)
    steps, reach = s_BHT.shape[-1], 1
    highest_BHT = torch.where((segments_BT == segments_BT[:, :1])[:, None], torch.maximum(s_BHT, initial_BH1), s_BHT)
    while reach < steps:  # after r rounds over the last 2^r tokens
        earlier = F.pad(highest_BHT, (reach, 0), value=NOTHING)[..., :steps]
        same = F.pad(segments_BT, (reach, 0))[:, :steps] == segments_BT
        highest_BHT = torch.where(same[:, None], torch.maximum(highest_BHT, earlier), highest_BHT)
        reach *= 2
    return highest_BHT


def _exp_of_differences(s_NBHC: Tensor, highest_NBHC: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(s_j - M_i) for j <= i, else 0. As high + low part: full relative precision without a C x C table in float64."""
    s, highest = s_NBHC.to(dtype), highest_NBHC.to(dtype)
    within = s[..., None, :] - highest[..., :, None]
    if dtype != torch.float64:
        within.add_((s_NBHC - s).to(dtype)[..., None, :]).sub_((highest_NBHC - highest).to(dtype)[..., :, None])
    # above the diagonal, where the difference may be positive, the exponential must not be infinite
    return within.clamp_(max=0).exp_().tril_()


class _ChunkMlstm(torch.autograd.Function):
    """Linear attention with a column of ones, divided; and the derivative by hand. W = V + 1 in the suffixes."""

    @staticmethod
    def forward(ctx: Any, q, k, v, i, log_f, c, n, m, segment_ids, chunk_size):  # type: ignore[override]
        (batch, steps, heads, key_dim), value_dim = q.shape, v.shape[-1]
        n_chunks, length = chunk_lengths(steps, chunk_size)
        shape_NBHC, matrices = (n_chunks, batch, heads, length), n_chunks * batch * heads
        dtype = compute_dtype(q, k, v, i, log_f, c)

        def new(width: int) -> Tensor:
            return torch.empty((*shape_NBHC, width), dtype=dtype, device=q.device)

        q_PCK = to_chunks(q, new(key_dim)).view(matrices, length, key_dim).mul_(key_dim**-0.5)
        k_PCK = to_chunks(k, new(key_dim)).view(matrices, length, key_dim)
        v_PCW = new(value_dim + 1)
        to_chunks(v, v_PCW[..., :value_dim])
        v_PCW[..., value_dim] = 1.0  # of padding too: its key is zero
        v_PCW = v_PCW.view(matrices, length, value_dim + 1)
        decay, bound_PC1, m_after = _gates(i, log_f, m, segment_ids, shape_NBHC, dtype)
        scores_PCC = torch.bmm(q_PCK, k_PCK.mT).mul_(decay.within)
        initial_GKW = None
        if c is not None:
            initial_GKW = torch.cat((c, n[..., None].to(c.dtype)), dim=-1).flatten(0, 1).to(dtype)
        states_NGKW = chunk_states(k_PCK, v_PCW, decay, n_chunks, initial_GKW)
        entered_PKW = states_NGKW[:-1].view(matrices, key_dim, value_dim + 1)
        o_PCW = chunk_read(q_PCK, scores_PCC, v_PCW, entered_PKW, decay)
        h_PCV = o_PCW[..., :-1] / torch.maximum(o_PCW[..., -1:].abs(), bound_PC1)
        ctx.save_for_backward(q_PCK, k_PCK, v_PCW, scores_PCC, states_NGKW, o_PCW, bound_PC1, *decay)
        ctx.shape_NBHC, ctx.steps = shape_NBHC, steps
        ctx.dtypes = [None if x is None else x.dtype for x in (q, k, v, i, log_f, c, n)]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(m_after)
        h = from_chunks(h_PCV.view(*shape_NBHC, value_dim), steps, q.dtype)
        after_BHKW = states_NGKW[-1].view(batch, heads, key_dim, value_dim + 1)
        return (
            h,
            after_BHKW[..., :-1].clone(memory_format=torch.contiguous_format),
            after_BHKW[..., -1].clone(),
            m_after,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh, dc, dn, _dm):  # type: ignore[override]
        q_PCK, k_PCK, v_PCW, scores_PCC, states_NGKW, o_PCW, bound_PC1, *factors = ctx.saved_tensors  # looked at once
        shape_NBHC, (q_dtype, k_dtype, v_dtype, i_dtype, f_dtype, c_dtype, n_dtype) = ctx.shape_NBHC, ctx.dtypes
        with torch.autocast(q_PCK.device.type, enabled=False):
            grads = LinearGradients(
                q_PCK,
                k_PCK,
                v_PCW,
                scores_PCC,
                states_NGKW,
                ChunkDecay(*factors),
                _before_division(dh, o_PCW, bound_PC1, shape_NBHC),
                _final_cotangent(dc, dn, states_NGKW),
                gates=True,
            )
            # every product in which k_j stands has the factor exp(i_j): the shares sum up to k_j . dk_j
            di_PC = (k_PCK * grads.dk_PCK).sum(-1)
            dq_PCK = grads.dq_PCK.mul_(q_PCK.shape[-1] ** -0.5)

        def back(x_PCX: Tensor, dtype: torch.dtype) -> Tensor:
            return from_chunks(x_PCX.view(*shape_NBHC, *x_PCX.shape[2:]), ctx.steps, dtype)

        assert grads.dg_PC is not None
        dinitial_BHKW = grads.dinitial_GKV.unflatten(0, shape_NBHC[1:3])
        return (
            back(dq_PCK, q_dtype),
            back(grads.dk_PCK, k_dtype),
            from_chunks(grads.dv_PCV.view(*shape_NBHC, -1)[..., :-1], ctx.steps, v_dtype),
            back(di_PC, i_dtype),
            back(grads.dg_PC, f_dtype),
            None if c_dtype is None else dinitial_BHKW[..., :-1].to(c_dtype),
            None if n_dtype is None else dinitial_BHKW[..., -1].to(n_dtype),
            None,
            None,
            None,
        )


def _before_division(
    dh: Tensor | None, o_PCW: Tensor, bound_PC1: Tensor, shape_NBHC: tuple[int, int, int, int]
) -> Tensor:
    """Cotangents (P,C,V+1) of numerator and denominator; the denominator has one only where it is above its bound."""
    do_PCW = torch.zeros_like(o_PCW)
    if dh is None:
        return do_PCW
    num_PCV, den_PC1 = o_PCW[..., :-1], o_PCW[..., -1:]
    dnum_PCV = do_PCW[..., :-1]
    to_chunks(dh, do_PCW.view(*shape_NBHC, -1)[..., :-1])
    size_PC1 = den_PC1.abs()
    divisor_PC1 = torch.maximum(size_PC1, bound_PC1)
    dnum_PCV.div_(divisor_PC1)
    dden_PC1 = (dnum_PCV * num_PCV).sum(-1, keepdim=True).neg_().div_(divisor_PC1)
    do_PCW[..., -1:] = torch.where(size_PC1 > bound_PC1, dden_PC1 * den_PC1.sign(), 0.0)
    return do_PCW


def _final_cotangent(dc: Tensor | None, dn: Tensor | None, states_NGKW: Tensor) -> Tensor | None:
    if dc is None and dn is None:
        return None
    dfinal_GKW = torch.zeros_like(states_NGKW[-1])
    if dc is not None:
        dfinal_GKW[..., :-1] = dc.flatten(0, 1)
    if dn is not None:
        dfinal_GKW[..., -1] = dn.flatten(0, 1)
    return dfinal_GKW
