"""What a test says of the reports: its figures, and how strongly they speak for the claim and against it.

Every elementary test ends in two p-values. ``p_for`` is twice the one-sided p of "the claim's side is not reached": below
0.05 exactly where the 95 % interval lies wholly on the claimed side. ``p_against`` is the same for the opposite side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import log2
from typing import Any

from sweeps.ledger.evidence import Outcome, Reports
from sweeps.ledger.figures import DIFFERENCE, MEAN, RATIO, Figure, Terms, make, outcome, ratio
from sweeps.ledger.places import NotMeasured, Place, locate, row_place
from sweeps.ledger.statements import CELL_KEYS, ClaimError, Test, as_list
from sweeps.reports.compare import ALPHA
from sweeps.reports.tuning import lower_is_better

SOLVED = 0.99
"""An accuracy at which a task is solved: where two mixers are there, no task can tell which is better at it."""


@dataclass(frozen=True)
class Part:
    """One comparison or threshold. ``exact``: counts, which have no noise and so no part in the correction."""

    p_for: float
    p_against: float
    exact: bool = False


@dataclass
class Finding:
    """All that a claim's tests found, before the correction for the number of claims."""

    figures: list[Figure] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    wanted: list[str] = field(default_factory=list)  # thresholds, in words
    metrics: dict[str, None] = field(default_factory=dict)  # an ordered set
    unpaired: bool = False
    documents: bool = False  # some difference is clear over seeds, but not over test documents
    at_edge: dict[str, None] = field(default_factory=dict)  # mixers whose chosen point is the last of its grid

    @property
    def p_for(self) -> float:
        """All parts must hold, so the weakest speaks (intersection-union test)."""
        return max(part.p_for for part in self.parts)

    @property
    def p_against(self) -> float:
        """One part on the other side is enough, so the strongest speaks, corrected for their number (Bonferroni)."""
        return min(1.0, len(self.parts) * min(part.p_against for part in self.parts))

    @property
    def exact(self) -> bool:
        return all(part.exact for part in self.parts)


def judge(tests: Sequence[Test], reports: Reports, who: str) -> Finding:
    """Raises ClaimError for names that a report lacks, NotMeasured for a suite that has not been run."""
    finding = Finding()
    for test in tests:
        _JUDGES[test.kind](test.keys, reports, who, finding)
    return finding


# ---- cells -----------------------------------------------------------------------------------------------------------

Spec = Mapping[str, Any]


def _specs(keys: Spec, name: str) -> list[dict[str, Any]]:
    """The cells that ``name`` lists, a label or a mapping each, completed by the test's own keys."""
    base = {key: keys[key] for key in CELL_KEYS if key in keys}
    return [{**base, **(one if isinstance(one, Mapping) else {"mixer": one})} for one in as_list(keys.get(name))]


def _note_edges(spec: Spec, reports: Reports, out: Finding) -> None:
    """A mixer that chose the last rate of its grid might do better with another one: whoever reads a verdict must know."""
    for study in as_list(spec["study"]):
        rows = _report(reports, str(study))["rows"]
        if any(row["mixer"] == spec["mixer"] and row.get("at_edge") for row in rows):
            out.at_edge[str(spec["mixer"])] = None


def _terms(spec: Spec, reports: Reports, who: str) -> list[tuple[float, Place]]:
    """Of one study, or the mean over several."""
    studies = [str(study) for study in as_list(spec["study"])]
    return [(1 / len(studies), locate(_report(reports, study), spec, study, who)) for study in studies]


def _report(reports: Reports, study: str) -> Mapping[str, Any]:
    content = reports.get(study)
    assert content is not None  # `sweeps.ledger.verdicts` asks before
    return content


def _what(spec: Spec) -> str:
    """``mesa pairs=16``: what tells a cell from the others of its claim."""
    words = [str(spec["mixer"])]
    if spec.get("mode"):
        words.append(f"({spec['mode']})")
    if spec.get("slice"):
        words.append(str(spec["slice"]))
    if spec.get("positions"):
        words.append(f"positions {spec['positions'][0]} to {spec['positions'][1]}")
    if spec.get("distance"):
        words.append(f"distance at {spec['distance'][0]} to {spec['distance'][1]}")
    if spec.get("suite"):
        words.append(str(spec.get("metric")))
    return " ".join(words)


def _lower_is_better(spec: Spec, reports: Reports, who: str) -> bool:
    """Raises ClaimError for a metric of a suite of which the report does not say what is better."""
    if spec.get("positions") or spec.get("distance"):
        return True  # losses and distances, whatever the table's metric
    study = str(as_list(spec["study"])[0])
    content = _report(reports, study)
    if not spec.get("suite"):
        return lower_is_better(str(spec.get("metric") or content["metric"]))
    place = locate(content, spec, study, who)
    row = reports.node(place)
    if row["better"] is None:
        raise ClaimError(
            f"{who}: mixer {spec['mixer']}, metric {row['metric']}: neither more nor less of it is better; use contrast"
        )
    return row["better"] == "lower"


