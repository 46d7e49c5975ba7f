"""Small building blocks that several mixers share: rotary positions, short convolution, normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def rotary(x_BTHK: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotary position embedding (Su et al. 2021), half-split pairing (j, j + K/2).

    ``positions``: (T,) or (B, T) integers. Angles are taken in float32 (float64 for float64 input): in bf16 positions
    collide beyond 256.
    """
    width = x_BTHK.shape[-1]
    wide = torch.promote_types(x_BTHK.dtype, torch.float32)
    inverse = base ** (-torch.arange(0, width, 2, device=x_BTHK.device, dtype=wide) / width)
    angle = positions.to(x_BTHK.device, wide)[..., None, None] * inverse  # (T, 1, K/2) or (B, T, 1, K/2)
    cos, sin = angle.cos(), angle.sin()
    turned = _Rotate.apply(x_BTHK.to(wide), torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
    return turned.to(x_BTHK.dtype)


class _Rotate(torch.autograd.Function):
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin). The derivative is the rotation back, so nothing is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, signed_sin)
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, signed_sin = ctx.saved_tensors
        return torch.addcmul(dy * cos, dy.roll(dy.shape[-1] // 2, -1), signed_sin, value=-1), None, None


def l2_normalise(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last axis, in float32 or wider. Zero stays zero, with a finite gradient."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm``, on a CPU at a third of its time: torch has no fused form there."""

    def forward(self, x: Tensor) -> Tensor:
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        if x.device.type == "cpu" and x.dtype == self.weight.dtype:
            return _RMSNorm.apply(x, self.weight, eps)
        return F.rms_norm(x, self.normalized_shape, self.weight, eps)


class _RMSNorm(torch.autograd.Function):
    """y = x r w with r = 1 / rms(x). The derivative is that of layer norm with mean zero, which has a fused kernel, plus
    what that one takes off for its mean."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        r = size.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = ctx.saved_tensors
        width = x.shape[-1]
        dx, dweight, _ = torch.ops.aten.native_layer_norm_backward(
            dy.contiguous(), x, [width], torch.zeros_like(r), r, weight, None, [True, True, False]
        )
        return dx.add_((dy @ weight)[..., None].mul_(r).div_(width)), dweight, None


def rms_normalise(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Gain-free RMS norm over the last axis (QK norm)."""
    return F.rms_norm(x, x.shape[-1:], eps=eps)


def wide_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """A linear map in float32 or wider, also under autocast: for gates, as a decay of 0.999 does not survive bf16."""
    with torch.autocast(x.device.type, enabled=False):
        wide = torch.promote_types(layer.weight.dtype, torch.float32)
        bias = None if layer.bias is None else layer.bias.to(wide)
        return F.linear(x.to(wide), layer.weight.to(wide), bias)


class ResidualLinear(nn.Linear):
    """A linear map that writes to the residual stream: the backbone scales its initial weights by the depth."""


class FusedLinear(nn.Linear):
    """Several linear maps of the same input in one matrix, one above the other: ``parts`` are their widths. An optimizer
    that looks at a matrix as a whole (Muon) takes them one by one."""

    def __init__(self, in_features: int, parts: Sequence[int], bias: bool = True):
        super().__init__(in_features, sum(parts), bias=bias)
        self.parts = tuple(parts)


CONV_ON = ("none", "qk", "qkv")
"""What may pass the short convolution, in configs."""


class ShortConv(nn.Module):
    """Depthwise causal convolution over the last ``width`` tokens (4 in the field), then SiLU unless switched off.

    y_t = sum_j c_j x_{t-j} + bias. The state is the tail of the last width - 1 inputs.
    """

    def __init__(self, channels: int, width: int, *, bias: bool = False, activation: bool = True):
        super().__init__()
        self.width, self.activation = width, activation
        self.taps_JD = nn.Parameter(torch.empty(width, channels))  # row j weighs the input j tokens ago
        self.bias_D = nn.Parameter(torch.empty(channels)) if bias else None

    def init_parameters(self, generator: torch.Generator) -> None:
        """Uniform in +-1/sqrt(width), bias too: what a depthwise Conv1d starts from."""
        bound = 1 / math.sqrt(self.width)
        with torch.no_grad():
            self.taps_JD.uniform_(-bound, bound, generator=generator)
            if self.bias_D is not None:
                self.bias_D.uniform_(-bound, bound, generator=generator)

    def forward(
        self, x_BTD: Tensor, tail_BJD: Tensor | None = None, segment_ids_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns y_BTD and the new tail (None where none came in).

        ``tail_BJD`` belongs to the document of the first column, the returned one to that of the last column.
        """
        steps, reach = x_BTD.shape[1], self.width - 1
        taps = self.taps_JD.to(x_BTD.dtype)
        bias = None if self.bias_D is None else self.bias_D.to(x_BTD.dtype)
        if tail_BJD is None:
            past = F.pad(x_BTD, (0, 0, reach, 0))
        else:
            past = torch.cat((tail_BJD.to(x_BTD.dtype), x_BTD), dim=1)
        document = None
        if segment_ids_BT is None:
            kernel = taps.flip(0).T[:, None]  # (D, 1, width), oldest tap first
            y = F.conv1d(past.transpose(1, 2), kernel, bias, groups=taps.shape[1]).transpose(1, 2)
        else:  # tap by tap, since each tap has its own borders
            document = torch.cat((segment_ids_BT[:, :1].expand(-1, reach), segment_ids_BT), dim=1)
            y = x_BTD * taps[0] if bias is None else torch.addcmul(bias, x_BTD, taps[0])
            for j in range(1, self.width):
                window = slice(reach - j, reach - j + steps)
                inside = (document[:, window] == segment_ids_BT)[..., None]
                y = torch.addcmul(y, past[:, window] * inside, taps[j])
        if self.activation:
            y = F.silu(y)
        if tail_BJD is None:
            return y, None
        tail = past[:, steps:]
        if document is not None:
            tail = tail * (document[:, steps:] == document[:, -1:])[..., None]
        return y, tail.to(tail_BJD.dtype)
