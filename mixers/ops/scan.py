"""Linear recurrence with a decay of its own for every channel: what RG-LRU (Hawk, arXiv 2402.19427, eq. 4) runs on.

    h_t = exp(log_a_t) * h_{t-1} + u_t,   log_a_t <= 0

``recurrent_scan`` is the specification, ``linear_scan`` computes the same in about 2 sqrt(T) calls and O(T) work.

Two levels: T is cut into N chunks of C tokens. C steps run the recurrence in all chunks at once, each from zero, and keep
the product p of the decays since the chunk began; N steps carry the last column from chunk to chunk; one product
h += p * (state that entered) ends it. Factors are products of numbers in [0, 1]: nothing is divided or can overflow.

Backward: with delta_t = dh_t + a_{t+1} delta_{t+1}, which is the same scan reversed, du_t = delta_t and
d log_a_t = delta_t a_t h_{t-1}. Only a and h are kept.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mixers.ops._chunks import check_shapes, compute_dtype


def linear_scan(
    log_a: Tensor, u: Tensor, *, initial_state: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The recurrence in about 2 sqrt(T) calls; equal to ``recurrent_scan`` up to rounding, for any T >= 1.

    Decays, state and arithmetic are float32 (float64 if any input is). Gradients reach every floating-point argument;
    there is no second derivative (use the recurrent form).

    Args:
        log_a: log decay <= 0 (B,T,D); -inf forgets everything.
        u: input (B,T,D).
        initial_state: (B,D), h before the first token; it belongs to the first column's document.
        segment_ids: integers (B,T), non-decreasing; h restarts from zero where they change.

    Returns:
        h (B,T,D) in the dtype of u, and h after the last token (B,D) in float32 or wider.

    Raises:
        ValueError: shapes that do not fit together or T = 0.
    """
    _check(log_a, u, initial_state, segment_ids)
    with torch.autocast(u.device.type, enabled=False):
        return _LinearScan.apply(log_a, u, initial_state, segment_ids)


