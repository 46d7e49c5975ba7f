"""Linear attention whose decay differs between key channels (GLA), in chunks; called through `linear.py`.

The scores of a chunk, A_ij = sum_c q_ic k_jc exp(b_ic - b_jc) with b the log decays summed over the chunk, are no single
product of matrices: exp(b) and exp(-b) taken apart overflow. The chunk is cut into blocks of ``_BLOCK`` tokens instead. A
block of rows against all columns before it is a product, with the decay split at the block's start: both factors are at
most one (GLA, arXiv 2312.06635, section 4.3). Inside a block the differences are taken pair by pair, one lag at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mixers.ops._chunks import ChunkDecay, chunk_decay, chunk_lengths, compute_dtype, from_chunks, to_chunks

_BLOCK = 8  # tokens: fewer make more products, more make more pairs; 8 needs the fewest exponentials at 64 per chunk


class _Decays:
    """Factors of a chunk, all in [0, 1]. ``b_PCK`` is kept in float64: it may reach thousands."""

    def __init__(self, b_PCK: Tensor, dtype: torch.dtype, borders: ChunkDecay):
        self.b_PCK, self.dtype = b_PCK, dtype
        last_P1K = b_PCK[:, -1:]
        self.entry_PCK, self.exit_PCK, self.whole_PK1 = (
            self._exp(b_PCK),
            self._exp(last_P1K - b_PCK),
            self._exp(last_P1K).mT,
        )
        self.same_PCC = None
        if borders.decays:
            self.same_PCC = borders.within
            self.entry_PCK, self.exit_PCK = self.entry_PCK * borders.entry, self.exit_PCK * borders.exit
            self.whole_PK1 = self.whole_PK1 * borders.whole.view(-1, 1, 1)

    def _exp(self, difference: Tensor) -> Tensor:
        return difference.clamp(max=0).to(self.dtype).exp_()

    def before_block(self, start: int) -> tuple[slice, Tensor, Tensor]:
        """For the block of rows that begins at ``start``: the rows, the rows' factor and that of all columns before."""
        rows = slice(start, start + _BLOCK)
        at_P1K = self.b_PCK[:, start - 1 : start]
        return rows, self._exp(self.b_PCK[:, rows] - at_P1K), self._exp(at_P1K - self.b_PCK[:, :start])

    def lags(self) -> Iterator[tuple[int, Tensor]]:
        """Inside the blocks: (lag, factors (P, blocks, _BLOCK - lag, K)) of the pairs (i, i - lag)."""
        b = self.b_PCK.unflatten(1, (-1, _BLOCK))
        for lag in range(1, _BLOCK):
            yield lag, self._exp(b[:, :, lag:] - b[:, :, :-lag])


def _blocks(x_PCC: Tensor) -> Tensor:
    """View of the blocks on the diagonal, (P, blocks, _BLOCK, _BLOCK)."""
    count = x_PCC.shape[-1] // _BLOCK
    return x_PCC.unflatten(2, (count, _BLOCK)).unflatten(1, (count, _BLOCK)).diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _scores(q_PCK: Tensor, k_PCK: Tensor, decays: _Decays) -> Tensor:
    """A (P,C,C), zero above the diagonal and across document borders."""
    matrices, length, _ = q_PCK.shape
    a_PCC = q_PCK.new_zeros(matrices, length, length)
    for start in range(_BLOCK, length, _BLOCK):
        rows, of_rows, of_columns = decays.before_block(start)
        a_PCC[:, rows, :start] = torch.bmm(q_PCK[:, rows] * of_rows, (k_PCK[:, :start] * of_columns).mT)
    q, k, blocks = q_PCK.unflatten(1, (-1, _BLOCK)), k_PCK.unflatten(1, (-1, _BLOCK)), _blocks(a_PCC)
    for lag, factor in decays.lags():
        blocks.diagonal(-lag, -2, -1).copy_((factor.mul_(q[:, :, lag:]).mul_(k[:, :, :-lag])).sum(-1))
    a_PCC.diagonal(dim1=-2, dim2=-1).copy_((q_PCK * k_PCK).sum(-1))
    return a_PCC if decays.same_PCC is None else a_PCC.mul_(decays.same_PCC)


