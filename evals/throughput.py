"""Speed of one trained model: prefill and decoding in tokens a second, time to the first token, peak memory and state
bytes, by context length and batch. Mesa also with fewer solver steps.

Times are medians. `python -m evals.speed` is another thing: it compares operations with other libraries.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from evals.mesa import solver
from evals.suite import Parts, Result, Subject, suite
from mixers.mesa import Mesa
from models.config import above_zero, at_least
from models.evaluate import autocast


@dataclass
class SpeedConfig:
    """See `conf/suite/speed.yaml`."""

    contexts: list[int] = field(default_factory=lambda: [256, 1024, 4096])
    batches: list[int] = field(default_factory=lambda: [1, 8])
    decode_tokens: int = 32
    repeats: int = 3
    cg_steps: list[int] = field(default_factory=lambda: [10, 15, 30])
    seconds: float = 480.0

    def check(self, path: str) -> None:
        for name in ("contexts", "batches"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"{path}.{name}={values}: must be whole numbers from 1 on")
        at_least(f"{path}.decode_tokens", self.decode_tokens, 1)
        at_least(f"{path}.repeats", self.repeats, 1)
        above_zero(f"{path}.seconds", self.seconds, "480 is usual")


@suite("speed", SpeedConfig)
def evaluate(subject: Subject, config: SpeedConfig, parts: Parts) -> Result:
    """Table ``rows``: ``context``, ``batch``, ``cg_steps``, ``prefill_tokens_per_s``, ``decode_tokens_per_s``,
    ``first_token_s``, ``peak_bytes`` (CUDA only) and ``state_bytes``. Metrics are those of batch 1."""
    result, begin = Result(), time.perf_counter()
    mixers = [block.mixer for block in subject.model.backbone.layers if isinstance(block.mixer, Mesa)]
    longest = subject.config.mixer.max_len()
    rows = []
    for steps in config.cg_steps if mixers else [None]:
        for context in config.contexts:
            for batch in config.batches:
                tag = f"context={context}/batch={batch}" + ("" if steps is None else f"/cg_steps={steps}")
                if longest is not None and longest < context + config.decode_tokens:
                    result.reasons[tag] = f"mixer {subject.config.mixer.kind} takes at most {longest} tokens"
                    continue
                if time.perf_counter() - begin > config.seconds:
                    result.reasons[tag] = f"suite.speed.seconds={config.seconds:g} were over"
                    continue
                with solver(mixers, steps, None) if steps is not None else contextlib.nullcontext():
                    row = parts(tag, lambda c=context, b=batch: _measure(subject, config, c, b))  # type: ignore[misc]
                rows.append({"context": context, "batch": batch, "cg_steps": steps, **row})
                if batch == min(config.batches):
                    for name in ("prefill_tokens_per_s", "decode_tokens_per_s"):
                        result.metrics[f"{name}/{tag}"] = row[name]
    result.metrics |= dict.fromkeys(result.reasons)
    result.tables["rows"] = rows
    return result


@torch.no_grad()
def _measure(subject: Subject, config: SpeedConfig, context: int, batch: int) -> dict[str, Any]:
    model, device = subject.model, subject.device
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(0, subject.dataset.vocab_size, (batch, context), generator=generator).to(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def first() -> tuple[torch.Tensor, Any]:
        state = model.init_state(batch, context + config.decode_tokens)
        features_BTD, state = model.read(tokens_BT, state, donate_state=True)
        return model.logits(features_BTD[:, -1:])[:, -1].argmax(-1), state

    with autocast(device, subject.config.precision):
        first()  # compiles, allocates
        seconds = [_timed(first, device)[0] for _ in range(config.repeats)]
        token_B, state = first()
        steps = []
        for _ in range(config.decode_tokens):

            def one(token: torch.Tensor = token_B, before: Any = state) -> tuple[torch.Tensor, Any]:
                logits_BV, after = model.step(token, before, donate_state=True)
                return logits_BV.argmax(-1), after

            took, (token_B, state) = _timed(one, device)
            steps.append(took)
    prefill, step = statistics.median(seconds), statistics.median(steps)
    return {
        "prefill_tokens_per_s": batch * context / prefill,
        "decode_tokens_per_s": batch / step,
        "first_token_s": prefill,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "state_bytes": batch * model.counts(context)["state_bytes"],
    }


def _timed(act: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Seconds and what came out, with the device's work in them."""
    _wait(device)
    begin = time.perf_counter()
    out = act()
    _wait(device)
    return time.perf_counter() - begin, out


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
