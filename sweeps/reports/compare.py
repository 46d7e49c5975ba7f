"""The statistics of a table: intervals, paired differences, verdicts. What may stand in it is `sweeps.reports.gate`'s part.

**Intervals** (95 %). With two or more seeds: Student's t over seeds; that is the chance of another initialisation and
another order of the training data, on these test documents. With one seed there is no such interval; the one given is
over test documents (ratio estimator of bits to bytes, delta method) and does not contain seed noise.

**Differences** to a reference are paired, by seed and by document, since both models meet the same data. A verdict
needs both: ``p`` is the larger of the two p-values, the chance of a difference this clear if retraining *or* the choice
of test documents explained it all. p-values are corrected for the number of mixers compared with the reference (Holm
1979); intervals are not. One seed decides nothing, whatever the documents say. Where there is no verdict,
`sweeps.reports.power` says how many seeds would bring one if the true difference were the one that was seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtr, stdtrit

from sweeps.reports.collect import Run
from sweeps.reports.power import detectable, seeds_needed

ALPHA = 0.05
ONE_SEED = "one seed: not decided"


# ---- intervals -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval."""

    mean: float
    low: float | None  # None: no interval can be had
    high: float | None
    n: int  # runs (seeds); also where the interval is over documents
    over: str  # "seeds", "documents", or "none" where there is no interval
    p: float | None = None  # two-sided, of a mean of 0
    sd: float | None = None  # of the values, where the interval is over seeds

    @property
    def ci95(self) -> list[float] | None:
        return None if self.low is None or self.high is None else [self.low, self.high]


def t_interval(mean: float, error: float, df: int, n: int, over: str) -> Estimate:
    """Student's t with ``df`` degrees of freedom, ``error`` the standard error of the mean."""
    half = float(stdtrit(df, 1 - ALPHA / 2)) * error
    if error > 0:
        p = float(2 * stdtr(df, -abs(mean) / error))
    else:
        p = 1.0 if mean == 0 else 0.0
    return Estimate(mean, mean - half, mean + half, n, over, p)


def over_seeds(values: Sequence[float]) -> Estimate:
    """Student's t over two or more runs."""
    x = np.asarray(values, dtype=np.float64)
    if len(x) < 2:
        raise ValueError("an interval over seeds needs two or more")
    sd = float(x.std(ddof=1))
    return replace(t_interval(float(x.mean()), sd / math.sqrt(len(x)), len(x) - 1, len(x), "seeds"), sd=sd)


def over_documents(values: np.ndarray, sizes: np.ndarray, *, n: int = 1) -> Estimate:
    """sum(values) / sum(sizes), such as bits per byte, with an interval over documents.

    The ratio R is no mean of per-document ratios, so its error is that of the residuals value_d - R size_d (delta method;
    Cochran, Sampling Techniques, 3rd edition, equation 6.13). ``values`` may be a difference of two models' values.
    Documents of size 0 are left out.
    """
    graded = np.asarray(sizes) > 0
    bits = np.asarray(values, dtype=np.float64)[graded]
    size = np.asarray(sizes, dtype=np.float64)[graded]
    d = len(size)
    if d < 2:
        mean = float(bits.sum() / size.sum()) if d else math.nan
        return Estimate(mean, None, None, n, "none")
    ratio = bits.sum() / size.sum()
    residual = bits - ratio * size
    error = math.sqrt(d / (d - 1) * float(np.square(residual).sum())) / float(size.sum())
    return t_interval(float(ratio), error, d - 1, n, "documents")


def estimate(runs: Sequence[Run], metric: str) -> Estimate:
    """The mean of one mixer's runs over its seeds."""
    values = [run.metrics[metric] for run in runs]
    if len(values) > 1:
        return over_seeds(values)
    run = runs[0]
    found = run.by_document(metric)
    if found is None:
        return Estimate(values[0], None, None, 1, "none")
    interval = over_documents(*found)
    return replace(interval, mean=values[0])  # the run's own figure: the same up to rounding


# ---- differences to the reference ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A mixer minus the reference."""

    reference: str
    seeds: Estimate | None  # paired by seed; None with fewer than two pairs
    documents: Estimate | None  # paired by document, mean over the paired seeds
    pairs: int
    p: float | None = None  # the larger of the two
    p_holm: float | None = None
    verdict: str = ""
    note: str = ""
    favours: bool | None = None  # does the mean favour the mixer?
    seeds_needed: int | None = (
        None  # to tell the difference seen; None: told already, not decided by seeds, or very many
    )
    detectable: float | None = None  # the smallest difference that these seeds find, with 80 % power

    @property
    def shown(self) -> Estimate | None:
        """The interval that stands in the table: over seeds, else over documents."""
        return self.seeds or self.documents


