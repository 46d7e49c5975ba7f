"""Speed of one trained model: prefill and decoding in tokens a second, time to the first token, peak memory and state
bytes, by context length and batch. Mesa also with fewer solver steps.

Times are medians. `python -m evals.speed` is another thing: it compares operations with other libraries.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from evals.mesa import solver
from evals.suite import Parts, Result, Subject, suite
from mixers.mesa import Mesa
from models.config import above_zero, at_least
from models.evaluate import autocast
from runs.host import processor


@dataclass
class SpeedConfig:
    """See `conf/suite/speed.yaml`."""

    contexts: list[int] = field(default_factory=lambda: [256, 1024, 4096])
    batches: list[int] = field(default_factory=lambda: [1, 8])
    decode_tokens: int = 32
    repeats: int = 3
    cg_steps: list[int] = field(default_factory=lambda: [10, 15, 30])
    seconds: float = 40.0

    def check(self, path: str) -> None:
        for name in ("contexts", "batches"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"{path}.{name}={values}: must be whole numbers from 1 on")
        at_least(f"{path}.decode_tokens", self.decode_tokens, 1)
        at_least(f"{path}.repeats", self.repeats, 1)
        above_zero(f"{path}.seconds", self.seconds, "40 is usual")


@suite("speed", SpeedConfig)
def evaluate(subject: Subject, config: SpeedConfig, parts: Parts) -> Result:
    """Table ``rows``: ``context``, ``batch``, ``cg_steps``, ``prefill_tokens_per_s``, ``decode_tokens_per_s``,
    ``first_token_s``, ``prefills`` (that were timed), ``peak_bytes`` (CUDA only) and ``state_bytes``; table ``device``.
    Metrics are those of the smallest batch. Short contexts come first; what would end after ``seconds``, by what the
    settings before it took for a token, is left out."""
    result = Result()
    mixers = [block.mixer for block in subject.model.backbone.layers if isinstance(block.mixer, Mesa)]
    longest = subject.config.mixer.max_len()
    rows: list[dict[str, Any]] = []
    if longest is None or longest >= min(config.contexts) + 1:  # what is compiled at the first call is not timed
        _measure(
            subject, replace(config, decode_tokens=1, repeats=1), min(config.contexts), min(config.batches), math.inf
        )
    until = time.perf_counter() + config.seconds
    per_token: dict[Any, float] = {}
    settings = itertools.product(sorted(config.contexts), sorted(config.batches), config.cg_steps if mixers else [None])
    for context, batch, steps in settings:
        tag = f"context={context}/batch={batch}" + ("" if steps is None else f"/cg_steps={steps}")
        if longest is not None and longest < context + config.decode_tokens:
            result.reasons[tag] = f"mixer {subject.config.mixer.kind} takes at most {longest} tokens"
            continue
        now = time.perf_counter()
        if now + 2 * per_token.get((batch, steps), 0.0) * context > until:  # a prefill to warm up, one to time
            result.reasons[tag] = f"suite.speed.seconds={config.seconds:g} would not be enough"
            continue
        with solver(mixers, steps, None) if steps is not None else contextlib.nullcontext():
            row = parts(tag, lambda c=context, b=batch: _measure(subject, config, c, b, until))  # type: ignore[misc]
        per_token[batch, steps] = row["first_token_s"] / context
        rows.append({"context": context, "batch": batch, "cg_steps": steps, **row})
        if batch == min(config.batches):
            for name in ("prefill_tokens_per_s", "decode_tokens_per_s"):
                result.metrics[f"{name}/{tag}"] = row[name]
    result.metrics |= dict.fromkeys(result.reasons)
    result.tables["rows"] = rows
    cuda = subject.device.type == "cuda"
    threads = torch.get_num_threads()
    result.tables["device"] = (
        torch.cuda.get_device_name(subject.device) if cuda else f"{processor()}, {threads} threads"
    )
    return result


@torch.no_grad()
def _measure(subject: Subject, config: SpeedConfig, context: int, batch: int, until: float) -> dict[str, Any]:
    """One row. ``until``: time.perf_counter() after which no further prefill is timed; one always is."""
    model, device = subject.model, subject.device
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(0, subject.dataset.vocab_size, (batch, context), generator=generator).to(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def first() -> tuple[torch.Tensor, Any]:
        state = model.init_state(batch, context + config.decode_tokens)
        features_BTD, state = model.read(tokens_BT, state, donate_state=True, assisted=True)
        return model.logits(features_BTD[:, -1:])[:, -1].argmax(-1), state

    with autocast(device, subject.config.precision):
        _timed(first, device)  # compiles, allocates
        seconds: list[float] = []
        while len(seconds) < config.repeats and (not seconds or time.perf_counter() + seconds[-1] < until):
            took, (token_B, state) = _timed(first, device)
            seconds.append(took)
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
        "prefills": len(seconds),
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
