"""sLSTM: a scalar memory per cell with exponential gates and recurrent connections (arXiv 2405.04517, eqs. 8 to 18).

    (i, f, z, o)_t = raw_t + R y_{t-1}                                 R: one block per head
    c_t = f' c_{t-1} + i' tanh(z),  n_t = f' n_{t-1} + i',  y_t = sigmoid(o) c_t / n_t
    m_t = max(log sigmoid(f) + m_{t-1}, i),  i' = exp(i - m_t),  f' = exp(log sigmoid(f) + m_{t-1} - m_t)

y does not depend on m, which the derivative holds constant. At the start m is as good as minus infinity: then n_1 = 1, and n
never falls below 1. y_{t-1} stands inside the gates, so no form is parallel over time. ``recurrent_slstm`` is the
specification; ``slstm`` runs the same steps with few calls in each and with a derivative by hand, in which all that does not
depend on the cotangents is taken for all steps at once and dR is one product at the end.

The axis G holds the gates i, f, z, o; V is the width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mixers.ops._chunks import compute_dtype
from mixers.ops.mlstm import NOTHING

SlstmState = tuple[Tensor, Tensor, Tensor, Tensor]
"""y, c, n, m, each (B,H,V)."""


def init_slstm_state(
    batch_size: int,
    n_heads: int,
    width: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> SlstmState:
    """The state before the first token: zeros, and m = log 0."""
    y, c, n = torch.zeros(3, batch_size, n_heads, width, device=device, dtype=dtype).unbind(0)
    return y, c, n, torch.full_like(y, NOTHING)


@torch.compiler.disable  # a compiler would unroll the loop over tokens
def slstm(
    raw: Tensor, recurrent: Tensor, *, initial_state: SlstmState | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, SlstmState]:
    """sLSTM, equal to ``recurrent_slstm`` up to rounding and several times as fast in training.

    Gates, state and arithmetic are float32 (float64 if any input is). Gradients reach every floating-point argument but
    m; there is no second derivative (use the recurrent form).

    Args:
        raw: gates before their functions (B,T,H,4,V), what the input and the biases put into them.
        recurrent: R (H,V,4,V); row: cell of y_{t-1}.
        initial_state: (y, c, n, m) before the first token; it belongs to the first column's document.
        segment_ids: integers (B,T), non-decreasing; the state restarts where they change.

    Returns:
        y (B,T,H,V) in the dtype of raw, and (y, c, n, m) after the last token, of the last column's document.

    Raises:
        ValueError: shapes that do not fit together or T = 0.
    """
    _check(raw, recurrent, initial_state, segment_ids)
    state = _start(raw, recurrent, initial_state)
    with torch.autocast(raw.device.type, enabled=False):
        y, *after = _Slstm.apply(raw, recurrent, *state, segment_ids)
    return y, tuple(after)  # type: ignore[return-value]


def recurrent_slstm(
    raw: Tensor, recurrent: Tensor, *, initial_state: SlstmState | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, SlstmState]:
    """sLSTM token by token: the specification and, with T = 1, the decoding step.

    Arguments, dtypes, result and errors are those of ``slstm``. Differentiable any number of times.
    """
    _check(raw, recurrent, initial_state, segment_ids)
    y, c, n, m = _start(raw, recurrent, initial_state)
    m, outputs = m.detach(), []
    with torch.autocast(raw.device.type, enabled=False):
        raw_BTHGV, recurrent_HVG = raw.to(y.dtype), recurrent.to(y.dtype).flatten(2)
        for t in range(raw.shape[1]):
            if segment_ids is not None and t > 0:
                same = (segment_ids[:, t] == segment_ids[:, t - 1])[:, None, None]
                y, c, n = (torch.where(same, x, 0.0) for x in (y, c, n))
                m = torch.where(same, m, NOTHING)
            fed_BHGV = (y[:, :, None] @ recurrent_HVG).unflatten(-1, (4, -1))[:, :, 0]
            i, f, z, o = (raw_BTHGV[:, t] + fed_BHGV).unbind(2)
            kept = F.logsigmoid(f) + m
            m = torch.maximum(kept, i).detach()
            forget, write = (kept - m).exp(), (i - m).exp()
            c = forget * c + write * z.tanh()
            n = forget * n + write
            y = o.sigmoid() * c / n
            outputs.append(y)
    return torch.stack(outputs, dim=1).to(raw.dtype), (y, c, n, m)


def _start(raw: Tensor, recurrent: Tensor, initial_state: SlstmState | None) -> SlstmState:
    if initial_state is None:
        dtype = compute_dtype(raw, recurrent)
        return init_slstm_state(raw.shape[0], raw.shape[2], raw.shape[4], device=raw.device, dtype=dtype)
    y, c, n, m = initial_state
    dtype = compute_dtype(raw, recurrent, y)
    return y.to(dtype), c.to(dtype), n.to(dtype), m.to(dtype)


def _check(raw: Tensor, recurrent: Tensor, initial_state: SlstmState | None, segment_ids: Tensor | None) -> None:
    if raw.ndim != 5 or raw.shape[1] < 1 or raw.shape[3] != 4:
        raise ValueError(f"raw must be (B,T,H,4,V) with T >= 1, got {tuple(raw.shape)}")
    batch, steps, heads, _, width = raw.shape
    expected: dict[str, tuple[Tensor, tuple[int, ...]]] = {"recurrent": (recurrent, (heads, width, 4, width))}
    if initial_state is not None:
        for letter, tensor in zip("ycnm", initial_state, strict=True):
            expected[f"{letter} of initial_state"] = (tensor, (batch, heads, width))
    if segment_ids is not None:
        expected["segment_ids"] = (segment_ids, (batch, steps))
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {tuple(shape)} for raw {tuple(raw.shape)}, got {tuple(tensor.shape)}")


class _Slstm(torch.autograd.Function):
    """Everything time-major with heads before the batch (T,H,B,..), so that a step's product is one ``baddbmm``."""

    @staticmethod
    def forward(ctx: Any, raw, recurrent, y, c, n, m, segment_ids):  # type: ignore[override]
        steps, dtype = raw.shape[1], y.dtype
        gates_THBGV = raw.permute(1, 2, 0, 3, 4).to(dtype, copy=True).contiguous()
        recurrent_HVG = recurrent.to(dtype).flatten(2)
        # y, c, n, m before each token; [T] is the state that is returned
        states_4SHBV = torch.stack([x.transpose(0, 1) for x in (y, c, n, m)])[:, None].repeat(1, steps + 1, 1, 1, 1)
        ys, cs, ns, ms = (x.unbind(0) for x in states_4SHBV.unbind(0))
        keep_T1B1, restarts = _restarts(segment_ids, steps)
        raws = gates_THBGV.flatten(3).unbind(0)
        unbound = [x.unbind(0) for x in gates_THBGV.unbind(3)]
        for t in range(steps):
            y, c, n, m = ys[t], cs[t], ns[t], ms[t]
            if keep_T1B1 is not None and restarts[t]:
                y, c, n, m = _restarted(keep_T1B1[t], y, c, n, m)
            torch.baddbmm(raws[t], y, recurrent_HVG, out=raws[t])
            i, f, z, o = (x[t] for x in unbound)
            kept = F.logsigmoid(f).add_(m)
            torch.maximum(kept, i, out=ms[t + 1])
            forget, write = kept.sub_(ms[t + 1]).exp_(), torch.sub(i, ms[t + 1]).exp_()
            torch.mul(forget, c, out=cs[t + 1]).addcmul_(write, z.tanh())
            torch.addcmul(write, forget, n, out=ns[t + 1])
            torch.mul(o.sigmoid(), cs[t + 1], out=ys[t + 1]).div_(ns[t + 1])
        ctx.save_for_backward(gates_THBGV, recurrent_HVG, states_4SHBV, keep_T1B1)
        ctx.restarts, ctx.dtypes = restarts, (raw.dtype, recurrent.dtype)
        ctx.set_materialize_grads(False)
        after = [x[-1].transpose(0, 1).clone(memory_format=torch.contiguous_format) for x in states_4SHBV]
        ctx.mark_non_differentiable(after[3])
        return states_4SHBV[0, 1:].permute(2, 0, 1, 3).to(raw.dtype, copy=True).contiguous(), *after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout, dy, dc, dn, _dm):  # type: ignore[override]
        gates_THBGV, recurrent_HVG, states_4SHBV, keep_T1B1 = ctx.saved_tensors  # looked at once
        steps, (raw_dtype, recurrent_dtype) = gates_THBGV.shape[0], ctx.dtypes
        before = states_4SHBV[:, :-1].unbind(0)
        if keep_T1B1 is not None:
            before = _restarted(keep_T1B1, *before)
        dys_THBV = torch.zeros_like(before[0])
        if dout is not None:
            dys_THBV.copy_(dout.permute(1, 2, 0, 3))
        dy, dc, dn = (torch.zeros_like(before[0][0]) if x is None else x.transpose(0, 1).clone() for x in (dy, dc, dn))
        local = _Derivatives(gates_THBGV, before, states_4SHBV[:, 1:].unbind(0))
        draw_THBGV = torch.empty_like(gates_THBGV)
        turned_HGV = recurrent_HVG.mT.contiguous()
        for t in reversed(range(steps)):
            dy.add_(dys_THBV[t])
            dc.addcmul_(dy, local.y_by_c[t])
            dn.addcmul_(dy, local.y_by_n[t])
            draw = draw_THBGV[t]
            torch.mul(local.c_by_ifz[t], dc[:, :, None], out=draw[:, :, :3])
            draw[:, :, :2].addcmul_(local.n_by_if[t], dn[:, :, None])
            torch.mul(local.y_by_o[t], dy, out=draw[:, :, 3])
            torch.bmm(draw.flatten(2), turned_HGV, out=dy)
            if ctx.restarts[t]:
                dy.mul_(keep_T1B1[t])
            dc.mul_(local.forget[t])
            dn.mul_(local.forget[t])
        fed_HMV = before[0].transpose(0, 1).flatten(1, 2)  # M: all tokens of the batch
        drecurrent_HVG = torch.bmm(fed_HMV.mT, draw_THBGV.transpose(0, 1).flatten(1, 2).flatten(2))
        draw_BTHGV = draw_THBGV.permute(2, 0, 1, 3, 4).to(raw_dtype).contiguous()
        drecurrent = drecurrent_HVG.unflatten(-1, (4, -1)).to(recurrent_dtype)
        return draw_BTHGV, drecurrent, *(x.transpose(0, 1) for x in (dy, dc, dn)), None, None