def _scores_backward(da_PCC: Tensor, q_PCK: Tensor, k_PCK: Tensor, decays: _Decays) -> tuple[Tensor, Tensor]:
    """dq and dk from the pairs of different tokens; the pairs of a token with itself do not decay and are left out."""
    if decays.same_PCC is not None:
        da_PCC = da_PCC * decays.same_PCC
    dq_PCK, dk_PCK = torch.zeros_like(q_PCK), torch.zeros_like(k_PCK)
    for start in range(_BLOCK, q_PCK.shape[1], _BLOCK):
        rows, of_rows, of_columns = decays.before_block(start)
        da = da_PCC[:, rows, :start]
        dq_PCK[:, rows] += torch.bmm(da, k_PCK[:, :start] * of_columns).mul_(of_rows)
        dk_PCK[:, :start] += torch.bmm(da.mT, q_PCK[:, rows] * of_rows).mul_(of_columns)
    q, k, dq, dk = (x.unflatten(1, (-1, _BLOCK)) for x in (q_PCK, k_PCK, dq_PCK, dk_PCK))
    blocks = _blocks(da_PCC)
    for lag, factor in decays.lags():
        factor.mul_(blocks.diagonal(-lag, -2, -1)[..., None])
        dq[:, :, lag:].addcmul_(factor, k[:, :, :-lag])
        dk[:, :, :-lag].addcmul_(factor, q[:, :, lag:])
    return dq_PCK, dk_PCK