def compare(runs: Sequence[Run], reference: Sequence[Run], metric: str, name: str) -> Comparison:
    """One mixer's runs against the reference's, before the correction for several comparisons."""
    mine, theirs = {run.seeds: run for run in runs}, {run.seeds: run for run in reference}
    pairs = [(mine[seeds], theirs[seeds]) for seeds in mine if seeds in theirs]
    if not pairs:
        return Comparison(name, None, None, 0)
    seeds = None
    if len(pairs) > 1:
        seeds = over_seeds([a.metrics[metric] - b.metrics[metric] for a, b in pairs])
    documents = _documents(pairs, metric)
    known = [e.p for e in (seeds, documents) if e is not None and e.p is not None]
    return Comparison(name, seeds, documents, len(pairs), max(known) if seeds and known else None)


def compare_fixed(runs: Sequence[Run], value: float, theirs: np.ndarray, metric: str, name: str) -> Comparison:
    """One mixer's runs against something without seeds: its ``value``, and its values on the same documents, in the
    metric's unit."""
    seeds = over_seeds([run.metrics[metric] - value for run in runs]) if len(runs) > 1 else None
    documents = None
    own = [found for run in runs if (found := run.by_document(metric)) is not None]
    if len(own) == len(runs):
        gap = np.mean([values for values, _ in own], axis=0) - theirs
        documents = over_documents(gap, own[0][1], n=len(runs))
    known = [e.p for e in (seeds, documents) if e is not None and e.p is not None]
    return Comparison(name, seeds, documents, len(runs), max(known) if seeds and known else None)


def _documents(pairs: Sequence[tuple[Run, Run]], metric: str) -> Estimate | None:
    gaps, sizes = [], None
    for a, b in pairs:
        mine, theirs = a.by_document(metric), b.by_document(metric)
        if mine is None or theirs is None:
            return None
        if not np.array_equal(mine[1], theirs[1]):
            raise ValueError(f"{a.name} and {b.name} were scored on different parts of the test documents")
        gaps.append(mine[0] - theirs[0])
        sizes = mine[1]
    assert sizes is not None
    return over_documents(np.mean(gaps, axis=0), sizes, n=len(pairs))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values (Holm 1979): the chance of any false verdict among all of them stays below alpha."""
    order = np.argsort(p_values, kind="stable")
    adjusted, worst = np.empty(len(p_values)), 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = worst
    return adjusted.tolist()


def decide(comparisons: Mapping[str, Comparison], *, lower_is_better: bool = True) -> dict[str, Comparison]:
    """All comparisons with one reference, corrected together, each with its verdict."""
    tested = [name for name, c in comparisons.items() if c.p is not None]
    adjusted = dict(zip(tested, holm([comparisons[name].p or 0.0 for name in tested]), strict=True))
    return {
        name: _verdict(replace(c, p_holm=adjusted.get(name), favours=_favours(c, lower_is_better)), len(tested))
        for name, c in comparisons.items()
    }


def _favours(c: Comparison, lower_is_better: bool) -> bool | None:
    return None if c.shown is None else (c.shown.mean < 0) == lower_is_better


def _verdict(c: Comparison, tests: int) -> Comparison:
    if c.pairs == 0:
        return replace(c, verdict="not paired", note="no seed in common with the reference: not decided")
    if c.seeds is None:
        note = "the interval is over documents; seed noise is not in it"
        return replace(c, verdict=ONE_SEED, note=note)
    seeds, p_holm = c.seeds, c.p_holm
    assert p_holm is not None and seeds.sd is not None and seeds.p is not None
    c = replace(c, detectable=detectable(seeds.sd, seeds.n, alpha=ALPHA, tests=tests))
    if p_holm < ALPHA:
        return replace(c, verdict="better" if c.favours else "worse")
    note, needed = "", seeds_needed(seeds.mean, seeds.sd, alpha=ALPHA, tests=tests)
    if needed is not None and needed <= seeds.n:
        needed = None  # the seeds are enough: it is the documents that leave it open
    if seeds.p < ALPHA:  # the interval that stands beside this verdict excludes 0
        by_documents = c.documents is not None and (c.documents.p or 0.0) > seeds.p
        note = (
            "seeds agree, but the choice of test documents leaves it open"
            if by_documents
            else f"the interval alone excludes 0, but {tests} comparisons were made (Holm)"
        )
    return replace(c, verdict="not distinguishable", note=note, seeds_needed=needed)
