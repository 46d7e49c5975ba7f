"""The leaderboard on the page: figures beside drawn intervals, the yardstick in its place among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from sweeps.reports.bar import Bar
from sweeps.reports.compare import Comparison, Estimate
from sweeps.reports.format import decimals, interval, si
from sweeps.reports.matching import summary, words
from sweeps.reports.style import Look
from sweeps.reports.table import Board, OtherMode, Row
from sweeps.reports.wording import needs

WIDTH, HEIGHT = 230, 26


@dataclass(frozen=True)
class Scale:
    """Values to pixels, common to all rows."""

    low: float
    high: float

    def __call__(self, value: float) -> float:
        return WIDTH * (value - self.low) / (self.high - self.low)

    def clipped(self, value: float) -> float:
        return min(max(self(value), 0.0), float(WIDTH))

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def scale_of(board: Board) -> Scale:
    """Wide enough for all means; of intervals for as much as leaves the means apart. The yardstick if it is near."""
    means = [row.estimate.mean for row in board.rows]
    spread = max(means) - min(means) or 0.02 * abs(means[0]) or 1.0
    bar = [board.bar.value] if board.bar is not None else []
    near = [value for value in bar if min(means) - 1.5 * spread <= value <= max(means) + 1.5 * spread]
    ends = [end for row in board.rows for end in (row.estimate.low, row.estimate.high) if end is not None]
    low = max(min([*means, *ends]), min(means) - 0.5 * spread)
    high = min(max([*means, *ends]), max(means) + 0.5 * spread)
    low, high = min([low, *near]), max([high, *near])
    pad = 0.06 * (high - low) or 1.0
    return Scale(low - pad, high + pad)


def leaderboard(board: Board, style: Mapping[str, Look]) -> str:
    """The section."""
    digits, scale = decimals(board), scale_of(board)
    rows = [
        _row(row, board, style[row.label], scale, digits)
        + "".join(_other_row(other, style[row.label], scale, digits) for other in row.others)
        for row in board.rows
    ]
    if board.bar is not None:
        sign = 1 if board.lower_is_better else -1
        place = sum(sign * row.estimate.mean < sign * board.bar.value for row in board.rows)
        rows.insert(place, _bar_row(board.bar, scale, digits))
    over = {row.estimate.over for row in board.rows} - {"none"}
    head = "".join(
        f'<th class="{css}">{text}</th>'
        for css, text in (
            ("n", ""),
            ("", "mixer"),
            ("", f"{_axis(scale, digits)}95 % interval over {' or '.join(sorted(over)) or '&ndash;'}"),
            ("", f"{escape(board.unit)}<br>mean [interval]"),
            ("n", "n"),
            ("", f"minus {escape(board.reference)}<br>[interval]"),
            ("n", "parameters<br>w/o embedding"),
            ("n", "trained on<br>tokens, FLOPs"),
            ("n", "state"),
            ("n", "tokens/s<br>here"),
        )
    )
    direction = "Lower is better." if board.lower_is_better else "Higher is better."
    note = (
        f"<code>{escape(board.metric)}</code>, chosen on validation and read once from the test split. {direction} "
        f"The fine upright line is {escape(board.reference)}, the reference."
    )
    note += f" {escape(matched)}" if (matched := summary([row.entry for row in board.rows])) else ""
    if any(row.others for row in board.rows):
        note += (
            " A two-pass model is ranked by what is deployed, its own memory fed back; teacher-forced, under it, is what the "
            "same weights do with a memory that deployment does not have."
        )
    hardware = next(iter(board.distinct("hardware"))) or {}
    where = hardware.get("gpu") or f"{hardware.get('cpu') or 'a CPU'} ({hardware.get('threads', '?')} threads)"
    forms = "PyTorch forms" if not hardware.get("gpu") else "kernels"
    scored = (
        " Scored: test tokens per second of a two-pass model as it is deployed, token by token, many sequences side by side."
        if any(row.scored_per_s is not None for row in board.rows)
        else ""
    )
    costs = (
        f'<p class="caption">Tokens per second: training, median over runs, measured on {escape(where)} with this '
        f"project's {forms}. They say little about other hardware.{scored} State: what must be kept to go on after one "
        "training window, for one sequence in float32. FLOPs: of all training, forward and backward.</p>"
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<section><h2>Leaderboard</h2><p class="note">{note}</p><div class="scroll">{table}</div>{costs}</section>'


def _row(row: Row, board: Board, look: Look, scale: Scale, digits: int) -> str:
    mode = "" if row.mode == "parallel" else f'<span class="tag">{escape(row.mode)}</span>'
    e = row.estimate
    low_high = "" if e.low is None or e.high is None else f"<small>[{e.low:.{digits}f}, {e.high:.{digits}f}]</small>"
    rate = "" if row.tokens_per_s is None else si(row.tokens_per_s)
    rate += "" if row.scored_per_s is None else f"<small>scored {si(row.scored_per_s)}</small>"
    shown = [other.comparison.shown for other in board.rows if other.comparison]
    mixed = len({one.over for one in shown if one}) > 1
    reference = next(other.estimate.mean for other in board.rows if other.label == board.reference)
    cells = (
        ("n", str(row.rank)),
        ("name", f'<span class="dot"></span>{escape(row.label)}{mode}'),
        ("", forest(e, scale, look, reference, board.bar)),
        ("", f"<b>{e.mean:.{digits}f}</b>{low_high}"),
        ("n", str(e.n)),
        ("", _difference(row.comparison, digits, mixed)),
        ("n", si(row.count("params_non_embedding")) + _matched(row)),
        ("n", f"{si(row.count('tokens'))}<small>{si(row.count('train_flops'))}</small>"),
        ("n", si(row.count("state_bytes"), "B", 1024)),
        ("n", rate),
    )
    inner = "".join(f'<td class="{css}">{text}</td>' for css, text in cells)
    return f'<tr style="--c:var({look.css})">{inner}</tr>'


def _matched(row: Row) -> str:
    """How well a budget was met, where one was asked for."""
    match = row.entry.runs[0].match
    if match is None:
        return ""
    residual = match.get("residual")
    met = "not met" if residual is None else f"{100 * residual:+.2f} %"
    return f'<small title="{escape(words(match))}">{escape(str(match["kind"]))} {met}</small>'


def _other_row(other: OtherMode, look: Look, scale: Scale, digits: int) -> str:
    """Under its own row, without a rank: a number that the deployed model does not have."""
    gap = ""
    if other.gap is not None:
        gap = f"<small>{interval(other.gap, digits, sign=True)} to deployed</small>"
    e = other.estimate
    low_high = "" if e.low is None or e.high is None else f"<small>[{e.low:.{digits}f}, {e.high:.{digits}f}]</small>"
    return (
        f'<tr class="other" style="--c:var({look.css})"><td></td><td class="other">{escape(other.mode)}</td>'
        f"<td>{forest(e, scale, look, None, None)}</td><td>{e.mean:.{digits}f}{low_high}</td>"
        f'<td class="n">{e.n}</td><td>{gap}</td><td colspan="4"></td></tr>'
    )


def _difference(c: Comparison | None, digits: int, mixed: bool) -> str:
    if c is None:
        return '<span class="open">reference</span>'
    css = c.verdict if c.verdict in ("better", "worse") else "open"
    note = f' title="{escape(c.note)}"' if c.note else ""
    shown = ""
    if c.shown is not None:
        over = f" over {c.shown.over}" if mixed else ""
        shown = f"<small>{interval(c.shown, digits, sign=True)}{over}</small>"
    needed = needs(c, digits)
    shown += f"<small>{needed}</small>" if needed else ""
    return f'<span class="verdict {css}"{note}>{escape(c.verdict)}</span>{shown}'


def _bar_row(bar: Bar, scale: Scale, digits: int) -> str:
    drawing = ""
    if scale.holds(bar.value):
        line = _upright(scale(bar.value), 'stroke="var(--muted)" stroke-width="1.5" stroke-dasharray="3 2.5"')
        drawing = f'<svg class="forest" viewBox="0 0 {WIDTH} {HEIGHT}" aria-hidden="true">{line}</svg>'
    return (
        f'<tr class="bar"><td></td><td>{escape(bar.name)}, the yardstick</td><td>{drawing}</td>'
        f'<td>{bar.value:.{digits}f}</td><td></td><td colspan="5">counts of 4 bytes of context, no network</td></tr>'
    )


def forest(e: Estimate, scale: Scale, look: Look, reference: float | None, bar: Bar | None) -> str:
    """Mean and interval on the common scale; an arrow's head means that the interval goes on."""
    middle, colour, parts = HEIGHT / 2, f"var({look.css})", []
    if reference is not None:
        parts.append(_upright(scale.clipped(reference), 'stroke="var(--rule)"'))
    if bar is not None and scale.holds(bar.value):
        parts.append(_upright(scale(bar.value), 'stroke="var(--muted)" stroke-dasharray="3 2.5" opacity=".45"'))
    if e.low is not None and e.high is not None:
        low, high = scale.clipped(e.low), scale.clipped(e.high)
        line = f'stroke="{colour}" stroke-width="2.5" stroke-linecap="round" opacity=".55"'
        parts.append(f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}" {line}/>')
        for value, x, step in ((e.low, low, -5), (e.high, high, 5)):
            if not scale.holds(value):
                head = f"M{x:.1f} {middle - 4} L{x + step:.1f} {middle} L{x:.1f} {middle + 4}"
                parts.append(f'<path d="{head}" fill="none" stroke="{colour}" opacity=".7"/>')
    parts.append(f'<circle cx="{scale.clipped(e.mean):.1f}" cy="{middle}" r="4.6" fill="{colour}"/>')
    label = interval(e, 3)
    return f'<svg class="forest" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _upright(x: float, look: str) -> str:
    """Through the row and into its neighbours, so that the rows' pieces make one line."""
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="-13" y2="{HEIGHT + 13}" {look}/>'


def _axis(scale: Scale, digits: int) -> str:
    """A few round values over the drawn intervals."""
    from matplotlib.ticker import MaxNLocator

    ticks = [tick for tick in MaxNLocator(4).tick_values(scale.low, scale.high) if scale.holds(tick)]
    shown = min(digits, 2) if len({f"{tick:.2f}" for tick in ticks}) == len(ticks) else digits
    place = 'y="12" font-size="11" text-anchor="middle"'
    words = "".join(f'<text x="{scale(tick):.1f}" {place}>{tick:.{shown}f}</text>' for tick in ticks)
    return f'<svg class="forest scale" viewBox="0 0 {WIDTH} 18" aria-hidden="true">{words}</svg>'
