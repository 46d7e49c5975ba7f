"""Timing in pairs: peer and ours in turn, so that what else runs on the machine falls on both."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Pass = Callable[[], Any]


@dataclass
class Row:
    """One comparison: the peer's time over ours (above 1: ours is faster), the median over repeats."""

    name: str
    peer: str
    setting: str
    ratio: float
    low: float
    high: float
    ours_ms: float
    peer_ms: float
    goal: float  # the ratio that is asked for


@dataclass
class Curve:
    """Time of forward and backward against length; ``exponent`` is the slope in log-log, least squares."""

    name: str
    lengths: list[int]
    ms: list[float]
    goal: float  # the exponent that may not be passed
    exponent: float = field(init=False)

    def __post_init__(self) -> None:
        x, y = [math.log(t) for t in self.lengths], [math.log(t) for t in self.ms]
        self.exponent = statistics.linear_regression(x, y).slope


def seconds(act: Pass) -> float:
    """Wall time of one call."""
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def compare(name: str, peer: str, setting: str, goal: float, ours: Pass, theirs: Pass, repeats: int) -> Row:
    """Time both in turn; every repeat gives a ratio. Where a third program takes a core for a moment, one repeat suffers
    and the median does not."""
    ours(), theirs()
    pairs = [(seconds(theirs), seconds(ours)) for _ in range(repeats)]
    return row_of(name, peer, setting, goal, pairs)


def row_of(name: str, peer: str, setting: str, goal: float, pairs: list[tuple[float, float]]) -> Row:
    """The row of pairs of seconds (peer, ours)."""
    ratios = [a / b for a, b in pairs]
    peer_ms, ours_ms = (1e3 * statistics.median(x) for x in zip(*pairs, strict=True))
    return Row(name, peer, setting, statistics.median(ratios), min(ratios), max(ratios), ours_ms, peer_ms, goal)


def forward_backward(act: Callable[..., Tensor], inputs: list[Tensor]) -> Pass:
    """One pass and its gradients with respect to all inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    upstream: list[Tensor] = []

    def run() -> None:
        out = act(*leaves)
        if not upstream:
            upstream.append(torch.randn_like(out))
        torch.autograd.grad(out, leaves, upstream[0])

    return run


def random(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
