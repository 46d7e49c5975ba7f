"""Gradients of a standard size inside a kernel whose backward pass is only right near that size.

A gradient is linear in what comes from above: divide that by a number before the kernel's backward pass, multiply what
comes out by the same number after it, and nothing has changed but the size of what the kernel sees. Where heads do not
mix, each head may have its own number. Both steps are nodes of the graph around the kernel's own node, in place of a
function that would hold the kernel's graph: memory, recomputation and a second backward pass are as without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# The largest upstream entry of a head after scaling. Kernels with float16 inside overflow at 65504 and lose digits below
# 6e-5; sums over some thousand tokens and the factor 1 / min(Lambda) = 4 must still fit.
LARGEST = 4.0


class _Size:
    """What the node behind the kernel has found for the node in front of it."""

    size_H: Tensor


def with_standard_gradients(
    kernel: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    input_heads: Sequence[int],
    output_heads: Sequence[int],
) -> tuple[Tensor, ...]:
    """``kernel(*inputs)``, with gradients computed at a standard size of the upstream gradient.

    Args:
        kernel: no head may influence another.
        inputs: floating-point tensors or None.
        input_heads: the axis of the heads in each input.
        output_heads: the same for each output.
    """
    size, present = _Size(), [x for x in inputs if x is not None]
    axes = [axis for axis, x in zip(input_heads, inputs, strict=True) if x is not None]
    passed = iter(_MultiplyGradients.apply(size, axes, *present))
    outputs = kernel(*(None if x is None else next(passed) for x in inputs))
    return _DivideGradients.apply(size, tuple(output_heads), *outputs)


def _per_head(x: Tensor, axis: int) -> Tensor:
    """(H, everything else)."""
    return x.movedim(axis, 0).flatten(1)


def _beside(size_H: Tensor, x: Tensor, axis: int) -> Tensor:
    """``size_H`` with axes of length one, so that it multiplies ``x`` head by head."""
    shape = [1] * x.ndim
    shape[axis] = -1
    return size_H.view(shape).to(x.dtype)


class _DivideGradients(torch.autograd.Function):
    """Behind the kernel: its backward runs first."""

    @staticmethod
    def forward(ctx, size, axes, *outputs):
        ctx.size, ctx.axes = size, axes
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in outputs)

    @staticmethod
    def backward(ctx, *gradients):
        pairs = [(x, axis) for x, axis in zip(gradients, ctx.axes, strict=True) if x is not None]
        largest_H = torch.stack([_per_head(x, axis).abs().amax(1).float() for x, axis in pairs]).amax(0)
        # A power of two: dividing and multiplying by it rounds nothing, in bfloat16 either.
        size_H = (largest_H / LARGEST).log2().round().clamp(min=-126).exp2()
        ctx.size.size_H = torch.where(largest_H > 0, size_H, 1.0)
        scaled = [
            None if x is None else x / _beside(ctx.size.size_H, x, a) for x, a in zip(gradients, ctx.axes, strict=True)
        ]
        return None, None, *scaled


class _MultiplyGradients(torch.autograd.Function):
    """In front of the kernel: its backward runs last."""

    @staticmethod
    def forward(ctx, size, axes, *inputs):
        ctx.size, ctx.axes = size, axes
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx, *gradients):
        scaled = [
            None if x is None else x * _beside(ctx.size.size_H, x, a) for x, a in zip(gradients, ctx.axes, strict=True)
        ]
        return None, None, *scaled
