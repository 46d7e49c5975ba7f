"""Fredholm index of a causal filter: how many inputs a bi-infinite past hides from the output.

The semi-infinite Toeplitz operator with filter v has the symbol a(z) = sum_k v_k z^-k. It is Fredholm where a has no zero
on the unit circle, and then its index is the winding number of a around 0: minus the number of zeros of
sum_k v_k w^k inside |w| < 1 (Boettcher and Silbermann, Analysis of Toeplitz Operators, chapter 2). 0: the filter has a
stable causal inverse; -1: it loses one number, as a shift by one token does.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST_STEP = 2.5  # radians between neighbouring samples; at pi their order on the circle would be a guess
_NEAR_ZERO = 1e-9  # of the sum of |v|: float64 cannot tell the symbol from zero


def fredholm_index(v: Tensor, *, most_samples: int = 1 << 22) -> tuple[int | None, float]:
    """Winding number of the symbol of ``v`` (n,), by its angle along the unit circle in float64.

    Samples are doubled until no step of the angle is near half a turn and the result stays the same: with 4 n of them
    zeros near the circle are missed.

    Args:
        v: taps (n,), tap k weighs the input k tokens ago.
        most_samples: where to give up.

    Returns:
        The index, None where it is undefined or cannot be told, and the smallest |a| that was sampled: near zero the
        index hangs on the last digits of v.

    Raises:
        ValueError: v is not a vector with at least one tap.
    """
    if v.ndim != 1 or not len(v):
        raise ValueError(f"v must be (n,) with n >= 1, got {tuple(v.shape)}")
    taps = v.detach().double().cpu()
    size, samples, before = float(taps.abs().sum()), 1 << (16 * len(v) - 1).bit_length(), None
    margin = 0.0
    while samples <= max(most_samples, 64 * len(v)):
        symbol = torch.fft.fft(taps, n=samples)
        margin = float(symbol.abs().min())
        if not margin > _NEAR_ZERO * size:
            return None, margin
        steps = torch.angle(symbol.roll(-1) * symbol.conj())  # of each sample to the next, the last to the first
        found = round(float(steps.sum()) / (2 * torch.pi)) if float(steps.abs().max()) < _LARGEST_STEP else None
        if found is not None and found == before:
            return found, margin
        samples, before = 2 * samples, found
    return None, margin