def _minus(a: Spec, b: Spec, reports: Reports, who: str) -> list[tuple[float, Place]]:
    """a - b. One run in two modes is its own pair: reports have that difference ready."""
    left, right = _terms(a, reports, who), _terms(b, reports, who)
    if len(left) == len(right) == 1 and a["mixer"] == b["mixer"]:
        for (_, place), sign in ((left[0], 1.0), (right[0], -1.0)):
            if place.pointer.startswith("/rows/") and left[0][1].study == right[0][1].study:
                row = _report(reports, place.study)["rows"][int(place.pointer.rpartition("/")[2])]
                if row.get("minus_deployed"):
                    return [(sign, Place(place.study, f"{place.pointer}/minus_deployed"))]
    return [*left, *((-weight, place) for weight, place in right)]


# ---- the kinds -------------------------------------------------------------------------------------------------------


def _better(keys: Spec, reports: Reports, who: str, out: Finding) -> None:
    for mine, other, terms in _pairs(keys, reports, who, out):
        _refuse_solved(mine, other, reports, who)
        found = outcome(terms, reports)
        below, above = found.below(0.0), found.above(0.0)
        p_for, p_against = (below, above) if _lower_is_better(mine, reports, who) else (above, below)
        documents = _documents(terms, reports)
        if documents is not None:
            out.documents |= min(p_for, p_against) < ALPHA <= documents
            p_for, p_against = max(p_for, documents), max(p_against, documents)
        out.parts.append(Part(p_for, p_against))


def _refuse_solved(mine: Spec, other: Spec, reports: Reports, who: str) -> None:
    """Raises NotMeasured where both solve the task: at a ceiling nothing is better, and that refutes nothing."""
    metric = str(mine.get("metric") or _report(reports, str(as_list(mine["study"])[0]))["metric"])
    if metric.partition("=")[0].rsplit("/", 1)[-1] != "accuracy" and not metric.startswith("test/accuracy"):
        return
    if all(outcome(_terms(spec, reports, who), reports).mean >= SOLVED for spec in (mine, other)):
        raise NotMeasured(f"{mine['mixer']} and {other['mixer']} both solve it: accuracies of {SOLVED} and more")


def _no_worse(keys: Spec, reports: Reports, who: str, out: Finding) -> None:
    margin = float(keys["margin"])
    out.wanted.append(f"worse by no more than {keys['margin']}")
    for mine, _, terms in _pairs(keys, reports, who, out):
        found = outcome(terms, reports)
        if _lower_is_better(mine, reports, who):
            out.parts.append(Part(found.below(margin), found.above(margin)))
        else:
            out.parts.append(Part(found.above(-margin), found.below(-margin)))


def _equal_within(keys: Spec, reports: Reports, who: str, out: Finding) -> None:
    out.wanted.append(f"equal within {keys['margin']}")
    for _, _, terms in _pairs(keys, reports, who, out):
        _add_within(terms, float(keys["margin"]), reports, out)


def _pairs(keys: Spec, reports: Reports, who: str, out: Finding) -> Iterator[tuple[Spec, Spec, Terms]]:
    """Each of ``mixer`` minus each of ``than``; their figures are noted on the way."""
    for mine in _specs(keys, "mixer"):
        _note(mine, reports, who, out)
        for other in _specs({**keys, **mine}, "than"):
            terms = _minus(mine, other, reports, who)
            out.figures.append(make(f"{_what(mine)} minus {_what(other)}", DIFFERENCE, terms, reports))
            out.unpaired |= not outcome(terms, reports).paired
            _note_edges(other, reports, out)
            yield mine, other, terms


def _note(spec: Spec, reports: Reports, who: str, out: Finding) -> Terms:
    """A cell's own figure, what is measured there, and whether its tuning ended at the edge."""
    terms = _terms(spec, reports, who)
    _note_edges(spec, reports, out)
    out.figures.append(make(_what(spec), MEAN, terms, reports))
    content = _report(reports, str(as_list(spec["study"])[0]))
    metric = str(spec.get("metric") or content["metric"])
    if spec.get("positions") or spec.get("distance"):
        metric = "loss by position" if spec.get("positions") else "distance of the passes' memories"
    out.metrics[metric if not spec.get("suite") else f"{spec['suite']}: {metric}"] = None
    return terms


def _documents(terms: Terms, reports: Reports) -> float | None:
    """The p-value over test documents that a report has of each mixer against its reference."""
    if len(terms) != 2 or terms[0][1].study != terms[1][1].study:
        return None
    rows = []
    for _, place in terms:
        if not place.pointer.startswith("/rows/") or place.pointer.count("/") != 2:
            return None
        rows.append(_report(reports, place.study)["rows"][int(place.pointer.rpartition("/")[2])])
    for row, other in (rows, reversed(rows)):
        difference = row.get("difference")
        if difference and difference["reference"] == other["mixer"] and other["rank"] is not None:
            return (difference.get("over_documents") or {}).get("p")
    return None