class VectorDecayAttention(torch.autograd.Function):
    """Forward and hand-written backward; arguments and results as `linear.chunk_linear_attention` passes them on."""

    @staticmethod
    def forward(ctx: Any, q, k, v, g, initial_state, segment_ids, chunk_size):  # type: ignore[override]
        (batch, steps, heads, key_dim), value_dim = q.shape, v.shape[-1]
        n_chunks, length = chunk_lengths(steps, chunk_size)
        length = -(-length // _BLOCK) * _BLOCK
        n_chunks = -(-steps // length)
        shape_NBHC, matrices = (n_chunks, batch, heads, length), n_chunks * batch * heads
        dtype = compute_dtype(q, k, v, g, initial_state)

        def chunks(x: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            out = torch.empty((*shape_NBHC, x.shape[-1]), dtype=dtype, device=q.device)
            return to_chunks(x, out).view(matrices, length, x.shape[-1])

        q_PCK, k_PCK, v_PCV = chunks(q), chunks(k), chunks(v)
        ones = torch.ones(length, length, dtype=torch.float64, device=q.device).tril_()
        b_PCK = torch.matmul(ones, chunks(g, torch.float64))
        borders = chunk_decay(None, segment_ids, shape_NBHC=shape_NBHC, dtype=dtype, device=q.device)
        decays = _Decays(b_PCK, dtype, borders)
        scores_PCC = _scores(q_PCK, k_PCK, decays)
        states_NGKV = q_PCK.new_empty(n_chunks + 1, batch * heads, key_dim, value_dim)
        states_NGKV[0] = 0.0 if initial_state is None else initial_state.reshape(-1, key_dim, value_dim)
        torch.bmm((k_PCK * decays.exit_PCK).mT, v_PCV, out=states_NGKV[1:].view(matrices, key_dim, value_dim))
        whole = decays.whole_PK1.unflatten(0, (n_chunks, -1))
        for n in range(n_chunks):
            states_NGKV[n + 1].addcmul_(states_NGKV[n], whole[n])
        entered_PKV = states_NGKV[:-1].view(matrices, key_dim, value_dim)
        o_PCV = torch.bmm(q_PCK * decays.entry_PCK, entered_PKV)
        torch.baddbmm(o_PCV, scores_PCC, v_PCV, out=o_PCV)
        ctx.save_for_backward(q_PCK, k_PCK, v_PCV, b_PCK, scores_PCC, states_NGKV, *borders)
        ctx.shape_NBHC, ctx.steps, ctx.compute = shape_NBHC, steps, dtype
        ctx.dtypes = [None if x is None else x.dtype for x in (q, k, v, g, initial_state)]
        ctx.set_materialize_grads(False)
        o = from_chunks(o_PCV.view(*shape_NBHC, value_dim), steps, q.dtype)
        return o, states_NGKV[-1].view(batch, heads, key_dim, value_dim).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do, dfinal):  # type: ignore[override]
        q_PCK, k_PCK, v_PCV, b_PCK, scores_PCC, states_NGKV, *borders = ctx.saved_tensors
        shape_NBHC, (q_dtype, k_dtype, v_dtype, g_dtype, state_dtype) = ctx.shape_NBHC, ctx.dtypes
        n_chunks, matrices = shape_NBHC[0], q_PCK.shape[0]
        with torch.autocast(q_PCK.device.type, enabled=False):
            decays = _Decays(b_PCK, ctx.compute, ChunkDecay(*borders))
            do_PCV = torch.empty_like(v_PCV)
            if do is None:
                do_PCV.zero_()
            else:
                to_chunks(do, do_PCV.view(*shape_NBHC, -1))
            entered_PKV = states_NGKV[:-1].view(matrices, *states_NGKV.shape[2:])
            dstates_NGKV = torch.empty_like(states_NGKV)
            dstates_NGKV[-1] = 0.0 if dfinal is None else dfinal.reshape(states_NGKV.shape[1:])
            torch.bmm((q_PCK * decays.entry_PCK).mT, do_PCV, out=dstates_NGKV[:-1].view_as(entered_PKV))
            whole = decays.whole_PK1.unflatten(0, (n_chunks, -1))
            for n in reversed(range(n_chunks)):
                dstates_NGKV[n].addcmul_(dstates_NGKV[n + 1], whole[n])
            dleft_PKV = dstates_NGKV[1:].view_as(entered_PKV)

            da_PCC = torch.bmm(do_PCV, v_PCV.mT)
            dq_PCK, dk_PCK = _scores_backward(da_PCC, q_PCK, k_PCK, decays)
            read_PCK = torch.bmm(do_PCV, entered_PKV.mT).mul_(decays.entry_PCK)
            left_PCK = torch.bmm(v_PCV, dleft_PKV.mT).mul_(decays.exit_PCK)
            dq_PCK.add_(read_PCK)
            # The log decay: what decays at i is written at j or entered the chunk, and some of it leaves the chunk.
            at_PCK, exits_PCK = (q_PCK * dq_PCK).sub_(k_PCK * dk_PCK), k_PCK * left_PCK
            whole_P1K = (entered_PKV * dleft_PKV).sum(-1, keepdim=True).mul_(decays.whole_PK1).mT
            ones = torch.ones(q_PCK.shape[1], q_PCK.shape[1], dtype=q_PCK.dtype, device=q_PCK.device)
            dg_PCK = torch.matmul(ones.triu(), at_PCK).add_(torch.matmul(ones.tril(-1), exits_PCK)).add_(whole_P1K)

            itself_PC1 = da_PCC.diagonal(dim1=-2, dim2=-1)[..., None]
            dq_PCK.addcmul_(itself_PC1, k_PCK)
            dk_PCK.add_(left_PCK).addcmul_(itself_PC1, q_PCK)
            dv_PCV = torch.bmm(k_PCK * decays.exit_PCK, dleft_PKV)
            torch.baddbmm(dv_PCV, scores_PCC.mT, do_PCV, out=dv_PCV)

        def back(x_PCX: Tensor, dtype: torch.dtype) -> Tensor:
            return from_chunks(x_PCX.view(*shape_NBHC, x_PCX.shape[-1]), ctx.steps, dtype)

        return (
            back(dq_PCK, q_dtype),
            back(dk_PCK, k_dtype),
            back(dv_PCV, v_dtype),
            back(dg_PCK, g_dtype),
            None if state_dtype is None else dstates_NGKV[0].unflatten(0, shape_NBHC[1:3]).to(state_dtype),
            None,
            None,
        )
