"""From findings to verdicts: positive controls, the correction for the number of claims, one verdict for each claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runs.validate import ConfigError, unknown_key
from sweeps.ledger.evidence import Reports
from sweeps.ledger.figures import MEAN, Figure, make, outcome
from sweeps.ledger.judge import Finding, judge
from sweeps.ledger.places import NotMeasured, locate
from sweeps.ledger.statements import CELL_KEYS, Claim, ClaimError, Paper, Test, studies_of
from sweeps.reports.compare import ALPHA, holm
from sweeps.study import content_of

HOLDS, FAILS, OPEN, UNTESTED = "holds", "does not hold", "not distinguishable at this size", "not tested here"
VERDICTS = (HOLDS, FAILS, OPEN, UNTESTED)
CONTROL_KEYS = [*CELL_KEYS[1:], "at_least", "at_most", "note"]
YARDSTICK = "yardstick"
"""Instead of a number in a control: the figure of the n-gram that the report has."""


@dataclass(frozen=True)
class Control:
    """A study's positive control: a mixer that must have solved it. ``figure`` is None where nothing could be read."""

    study: str
    ok: bool
    words: str  # what was wanted, or why there is none
    figure: Figure | None = None
    note: str = ""  # what a reader must know of it, as that it was set after the figures were known

    @property
    def failure(self) -> str:
        if self.figure is None:
            return self.words
        return f"control failed: {self.figure.what} {self.figure.text}, wanted {self.words}"


@dataclass
class Judged:
    """A claim, or a claim without its confound, with its verdict. ``reason``: why it is not tested."""

    label: str
    studies: list[str]
    finding: Finding | None = None
    reason: str = ""
    verdict: str = UNTESTED
    note: str = ""
    missing: list[str] = field(default_factory=list)  # studies that have no report yet


@dataclass
class Entry:
    """A claim as it stands in the ledger."""

    claim: Claim
    main: Judged
    without: list[Judged]


@dataclass
class Ledger:
    """All papers' claims, judged."""

    papers: list[tuple[Paper, list[Entry]]]
    controls: list[Control]

    @property
    def entries(self) -> list[Entry]:
        return [entry for _, entries in self.papers for entry in entries]


def judge_all(papers: Sequence[Paper], results: Path, sweeps: Path) -> Ledger:
    """``results`` has the reports, ``sweeps`` the studies' files, which name the controls. Raises ClaimError."""
    reports = Reports(results)
    controls: dict[str, Control] = {}
    out = []
    for paper in papers:
        entries = []
        for claim in paper.claims:
            main = _judged("", claim.tests, claim.id, reports, sweeps, controls)
            without = [_judged(w.label, w.tests, claim.id, reports, sweeps, controls) for w in claim.without]
            entries.append(Entry(claim, main, without))
        _decide([one for entry in entries for one in (entry.main, *entry.without)])
        out.append((paper, entries))
    return Ledger(out, [controls[study] for study in sorted(controls)])


def _judged(
    label: str, tests: Sequence[Test], who: str, reports: Reports, sweeps: Path, controls: dict[str, Control]
) -> Judged:
    studies = list(dict.fromkeys(name for test in tests for name in studies_of(test)))
    out = Judged(label, studies)
    out.missing = [study for study in studies if reports.get(study) is None]
    if not tests:
        return out
    if out.missing:
        out.reason = f"no report of {', '.join(out.missing)} yet"
        return out
    trained = [name for test in tests if test.kind != "ratio" for name in studies_of(test)]  # counts need no training
    for study in dict.fromkeys(trained):
        if study not in controls:
            controls[study] = control(study, reports, sweeps)
        if not controls[study].ok:
            out.reason = controls[study].failure
            return out
    try:
        out.finding = judge(tests, reports, who)
    except NotMeasured as missing:
        out.reason = str(missing)
    return out


# ---- controls --------------------------------------------------------------------------------------------------------


def control(study: str, reports: Reports, sweeps: Path) -> Control:
    """Whether the mixer that ``report.control`` of the study's file names reached what it must. Raises ClaimError."""
    file = sweeps / f"{study}.yaml"
    spec = _spec(file)
    if spec is None:
        return Control(study, False, f"{file.name} names no positive control (report.control)")
    where = f"{file.name}: report.control"
    for key in spec:
        if key not in CONTROL_KEYS:
            raise ClaimError(f"{where}: {unknown_key(str(key), CONTROL_KEYS)}")
    bounds = [key for key in ("at_least", "at_most") if key in spec]
    if "mixer" not in spec or len(bounds) != 1:
        raise ClaimError(f"{where}={spec}: must name a mixer and one of at_least and at_most")
    content = reports.get(study)
    assert content is not None
    place = locate(content, spec, study, where)
    bound = _bound(spec[bounds[0]], content, str(spec.get("metric") or content["metric"]), where)
    mean = outcome([(1.0, place)], reports).mean
    ok = mean >= bound if bounds[0] == "at_least" else mean <= bound
    named = " ".join(str(spec[key]) for key in ("mixer", "slice", "suite", "metric") if spec.get(key))
    words = f"{bounds[0].replace('_', ' ')} {spec[bounds[0]]}"
    return Control(study, ok, words, make(named, MEAN, [(1.0, place)], reports), str(spec.get("note") or ""))


def _bound(value: Any, content: dict[str, Any], metric: str, where: str) -> float:
    if value == YARDSTICK:
        found = (content.get("yardstick") or {}).get(metric)
        if found is None:
            raise ClaimError(f"{where}: {YARDSTICK}: the report has none for metric {metric}")
        return float(found)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ClaimError(f"{where}: {value}: must be a number or {YARDSTICK}")
    return float(value)


def _spec(file: Path) -> dict[str, Any] | None:
    """None where there is no such file or it names no control."""
    if not file.exists():
        return None
    try:
        settings = content_of(file).get("report")
    except ConfigError as error:
        raise ClaimError(" ".join(str(error).split())) from None
    found = settings.get("control") if isinstance(settings, dict) else None
    if found is not None and not isinstance(found, dict):
        raise ClaimError(f"{file.name}: report.control={found}: must be a mapping")
    return None if found is None else {str(key): value for key, value in found.items()}


# ---- verdicts --------------------------------------------------------------------------------------------------------


def _decide(family: Sequence[Judged]) -> None:
    """Holm (1979) over all that was tested of one paper, claims without their confounds among them. Counts are exact."""
    tested = [(one, one.finding) for one in family if one.finding is not None and not one.finding.exact]
    strongest = [min(finding.p_for, finding.p_against) for _, finding in tested]
    for (one, finding), p, adjusted in zip(tested, strongest, holm(strongest), strict=True):
        side = HOLDS if finding.p_for < finding.p_against else FAILS
        one.verdict = side if adjusted < ALPHA else OPEN
        notes = []
        if one.verdict == OPEN and p < ALPHA:
            notes.append(f"the interval alone says: {side}; {len(tested)} tests of this paper do not allow it (Holm)")
        if one.verdict == OPEN and finding.documents:
            notes.append("clear over seeds, but not over test documents")
        if finding.unpaired:
            notes.append("not paired by seed")
        if finding.at_edge:
            notes.append(f"the largest or smallest rate tried was chosen for {', '.join(finding.at_edge)}")
        one.note = "; ".join(notes)
    for one in family:
        if one.finding is not None and one.finding.exact:
            one.verdict = HOLDS if one.finding.p_for == 0 else FAILS