def recurrent_scan(
    log_a: Tensor, u: Tensor, *, initial_state: Tensor | None = None, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The recurrence token by token: the specification and, with T = 1, the decoding step.

    Arguments, dtypes, result and errors are those of ``linear_scan``. Differentiable any number of times.
    """
    _check(log_a, u, initial_state, segment_ids)
    dtype = compute_dtype(log_a, u, initial_state)
    h = u.new_zeros(u.shape[0], u.shape[2], dtype=dtype) if initial_state is None else initial_state.to(dtype)
    outputs = []
    with torch.autocast(u.device.type, enabled=False):
        a_BTD, u_BTD = log_a.to(dtype).exp(), u.to(dtype)
        for t in range(u.shape[1]):
            if segment_ids is not None and t > 0:
                same = segment_ids[:, t] == segment_ids[:, t - 1]
                h = torch.where(same[:, None], h, 0.0)
            h = torch.addcmul(u_BTD[:, t], a_BTD[:, t], h)
            outputs.append(h)
    return torch.stack(outputs, dim=1).to(u.dtype), h


def _check(log_a: Tensor, u: Tensor, initial_state: Tensor | None, segment_ids: Tensor | None) -> None:
    if u.ndim != 3 or u.shape[1] < 1:
        raise ValueError(f"u must be (B,T,D) with T >= 1, got {tuple(u.shape)}")
    check_shapes(
        "u",
        u,
        {
            "log_a": (log_a, u.shape),
            "initial_state": (initial_state, (u.shape[0], u.shape[2])),
            "segment_ids": (segment_ids, u.shape[:2]),
        },
    )


class _LinearScan(torch.autograd.Function):
    """The scan and its derivative by hand: autograd through T steps would cost several times the work."""

    @staticmethod
    def forward(ctx: Any, log_a, u, initial_state, segment_ids):  # type: ignore[override]
        (batch, steps, width), dtype = u.shape, compute_dtype(log_a, u, initial_state)
        n_chunks, length = _lengths(steps)
        padded = n_chunks * length
        # one column more than needed: the backward pass reads a_{t+1}, and nothing comes after the last token
        a = u.new_zeros(batch, padded + 1, width, dtype=dtype)
        h = u.new_empty(batch, padded, width, dtype=dtype)
        a[:, :steps].copy_(log_a).exp_()
        if segment_ids is not None:
            a[:, 1:steps] *= (segment_ids[:, 1:] == segment_ids[:, :-1])[..., None]
        h[:, :steps].copy_(u)
        h[:, steps:].zero_()
        if initial_state is not None:
            h[:, 0].addcmul_(a[:, 0], initial_state.to(dtype))
        _scan_(_chunks(a[:, :padded], length), _chunks(h, length))
        ctx.save_for_backward(a, h, initial_state)
        ctx.length, ctx.steps = length, steps
        ctx.dtypes = [None if x is None else x.dtype for x in (log_a, u, initial_state)]
        ctx.set_materialize_grads(False)
        return h[:, :steps].to(u.dtype), h[:, steps - 1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh, dfinal):  # type: ignore[override]
        a, h, initial_state = ctx.saved_tensors  # once: activation checkpointing recomputes them at each look
        steps, (a_dtype, u_dtype, state_dtype) = ctx.steps, ctx.dtypes
        delta = torch.zeros_like(h)
        if dh is not None:
            delta[:, :steps].copy_(dh)
        if dfinal is not None:
            delta[:, steps - 1] += dfinal
        _scan_(_chunks(a[:, 1:], ctx.length), _chunks(delta, ctx.length), reverse=True)
        delta = delta[:, :steps]
        dlog_a, dinitial = delta * a[:, :steps], None
        if initial_state is None:
            dlog_a[:, 0] = 0.0
        else:
            dinitial = dlog_a[:, 0].to(state_dtype, copy=True)
            dlog_a[:, 0] *= initial_state
        dlog_a[:, 1:] *= h[:, : steps - 1]
        return dlog_a.to(a_dtype), delta.to(u_dtype), dinitial, None


def _lengths(steps: int) -> tuple[int, int]:
    """(N, C) with N C >= T. A step within the chunks is two calls on N D numbers, a carry one call on D."""
    length = min(steps, max(1, round(math.sqrt(steps / 2))))
    return -(-steps // length), length


def _chunks(x_BTD: Tensor, length: int) -> Tensor:
    return x_BTD.unflatten(1, (-1, length))


def _scan_(a_BNCD: Tensor, h_BNCD: Tensor, *, reverse: bool = False) -> None:
    """h_t += a_t h_{t-1} for all t in order, in place; reversed: h_t += a_t h_{t+1} from the end."""
    n_chunks, length = h_BNCD.shape[1:3]
    first, last, towards = (length - 1, 0, -1) if reverse else (0, length - 1, 1)
    product_BNCD = a_BNCD.clone()
    a, h, product = a_BNCD.unbind(2), h_BNCD.unbind(2), product_BNCD.unbind(2)
    for c in range(first + towards, last + towards, towards):
        h[c].addcmul_(a[c], h[c - towards])
        product[c].mul_(product[c - towards])
    if n_chunks == 1:
        return
    # the last columns become true states one by one; then every other column takes the state that entered its chunk
    states, factors = h[last].unbind(1), product[last].unbind(1)
    order = range(n_chunks - 2, -1, -1) if reverse else range(1, n_chunks)
    for n in order:
        states[n].addcmul_(factors[n], states[n - towards])
    inner = slice(1, None) if reverse else slice(0, length - 1)
    entered_BN1D = h[last][:, 1:, None] if reverse else h[last][:, :-1, None]
    late = slice(0, n_chunks - 1) if reverse else slice(1, None)
    h_BNCD[:, late, inner].addcmul_(product_BNCD[:, late, inner], entered_BN1D)
