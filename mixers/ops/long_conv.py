"""Causal convolution with filters as long as the sequence, all tokens at once.

    y_t = sum_{k <= t} f_k x_{t-k}

One filter per head, shared by its V channels (Toeplitz mixers), or one per channel (implicit filters, as in Hyena).
``recurrent_conv`` is the specification. The other forms differ in cost and in nothing else:

    dense    products with the lower triangular Toeplitz matrices; exactly causal
    blocked  the same in strips of rows: half the products, memory O(T block) per filter instead of O(T^2)
    fft      O(T log T); causal up to rounding: a future 1000 times larger than the past shows in its last digits

With neighbours, filters (H,J,L), a head also mixes channels: output v reads channels v - J + 1 to v of its head, each
through its own filter, the last of which is the channel's own. Decoding token by token: ``online_conv``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mixers.ops._chunks import compute_dtype
from mixers.ops._documents import apart

BACKENDS = ("auto", "dense", "blocked", "fft")
_BLOCK = 256  # most rows of a strip
_CACHE = 1 << 21  # bytes of padded input that are transformed at a time on a CPU: about half the time of all at once
# Longest sequence that runs dense, then blocked. CPU: measured, forward and backward, 2048 to 4096 channels on one and two
# threads. CUDA: estimated, float32 products against memory-bound transforms. With one channel per filter, building a
# matrix costs more than its product.
_CROSSOVERS = {"cpu": (256, 512), "cuda": (512, 1024)}
_CROSSOVERS_PER_CHANNEL = {"cpu": (16, 16), "cuda": (32, 32)}


def causal_conv(x: Tensor, filter: Tensor, *, segment_ids: Tensor | None = None, backend: str = "auto") -> Tensor:
    """Convolve each channel with the first T taps of its filter. Arithmetic is float32, or float64 if an input is.

    Args:
        x: (B,T,H,V), or (B,T,D) for a filter per channel.
        filter: (H,L), (H,J,L) or (D,L) with L >= T taps; tap k weighs what came k tokens before.
        segment_ids: integers (B,T), non-decreasing; no information crosses a border.
        backend: dense, blocked, fft, or auto: what is fastest for the length and the device.

    Returns:
        Shape and dtype of x. The fft form has no second derivative (use the others).

    Raises:
        ValueError: shapes that do not fit together, fewer taps than tokens or an unknown backend.
    """
    _check(x, filter, segment_ids, backend)
    if filter.shape[-1] < x.shape[1]:
        raise ValueError(f"the filter has {filter.shape[-1]} taps, too few for T={x.shape[1]} tokens")

    def convolve(rows: Tensor) -> Tensor:
        x_BTHV, taps_HL = fanned(rows, filter[..., : rows.shape[1]])
        kind = chosen_backend(rows.shape[1], x_BTHV.shape[-1], rows.device.type) if backend == "auto" else backend
        if kind == "fft":
            y_BTHV = _FFTConv.apply(x_BTHV, taps_HL)
        else:
            y_BTHV = _strips(x_BTHV, taps_HL, rows.shape[1] if kind == "dense" else _BLOCK)
        return folded(y_BTHV, rows, filter)

    with torch.autocast(x.device.type, enabled=False):
        return apart(convolve, x, segment_ids)


def recurrent_conv(x: Tensor, filter: Tensor, *, segment_ids: Tensor | None = None) -> Tensor:
    """The sum as it is written, output by output: the specification. Arguments, result and errors of ``causal_conv``."""
    _check(x, filter, segment_ids, "auto")
    dtype = compute_dtype(x, filter)
    x_BTHV, taps_HL = fanned(x.to(dtype), filter.to(dtype))
    outputs = []
    for t in range(x.shape[1]):
        reach_BT = x_BTHV[:, : t + 1]
        if segment_ids is not None:
            own = segment_ids[:, : t + 1] == segment_ids[:, t : t + 1]
            reach_BT = torch.where(own[..., None, None], reach_BT, 0.0)
        outputs.append((reach_BT * taps_HL[:, : t + 1].flip(-1).T[..., None]).sum(1))
    return folded(torch.stack(outputs, dim=1), x, filter).to(x.dtype)


def chosen_backend(seq_len: int, width: int, device: str) -> str:
    """What ``auto`` runs for filters that ``width`` channels share."""
    table = _CROSSOVERS_PER_CHANNEL if width == 1 else _CROSSOVERS
    dense, blocked = table["cuda" if device == "cuda" else "cpu"]
    return "dense" if seq_len <= dense else "blocked" if seq_len <= blocked else "fft"


def fft_length(needed: int) -> int:
    """The next power of two: lengths with large prime factors, such as 2 T - 1, are up to ten times slower."""
    return 1 << (needed - 1).bit_length()


def conv_flops_per_token(seq_len: int, n_filters: int, width: int, backend: str = "auto") -> float:
    """FLOPs of one sequence's convolution per token, by the form that runs on a CPU; causal halves taken.

    A transform of p real numbers is 2 p log2 p - 4 p + 6 (split radix); inputs and outputs have one per channel, filters
    one each, and a product of spectra is 3 p.
    """
    if (chosen_backend(seq_len, width, "cpu") if backend == "auto" else backend) != "fft":
        return n_filters * width * (seq_len + 1)
    p = fft_length(2 * seq_len - 1)
    transform = max(2 * p * math.log2(p) - 4 * p + 6, 0)
    return n_filters * (width * (2 * transform + 3 * p) + transform) / seq_len


def fanned(x: Tensor, filter: Tensor) -> tuple[Tensor, Tensor]:
    """x_BTHV and taps_HL for every layout: a channel alone is a head of width 1, neighbours are heads of their own."""
    if x.ndim == 3:
        return x[..., None], filter
    if filter.ndim == 2:
        return x, filter
    neighbours = filter.shape[1]
    shifted = [F.pad(x, (j, 0))[..., : x.shape[-1]] for j in reversed(range(neighbours))]
    return torch.stack(shifted, dim=3).flatten(2, 3), filter.flatten(0, 1)


def folded(y_BTHV: Tensor, x: Tensor, filter: Tensor) -> Tensor:
    """From the result for ``fanned`` inputs back to the layout of x."""
    if x.ndim == 3:
        return y_BTHV[..., 0]
    return y_BTHV if filter.ndim == 2 else y_BTHV.unflatten(2, filter.shape[:2]).sum(3)


def _check(x: Tensor, filter: Tensor, segment_ids: Tensor | None, backend: str) -> None:
    if x.ndim not in (3, 4) or x.shape[1] < 1:
        raise ValueError(f"x must be (B,T,H,V) or (B,T,D) with T >= 1, got {tuple(x.shape)}")
    if filter.ndim not in (2, x.ndim - 1) or filter.shape[0] != x.shape[2] or 0 in filter.shape:
        raise ValueError(
            f"the filter must be (H,L), (H,J,L) or (D,L) for x {tuple(x.shape)}, got {tuple(filter.shape)}"
        )
    if segment_ids is not None and segment_ids.shape != x.shape[:2]:
        raise ValueError(f"segment_ids must be {tuple(x.shape[:2])}, got {tuple(segment_ids.shape)}")
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend}: must be one of {', '.join(BACKENDS)}")


def _strips(x_BTHV: Tensor, taps_HT: Tensor, block: int) -> Tensor:
    """Products with strips of at most ``block`` rows of the Toeplitz matrix. All are ends of its lowest strip."""
    batch, steps, heads, width = x_BTHV.shape
    dtype = compute_dtype(x_BTHV, taps_HT)
    n_strips = -(-steps // block)
    block = -(-steps // n_strips)  # equally high: 300 rows are 2 x 150, not 2 x 256
    columns = n_strips * block
    # Entry (i, s) of the lowest strip is tap columns - block + i - s, and 0 above the diagonal.
    padded = F.pad(taps_HT.to(dtype), (block - 1, columns - steps))
    lowest_HCT = padded.unfold(-1, columns, 1).flip(-1)
    x_HTX = F.pad(x_BTHV.to(dtype).permute(2, 1, 0, 3).reshape(heads, steps, batch * width), (0, 0, 0, columns - steps))
    outputs = [lowest_HCT[..., columns - end :] @ x_HTX[:, :end] for end in range(block, columns + 1, block)]
    y_HTX = torch.cat(outputs, dim=1)[:, :steps]
    return y_HTX.unflatten(-1, (batch, width)).permute(2, 1, 0, 3).to(x_BTHV.dtype)


class _FFTConv(torch.autograd.Function):
    """Saves x and the filter alone and transforms them again in the backward pass: plain autograd keeps five copies
    of x. The filter's gradient is summed over its channels before it is transformed back."""

    @staticmethod
    def forward(ctx: Any, x_BTHV: Tensor, taps_HT: Tensor) -> Tensor:
        ctx.save_for_backward(x_BTHV, taps_HT)
        dtype = compute_dtype(x_BTHV, taps_HT)
        filter_H1F = _filter_spectrum(taps_HT, dtype)
        y_BTHV = torch.empty_like(x_BTHV, memory_format=torch.contiguous_format)
        for rows in _row_blocks(x_BTHV, dtype):
            _transform_back(_spectrum(x_BTHV[rows], dtype).mul_(filter_H1F), y_BTHV[rows])
        return y_BTHV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTHV: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_BTHV, taps_HT = ctx.saved_tensors  # once: activation checkpointing recomputes them at each look
        steps, dtype = x_BTHV.shape[1], compute_dtype(x_BTHV, taps_HT)
        wants_x, wants_taps = ctx.needs_input_grad
        with torch.autocast(dy_BTHV.device.type, enabled=False):
            dx_BTHV = torch.empty_like(x_BTHV, memory_format=torch.contiguous_format) if wants_x else None
            filter_H1F = _filter_spectrum(taps_HT, dtype).conj().resolve_conj() if wants_x else None
            dfilter_HF: Tensor | None = None
            for rows in _row_blocks(x_BTHV, dtype):
                upstream_BHVF = _spectrum(dy_BTHV[rows], dtype)
                if wants_taps:
                    products = _spectrum(x_BTHV[rows], dtype).conj_physical_().mul_(upstream_BHVF).sum((0, 2))
                    dfilter_HF = products if dfilter_HF is None else dfilter_HF.add_(products)
                if dx_BTHV is not None and filter_H1F is not None:
                    _transform_back(upstream_BHVF.mul_(filter_H1F), dx_BTHV[rows])
            dtaps_HT = None
            if dfilter_HF is not None:
                dtaps_HT = torch.fft.irfft(dfilter_HF, n=fft_length(2 * steps - 1))[:, :steps].to(taps_HT.dtype)
        return dx_BTHV, dtaps_HT


