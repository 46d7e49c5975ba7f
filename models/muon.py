"""Muon: momentum whose update is the nearest orthogonal matrix; with AdamW for what is no hidden matrix.

    M <- m M + (1 - m) G          U = (1 - m) G + m M                 momentum, Nesterov's
    O = polar(U)                                                      all singular values near 1
    O <- O / sqrt(v), v a moving mean of O^2 over the longer axis; then O has the norm that it had before
    W <- W - eta O - eta d W [O W >= 0],  eta = lr sqrt(max(1, rows / columns))          cautious weight decay

Muon is Jordan et al. 2024. The polar factor comes from five steps of the Polar Express (arXiv 2505.16932), an odd
polynomial each, optimal for what the step before leaves. The moving mean is NorMuon's (arXiv 2510.05491): one number for
each row (each column, where those are more). Decay only where it goes with the update is arXiv 2510.12402. This is
nanochat's recipe of early 2026 (d20: maglev 7.4).

`torch.optim.Muon` has neither the two last parts nor the Polar Express, and no AdamW beside it, which Lightning's loop
wants in one optimizer. Each process updates all matrices: gradients are equal after their reduction, so weights stay so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from models.config import POLAR_STEPS

Coefficients = Sequence[tuple[float, float, float]]

POLAR_EXPRESS: Coefficients = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""(a, b, c) of x -> a x + b x^3 + c x^5, computed for five steps (cushion 2) and for inputs of norm 1 / 1.02."""
MARGIN = 1.02
assert len(POLAR_EXPRESS) == POLAR_STEPS


def polar(matrix: Tensor, coefficients: Coefficients = POLAR_EXPRESS, margin: float = MARGIN) -> Tensor:
    """The orthogonal factor of a matrix (rows, columns), in its dtype and up to what the polynomials leave: U p(S) V^T
    for the singular value decomposition U S V^T. Zero stays zero."""
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / (torch.linalg.matrix_norm(x) * margin + 1e-6)
    for a, b, c in coefficients:
        gram = x @ x.T  # of the shorter side
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.T


class MuonAdamW(torch.optim.Optimizer):
    """Groups with ``kind`` muon or adamw, each with a learning rate of its own.

    Of Muon: ``lr``, ``momentum``, ``weight_decay``, ``variance_beta`` (None: no moving mean), ``cautious``, ``steps``, and
    ``parts``: for each parameter the rows of the maps that it holds, which are updated apart. Parameters are matrices.
    Of AdamW: ``lr``, ``betas``, ``eps``, ``weight_decay``.

    Polynomials are computed in ``dtype``; all else, and where it is None they too, in the parameters' own.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], dtype: torch.dtype | None = None):
        super().__init__(groups, {})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; parameters without a gradient stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["kind"] == "muon":
                for parameter, parts in zip(group["params"], group["parts"], strict=True):
                    if parameter.grad is not None:
                        self._muon(parameter, parameter.grad, parts, group)
            else:
                self._adamw(group)
        return loss

    def _muon(self, weight: Tensor, gradient: Tensor, parts: Sequence[int], group: dict[str, Any]) -> None:
        state, m = self.state[weight], group["momentum"]
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        state["momentum"].lerp_(gradient, 1 - m)
        direction = gradient.lerp(state["momentum"], m)
        for i, (part, into) in enumerate(zip(weight.split(parts), direction.split(parts), strict=True)):
            rows, columns = part.shape
            update = polar(into.to(self.dtype or part.dtype), POLAR_EXPRESS[: group["steps"]]).to(part.dtype)
            if group["variance_beta"] is not None:
                axis = 1 if rows >= columns else 0
                if f"variance_{i}" not in state:
                    state[f"variance_{i}"] = torch.zeros_like(update.sum(axis, keepdim=True))
                update = evened(update, state[f"variance_{i}"], group["variance_beta"], axis)
            eta = group["lr"] * max(1.0, rows / columns) ** 0.5
            decayed = part * (update * part >= 0) if group["cautious"] else part
            part.sub_(update.add(decayed, alpha=group["weight_decay"]), alpha=eta)

    def _adamw(self, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        for p in parameters:
            if not self.state[p]:
                self.state[p].update(
                    step=torch.zeros((), dtype=torch.float32, device=p.device),
                    exp_avg=torch.zeros_like(p),
                    exp_avg_sq=torch.zeros_like(p),
                )
        if not parameters:
            return
        states = [self.state[p] for p in parameters]
        adamw(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def evened(update: Tensor, variance: Tensor, beta: float, axis: int) -> Tensor:
    """The update with rows (or columns) of equal size over time, and of the same norm as a whole; ``variance``, the
    moving mean of its squares over ``axis``, is updated in place."""
    variance.lerp_(update.square().mean(axis, keepdim=True), 1 - beta)
    out = update * variance.clamp_min(1e-10).rsqrt()
    norm = torch.linalg.matrix_norm
    return out * (norm(update) / norm(out).clamp_min(1e-10))
