"""Causal convolution that carries on from earlier tokens: exact decoding in O(log^2 T) per token and channel.

Dyadic ("relaxed") convolution (van der Hoeven 2002, Relax, but don't be too lazy). When m tokens have come since the
base, and b is the largest power of two that divides m, the last b inputs are *pushed* to the next b outputs with one
transform of length 2 b. A pair of an input and a later output is pushed exactly once: at the one level at which the two
lie in neighbouring blocks. Inputs of the current block of 64 are not pushed yet and are summed directly. A call with
several tokens pushes everything to all that can follow, and the scheme starts anew behind it.

A state is a dict, batch first in every tensor. One buffer serves past and future, as only one of them needs a slot:

    buffer (B,S,H,V) or (B,S,D)   slot t < length: the input of token t, zero if it belongs to an older document;
                                  slot t >= length: what was already pushed to output t. float32 or wider: it adds up
    length (B,) int64, CPU        tokens seen so far, the same in every row
    start (B,) int64, CPU         first token of the row's current document
    base (B,) int64, CPU          tokens whose pushes are complete, the same in every row
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mixers.ops.long_conv import causal_conv, fanned, fft_length, folded

DIRECT = 64  # inputs that are summed one by one: below this, calls cost more than products

Taps = Callable[[int], Tensor]
"""The first n taps, or all if there are fewer: a filter that is computed need not be computed whole at each token."""


def init_conv_state(
    batch_size: int,
    max_len: int,
    shape: tuple[int, ...],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """An empty state for up to ``max_len`` tokens of ``shape``, (H,V) or (D,); the buffer is float32 or wider."""
    if max_len < 1:
        raise ValueError(f"max_len must be at least 1, got {max_len}")
    wide = torch.promote_types(dtype, torch.float32)
    counters = {key: torch.zeros(batch_size, dtype=torch.int64, device="cpu") for key in ("length", "start", "base")}
    return {"buffer": torch.zeros(batch_size, max_len, *shape, device=device, dtype=wide), **counters}


def online_conv(
    x: Tensor,
    filter: Tensor | Taps,
    state: dict[str, Tensor],
    *,
    segment_ids: Tensor | None = None,
    donate_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, dict[str, Tensor]]:
    """``causal_conv`` of all tokens since the state was made, at the new ones.

    Args:
        x: (B,T,H,V) or (B,T,D), T >= 1.
        filter: (H,L), (H,J,L), (D,L), or ``Taps`` that give them; taps that are not there weigh nothing.
        state: from ``init_conv_state`` or an earlier call with the same filter; its document is the first column's.
        segment_ids: integers (B,T), non-decreasing; no information crosses a border.
        donate_state: the buffer may be overwritten and returned. Otherwise the passed state is unchanged, at the price
            of a copy.
        backend: of the convolution among the new tokens.

    Returns:
        Shape and dtype of x, and the state after the last token, of the last column's document.

    Raises:
        ValueError: shapes that do not fit together or more tokens than the state has room for.
    """
    taps: Taps = filter if callable(filter) else lambda count: filter[..., :count]
    buffer, steps = state["buffer"], x.shape[1]
    length, size = int(state["length"][0]), buffer.shape[1]
    if (buffer.shape[0], *buffer.shape[2:]) != (x.shape[0], *x.shape[2:]):
        raise ValueError(f"the state's buffer is {tuple(buffer.shape)}, which does not fit x {tuple(x.shape)}")
    if length + steps > size:
        raise ValueError(f"the state was made for max_len={size} tokens, {length + steps} are needed")
    if not donate_state:
        buffer = buffer.clone()
    with torch.autocast(x.device.type, enabled=False):
        if steps == 1:  # the document of the only column is the state's: there is no border
            y = _step(x, taps, buffer, length, int(state["base"][0]))
            start, base = state["start"].clone(), state["base"].clone()
        else:
            start = document_starts(state, segment_ids)
            y = _several(x, taps, buffer, length, start, segment_ids, backend)
            base = state["length"] + steps
    return y.to(x.dtype), {"buffer": buffer, "length": state["length"] + steps, "start": start, "base": base}


def document_starts(state: dict[str, Tensor], segment_ids: Tensor | None) -> Tensor:
    """(B,) on the CPU: first token of each row's last document. Reading it costs a device sync, with documents only."""
    if segment_ids is None:
        return state["start"].clone()
    earlier = (segment_ids != segment_ids[:, -1:]).sum(1).cpu()
    return torch.where(earlier > 0, state["length"] + earlier, state["start"])


