"""The finding in words, the same on the page, in Markdown, in the terminal: no stronger than the intervals allow."""

from __future__ import annotations

from collections.abc import Sequence

from sweeps.reports import scaling
from sweeps.reports.compare import ONE_SEED, Comparison
from sweeps.reports.format import decimals, half, si
from sweeps.reports.power import MOST, POWER
from sweeps.reports.table import Board

DATA_NAMES = {"kjv": "the King James Bible"}
OPEN = "not distinguishable"


def question(board: Board) -> str:
    """What the report is about, in one sentence."""
    data = board.runs[0].science.get("data.name") or board.runs[0].science.get("data.kind", "the data")
    text = board.runs[0].science.get("data.kind") == "corpus"
    what = f"predicts {DATA_NAMES.get(data, data)}" if text else f"solves {data}"
    return f"Which sequence mixer {what} best, everything else being equal?"


def sentences(board: Board) -> list[str]:
    """The first mixer, or those that share its figure, all verdicts against the reference, the yardstick. Plain text."""
    digits = decimals(board)
    extreme = "lowest" if board.lower_is_better else "highest"
    best = f"{board.rows[0].estimate.mean:.{digits}f}"
    first = [row.label for row in board.rows if f"{row.estimate.mean:.{digits}f}" == best]
    out = [f"{names(first)} {'have' if len(first) > 1 else 'has'} the {extreme} mean, {best} {board.unit}."]
    if (found := scaling.find(board)) is not None and len(found.ladders) > 1:
        return [*out, *with_size(found)]  # of rows of other sizes the size is what there is to say
    groups: dict[str, list[str]] = {}
    for row in board.rows:
        if row.comparison is not None:
            groups.setdefault(row.comparison.verdict, []).append(row.label)
    if set(groups) == {ONE_SEED}:
        out.append(f"With one seed each, no difference to {board.reference} is decided.")
    elif groups:
        listed = "; ".join(f"{verdict}: {names(labels)}" for verdict, labels in groups.items())
        out.append(f"Against {board.reference} \N{EN DASH} {listed}.")
    if board.bar is not None:
        beaten = [row.label for row in board.rows if row.beats_yardstick]
        bar = f"a byte {board.bar.name} ({board.bar.value:.{digits}f})"
        if len(beaten) == len(board.rows):
            out.append(f"All clearly beat {bar}.")
        elif beaten:
            out.append(f"{names(beaten)} clearly beat{'' if len(beaten) > 1 else 's'} {bar}.")
        else:
            out.append(f"None clearly beats {bar}.")
    return out


def with_size(found: scaling.Scaling) -> list[str]:
    """What the intervals allow to say of mixers at several sizes, against the reference. Plain text."""
    out = []
    for what, key in ((f"loss at {si(found.flops)} FLOPs", "loss"), ("exponent", "exponent")):
        groups: dict[str, list[str]] = {}
        for ladder in found.ladders:
            if ladder.versus is not None and (one := getattr(ladder.versus, key)) is not None:
                groups.setdefault(one.verdict, []).append(ladder.label)
        if groups:
            listed = "; ".join(f"{verdict}: {names(labels)}" for verdict, labels in groups.items())
            out.append(f"Against {found.reference}, {what} \N{EN DASH} {listed}.")
    return out


def names(labels: Sequence[str]) -> str:
    """``a, b and c``."""
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def needs(c: Comparison, digits: int) -> str:
    """What it would take to tell the two apart, a few words; empty where that is no question of seeds, and where the
    difference is none with as many ``digits`` as are shown."""
    if c.verdict != OPEN or c.seeds is None or _nothing(c, digits) or c.seeds.sd is None:
        return ""
    if c.seeds_needed is not None:
        return f"{c.seeds_needed} seeds would tell"
    by_documents = c.documents is not None and c.p is not None and c.p > (c.seeds.p or 0.0)
    return "more test documents would tell" if by_documents else f"not told by {MOST} seeds"


def _nothing(c: Comparison, digits: int) -> bool:
    return c.seeds is not None and float(f"{c.seeds.mean:.{digits}f}") == 0


def open_questions(board: Board) -> list[str]:
    """One sentence for each mixer that is not told apart from the reference: how many seeds it would take."""
    digits, out = decimals(board), []
    for row in board.rows:
        c = row.comparison
        if c is None or c.verdict != OPEN or c.seeds is None:
            continue
        if _nothing(c, digits):
            every = ", seed by seed" if c.seeds.mean == 0 and not c.seeds.sd else ""
            out.append(f"{row.label} and {c.reference} gave the same figures{every}.")
            continue
        seen = f"the difference seen ({half(c.seeds, digits, sign=True)})"
        if c.seeds_needed is not None:
            text = f"{row.label}: about {c.seeds_needed} seeds would tell {seen} from none"
        elif needs(c, digits).startswith("more"):
            text = f"{row.label}: {seen} is clear over seeds, but not over test documents: a larger test split would settle it"
        else:
            text = f"{row.label}: not even {MOST} seeds would tell {seen} from none"
        if c.detectable is None:
            out.append(f"{text}.")
        elif board.metric.endswith("accuracy") and c.detectable >= 1:  # no two accuracies are so far apart
            out.append(f"{text}; its seeds disagree so much that {c.seeds.n} of them find no difference at all.")
        else:
            out.append(f"{text}; {c.seeds.n} seeds find differences of {c.detectable:.{digits}f} and more.")
    return out


def power_note() -> str:
    """How the numbers of seeds are meant."""
    return (
        f"Numbers of seeds: for a chance of {100 * POWER:.0f} % to find a true difference as large as the one seen, with the "
        "standard deviation of these pairs, at 5 % after Holm's correction. Both are estimates from few seeds: take them as "
        "an order of magnitude."
    )