def _row_blocks(x_BTHV: Tensor, dtype: torch.dtype) -> list[slice]:
    """Rows of the batch that are transformed together: on a CPU what fits its cache, elsewhere all."""
    batch, steps, heads, width = x_BTHV.shape
    count = batch
    if x_BTHV.device.type == "cpu":
        count = max(1, _CACHE // (heads * width * fft_length(2 * steps - 1) * dtype.itemsize))
    return [slice(first, first + count) for first in range(0, batch, count)]


def _spectrum(x_BTHV: Tensor, dtype: torch.dtype) -> Tensor:
    """(B,H,V,p/2+1), of x padded with zeros so that nothing wraps around. Time is last: strided transforms are slow."""
    batch, steps, heads, width = x_BTHV.shape
    padded_BHVP = x_BTHV.new_zeros(batch, heads, width, fft_length(2 * steps - 1), dtype=dtype)
    padded_BHVP[..., :steps] = x_BTHV.permute(0, 2, 3, 1)
    return torch.fft.rfft(padded_BHVP)


def _filter_spectrum(taps_HT: Tensor, dtype: torch.dtype) -> Tensor:
    """(H,1,p/2+1)."""
    return torch.fft.rfft(taps_HT.to(dtype), n=fft_length(2 * taps_HT.shape[-1] - 1))[:, None]


def _transform_back(spectrum_BHVF: Tensor, out_BTHV: Tensor) -> None:
    """Fill ``out`` with the first T of the inverse transform."""
    steps = out_BTHV.shape[1]
    y_BHVP = torch.fft.irfft(spectrum_BHVF, n=fft_length(2 * steps - 1))
    out_BTHV.copy_(y_BHVP[..., :steps].permute(0, 3, 1, 2))