def _step(x: Tensor, taps: Taps, buffer: Tensor, length: int, base: int) -> Tensor:
    """One token: what was pushed to it, the current block directly, and the push that is due behind it."""
    first = base + (length - base) // DIRECT * DIRECT
    wide = x.to(buffer.dtype)
    # A copy, as everything that is read here: later writes to the buffer must not touch what autograd remembers.
    y = buffer[:, length : length + 1] + _direct(torch.cat((buffer[:, first:length], wide), dim=1), taps)
    buffer[:, length] = wide[:, 0]
    length += 1
    block = (length - base) & (base - length)  # the largest power of two that divides it
    count = min(block, buffer.shape[1] - length)
    if block >= DIRECT and count:
        buffer[:, length : length + count] += pushed(buffer[:, length - block : length].clone(), taps, count)
    return y


def _several(
    x: Tensor, taps: Taps, buffer: Tensor, length: int, start: Tensor, segment_ids: Tensor | None, backend: str
) -> Tensor:
    """Several tokens: the convolution among them, the past's share, and pushes to all that can follow."""
    (steps, size), end = (x.shape[1], buffer.shape[1]), length + x.shape[1]
    wide = x.to(buffer.dtype)
    filter = taps(steps)
    filter = F.pad(filter, (0, steps - filter.shape[-1]))
    y = causal_conv(wide, filter, segment_ids=segment_ids, backend=backend)
    if length:
        carried = pushed(buffer[:, :length].clone(), taps, steps)
        if segment_ids is not None:
            carried = _kept(carried, segment_ids == segment_ids[:, :1])
        y = y + carried
    buffer[:, length:end] = wide
    if segment_ids is not None:
        current = torch.arange(end) >= start[:, None]
        buffer[:, :end] = _kept(buffer[:, :end], current.to(buffer.device))
    if end < size:
        buffer[:, end:] = pushed(buffer[:, :end].clone(), taps, size - end)
    return y


def pushed(block: Tensor, taps: Taps, count: int) -> Tensor:
    """Shares of a block of inputs (B,b,...) in the ``count`` outputs right behind it: (B,count,...).

    A transform of b + count numbers is enough: what wraps around falls on the block's own places, which are not read.
    """
    size = block.shape[1]
    filter = taps(size + count).to(block.dtype)
    x_BTHV, taps_HL = fanned(block, filter)
    length = fft_length(size + count)
    spectrum_BHVF = torch.fft.rfft(x_BTHV.permute(0, 2, 3, 1), n=length)
    spectrum_BHVF = spectrum_BHVF * torch.fft.rfft(taps_HL, n=length)[:, None]
    y_BHVT = torch.fft.irfft(spectrum_BHVF, n=length)[..., size : size + count]
    return folded(y_BHVT.permute(0, 3, 1, 2), block, filter)


def _direct(recent: Tensor, taps: Taps) -> Tensor:
    """The output at the last of ``recent``, from these inputs alone, as a sum: (B,1,...)."""
    filter = taps(recent.shape[1]).to(recent.dtype)
    x_BTHV, taps_HL = fanned(recent[:, -filter.shape[-1] :], filter)
    y_B1HV = (x_BTHV * taps_HL.flip(-1).T[..., None]).sum(1, keepdim=True)
    return folded(y_B1HV, recent, filter)


def _kept(x: Tensor, mask_BT: Tensor) -> Tensor:
    """x where the mask is true, 0 elsewhere, also where x is not finite."""
    return torch.where(mask_BT.view(*mask_BT.shape, *(1,) * (x.ndim - 2)), x, 0.0)