def _threshold(keys: Spec, reports: Reports, who: str, out: Finding, *, least: bool) -> None:
    value = float(keys["value"])
    out.wanted.append(f"{'at least' if least else 'at most'} {keys['value']}")
    for mine in _specs(keys, "mixer"):
        found = outcome(_note(mine, reports, who, out), reports)
        above, below = found.above(value), found.below(value)
        out.parts.append(Part(above, below) if least else Part(below, above))


def _at_least(keys: Spec, reports: Reports, who: str, out: Finding) -> None:
    _threshold(keys, reports, who, out, least=True)


def _at_most(keys: Spec, reports: Reports, who: str, out: Finding) -> None:
    _threshold(keys, reports, who, out, least=False)


def _add_within(terms: Terms, margin: float, reports: Reports, out: Finding) -> None:
    """Two one-sided tests: the interval must lie between the margins; against it speaks one wholly outside."""
    found = outcome(terms, reports)
    p_for = max(found.above(-margin), found.below(margin))
    out.parts.append(Part(p_for, min(found.above(margin), found.below(-margin))))


def _contrast(keys: Spec, reports: Reports, who: str, out: Finding) -> None:
    plus, minus = _specs(keys, "plus"), _specs(keys, "minus")
    for spec in (*plus, *minus):
        _note(spec, reports, who, out)
    signs = [(1.0, spec) for spec in plus] + [(-1.0, spec) for spec in minus]
    terms = [(sign * weight, place) for sign, spec in signs for weight, place in _terms(spec, reports, who)]
    sides = [" plus ".join(_what(spec) for spec in side) for side in (plus, minus)]
    what = " minus ".join(
        f"({side})" if len(specs) > 1 else side for side, specs in zip(sides, (plus, minus), strict=True)
    )
    out.figures.append(make(what, DIFFERENCE, terms, reports))
    found = outcome(terms, reports)
    out.unpaired |= not found.paired
    if "within" in keys:
        out.wanted.append(f"equal within {keys['within']}")
        _add_within(terms, float(keys["within"]), reports, out)
        return
    word = "above" if "above" in keys else "below"
    for left in plus:
        for right in minus:
            _refuse_solved(left, right, reports, who)
    value = float(keys[word])
    out.wanted.append(f"{word} {keys[word]}")
    above, below = found.above(value), found.below(value)
    out.parts.append(Part(above, below) if word == "above" else Part(below, above))


def _slope(keys: Spec, reports: Reports, who: str, out: Finding) -> None:
    """Least squares over the mixers' x, seed by seed: a weighted sum of their figures."""
    points = {str(mixer): log2(x) if keys.get("log") else float(x) for mixer, x in keys["x"].items()}
    centre = sum(points.values()) / len(points)
    spread = sum((x - centre) ** 2 for x in points.values())
    terms: list[tuple[float, Place]] = []
    for mixer, x in points.items():
        [spec] = _specs({**keys, "mixer": mixer}, "mixer")
        terms += [(weight * (x - centre) / spread, place) for weight, place in _note(spec, reports, who, out)]
    per = "per doubling" if keys.get("log") else "per unit"
    out.figures.append(make(f"slope {per}", DIFFERENCE, terms, reports))
    out.wanted.append(str(keys["sign"]))
    found: Outcome = outcome(terms, reports)
    out.unpaired |= not found.paired
    above, below = found.above(0.0), found.below(0.0)
    out.parts.append(Part(above, below) if keys["sign"] == "rising" else Part(below, above))


def _ratio(keys: Spec, reports: Reports, who: str, out: Finding) -> None:
    low, high = keys["between"]
    out.wanted.append(f"between {low} and {high} times")
    for mine in _specs(keys, "mixer"):
        for other in _specs({**keys, **mine}, "than"):
            terms = [
                (
                    1.0,
                    row_place(_report(reports, str(spec["study"])), spec, str(keys["field"]), str(spec["study"]), who),
                )
                for spec in (mine, other)
            ]
            what = f"{keys['field']} of {_what(mine)} over {_what(other)}"
            out.figures.append(make(what, RATIO, terms, reports))
            fits = low <= ratio(terms, reports) <= high
            out.parts.append(Part(0.0 if fits else 1.0, 1.0 if fits else 0.0, exact=True))


_JUDGES = {
    "better": _better,
    "no_worse": _no_worse,
    "at_least": _at_least,
    "at_most": _at_most,
    "equal_within": _equal_within,
    "contrast": _contrast,
    "slope": _slope,
    "ratio": _ratio,
}