class _Derivatives:
    """Of one step, for all steps: y by c, n and o; c by i, f and z; n by i and f; f' from state to state."""

    def __init__(self, gates_THBGV: Tensor, before: tuple[Tensor, ...], after: tuple[Tensor, ...]):
        i, f, z, o = gates_THBGV.unbind(3)
        (_, c_before, n_before, m_before), (y, _, n, m) = before, after
        write, z = (i - m).exp_(), z.tanh()
        self.forget = F.logsigmoid(f).add_(m_before).sub_(m).exp_()
        by_f = self.forget * torch.sigmoid(-f)
        self.y_by_c = o.sigmoid().div_(n)
        self.y_by_n = -y / n
        self.y_by_o = y * torch.sigmoid(-o)
        self.c_by_ifz = torch.stack((write * z, by_f * c_before, write * (1 - z.square())), dim=3)
        self.n_by_if = torch.stack((write, by_f * n_before), dim=3)


def _restarts(segment_ids: Tensor | None, steps: int) -> tuple[Tensor | None, list[bool]]:
    """(T,1,B,1) bool, false where a row begins a new document; and for each token whether any row does."""
    if segment_ids is None:
        return None, [False] * steps
    keep_BT = torch.ones_like(segment_ids, dtype=torch.bool)
    keep_BT[:, 1:] = segment_ids[:, 1:] == segment_ids[:, :-1]
    return keep_BT.T[:, None, :, None], (~keep_BT).any(0).tolist()


def _restarted(keep: Tensor, y: Tensor, c: Tensor, n: Tensor, m: Tensor) -> SlstmState:
    return y * keep, c * keep, n * keep, torch.where(keep, m, NOTHING)
