"""Figures out of report.json: what stands at a place, and what follows from several of them.

`read` takes a figure from its place and looks nothing up by name, so that a ledger can be checked from its places alone.
Whatever a claim needs is a weighted sum of such figures (`combine`): a difference, a mean over tasks, a slope, a difference of
differences.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.special import stdtr, stdtrit

from sweeps.ledger.places import Place
from sweeps.ledger.statements import ClaimError
from sweeps.reports.compare import ALPHA, over_seeds


@dataclass(frozen=True)
class Cell:
    """One figure. ``by_seed`` where the report has the single runs' values."""

    mean: float
    error: float | None  # standard error over runs; None: it has no interval
    n: int
    by_seed: Mapping[tuple[Any, ...], float] | None = None


@dataclass(frozen=True)
class Outcome:
    """A weighted sum of cells. ``error`` is its standard error with ``df`` degrees of freedom; None: no interval."""

    mean: float
    error: float | None
    df: float
    n: int
    paired: bool = True

    @property
    def half(self) -> float | None:
        """Half the width of the 95 % interval."""
        return None if self.error is None else float(stdtrit(self.df, 1 - ALPHA / 2)) * self.error

    def above(self, value: float) -> float:
        """Twice the one-sided p-value of "no more than ``value``", at most 1: below 0.05 exactly where the interval is
        above it. 1 where there is no interval."""
        if self.error is None:
            return 1.0
        if self.error == 0:
            return 0.0 if self.mean > value else 1.0
        return min(1.0, 2 * float(stdtr(self.df, (value - self.mean) / self.error)))

    def below(self, value: float) -> float:
        """The same for "no less than ``value``"."""
        return Outcome(-self.mean, self.error, self.df, self.n).above(-value)


# ---- reports ---------------------------------------------------------------------------------------------------------


class Reports:
    """The report.json of each study under ``results``, read once. Those that are not there are None."""

    def __init__(self, results: Path):
        self.results = results
        self._read: dict[str, dict[str, Any] | None] = {}

    def get(self, study: str) -> dict[str, Any] | None:
        """Raises ClaimError for a damaged file."""
        if study not in self._read:
            file = self.results / study / "report.json"
            try:
                self._read[study] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
            except json.JSONDecodeError as error:
                raise ClaimError(f"{file}: damaged ({error})") from None
        return self._read[study]

    def at(self, place: Place) -> Cell:
        """The figure at a place. Raises ClaimError where there is none."""
        content = self.get(place.study)
        if content is None:
            raise ClaimError(f"{place.pointer}: there is no {place.study}/report.json")
        return read(content, place)

    def node(self, place: Place) -> Any:
        """What stands at the pointer."""
        return _resolve(self.get(place.study) or {}, place)

    def number(self, place: Place) -> float:
        """A plain number at a place, such as a row's ``state_bytes``."""
        value = self.node(place)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ClaimError(f"{place.study}/report.json {place.pointer}: must be a number, not {value}")
        return float(value)


# ---- what it says ----------------------------------------------------------------------------------------------------


def _resolve(content: Any, place: Place) -> Any:
    node = content
    for part in place.pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        try:
            node = node[int(name)] if isinstance(node, list) else node[name]
        except (KeyError, IndexError, ValueError, TypeError):
            raise ClaimError(f"{place.study}/report.json has nothing at {place.pointer}") from None
    return node


def read(content: Mapping[str, Any], place: Place) -> Cell:
    """The figure at a place."""
    node = _resolve(content, place)
    if place.span is not None:
        seeds = _main_row(content, place)["seeds"]
        values = [_mean_over(run, place.span) for run in node]
        return _by_seed(values, seeds)
    if place.item is not None:
        return _by_seed(node["values"][place.item], _main_row(content, place)["seeds"])
    if node.get("values"):
        return _by_seed(node["values"], node.get("seeds") or _seeds_of(content, node["runs"]))
    if place.pointer.endswith("/minus_deployed"):
        row = _resolve(content, Place(place.study, place.pointer.removesuffix("/minus_deployed")))
        return _from_interval(node["mean"], node["ci95"], row["n"])
    over = node.get("interval_over", "seeds")
    return _from_interval(node["mean"], node.get("ci95") if over == "seeds" else None, node["n"])


