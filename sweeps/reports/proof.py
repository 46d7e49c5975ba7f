"""The page's evidence: how each mixer was tuned, what each layer carries, and that nothing else differed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from runs.identity import canonical
from sweeps.reports.gate import Proof
from sweeps.reports.matching import summary, words
from sweeps.reports.style import Look
from sweeps.reports.table import Board
from sweeps.reports.tuning import Entry, Point, Trial

COMMON = ("d_model", "n_heads", "head_dim")
"""Settings of every mixer that come from the model."""


def _named(label: str) -> str:
    return f'<td class="name"><span class="dot"></span>{escape(label)}</td>'


def _table(head: Sequence[str], rows: Sequence[str]) -> str:
    cells = "".join(f"<th>{text}</th>" for text in head)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- tuning ----------------------------------------------------------------------------------------------------------


def tuning(board: Board, style: Mapping[str, Look], picture: str = "") -> str:
    """Each mixer's grid with its validation figures and the choice; ``picture`` is the figure of the same."""
    title = "<section><h2>How each was tuned</h2>"
    tuned = [row for row in board.rows if row.entry.trials]
    if not tuned:
        points = [row.entry.point for row in board.rows]
        same = len({canonical(point) for point in points}) == 1
        what = f" ({escape(_words(points[0]))})" if same and points[0] else ""
        note = f"Not at all: each mixer ran at one setting{what}. A better one may exist."
        return f'{title}<p class="note">{note}</p></section>'
    # One table when all tuned the same keys, as a rule the learning rate; columns are the points that anyone tried.
    columns: dict[str, Point] = {}
    for row in tuned:
        for trial in row.entry.trials:
            columns.setdefault(canonical(trial.point), trial.point)
    order = sorted(columns, key=lambda key: [_sortable(v) for v in columns[key].values()])
    keys = {key for point in columns.values() for key in point}
    head = ["mixer", *(escape(_words(columns[key], short=len(keys) == 1)) for key in order), ""]
    rows = [_tuning_row(row.entry, order, style[row.label]) for row in tuned]
    over = f"<code>{escape(next(iter(keys)))}</code>" if len(keys) == 1 else "each point"
    return (
        f"{title}<p class='note'>Mean validation figure for {over}; framed is what was chosen. The test split chose "
        f"nothing.</p>{_table(head, rows)}{picture}</section>"
    )


def _tuning_row(entry: Entry, order: Sequence[str], look: Look) -> str:
    by_point: dict[str, Trial] = {canonical(trial.point): trial for trial in entry.trials}
    cells = []
    for key in order:
        trial = by_point.get(key)
        if trial is None:
            cells.append('<td class="none">&middot;</td>')
        else:
            text = "failed" if trial.value is None else f"{trial.value:.3f}"
            cells.append(f'<td><span class="{"chosen" if trial.chosen else ""}">{text}</span></td>')
    edge = ", ".join(f"{key}: {which} tried" for key, which in entry.at_edge.items())
    warning = f"at the edge of the grid ({escape(edge)})" if edge else ""
    cells.append(f'<td class="edge">{warning}</td>')
    return f'<tr style="--c:var({look.css})">{_named(entry.label)}{"".join(cells)}</tr>'


def _words(point: Point, short: bool = False) -> str:
    if short:
        return ", ".join(_value(value) for value in point.values())
    return ", ".join(f"{key} = {_value(value)}" for key, value in point.items())


def _sortable(value: Any) -> tuple[int, float, str]:
    number = isinstance(value, int | float)
    return (0, float(value), "") if number else (1, 0.0, str(value))


# ---- accessories -----------------------------------------------------------------------------------------------------


def accessories(board: Board, style: Mapping[str, Look]) -> str:
    """What each layer has beside its state rule: half of published gains are made of these."""
    having = {row.label: row.entry.runs[0].record.get("accessories") or {} for row in board.rows}
    names = list(dict.fromkeys(name for parts in having.values() for name in parts))
    if not names:
        return ""
    rows = []
    for label, parts in having.items():
        cells = "".join(_accessory(parts.get(name)) for name in names)
        look = style[label]
        rows.append(f'<tr style="--c:var({look.css})">{_named(label)}{cells}</tr>')
    return (
        "<section><h2>What each layer carries</h2><p class='note'>Beside its state rule. Where two mixers differ here, "
        "the table compares these as well. A dot: it has no place for one.</p>"
        f"{_table(['mixer', *map(escape, names)], rows)}</section>"
    )


