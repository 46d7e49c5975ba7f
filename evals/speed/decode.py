"""Decoding: milliseconds of one token at different positions, and what is kept. Constant in the position for linear mixers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from evals.speed.models import HEADS, LAYERS, WIDTH
from models.lm import LanguageModel

POSITIONS = (256, 1024, 4096)
MIXERS = [
    "transformer",
    "swa",
    "linear",
    "gla",
    "retnet",
    "mamba2",
    "deltanet",
    "gated_deltanet",
    "xlstm",
    "slstm",
    "hyena",
    "toeplitz",
    "hawk",
    "mesa",
    "maglev",
]


@dataclass
class DecodeRow:
    """One mixer: milliseconds per token of the whole model after each of POSITIONS tokens, and state bytes there."""

    name: str
    positions: list[int]
    ms: list[float]
    state_bytes: list[int]

    @property
    def growth(self) -> float:
        """Cost at the last position over that at the first."""
        return self.ms[-1] / self.ms[0]


@torch.no_grad()
def rows(repeats: int, only: str) -> Iterator[DecodeRow]:
    """Median over a run of steps after a prefill of each length, batch 1; the state is handed over (donated)."""
    from hydra import compose, initialize_config_dir

    from models.lm import build_model
    from runs.validate import validate

    size = [f"model.d_model={WIDTH}", f"model.n_layers={LAYERS}", f"model.n_heads={HEADS}", "data.seq_len=8192"]
    root = Path(__file__).resolve().parents[2]
    for name in MIXERS:
        if only not in name:
            continue
        with initialize_config_dir(str(root / "conf"), version_base="1.3"):
            config = validate(compose("config", overrides=[f"mixer={name}", "logger=none", *size]))
        model = build_model(config, 4096).eval()
        ms = [_one(model, position, 32 * repeats) for position in POSITIONS]
        kept = [model.counts(position)["state_bytes"] for position in POSITIONS]
        yield DecodeRow(name, list(POSITIONS), ms, kept)


def _one(model: LanguageModel, position: int, count: int) -> float:
    """Milliseconds per token over ``count`` steps after a prefill of ``position`` tokens."""
    tokens_BT = torch.randint(0, 4096, (1, position), generator=torch.Generator().manual_seed(0))
    _, state = model.prefill(tokens_BT, model.init_state(1, position + count + 1), donate_state=True)
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        _, state = model.step(tokens_BT[:, -1], state, donate_state=True)
        times.append(time.perf_counter() - begin)
    # without the slowest 3 %: another program's turn does not count, a convolution's pushes do
    return 1e3 * statistics.fmean(sorted(times)[: int(0.97 * count)])
