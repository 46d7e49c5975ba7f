"""The ledger as Markdown and as JSON. Both say the same; the JSON also has where each figure stands in its report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sweeps.ledger.figures import Figure
from sweeps.ledger.verdicts import HOLDS, UNTESTED, VERDICTS, Control, Entry, Judged, Ledger

MARKDOWN, RECORD = "CLAIMS.md", "claims.json"
HEAD = ("id", "claim", "the paper", "here", "verdict", "report", "confound, and what is found without it")
BREAK = "<br>"

INTRODUCTION = """\
# What the papers claim, and what we found

Made by `python -m sweeps.claims` from the papers' claims ([`sweeps/ledger/`](../sweeps/ledger)) and from `report.json` of our studies;
[docs/claims.md](../docs/claims.md) says what the verdicts mean. Our figures are of models of less than two million parameters on two CPU cores:
*holds* and *does not hold* are said of that size and of nothing larger. Means with 95 % intervals over seeds (n), differences
paired by seed, verdicts after Holm's correction over all tests of one paper. Beside each claim: a study that tests it, or the command that would.
Numbers that stand for a paper's words ("far", "much", "ruined") follow its own figures, but many were set after our studies had been run."""


# ---- JSON ------------------------------------------------------------------------------------------------------------


def record(ledger: Ledger) -> dict[str, Any]:
    """As JSON values; the figures with their places."""
    return {
        "counts": {paper.name: _counts(entries) for paper, entries in ledger.papers},
        "claims": [
            {
                "id": entry.claim.id,
                "paper": entry.claim.paper,
                "claim": entry.claim.text,
                "paper_figure": entry.claim.figure,
                "where": entry.claim.where,
                **_plain(entry.main),
                "command": command(entry),
                "confound": entry.claim.confound,
                "without": [{"label": one.label, **_plain(one)} for one in entry.without],
            }
            for entry in ledger.entries
        ],
        "controls": [
            {
                "study": one.study,
                "met": one.ok,
                "note": one.note,
                "wanted": one.words,
                "figures": [one.figure.plain()] if one.figure else [],
            }
            for one in ledger.controls
        ],
    }


def _plain(one: Judged) -> dict[str, Any]:
    finding = one.finding
    return {
        "studies": one.studies,
        "verdict": one.verdict,
        "reason": one.reason,
        "note": one.note,
        "metrics": list(finding.metrics) if finding else [],
        "wanted": finding.wanted if finding else [],
        "p_for": finding.p_for if finding else None,
        "p_against": finding.p_against if finding else None,
        "figures": [figure.plain() for figure in finding.figures] if finding else [],
    }


def _counts(entries: Sequence[Entry]) -> dict[str, int]:
    found = Counter(entry.main.verdict for entry in entries)
    return {verdict: found[verdict] for verdict in VERDICTS}


def command(entry: Entry) -> str:
    """What would test it: the study that has not been run, else what the claim names for the full size."""
    missing = entry.main.missing
    return f"python train.py study={missing[0]}" if missing else entry.claim.command


# ---- Markdown --------------------------------------------------------------------------------------------------------


def markdown(ledger: Ledger) -> str:
    """The whole file."""
    lines = [INTRODUCTION, "", "## Summary", "", _line(["paper", "claims", *VERDICTS])]
    lines.append(_line(["---", *["--:"] * (1 + len(VERDICTS))]))
    totals: Counter[str] = Counter()
    for paper, entries in ledger.papers:
        found = _counts(entries)
        totals.update(found)
        lines.append(_line([f"{paper.name}, {paper.source}", str(len(entries)), *(str(n) for n in found.values())]))
    lines.append(_line(["all", str(len(ledger.entries)), *(str(totals[verdict]) for verdict in VERDICTS)]))
    lines += ["", _of_those_that_hold(ledger.entries)]
    for paper, entries in ledger.papers:
        lines += ["", f"## {paper.name}", ""]
        lines += [paper.note, ""] if paper.note else []
        lines += [_line(HEAD), _line(["---"] * len(HEAD)), *(row(entry) for entry in entries)]
    if ledger.controls:
        lines += ["", "## Positive controls", "", "A study counts only if a mixer known to solve it does.", ""]
        lines += [_line(["study", "control", "found (the mean counts)", "wanted", "", ""]), _line(["---"] * 6)]
        lines += [control_row(one) for one in ledger.controls]
    return "\n".join(lines) + "\n"


