"""Sliding-window attention: softmax attention over the last W keys, self included (baselines 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mixers import register
from mixers.base import Knob
from mixers.transformer import TransformerConfig


@register
@dataclass
class SlidingWindowConfig(TransformerConfig):
    """As `transformer`, with a window. The cost is O(T W) and the state a ring of W keys and values."""

    kind: str = "swa"
    window: int = 64  # type: ignore[misc]

    state_knob: ClassVar[Knob | str] = Knob("mixer.window")
    test_overrides: ClassVar[dict] = {"window": 5}

    def check(self, path: str) -> None:
        super().check(path)
        if self.window < 1:
            raise ValueError(f"{path}.window={self.window}: must be at least 1 (1: each token sees itself alone)")

    def accessories(self) -> dict[str, str]:
        return {**super().accessories(), "window": f"{self.window} keys with self"}
