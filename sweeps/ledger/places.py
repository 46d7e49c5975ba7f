"""Where a figure stands in report.json, found by the names that a claim's test gives.

A `Place` is a figure's address: study, JSON pointer, and where needed the item of a list or a range of positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sweeps.ledger.statements import ClaimError

FIRST, LAST = "min", "max"
"""In place of a label's number: the smallest and the largest that the report has, as in ``length=max``."""


class NotMeasured(Exception):
    """The report is there, but this kind of measurement was not made; says which and the command that makes it."""


@dataclass(frozen=True)
class Place:
    """Where a figure stands in ``results/<study>/report.json``."""

    study: str
    pointer: str  # RFC 6901
    item: int | None = None  # of the lists there
    span: tuple[int, int] | None = None  # positions in tokens, from and up to

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        out: dict[str, Any] = {"study": self.study, "pointer": self.pointer}
        if self.item is not None:
            out["item"] = self.item
        if self.span is not None:
            out["span"] = list(self.span)
        return out

    @classmethod
    def parse(cls, node: Mapping[str, Any]) -> Place:
        """The inverse of `plain`."""
        span = node.get("span")
        return cls(node["study"], node["pointer"], node.get("item"), None if span is None else (span[0], span[1]))


def locate(content: Mapping[str, Any], spec: Mapping[str, Any], study: str, who: str) -> Place:
    """The place of the figure that a test names by ``mixer``, ``metric``, ``mode``, ``slice``, ``suite``, ``positions``,
    ``distance``.

    Raises ClaimError, naming mixer and metric, where the report lacks it, NotMeasured where a whole suite is not there.
    """
    if not isinstance(spec.get("mixer"), str):
        raise ClaimError(f"{who}: mixer={spec.get('mixer')}: must be the name of one row")
    mixer, metric = spec["mixer"], str(spec.get("metric") or content["metric"])
    if spec.get("suite"):
        return _in_suite(content, spec, study, who)
    if spec.get("distance"):
        return _in_drift(content, spec, study, who)
    index = _row(content, mixer, metric, spec.get("mode"), study, who)
    if spec.get("slice"):
        return _in_slice(content, mixer, metric, str(spec["slice"]), study, who)
    if spec.get("positions"):
        return _in_positions(content, mixer, spec["positions"], study, who)
    return Place(study, f"/rows/{index}")


def row_place(content: Mapping[str, Any], spec: Mapping[str, Any], field: str, study: str, who: str) -> Place:
    """The place of a count of a mixer's row, such as ``train_flops``."""
    mixer = str(spec["mixer"])
    index = _row(content, mixer, str(content["metric"]), spec.get("mode"), study, who)
    if not isinstance(content["rows"][index].get(field), int | float):
        raise ClaimError(f"{who}: field {field} of mixer {mixer}: no number in {study}/report.json")
    return Place(study, f"/rows/{index}/{field}")


def _row(content: Mapping[str, Any], mixer: str, metric: str, mode: str | None, study: str, who: str) -> int:
    """Without a mode: the ranked row of the mixer."""
    rows = content["rows"]
    for i, row in enumerate(rows):
        fits = row["rank"] is not None if mode is None else row["mode"] == mode
        if row["mixer"] == mixer and row["metric"] == metric and fits:
            return i
    there = ", ".join(f"{row['mixer']} ({row['mode']}, {row['metric']})" for row in rows)
    named = f"mixer {mixer}{'' if mode is None else f' in mode {mode}'}, metric {metric}"
    raise ClaimError(f"{who}: {named}: not in {study}/report.json, which has {there}")


def _in_suite(content: Mapping[str, Any], spec: Mapping[str, Any], study: str, who: str) -> Place:
    """In the first of a suite's tables that has it: reports begin with the one that has most mixers. Without a mode: the
    deployed one, which is first."""
    suite, mixer, mode = str(spec["suite"]), str(spec["mixer"]), spec.get("mode")
    tables = [(i, one["rows"]) for i, one in enumerate(content.get("evaluations") or []) if one["suite"] == suite]
    if not tables:
        raise NotMeasured(f"the suite {suite} has not been run on {study}: eval.py suite=[{suite}]")
    for i, rows in tables:
        mine = [k for k, row in enumerate(rows) if row["mixer"] == mixer and mode in (None, row["mode"])]
        metric = _labelled(str(spec.get("metric")), [rows[k]["metric"] for k in mine])
        for k in mine:
            if rows[k]["metric"] == metric:
                if rows[k]["mean"] is None:
                    raise NotMeasured(f"{mixer}, {metric}: {rows[k]['reason']}")
                return Place(study, f"/evaluations/{i}/rows/{k}")
    there = ", ".join(dict.fromkeys(f"{row['mixer']} ({row['metric']})" for _, rows in tables for row in rows))
    named = f"mixer {mixer}{'' if mode is None else f' in mode {mode}'}, metric {spec.get('metric')} of suite {suite}"
    raise ClaimError(f"{who}: {named}: not in {study}/report.json, which has {there}")


