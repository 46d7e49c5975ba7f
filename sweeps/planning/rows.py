"""What each planned run costs: counts, how its budget is met, memory, time."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.config import CorpusConfig, HfConfig
from models.budget import LIMITS, CannotMeet, Match, Shape, counts, meet
from runs.identity import canonical
from runs.schema import Config
from runs.validate import ConfigError
from sweeps.planning.memory import Memory, estimate, modes
from sweeps.planning.runs import Plan, Planned, label
from sweeps.planning.speed import Speed, calibrate, find, hours

VOCABULARIES = {"gpt2": 50_257, "llama2": 32_000}
"""Of tokenizers on the hub, by the name of their YAML file: a plan fetches nothing."""


@dataclass
class Row:
    """One mixer, or one of its points where they cost different amounts. ``unmet`` says why a budget is n/a."""

    mixer: str
    label: str
    n_runs: float
    tokens: int
    point: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)
    match: Match | None = None
    unmet: str | None = None
    memory: Memory | None = None
    speed: Speed | None = None
    hours: float | None = None

    def plain(self, reference: Row | None) -> dict[str, Any]:
        """For ``--json``: everything of an n/a row that is a cost is null."""
        names = ("params", "params_non_embedding", "params_training_only", "train_flops_per_token", "state_bytes")
        return {
            "mixer": self.mixer,
            "label": self.label,
            "point": self.point,
            **{name: self.counts.get(name) for name in names},
            "off": {by: off(self, reference, by) for by in LIMITS},
            "match": self.match.plain() if self.match else None,
            "not_available": self.unmet,
            "memory_gb": round(self.memory.total / 1e9, 3) if self.memory else None,
            "memory_parts_gb": {k: round(v / 1e9, 4) for k, v in dataclasses.asdict(self.memory).items()}
            if self.memory
            else None,
            "tokens": self.tokens,
            "tokens_per_s": round(self.speed.train, 1) if self.speed else None,
            "hours": self.hours,
            "hours_from": self.speed.source if self.speed else None,
            "core_share": round(self.speed.share, 3) if self.speed else None,
            "runs": self.n_runs,
            "hours_all_runs": None if self.hours is None else self.hours * self.n_runs,
        }


def off(row: Row, reference: Row | None, by: str) -> float | None:
    """(mine - reference's) / reference's of a count."""
    from models.budget import COUNTS

    name = COUNTS[by]
    if reference is None or not row.counts or not reference.counts or not reference.counts[name]:
        return None
    return (row.counts[name] - reference.counts[name]) / reference.counts[name]


def build(
    plan: Plan,
    *,
    results: Path,
    vocab_size: int | None = None,
    calibration: float | None = None,
    memory: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """A row for each mixer, or for each of its points that costs something else. ``say`` is told which is being worked on.

    Raises ConfigError for a vocabulary that is not known, and for a calibration without its data.
    """
    rows: dict[str, Row] = {}
    for run in plan.runs:
        key = canonical([run.mixer, _costs(run.config)])
        if key in rows:
            rows[key].n_runs += run.n_runs
        else:
            say(run.mixer)
            rows[key] = _row(run, results, vocab_size, calibration, memory)
    for row in rows.values():
        row.label = label(row.mixer, row.point, [other.point for other in rows.values() if other.mixer == row.mixer])
    return list(rows.values())


def _costs(config: Config) -> dict[str, Any]:
    """All of a config that may change what a run costs."""
    plain = dataclasses.asdict(config)
    for name in ("optimizer", "schedule", "study", "seed", "init_seed", "data_seed", "logger", "paths"):
        del plain[name]
    return plain


def _row(run: Planned, results: Path, vocab_size: int | None, calibration: float | None, with_memory: bool) -> Row:
    config = run.config
    assert config.steps is not None
    row = Row(run.mixer, run.mixer, run.n_runs, config.steps * config.tokens_per_step, run.point)
    shape = shape_of(config, vocab_size)
    if run.other is not None:
        try:
            config, row.match = meet(config, run.other, shape)
        except CannotMeet as cannot:
            row.unmet = str(cannot)
            return row
    row.counts = counts(config, shape)
    if calibration is not None:
        try:
            row.speed = calibrate(config, calibration)
        except ValueError as error:  # its data are not prepared
            raise ConfigError(str(error)) from None
    else:
        row.speed = find(config, run.mixer, row.counts, modes(config, shape), results)
    tested = split_tokens(config, "test")
    row.hours = hours(config, row.speed, tested)
    if with_memory:
        sizes = (config.evaluation.val_tokens, config.evaluation.test_tokens or tested)
        known = None if None in sizes else max(s for s in sizes if s is not None) // config.data.seq_len
        row.memory = estimate(config, shape, known and max(1, known))
    return row


# ---- what is known of data that was perhaps never opened -------------------------------------------------------------


def shape_of(config: Config, vocab_size: int | None = None) -> Shape:
    """What the model takes from its data, known without opening them. Raises ConfigError where the vocabulary is not."""
    data: Any = config.data
    if data.kind != "corpus":
        return Shape(data.vocab_size, data.input_width, data.seq_len if data.readout == "last" else None)
    if vocab_size is not None:
        return Shape(vocab_size)
    if (manifest := _manifest(config)) is not None:
        return Shape(manifest["vocab_size"])
    tokenizer: Any = config.tokenizer
    if not isinstance(tokenizer, HfConfig):
        return Shape(257 if tokenizer.kind == "bytes" else tokenizer.vocab_size)
    if tokenizer.file() is not None:
        from data.pretrained import fetch_tokenizer

        return Shape(fetch_tokenizer(tokenizer).vocab_size)
    if tokenizer.name in VOCABULARIES:
        return Shape(VOCABULARIES[tokenizer.name])
    raise ConfigError(
        f"tokenizer.path={tokenizer.path}: how many tokens it has is not known here; prepare the data first, or say it, as "
        "in vocab_size=50257"
    )


def split_tokens(config: Config, split: str) -> int | None:
    """Tokens of a split that an evaluation reads; None where the data are not prepared."""
    limit = config.evaluation.val_tokens if split == "val" else config.evaluation.test_tokens
    data: Any = config.data
    if data.kind != "corpus":
        whole = data.eval_examples * data.seq_len
    elif (manifest := _manifest(config)) is not None:
        whole = manifest["splits"][split]["tokens"]
    else:
        return limit
    return whole if limit is None else min(limit, whole)


def _manifest(config: Config) -> dict[str, Any] | None:
    """Of the prepared corpus, if it is there."""
    from data.prepare import MANIFEST, request_of
    from data.prepare import find as find_prepared

    assert isinstance(config.data, CorpusConfig)
    folder = find_prepared(Path(config.paths.cache), request_of(config.data, config.tokenizer))
    return None if folder is None else json.loads((folder / MANIFEST).read_text(encoding="utf-8"))


def reference_row(plan: Plan, rows: Sequence[Row]) -> Row | None:
    """The first row of the mixer that the others are compared with, if its costs are known."""
    return next((row for row in rows if row.mixer == plan.reference and row.counts), None)
