"""Figures of the ledger as text, each with the places in report.json from which it follows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sweeps.ledger.evidence import Outcome, Reports, combine
from sweeps.ledger.places import Place
from sweeps.reports.format import signed

Terms = Sequence[tuple[float, Place]]
"""Weights and places: the figure is the weighted sum."""

MEAN, DIFFERENCE, RATIO = "mean", "difference", "ratio"
KINDS = (MEAN, DIFFERENCE, RATIO)


@dataclass(frozen=True)
class Figure:
    """``what`` says of what it is, ``text`` is what stands in the ledger."""

    what: str
    kind: str
    terms: tuple[tuple[float, Place], ...]
    text: str

    def plain(self) -> dict[str, Any]:
        """As JSON values; what `again` needs is in it."""
        terms = [{"weight": weight, **place.plain()} for weight, place in self.terms]
        return {"what": self.what, "kind": self.kind, "terms": terms, "text": self.text}


def make(what: str, kind: str, terms: Terms, reports: Reports) -> Figure:
    """A figure from its places. Raises ClaimError where a report has nothing there."""
    return Figure(what, kind, tuple(terms), _text(kind, terms, reports))


def again(node: Mapping[str, Any], reports: Reports) -> Figure:
    """A recorded figure, taken anew from the reports: its places are read, nothing is looked up by name."""
    return make(node["what"], node["kind"], [(one["weight"], Place.parse(one)) for one in node["terms"]], reports)


def outcome(terms: Terms, reports: Reports) -> Outcome:
    """The weighted sum with its error."""
    return combine([(weight, reports.at(place)) for weight, place in terms])


def ratio(terms: Terms, reports: Reports) -> float:
    """The first of two plain numbers over the second."""
    (_, above), (_, below) = terms
    return reports.number(above) / reports.number(below)


def _text(kind: str, terms: Terms, reports: Reports) -> str:
    if kind == RATIO:
        return f"{ratio(terms, reports):.3g} times"
    found = outcome(terms, reports)
    return written(found, sign=kind == DIFFERENCE)


def written(found: Outcome, *, sign: bool) -> str:
    """``1.616 ± 0.005 (n = 5)``: mean and half the interval, which shows two digits."""
    half = found.half
    digits = 3 if not half else min(6, max(3, 1 - math.floor(math.log10(half))))
    mean = signed(found.mean, digits) if sign else f"{found.mean:.{digits}f}".replace("-", "\N{MINUS SIGN}")
    if half is None:
        return f"{mean} (n = {found.n}, no interval)"
    return f"{mean} \N{PLUS-MINUS SIGN} {half:.{digits}f} (n = {found.n})"