def _labelled(metric: str, known: Sequence[str]) -> str:
    """``loss/length=max`` -> ``loss/length=4096``."""
    head, equals, label = metric.rpartition("=")
    if not equals or label not in (FIRST, LAST):
        return metric
    labels = [name.removeprefix(f"{head}=") for name in known if name.startswith(f"{head}=") and "/" not in name[len(head) :]]  # fmt: skip
    numbers = sorted((float(one), one) for one in labels if _is_number(one))
    return f"{head}={numbers[0 if label == FIRST else -1][1]}" if numbers else metric


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _in_slice(content: Mapping[str, Any], mixer: str, metric: str, wanted: str, study: str, who: str) -> Place:
    name, _, label = wanted.partition("=")
    for i, found in enumerate(content["slices"]):
        if found["slice"] == name and found["metric"] == metric and mixer in found["mixers"]:
            labels = found["labels"]
            at = {FIRST: min(labels), LAST: max(labels)}.get(label, label)
            item = next((k for k, one in enumerate(labels) if str(one) == str(at)), None)
            if item is not None and found["mixers"][mixer]["mean"][item] is not None:
                return Place(study, f"/slices/{i}/mixers/{_escaped(mixer)}", item=item)
    there = ", ".join(f"{found['slice']}={found['labels']} ({found['metric']})" for found in content["slices"])
    raise ClaimError(f"{who}: mixer {mixer}, metric {metric}, slice {wanted}: not in {study}/report.json, which has {there or 'no slices'}")  # fmt: skip


def _in_positions(content: Mapping[str, Any], mixer: str, wanted: Any, study: str, who: str) -> Place:
    """Positions in tokens, or as shares of the context where both are at most 1."""
    if not content.get("positions"):
        raise NotMeasured(f"the suite positions has not been run on {study}: eval.py suite=[positions]")
    if mixer not in content["positions"]:
        raise ClaimError(f"{who}: mixer {mixer}, metric positions: not in {study}/report.json, which has {', '.join(content['positions'])}")  # fmt: skip
    edges = content["positions"][mixer][0]["edges"]
    return Place(study, f"/positions/{_escaped(mixer)}", span=_span(wanted, edges, edges[-1], f"{who}: mixer {mixer}, metric positions"))  # fmt: skip


def _in_drift(content: Mapping[str, Any], spec: Mapping[str, Any], study: str, who: str) -> Place:
    """How far apart the memories of a two-pass model's passes are, in positions as above. Without a mode: recurrent."""
    mixer, mode = spec["mixer"], spec.get("mode") or "recurrent"
    found = (content.get("drift") or {}).get(mode) or {}
    if mixer not in found:
        raise ClaimError(f"{who}: mixer {mixer}, distance in mode {mode}: not in {study}/report.json, which has {', '.join(found) or 'none'}")  # fmt: skip
    run = found[mixer][0]
    span = _span(spec["distance"], run["edges"], run["train_length"], f"{who}: mixer {mixer}, distance")
    return Place(study, f"/drift/{mode}/{_escaped(mixer)}", span=span)


def _span(wanted: Any, edges: Sequence[int], whole: int, who: str) -> tuple[int, int]:
    """The ranges that lie in ``wanted``, which is in tokens, or shares of ``whole`` where both are at most 1."""
    if not isinstance(wanted, list) or len(wanted) != 2 or not wanted[0] < wanted[1]:
        raise ClaimError(f"{who}={wanted}: must be two growing numbers, tokens or shares of the context")
    low, high = (round(whole * x) for x in wanted) if wanted[1] <= 1 else wanted
    inside = [i for i, (a, b) in enumerate(zip(edges, edges[1:], strict=False)) if a >= low and b <= high]
    if not inside:
        raise ClaimError(f"{who} {low} to {high}: the report has no range in it, but edges {edges}")
    return edges[inside[0]], edges[inside[-1] + 1]


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
