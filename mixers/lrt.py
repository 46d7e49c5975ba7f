"""Latent Recurrent Transformer (LRT, arXiv 2605.26797): Maglev's predecessor, on the same code path.

Pass 1 is the network itself with a memory of zero, and has a cross-entropy of its own. Then positions are refined in
``subsets`` strided parts, each reading the newest memories and the keys and values of all positions so far (LRT, section
"interleaved parallel training"). Keys are mixed raw, then normalised and rotated; there is no consistency loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mixers import register
from mixers.maglev import MaglevConfig


@register
@dataclass
class LRTConfig(MaglevConfig):
    """As `maglev`, with LRT's choices; the decoder may have full attention (L), at the price of a growing cache."""

    kind: str = "lrt"
    q_pattern: str = "S"
    rec_key_norm: str = "none"
    mix_order: str = "lrt"
    subsets: int = 2
    q_ce_weight: float | None = None
    lam: float | None = 0.0

    recurrent_only: ClassVar[bool] = False
    prefiller_gated: ClassVar[bool] = True

    def check(self, path: str) -> None:
        super().check(path)
        if self.sharing == "separate":
            raise ValueError(f"{path}.sharing=separate: pass 1 of LRT is the network itself; use mixer=maglev for two")
