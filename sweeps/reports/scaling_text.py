"""The section "With size": on the page, and in Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from sweeps.reports.compare import Estimate
from sweeps.reports.format import MINUS, si, signed
from sweeps.reports.scaling import OPEN, Ladder, Rung, Scaling, Verdict, factor
from sweeps.reports.style import Look
from sweeps.reports.wording import with_size

NOTHING = "\N{EN DASH}"


def about(found: Scaling) -> list[str]:
    """How the numbers are meant, one sentence each. Plain text."""
    low, high = found.tokens_per_param
    same = high <= 1.02 * low
    shares = f"{low:.3g}" if same else f"{low:.3g} to {high:.3g}, so that size and training differ together"
    sizes = [len(ladder.rungs) for ladder in found.ladders]
    count = str(min(sizes)) if len(set(sizes)) == 1 else f"{min(sizes)} to {max(sizes)}"
    return [
        f"ln({found.unit}) against ln(training FLOPs), a straight line through {count} sizes of each mixer; tokens per "
        f"parameter: {shares}.",
        "The intervals are of the scatter of sizes around the line (Student's t, sizes minus 2), not of seeds alone: the seeds "
        "of a size share what is peculiar to it.",
        "The line has no floor, a loss that no compute removes: so few sizes could not tell one from the exponent, and the line "
        "says nothing beyond them. The choice of test documents is in no interval.",
        f"Differences are paired by size and seed, verdicts after Holm's correction for the number of mixers. {si(found.flops)} "
        f"FLOPs are the middle of what all mixers span; how many times as many {found.reference} needs for the loss that a mixer "
        "has there is a ratio of two estimates, with Fieller's interval.",
    ]


# ---- figures in words ------------------------------------------------------------------------------------------------


def _number(e: Estimate, write: Callable[[float], str]) -> tuple[str, str]:
    """The mean, and its interval in brackets."""
    between = "" if e.low is None or e.high is None else f"[{write(e.low)}, {write(e.high)}]"
    return write(e.mean), between


def _plain(value: float) -> str:
    return f"{value:.3f}"


def _exponents(value: float) -> str:
    return f"{value:.4f}".replace("-", MINUS)


def _signed(value: float) -> str:
    return signed(value, 4)


def _percent(value: float) -> str:
    return signed(100 * (value - 1), 2 if abs(value - 1) < 0.1 else 1)


def _times(value: float) -> str:
    return f"{value:.2f}" if value < 10 else si(value)


def sizes_and_seeds(ladder: Ladder) -> str:
    """``4 sizes, 5 seeds``."""
    seeds = sorted({len(rung.by_seed) for rung in ladder.rungs})
    return f"{len(ladder.rungs)} sizes, {_range(seeds)} seed{'s' if seeds[-1] > 1 else ''}"


def cells(ladder: Ladder, found: Scaling) -> list[tuple[str, str, str]]:
    """(figure, interval, verdict) of each column after the mixer's name."""
    middle = ("", "not among its sizes") if ladder.middle is None else _number(factor(ladder.middle), _plain)
    scatter = "" if ladder.seed_sd is None else f"seeds {100 * ladder.seed_sd:.2f} %"
    return [
        (*_number(ladder.line.slope(), _exponents), ""),
        _difference(ladder, found, None if ladder.versus is None else ladder.versus.exponent, _signed),
        (*middle, ""),
        _difference(ladder, found, None if ladder.versus is None else ladder.versus.loss, _percent),
        (*_compute(ladder, found), ""),
        (f"{100 * ladder.line.misfit:.2f} %", scatter, ""),
    ]


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _difference(
    ladder: Ladder, found: Scaling, one: Verdict | None, write: Callable[[float], str]
) -> tuple[str, str, str]:
    if ladder.label == found.reference:
        return "", "", "reference"
    if one is None:
        return "", "too few sizes in common" if ladder.versus is None else "not among its sizes", ""
    if write is _percent:
        mean, between = _number(factor(one.estimate), _percent)
        return f"{mean} %", between, one.verdict
    return (*_number(one.estimate, write), one.verdict)


def _compute(ladder: Ladder, found: Scaling) -> tuple[str, str]:
    """The multiplier, or in place of its interval why there is none."""
    versus = ladder.versus
    if ladder.label == found.reference or versus is None:
        return "", ""
    if versus.loss is None:
        return "", "not among its sizes"
    if versus.multiplier is None:
        return "", f"no bounds: {found.reference}'s exponent is too unsure"
    mean, between = _number(factor(versus.multiplier), _times)
    return f"{mean} times", between


