"""With size: each mixer's loss against training FLOPs where a study has it at three sizes or more. See `power_law`.

A **ladder** is a set of rows with one mixer (``mixer.kind``) and equal settings of mixer and model but for the sizes: width,
depth, heads, width of the MLP. A width and depth that is there twice is no ladder, and neither is an accuracy or another metric
that is not above 0 everywhere: a power law is one of losses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from runs.identity import canonical
from sweeps.reports.collect import Run
from sweeps.reports.compare import ALPHA, Estimate, holm
from sweeps.reports.power_law import LEAST, Line, Pair
from sweeps.reports.style import Look, looks
from sweeps.reports.table import Board, Row

SIZE_KEYS = ("d_model", "n_layers", "n_heads", "head_dim", "mlp_width")
"""Last parts of the keys in which the sizes of one mixer may differ."""

OPEN = "not distinguishable"


@dataclass(frozen=True)
class Rung:
    """One size of one mixer."""

    size: str  # width x depth, as d64x3
    row: str  # its name in the table
    params: float  # beside the embedding
    tokens: float
    flops: float  # of the whole training
    by_seed: dict[Any, float]  # ln of the metric

    @property
    def mean(self) -> float:
        """ln of the geometric mean over seeds."""
        return float(np.mean(list(self.by_seed.values())))


@dataclass(frozen=True)
class Verdict:
    """A difference to the reference and what may be said of it."""

    estimate: Estimate
    words: tuple[str, str]  # for a mean below 0, and above
    p_holm: float | None = None

    @property
    def verdict(self) -> str:
        if self.p_holm is None or self.p_holm >= ALPHA:
            return OPEN
        return self.words[self.estimate.mean > 0]


@dataclass(frozen=True)
class Versus:
    """A ladder against the reference's, paired by size and seed."""

    sizes: list[str]
    exponent: Verdict  # mine minus theirs
    loss: Verdict | None  # ln(mine / theirs) at the middle compute; None where not both ladders reach it
    multiplier: (
        Estimate | None
    )  # ln of the reference's compute over mine at my loss there; None where there is no interval


@dataclass(frozen=True)
class Ladder:
    """One mixer over its sizes, the cheapest first."""

    label: str
    rungs: list[Rung]
    line: Line
    middle: Estimate | None  # ln of the fitted loss at the middle compute; None outside of its own sizes
    seed_sd: float | None  # of ln(loss) over the seeds of a size, pooled; None with one seed each
    versus: Versus | None = None  # None: the reference itself, or fewer than three sizes in common with it


@dataclass(frozen=True)
class Scaling:
    """All ladders of a report, the lowest fitted loss first."""

    metric: str
    unit: str
    reference: str
    flops: float  # the middle of the compute that all ladders span, on a logarithmic scale
    ladders: list[Ladder]

    @property
    def tokens_per_param(self) -> tuple[float, float]:
        """The smallest and the largest over all sizes."""
        shares = [rung.tokens / rung.params for ladder in self.ladders for rung in ladder.rungs]
        return min(shares), max(shares)

    @property
    def looks(self) -> dict[str, Look]:
        """A mixer has its usual colour here, whatever its sizes have elsewhere on the page."""
        own = looks([ladder.label for ladder in self.ladders])
        return {label: replace(look, css=look.css.replace("--mixer", "--ladder")) for label, look in own.items()}


# ---- finding them ----------------------------------------------------------------------------------------------------