def _of_those_that_hold(entries: Sequence[Entry]) -> str:
    """How much stands behind the word: counts cannot fail by noise, and a confound may explain the rest."""
    holding = [entry for entry in entries if entry.main.verdict == HOLDS]
    counts = sum(entry.main.finding is not None and entry.main.finding.exact for entry in holding)
    named = [entry for entry in holding if entry.claim.confound]
    without = [entry for entry in named if any(one.verdict != UNTESTED for one in entry.without)]
    still = sum(all(one.verdict in (HOLDS, UNTESTED) for one in entry.without) for entry in without)
    return (
        f"Of the {len(holding)} that hold {counts} are counts (bytes, FLOPs), without noise. {len(named)} have a confound; of these "
        f"{len(without)} were tested without it as well, where {still} still {'holds' if still == 1 else 'hold'}."
    )


def row(entry: Entry) -> str:
    """One claim's line."""
    claim = entry.claim
    text = claim.text + (f"{BREAK}*Here:* {claim.here}" if claim.here else "")
    paper = f"{claim.figure}{BREAK}" if claim.figure else ""
    cells = [
        f"`{claim.id}`",
        text,
        f"{paper}*{claim.where}*",
        here(entry),
        _verdict(entry.main),
        BREAK.join(
            [*(_link(study) for study in entry.main.studies if study not in entry.main.missing), *_metrics(entry.main)]
        ),
        _confound(entry),
    ]
    return _line(cells)


def here(entry: Entry) -> str:
    """Our figures, or what would make them."""
    if entry.main.finding is not None:
        return _found(entry.main)
    words = command(entry)
    return f"`{words}`" if words else entry.claim.why


def _found(one: Judged) -> str:
    assert one.finding is not None
    lines = [figure_line(figure) for figure in one.finding.figures]
    lines += [f"wanted: `{words}`" for words in dict.fromkeys(one.finding.wanted)]
    return BREAK.join(lines)


def figure_line(figure: Figure) -> str:
    """The figure after what it is of, which is code, so that numbers outside of code are figures."""
    return f"`{figure.what}` {figure.text}"


def _metrics(one: Judged) -> list[str]:
    return [f"`{metric}`" for metric in one.finding.metrics] if one.finding else []


def _verdict(one: Judged) -> str:
    more = one.reason if one.verdict == UNTESTED else one.note
    return f"**{one.verdict}**" + (f" ({_escaped(more)})" if more else "")


def _confound(entry: Entry) -> str:
    lines = [entry.claim.confound] if entry.claim.confound else []
    for one in entry.without:
        found = f"{BREAK}{_found(one)}" if one.finding is not None else ""
        links = " ".join(_link(study) for study in one.studies if study not in one.missing)
        lines.append(f"*{one.label}:* {_verdict(one)} {links}".rstrip() + found)
    return BREAK.join(lines)


def control_row(one: Control) -> str:
    """One study's line."""
    if one.figure is None:
        return _line([f"`{one.study}`", "", "", _escaped(one.words), "**none**", ""])
    met = "met" if one.ok else "**failed**"
    return _line([_link(one.study), f"`{one.figure.what}`", one.figure.text, f"`{one.words}`", met, _escaped(one.note)])


def _link(study: str) -> str:
    return f"[{study}]({study}/report.html)"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _escaped(text: str) -> str:
    return re.sub(r"([_*])", r"\\\1", text).replace("<", "&lt;")