def heads(found: Scaling) -> list[tuple[str, str]]:
    """Headings of the columns, the mixer's among them, each in two lines."""
    return [
        ("mixer", ""),
        ("exponent", "of compute"),
        ("exponent", f"minus {found.reference}'s"),
        (found.unit, f"at {si(found.flops)} FLOPs"),
        ("loss there", f"against {found.reference}"),
        (f"FLOPs {found.reference}", "needs for that loss"),
        ("scatter", "around the line"),
    ]


# ---- the page --------------------------------------------------------------------------------------------------------


def section(found: Scaling | None, figure: str) -> str:
    """HTML; empty where there is no ladder."""
    if found is None:
        return ""
    style = found.looks
    head = "".join(f"<th>{escape(first)}<br>{escape(second)}</th>" for first, second in heads(found))
    body = "".join(_row(ladder, found, style) for ladder in found.ladders)
    lead = f"<p>{escape(' '.join(with_size(found)))}</p>" if len(found.ladders) > 1 else ""
    return (
        f'<section id="with-size"><h2>With size</h2>{lead}<p class="note">{escape(" ".join(about(found)))}</p>{figure}'
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{_sizes(found, style)}'
        "</section>"
    )


def _name(ladder: Ladder, style: Mapping[str, Look], small: str = "") -> str:
    """The beginning of a row."""
    cell = f'<td class="name"><span class="dot"></span>{escape(ladder.label)}{small}</td>'
    return f'<tr style="--c:var({style[ladder.label].css})">{cell}'


def _row(ladder: Ladder, found: Scaling, style: Mapping[str, Look]) -> str:
    parts = [_name(ladder, style, f'<small style="font-weight:400">{sizes_and_seeds(ladder)}</small>')]
    for number, interval, verdict in cells(ladder, found):
        css = "open" if verdict in (OPEN, "reference") else "better" if verdict in ("better", "steeper") else "worse"
        said = f'<span class="verdict {css}">{escape(verdict)}</span>' if verdict else ""
        inner = f"<b>{escape(number)}</b>" if number and not verdict else ""
        small = f"{number} {interval}" if verdict else interval
        parts.append(f"<td>{said}{inner}" + (f"<small>{escape(small)}</small>" if small.strip() else "") + "</td>")
    return "".join(parts) + "</tr>"


def _sizes(found: Scaling, style: Mapping[str, Look]) -> str:
    """Every size of every mixer: its loss, and by how much it is off its mixer's line."""
    sizes = list(dict.fromkeys(rung.size for ladder in found.ladders for rung in ladder.rungs))
    rows = []
    for ladder in found.ladders:
        off = {
            rung.size: (rung, residual) for rung, residual in zip(ladder.rungs, ladder.line.residuals_S, strict=True)
        }
        rows.append(
            _name(ladder, style)
            + "".join(_size(*off[size]) if size in off else "<td></td>" for size in sizes)
            + "</tr>"
        )
    head = "".join(f"<th>{escape(text)}</th>" for text in ("mixer", *sizes))
    return (
        "<details><summary>Size by size<span>loss, and by how much it is off the line</span></summary>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div></details>'
    )


def _size(rung: Rung, residual: float) -> str:
    return f"<td><b>{math.exp(rung.mean):.3f}</b><small>{_percent(math.exp(residual))} %; {si(rung.flops)} FLOPs</small></td>"


# ---- Markdown --------------------------------------------------------------------------------------------------------


def markdown(found: Scaling | None) -> list[str]:
    """Lines; none where there is no ladder."""
    if found is None:
        return []
    rows = [
        [
            f"{_bold(ladder.label)} ({sizes_and_seeds(ladder)})",
            *(" ".join(filter(None, cell)) for cell in cells(ladder, found)),
        ]
        for ladder in found.ladders
    ]
    head = [f"{first} {second}".strip() for first, second in heads(found)]
    table = [_escaped(head), ["---"] * len(head), *rows]
    lines = ["", "**With size**", ""]
    lines += [" ".join(_escaped(with_size(found))), ""] if len(found.ladders) > 1 else []
    return [*lines, *("| " + " | ".join(row) + " |" for row in table), "", " ".join(_escaped(about(found)))]


def _escaped(texts: Sequence[str]) -> list[str]:
    """Names have underscores, and no emphasis is meant."""
    return [text.replace("_", "\\_") for text in texts]


def _bold(text: str) -> str:
    return f"**{_escaped([text])[0]}**"