def find(board: Board) -> Scaling | None:
    """None where the table has no ladder."""
    if not board.lower_is_better or any(run.metrics[board.metric] <= 0 for run in board.runs):
        return None
    groups: dict[str, list[Row]] = {}
    for row in board.rows:
        groups.setdefault(canonical(settings(row.entry.runs[0])), []).append(row)
    sets = {key: rungs for key, rows in groups.items() if (rungs := _rungs(rows, board.metric)) is not None}
    if not sets:
        return None
    labels = _labels({key: groups[key][0].entry.runs[0] for key in sets})
    ladders = [_ladder(labels[key], rungs) for key, rungs in sets.items()]
    ends = [(ladder.line.x_S.min(), ladder.line.x_S.max()) for ladder in ladders]
    middle = (max(low for low, _ in ends) + min(high for _, high in ends)) / 2
    ladders = [
        replace(ladder, middle=ladder.line.at(middle) if _reaches(ladder, middle) else None) for ladder in ladders
    ]
    home = [ladder.label for ladder in ladders if any(rung.row == board.reference for rung in ladder.rungs)]
    reference = (home or sorted(ladder.label for ladder in ladders))[0]
    ladders = _compared(ladders, reference, middle)
    ladders.sort(key=lambda ladder: (math.inf if ladder.middle is None else ladder.middle.mean, ladder.label))
    return Scaling(board.metric, board.unit, reference, math.exp(middle), ladders)


def settings(run: Run) -> dict[str, Any]:
    """What all sizes of a ladder have in common: the settings of mixer and model without the sizes."""
    return {
        key: value
        for key, value in run.science.items()
        if key.startswith(("mixer.", "model.")) and key.rpartition(".")[2] not in SIZE_KEYS
    }


def _rungs(rows: Sequence[Row], metric: str) -> list[Rung] | None:
    rungs = [
        Rung(
            size=f"d{row.entry.runs[0].science['model.d_model']}x{row.entry.runs[0].science['model.n_layers']}",
            row=row.label,
            params=row.count("params_non_embedding"),
            tokens=row.count("tokens"),
            flops=row.count("train_flops"),
            by_seed={run.seeds: math.log(run.metrics[metric]) for run in row.entry.runs},
        )
        for row in rows
        if {"model.d_model", "model.n_layers"} <= set(row.entry.runs[0].science)
    ]
    if len({rung.size for rung in rungs}) < max(LEAST, len(rungs)):
        return None
    return sorted(rungs, key=lambda rung: (rung.flops, rung.size))


def _labels(runs: dict[str, Run]) -> dict[str, str]:
    """The mixer's kind, with the settings that tell ladders of one kind apart."""
    out = {}
    for key, run in runs.items():
        kind, own = run.science["mixer.kind"], settings(run)
        others = [
            settings(other) for name, other in runs.items() if name != key and other.science["mixer.kind"] == kind
        ]
        apart = [name for name in own if any(other.get(name) != own[name] for other in others)]
        listed = ", ".join(f"{name.partition('.')[2]}={own[name]}" for name in apart)
        out[key] = f"{kind} ({listed})" if listed else kind
    return out


def _line(rungs: Sequence[Rung]) -> Line:
    return Line(np.log([rung.flops for rung in rungs]), np.array([rung.mean for rung in rungs]))


def _ladder(label: str, rungs: list[Rung]) -> Ladder:
    several = [list(rung.by_seed.values()) for rung in rungs if len(rung.by_seed) > 1]
    spread = sum(float(np.var(values)) * len(values) for values in several)
    free = sum(len(values) - 1 for values in several)
    return Ladder(label, rungs, _line(rungs), None, math.sqrt(spread / free) if free else None)


def _reaches(ladder: Ladder, x: float) -> bool:
    return bool(ladder.line.x_S.min() <= x <= ladder.line.x_S.max())


# ---- against the reference -------------------------------------------------------------------------------------------


def _compared(ladders: Sequence[Ladder], reference: str, middle: float) -> list[Ladder]:
    theirs = next(ladder for ladder in ladders if ladder.label == reference)
    against: dict[str, Versus] = {}
    for ladder in ladders:
        if ladder.label != reference and (versus := _versus(ladder, theirs, middle)) is not None:
            against[ladder.label] = versus
    exponents = _corrected({label: versus.exponent for label, versus in against.items()})
    losses = _corrected({label: versus.loss for label, versus in against.items() if versus.loss is not None})
    decided = {
        label: replace(versus, exponent=exponents[label], loss=losses.get(label)) for label, versus in against.items()
    }
    return [replace(ladder, versus=decided.get(ladder.label)) for ladder in ladders]