def _main_row(content: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
    """The ranked row of the mixer that a pointer ends with."""
    mixer = place.pointer.rpartition("/")[2].replace("~1", "/").replace("~0", "~")
    return next(row for row in content["rows"] if row["mixer"] == mixer and row["rank"] is not None)


def _seeds_of(content: Mapping[str, Any], runs: Sequence[str]) -> list[Any]:
    """Seeds of runs by their names: evaluations list runs, the table says which seeds they had."""
    known = {
        run: seed
        for row in content["rows"]
        for run, seed in zip(row.get("runs", ()), row.get("seeds", ()), strict=True)
    }
    return [known[run] for run in runs]


def _mean_over(run: Mapping[str, Any], span: tuple[int, int]) -> float:
    """Mean over positions: ranges weigh as much as they are long."""
    parts = [
        (b - a, mean)
        for a, b, mean in zip(run["edges"], run["edges"][1:], run["mean"], strict=False)
        if a >= span[0] and b <= span[1]
    ]
    return math.fsum(width * mean for width, mean in parts) / sum(width for width, _ in parts)


def _by_seed(values: Sequence[float], seeds: Sequence[Any]) -> Cell:
    by_seed = {tuple(seed) if isinstance(seed, list) else (seed,): value for seed, value in zip(seeds, values, strict=True)}  # fmt: skip
    mean, error = _mean_error(list(by_seed.values()))
    return Cell(mean, error, len(by_seed), by_seed)


def _mean_error(values: Sequence[float]) -> tuple[float, float | None]:
    if len(values) < 2:
        return values[0], None
    found = over_seeds(values)
    assert found.sd is not None
    return found.mean, found.sd / math.sqrt(found.n)


def _from_interval(mean: float, ci95: Sequence[float] | None, n: int) -> Cell:
    """The standard error is what made the t-interval over n seeds."""
    if ci95 is None or n < 2:
        return Cell(mean, None, n)
    return Cell(mean, (ci95[1] - ci95[0]) / 2 / float(stdtrit(n - 1, 1 - ALPHA / 2)), n)


def combine(terms: Sequence[tuple[float, Cell]]) -> Outcome:
    """The sum of weight * figure, with its error.

    Paired by seed where all cells have values and two or more seeds in common: Student's t over the sums. Otherwise the cells
    count as independent (Welch; degrees of freedom by Satterthwaite), which is wider wherever seeds go up and down together.
    """
    if len(terms) == 1:
        weight, cell = terms[0]
        return Outcome(weight * cell.mean, None if cell.error is None else abs(weight) * cell.error, cell.n - 1, cell.n)
    shared = _shared_seeds([cell for _, cell in terms])
    if len(shared) > 1:
        sums = [math.fsum(weight * cell.by_seed[seed] for weight, cell in terms if cell.by_seed) for seed in shared]
        mean, error = _mean_error(sums)
        return Outcome(mean, error, len(sums) - 1, len(sums))
    mean = math.fsum(weight * cell.mean for weight, cell in terms)
    n = min(cell.n for _, cell in terms)
    if any(cell.error is None for _, cell in terms):
        return Outcome(mean, None, 0, n, paired=False)
    parts = [((weight * (cell.error or 0.0)) ** 2, cell.n - 1) for weight, cell in terms]
    total = math.fsum(part for part, _ in parts)
    df = total**2 / math.fsum(part**2 / df for part, df in parts) if total > 0 else float(n - 1)
    return Outcome(mean, math.sqrt(total), df, n, paired=False)


def _shared_seeds(cells: Sequence[Cell]) -> list[tuple[Any, ...]]:
    if any(cell.by_seed is None for cell in cells):
        return []
    first = cells[0].by_seed or {}
    return [seed for seed in first if all(seed in (cell.by_seed or {}) for cell in cells)]
