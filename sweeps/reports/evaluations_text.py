"""The section on evaluations: on the page, and in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

from evals.names import split
from sweeps.reports.compare import Estimate
from sweeps.reports.evaluations import Line, Table
from sweeps.reports.format import MINUS, digits_for, si, signed
from sweeps.reports.style import Look

SUITES = {
    "perplexity": ("Perplexity", "Whole splits. Loss in nats per token; bits per byte compare across tokenizers."),
    "positions": (
        "Loss by position",
        "Nats per token of the same sequences for all; the reference has 0 in the figure.",
    ),
    "extrapolation": (
        "Beyond the training length",
        "Nats per token of longer sequences, with carried state: loss over all positions, last over the last training length; "
        "gain is that minus the loss of the same tokens without what lies before, where the windows allow it.",
    ),
    "downstream": ("Downstream tasks", "Through lm-eval, as deployed. acc_per_token divides an option by its tokens."),
    "niah": ("A needle in a haystack", "accuracy: the true number is the likeliest; exact: it is said digit by digit."),
    "mesa": (
        "Mesa's solver",
        "Nats per token with other solver settings than in training, and the steps that were taken.",
    ),
    "information": (
        "What survives in the last hidden state",
        "retained: the share of the unigram's nats that one vector takes away, by share of the decoder's training.",
    ),
    "fredholm": (
        "Fredholm index",
        "Of Toeplitz filters, by layer; initial_index is that of the weights before training, autoencoder_index that of the same weights trained to rebuild the input.",
    ),
    "speed": (
        "Speed",
        "One sequence at a time. Measured with this project's forms; other hardware gives other ratios.",
    ),
}
"""Title, and what the figures are."""

NOTE = (
    "What eval.py has measured. Only results with equal settings at an equal step stand in one table. Intervals are 95 % "
    "Student t over seeds; under them the difference to {reference}, paired by seed, with verdicts after Holm's correction for "
    "the number of mixers, not for that of metrics. They are over seeds alone: a suite reads the same text with every run, and "
    "the choice of that text is in no interval but that of the figure by position."
)
WIDEST, OPEN = 8, 3
"""Columns of a table; tables of a suite that are shown before a click."""


@dataclass(frozen=True)
class Block:
    """Some metrics of a table, side by side."""

    title: str
    columns: list[tuple[str, str]]  # metric, heading


def blocks(table: Table) -> list[Block]:
    """Plain metrics together; metrics with labels by name, the label with most values across: ``accuracy at length 64 by
    depth``. Those with fewer labels first."""
    kinds: dict[tuple[str, ...], list[tuple[str, dict[str, str]]]] = {}
    for metric in table.metrics:
        name, labels = split(metric)
        kinds.setdefault((name, *labels) if labels else (), []).append((metric, labels))
    families: dict[str, list[tuple[str, str]]] = {}
    for kind in sorted(kinds, key=len):
        across = max(kind[1:], key=lambda key: len({labels[key] for _, labels in kinds[kind]}), default="")
        for metric, labels in kinds[kind]:
            at = ", ".join(f"{key} {value}" for key, value in labels.items() if key != across)
            title = f"{kind[0]}{f' at {at}' if at else ''} by {across}" if kind else ""
            families.setdefault(title, []).append((metric, labels[across] if kind else metric))
    return [
        Block(title, columns[i : i + WIDEST])
        for title, columns in families.items()
        for i in range(0, len(columns), WIDEST)
    ]


def words(settings: Mapping[str, Any]) -> str:
    """``split=test, sequences=64``; lists as on a command line."""
    return ", ".join(f"{key}={_word(value)}" for key, value in settings.items())


def _word(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_word, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _what(table: Table) -> str:
    hardware = table.hardware or {}
    device = hardware.get("gpu") or f"{hardware.get('cpu')}, {hardware.get('threads')} threads"
    return words(table.settings) + (f"; on {device}" if hardware else "")


def _digits(table: Table, metric: str) -> int:
    means = [line.cells[metric].estimate.mean for line in table.lines if metric in line.cells]
    spread = max(means) - min(means)
    if spread >= 10:  # such as tokens a second
        return 1
    return max(3, digits_for(spread)) if len(means) > 1 else 3


def _number(value: float, digits: int, sign: bool = False) -> str:
    if abs(value) >= 1000:
        text = si(abs(value))
        return f"{MINUS if value < 0 else '+' if sign else ''}{text}"
    return signed(value, digits) if sign else f"{value:.{digits}f}".replace("-", MINUS)


def _interval(e: Estimate, digits: int, sign: bool = False) -> str:
    return (
        "" if e.low is None or e.high is None else f"[{_number(e.low, digits, sign)}, {_number(e.high, digits, sign)}]"
    )


def _reasons(lines: Sequence[Line], block: Block) -> list[str]:
    """Why figures of a block do not exist: ``toeplitz: takes at most 64 tokens (128, 256)``."""
    found: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        if not line.nothing:
            for metric, heading in block.columns:
                if metric in line.reasons:
                    found.setdefault((line.label, line.reasons[metric]), []).append(heading)
    return [f"{label}: {why} ({'; '.join(headings)})" for (label, why), headings in found.items()]


def _has(line: Line, block: Block, first: bool) -> bool:
    """Is there anything to say of a mixer in this block? That a suite says nothing of it stands in the first alone."""
    if line.nothing:
        return first
    return any(metric in line.cells or metric in line.reasons for metric, _ in block.columns)


# ---- the page --------------------------------------------------------------------------------------------------------


def section(tables: Sequence[Table], figures: Mapping[str, str], style: Mapping[str, Look], reference: str) -> str:
    """HTML; empty where nothing was evaluated. ``figures`` are those of `sweeps.reports.plots_evaluations`, by suite."""
    if not tables:
        return ""
    parts = []
    for suite, group in groupby(tables, key=lambda table: table.suite):
        first, *others = group
        title, about = SUITES.get(suite, (suite, ""))
        parts.append(
            f'<div style="margin-top:48px" id="evaluation-{escape(suite)}"><h3>{escape(title)}</h3><p class="caption">'
            f"{escape(about)} Step {first.step}; <code>{escape(_what(first))}</code></p>{figures.get(suite, '')}"
            f"{_table(first, style)}{''.join(_other(table, first, style) for table in others)}</div>"
        )
    note = escape(NOTE.format(reference=reference))
    return f'<section id="evaluations"><h2>Evaluations</h2><p class="note">{note}</p>{"".join(parts)}</section>'


def _other(table: Table, first: Table, style: Mapping[str, Look]) -> str:
    """Another step, other settings or other hardware: a table of its own, folded."""
    changed = {key: value for key, value in table.settings.items() if first.settings.get(key) != value}
    where = "" if table.hardware == first.hardware else "on other hardware"
    told = ", ".join(filter(None, (f"step {table.step}", words(changed), where)))
    full = f'<p class="caption"><code>{escape(_what(table))}</code></p>'
    return f"<details><summary>{escape(told)}</summary>{full}{_table(table, style)}</details>"


def _table(table: Table, style: Mapping[str, Look]) -> str:
    made = [(block.title, _block(table, block, style, number == 0)) for number, block in enumerate(blocks(table))]
    shown = "".join(html for _, html in made[:OPEN])
    folded = "".join(f"<details><summary>{escape(title)}</summary>{html}</details>" for title, html in made[OPEN:])
    lacking = f"Not evaluated so: {', '.join(table.lacking)}." if table.lacking else ""
    mixed = f"Made by different code ({', '.join(table.mixed_code)}): take differences with care." if table.mixed_code else ""  # fmt: skip
    notes = " ".join(one for one in (lacking, mixed) if one)
    return shown + folded + (f'<p class="caption">{escape(notes)}</p>' if notes else "")


def _block(table: Table, block: Block, style: Mapping[str, Look], first: bool) -> str:
    span = len(block.columns)
    over = f'<tr><th></th><th></th><th colspan="{span}">{escape(block.title)}</th></tr>' if block.title else ""
    heads = "".join(f"<th>{escape(heading)}</th>" for _, heading in block.columns)
    body = "".join(_line(table, line, block, style[line.label]) for line in table.lines if _has(line, block, first))
    why = "".join(f"<li>n/a: {escape(reason)}</li>" for reason in _reasons(table.lines, block))
    listed = f'<ul class="caption">{why}</ul>' if why else ""
    head = f'{over}<tr><th>mixer</th><th class="n">n</th>{heads}</tr>'
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>{listed}'


def _line(table: Table, line: Line, block: Block, look: Look) -> str:
    known = [line.cells[metric] for metric, _ in block.columns if metric in line.cells]
    n = max((cell.estimate.n for cell in known), default=0)
    tag = ' <span class="tag">reference</span>' if line.label == table.reference else ""
    name = f'<td class="name"><span class="dot"></span>{escape(line.label)}{tag}</td>'
    if not line.deployed:
        name = f'<td class="other">{escape(line.mode.replace("_", "-"))}</td>'
    if line.nothing:
        cells = f'<td class="none" colspan="{len(block.columns)}">n/a: {escape(line.nothing)}</td>'
    else:
        cells = "".join(f"<td>{_cell(table, line, metric, n)}</td>" for metric, _ in block.columns)
    kind = "" if line.deployed else ' class="other"'
    return f'<tr{kind} style="--c:var({look.css})">{name}<td class="n">{n or ""}</td>{cells}</tr>'


def _cell(table: Table, line: Line, metric: str, n: int) -> str:
    cell = line.cells.get(metric)
    if cell is None:
        why = line.reasons.get(metric)
        return f'<span class="none" title="{escape(why)}">n/a</span>' if why else ""
    digits = _digits(table, metric)
    out = f"<b>{_number(cell.estimate.mean, digits)}</b>" if line.deployed else _number(cell.estimate.mean, digits)
    spread = _interval(cell.estimate, digits)
    out += f"<small>{spread}</small>" if spread else ""
    out += f"<small>n = {cell.estimate.n}</small>" if cell.estimate.n != n else ""
    c = cell.comparison
    if c is None or cell.difference is None:
        return out
    css = c.verdict if c.verdict in ("better", "worse") else "open"
    shown = f" {_interval(c.seeds, digits, sign=True)}" if c.seeds else ""
    return (
        f"{out}<small>{_number(cell.difference, digits, sign=True)}{shown}</small>"
        f'<small><span class="verdict {css}" title="{escape(c.note)}">{escape(c.verdict)}</span></small>'
    )


# ---- Markdown --------------------------------------------------------------------------------------------------------


def markdown(tables: Sequence[Table], reference: str) -> list[str]:
    """Lines; none where nothing was evaluated. Of each suite the first table: the others are in ``evaluations.csv``."""
    if not tables:
        return []
    out = ["", "**Evaluations**", "", NOTE.format(reference=_escaped(reference))]
    for suite, group in groupby(tables, key=lambda table: table.suite):
        first, *others = group
        more = f" {len(others)} more with other settings or at other steps: `evaluations.csv`." if others else ""
        title = SUITES.get(suite, (suite, ""))[0]
        out += ["", f"*{_escaped(title)}*, step {first.step}: `{_what(first)}`.{more}"]
        for number, block in enumerate(blocks(first)):
            heads = [f"{block.title} {heading}".strip() for _, heading in block.columns]
            out += ["", _row(["mixer", "n", *map(_escaped, heads)]), _row(["---", "--:", *["---"] * len(heads)])]
            out += [_row(_cells(first, line, block)) for line in first.lines if _has(line, block, number == 0)]
            out += [""] if (why := _reasons(first.lines, block)) else []
            out += [f"- n/a: {_escaped(reason)}" for reason in why]
    return out


def _cells(table: Table, line: Line, block: Block) -> list[str]:
    known = [line.cells[metric] for metric, _ in block.columns if metric in line.cells]
    n = max((cell.estimate.n for cell in known), default=0)
    name = (
        f"**{_escaped(line.label)}**" if line.deployed else f"*{_escaped(line.label)}, {line.mode.replace('_', '-')}*"
    )
    if line.nothing:
        return [name, "", f"n/a: {_escaped(line.nothing)}", *[""] * (len(block.columns) - 1)]
    return [name, str(n or ""), *(_plain(table, line, metric) for metric, _ in block.columns)]


def _plain(table: Table, line: Line, metric: str) -> str:
    cell = line.cells.get(metric)
    if cell is None:
        return "n/a" if metric in line.reasons else ""
    digits, e, c = _digits(table, metric), cell.estimate, cell.comparison
    out = _number(e.mean, digits) + (f" ±{_number(e.high - e.mean, digits)}" if e.high is not None else "")
    if c is None or cell.difference is None:
        return out
    half = f" ±{_number(c.seeds.high - c.seeds.mean, digits)}" if c.seeds and c.seeds.high is not None else ""
    return f"{out} ({_number(cell.difference, digits, sign=True)}{half}, {c.verdict})"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _escaped(text: str) -> str:
    return text.replace("_", "\\_").replace("*", "\\*").replace("<", "&lt;")