def _versus(ladder: Ladder, reference: Ladder, middle: float) -> Versus | None:
    """Over the sizes that both have, each with the seeds that both have there."""
    other = {rung.size: rung for rung in reference.rungs}
    mine, theirs = [], []
    for rung in ladder.rungs:
        seeds = rung.by_seed.keys() & other[rung.size].by_seed.keys() if rung.size in other else set()
        if seeds:
            mine.append(replace(rung, by_seed={seed: rung.by_seed[seed] for seed in rung.by_seed if seed in seeds}))
            same = other[rung.size]
            theirs.append(replace(same, by_seed={seed: same.by_seed[seed] for seed in same.by_seed if seed in seeds}))
    if len(mine) < LEAST:
        return None
    pair = Pair(_line(mine), _line(theirs))
    both = ladder.middle is not None and reference.middle is not None
    return Versus(
        [rung.size for rung in mine],
        Verdict(pair.slopes(), ("steeper", "flatter")),
        Verdict(pair.at(middle), ("better", "worse")) if both else None,
        pair.multiplier(middle) if both else None,
    )


def _corrected(found: dict[str, Verdict]) -> dict[str, Verdict]:
    """With p-values for the number of mixers (Holm)."""
    adjusted = holm([one.estimate.p or 0.0 for one in found.values()])
    return {label: replace(one, p_holm=p) for (label, one), p in zip(found.items(), adjusted, strict=True)}


# ---- for report.json -------------------------------------------------------------------------------------------------


def plain(found: Scaling) -> dict[str, Any]:
    """Losses in the metric's unit, differences of losses and compute as factors, the rest of the logarithms' lines."""
    return {
        "metric": found.metric,
        "unit": found.unit,
        "reference": found.reference,
        "middle_train_flops": found.flops,
        "tokens_per_param": list(found.tokens_per_param),
        "mixers": [_plain_ladder(ladder) for ladder in found.ladders],
    }


def _plain_ladder(ladder: Ladder) -> dict[str, Any]:
    versus = ladder.versus
    return {
        "mixer": ladder.label,
        "exponent": _plain(ladder.line.slope()),
        "loss_at_middle": _factor(ladder.middle),
        "misfit_sd": ladder.line.misfit,
        "seed_sd": ladder.seed_sd,
        "sizes": [
            {
                "size": rung.size,
                "row": rung.row,
                "params_non_embedding": rung.params,
                "tokens": rung.tokens,
                "train_flops": rung.flops,
                "n": len(rung.by_seed),
                "loss": math.exp(rung.mean),
                "off_the_line": float(math.expm1(residual)),
            }
            for rung, residual in zip(ladder.rungs, ladder.line.residuals_S, strict=True)
        ],
        "versus": None
        if versus is None
        else {
            "sizes": versus.sizes,
            "exponent_difference": _decided(versus.exponent, _plain(versus.exponent.estimate)),
            "loss_ratio": None if versus.loss is None else _decided(versus.loss, _plain(factor(versus.loss.estimate))),
            "compute_multiplier": _factor(versus.multiplier),
        },
    }


def _plain(e: Estimate) -> dict[str, Any]:
    return {"mean": e.mean, "ci95": e.ci95, "n": e.n}


def _factor(e: Estimate | None) -> dict[str, Any] | None:
    return None if e is None else _plain(factor(e))


def factor(e: Estimate) -> Estimate:
    """From the logarithm, with its interval."""
    low, high = (None if end is None else math.exp(end) for end in (e.low, e.high))
    return replace(e, mean=math.exp(e.mean), low=low, high=high)


def _decided(one: Verdict, numbers: dict[str, Any]) -> dict[str, Any]:
    return {**numbers, "p": one.estimate.p, "p_holm": one.p_holm, "verdict": one.verdict}
