"""Cross-entropy of soft-capped logits, straight from the features: the logits of all tokens never exist at once.

For a chunk of rows the logits, their loss and, while they are still in the cache, their gradient are made in one go and
dropped. That saves the memory of (tokens, vocabulary) and most of its traffic; the sums are the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100  # the target of positions that are not graded


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(logits / cap) in float32 or wider."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if cap is None else cap * torch.tanh(logits / cap)


def graded_positions(targets: Tensor) -> Tensor:
    """Where a target is graded: not -100; of real numbers, not NaN."""
    return ~targets.isnan() if targets.is_floating_point() else targets != IGNORED


def squared_errors(predictions: Tensor, targets: Tensor) -> Tensor:
    """(prediction - target)^2 in float32 or wider, 0 where the target is not graded (NaN)."""
    graded = graded_positions(targets)
    wide = predictions.to(torch.promote_types(predictions.dtype, torch.float32))
    # Taken out before the difference, so that no NaN reaches a gradient.
    return torch.where(graded, (wide - targets.nan_to_num()).square(), torch.zeros_like(wide))


def cross_entropy_sum(
    features_ND: Tensor, matrix_VD: Tensor, targets_N: Tensor, *, cap: float | None = None, rows: int | None = None
) -> Tensor:
    """Sum over graded rows of -log softmax(cap(features @ matrix^T))[target], in nats.

    ``targets`` may hold -100: not graded. ``rows`` at a time; None: all at once. Differentiable once with respect to
    features and matrix.
    """
    with torch.autocast(features_ND.device.type, enabled=False):
        return _CrossEntropySum.apply(features_ND, matrix_VD, targets_N, cap, rows or len(features_ND))


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, features_ND: Tensor, matrix_VD: Tensor, targets_N: Tensor, cap: float | None, rows: int
    ) -> Tensor:
        dtype = features_ND.dtype
        wide = torch.promote_types(dtype, torch.float32)
        used_VD = matrix_VD.to(dtype)
        total = features_ND.new_zeros((), dtype=wide)
        with_gradient = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        d_features_ND = torch.empty_like(features_ND) if with_gradient else None
        d_matrix_VD = torch.zeros_like(matrix_VD, dtype=wide) if with_gradient else None
        for start in range(0, len(features_ND), rows):
            part = slice(start, start + rows)
            x_CD, graded_C1 = features_ND[part], (targets_N[part] != IGNORED)[:, None]
            target_C1 = targets_N[part].clamp(min=0)[:, None]
            z_CV = (x_CD @ used_VD.T).to(wide)
            if cap is not None:
                z_CV = z_CV.div_(cap).tanh_()
            log_p_CV = F.log_softmax(z_CV if cap is None else z_CV * cap, dim=-1)
            total -= (log_p_CV.gather(-1, target_C1) * graded_C1).sum()
            if d_features_ND is None or d_matrix_VD is None:
                continue
            d_z_CV = log_p_CV.exp_()  # softmax - onehot
            d_z_CV.scatter_add_(-1, target_C1, d_z_CV.new_full((1, 1), -1.0).expand_as(target_C1))
            if not bool(graded_C1.all()):
                d_z_CV.mul_(graded_C1)
            if cap is not None:  # derivative of the cap: 1 - tanh^2
                d_z_CV.addcmul_(d_z_CV, z_CV.square_(), value=-1)
            d_z_CV = d_z_CV.to(dtype)
            torch.mm(d_z_CV, used_VD, out=d_features_ND[part])
            if dtype == wide:
                d_matrix_VD.addmm_(d_z_CV.T, x_CD)
            else:
                d_matrix_VD += d_z_CV.T @ x_CD
        if d_features_ND is not None and d_matrix_VD is not None:
            ctx.save_for_backward(d_features_ND, d_matrix_VD)
            ctx.matrix_dtype = matrix_VD.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        d_features_ND, d_matrix_VD = ctx.saved_tensors
        return (
            d_features_ND * upstream.to(d_features_ND.dtype),
            (d_matrix_VD * upstream).to(ctx.matrix_dtype),
            None,
            None,
            None,
        )
