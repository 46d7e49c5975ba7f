"""Whether a ledger on disk is what the reports give, and whether each figure in it is in a report."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sweeps.ledger.evidence import Reports
from sweeps.ledger.figures import again
from sweeps.ledger.statements import ClaimError
from sweeps.ledger.write import MARKDOWN

NUMBER = re.compile(r"\d")
CODE = re.compile(r"`[^`]*`|\]\([^)]*\)|\*[^*]*\*")
"""Code, targets of links and emphasised words: labels, thresholds and verdicts, no figures."""


def stale(results: Path, files: Mapping[str, str]) -> list[str]:
    """Files that are missing or differ from what the reports give, one sentence each."""
    out = []
    for name, wanted in files.items():
        file = results / name
        found = file.read_text(encoding="utf-8") if file.exists() else None
        if found is None:
            out.append(f"{file}: is not there; python -m sweeps.claims writes it")
        elif found != wanted:
            at = next(
                (
                    i
                    for i, (a, b) in enumerate(zip(found.splitlines(), wanted.splitlines(), strict=False), start=1)
                    if a != b
                ),
                min(found.count("\n"), wanted.count("\n")) + 1,
            )
            out.append(
                f"{file}: differs from what the reports give, first in line {at}; python -m sweeps.claims renews it"
            )
    return out


def unsupported(results: Path, text: str, record: str) -> list[str]:
    """Figures of the files that no report.json has at the place that the record names, and numbers among our figures that
    have no record; one sentence each. Takes the files' own content: it trusts nothing that was computed before."""
    reports, lines, out = Reports(results), text.splitlines(), []
    known: dict[str, list[str]] = {}
    for name, start, figure in _figures(json.loads(record)):
        try:
            now = again(figure, reports).text
        except ClaimError as error:
            out.append(f"{name}: {figure['what']} {figure['text']}: {error}")
            continue
        if now != figure["text"]:
            out.append(f"{name}: {figure['what']}: {figure['text']} is written, the report gives {now}")
        mine = [line for line in lines if line.startswith(start)]
        if not any(figure["text"] in line for line in mine):
            out.append(
                f"{name}: {figure['what']} {figure['text']}: not in the line of {MARKDOWN} that begins with {start}"
            )
        known.setdefault(start, []).append(figure["text"])
    for start, column in _columns(json.loads(record)):
        for line in lines:
            if line.startswith(start):
                rest = re.split(r"(?<!\\)\|", line)[column]
                for figure_text in sorted(known.get(start, []), key=len, reverse=True):
                    rest = rest.replace(figure_text, "")
                if NUMBER.search(CODE.sub("", rest)):
                    out.append(
                        f"{start.strip('| `[]')}: a number among our figures has no place in a report: {CODE.sub('', rest).strip()}"
                    )
    return out


def _figures(record: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """(name, how its line in the Markdown begins, figure)."""
    for claim in record["claims"]:
        for one in (claim, *claim["without"]):
            for figure in one["figures"]:
                yield claim["id"], f"| `{claim['id']}` |", figure
    for control in record["controls"]:
        for figure in control["figures"]:
            yield f"control of {control['study']}", f"| [{control['study']}]", figure


def _columns(record: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Lines with figures, and in which column ours are."""
    for claim in record["claims"]:
        if claim["figures"]:
            yield f"| `{claim['id']}` |", 4
    for control in record["controls"]:
        if control["figures"]:
            yield f"| [{control['study']}]", 3