def _accessory(value: Any) -> str:
    if value is None:
        return '<td class="none">&middot;</td>'
    css = "none" if str(value) in ("none", "False", "no") else "wrap"
    return f'<td class="{css}">{escape(str(value))}</td>'


# ---- the proof -------------------------------------------------------------------------------------------------------


def proof(board: Board, style: Mapping[str, Look]) -> str:
    """Hashes, all equal keys, and all that differs."""
    p = board.proof
    settings = f"{len(p.equal)} settings of model, data, optimizer, budget and evaluation"
    seals = "".join(
        (
            _seal("Comparison key", p.comparison_key, settings, board),
            _seal("Shared code", p.shared_code, "backbone, data and trainer, comments aside", board),
            _seal("Data fingerprint", p.fingerprint, "texts, tokenizer, splits and packing", board),
        )
    )
    matched = summary([row.entry for row in board.rows])
    turned = (
        f"For it {moved(p)} was moved, mixer by mixer as listed below."
        if p.moved
        else "What was moved for it is listed below."
    )
    budget = f'<p class="note">{escape(matched)} {escape(turned)}</p>' if matched else ""
    equal = "".join(f"<li>{escape(key)}<span>{escape(_value(value))}</span></li>" for key, value in p.equal.items())
    return (
        f'<section id="proof"><h2>Nothing but the mixer{escape(besides(p))} differed</h2>'
        '<p class="note">Runs that differ in anything else are refused a place in this table.</p>'
        f'<div class="seals">{seals}</div>{budget}'
        f"<details><summary>What was equal <span>{len(p.equal)} keys</span></summary>"
        f'<ul class="keys">{equal}</ul></details>'
        "<details open><summary>What differed <span>mixer, tuned keys, seeds</span></summary>"
        f"{_differing(board, style)}</details></section>"
    )


def besides(p: Proof) -> str:
    """``, and model.mlp_width to make budgets equal,``: what differed beside the mixer, on purpose. Empty if nothing did."""
    return f", and {' and '.join(p.moved)} to make budgets equal," if p.moved else ""


def moved(p: Proof) -> str:
    """``model.mlp_width (120 to 229)``."""
    return " and ".join(f"{key} ({_value(low)} to {_value(high)})" for key, (low, high) in p.moved.items())


def _seal(name: str, value: str, what: str, board: Board) -> str:
    return (
        f'<div class="seal"><h3>{name}</h3><span class="hash">{escape(value)}</span>'
        f"<p><b>equal in all {len(board.runs)} runs</b><br>{what}</p></div>"
    )


def _differing(board: Board, style: Mapping[str, Look]) -> str:
    rows = []
    for row in board.rows:
        run, look = row.entry.runs[0], style[row.label]
        own = {k.removeprefix("mixer."): v for k, v in run.science.items() if k.startswith("mixer.")}
        own = {k: v for k, v in own.items() if k.rsplit(".", 1)[-1] not in COMMON and k != "kind"}
        settings = ", ".join(f"{key} {_value(value)}" for key, value in own.items()) or "no settings of its own"
        seeds = ", ".join("/".join(map(str, dict.fromkeys(one.seeds))) for one in row.entry.runs)
        rows.append(
            f'<tr style="--c:var({look.css})">{_named(row.label)}<td class="wrap">{escape(settings)}</td>'
            f'<td class="wrap">{escape(words(run.match) or "not matched")}</td>'
            f"<td>{escape(_words(row.entry.point) or 'none')}</td><td>{escape(seeds)}</td>"
            f'<td class="hash">{escape(board.proof.mixer_code[row.entry.mixer])}</td></tr>'
        )
    return _table(["mixer", "its settings", "budget", "tuned", "seeds", "own code"], rows)
