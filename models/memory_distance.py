"""How far two memories are apart, position by position: the consistency loss of two-pass models, and their drift."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def distance(ours_BTD: Tensor, theirs_BTD: Tensor, form: str = "rms", eps: float = 1e-8) -> Tensor:
    """(B, T) in float32 or wider: rms |a - b| / sqrt(D), mse, cosine (1 - cos), or huber.

    The root has ``eps`` under it: with output projections that start at zero both memories are equal, and the derivative
    of a bare root there is not finite.
    """
    wide = torch.promote_types(ours_BTD.dtype, torch.float32)
    with torch.autocast(ours_BTD.device.type, enabled=False):
        ours, theirs = ours_BTD.to(wide), theirs_BTD.to(wide)
        if form == "cosine":
            return 1 - F.cosine_similarity(ours, theirs, dim=-1)
        if form == "huber":
            return F.huber_loss(ours, theirs, reduction="none").mean(-1)
        square = (ours - theirs).square().mean(-1)
        return square if form == "mse" else (square + eps).sqrt()
