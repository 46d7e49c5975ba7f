"""The report as one HTML page that needs nothing else: question, answer, table, figures, tuning, proof, origin."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from sweeps.reports import budget
from sweeps.reports.compare import ONE_SEED
from sweeps.reports.format import duration, si
from sweeps.reports.leaderboard import leaderboard
from sweeps.reports.page_style import style_sheet
from sweeps.reports.plots import Picture
from sweeps.reports.proof import accessories, proof, tuning
from sweeps.reports.style import looks
from sweeps.reports.table import Board
from sweeps.reports.terminal import decimals

SMALL = ("curve_flops", "curve_seconds")
DATA_NAMES = {"kjv": "the King James Bible"}


def page(board: Board, content: dict[str, Any], figures: Sequence[Picture]) -> str:
    """The whole page."""
    style = looks([row.label for row in board.rows])
    parts = [
        _head(board),
        leaderboard(board, style),
        _warnings(board),
        _figures(figures),
        budget.section(board.equal_flops, board.reference, board.unit, decimals(board), style, board.lower_is_better),
        tuning(board, style),
        accessories(board, style),
        proof(board, style),
        _origin(board, content),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(board.study)} · isomix</title>\n<style>{style_sheet(style.values())}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(parts)}\n</main>\n</body>\n</html>\n"
    )


# ---- question and answer ---------------------------------------------------------------------------------------------


def question(board: Board) -> str:
    """What the report is about, in one sentence."""
    data = board.runs[0].science.get("data.name") or board.runs[0].science.get("data.kind", "the data")
    what = f"predicts {DATA_NAMES.get(data, data)}" if "accuracy" not in board.metric else f"solves {data}"
    return f"Which sequence mixer {what} best, everything else being equal?"


def answer(board: Board) -> str:
    """The finding in words, no stronger than the intervals allow. HTML."""
    digits, first = decimals(board), board.rows[0]
    extreme = "lowest" if board.lower_is_better else "highest"
    parts = [
        f"<b>{escape(first.label)}</b> has the {extreme} mean, {first.estimate.mean:.{digits}f} {escape(board.unit)}."
    ]
    groups: dict[str, list[str]] = {}
    for row in board.rows:
        if row.comparison is not None:
            groups.setdefault(row.comparison.verdict, []).append(row.label)
    if set(groups) == {ONE_SEED}:
        parts.append(f"With one seed each, no difference to {escape(board.reference)} is decided.")
    elif groups:
        listed = "; ".join(f"{verdict}: {_names(labels)}" for verdict, labels in groups.items())
        parts.append(f"Against {escape(board.reference)} &ndash; {listed}.")
    if board.bar is not None:
        beaten = [row.label for row in board.rows if row.beats_yardstick]
        bar = f"a byte {board.bar.name} ({board.bar.value:.{digits}f})"
        if len(beaten) == len(board.rows):
            parts.append(f"All clearly beat {bar}.")
        elif beaten:
            parts.append(f"{_names(beaten)} clearly beat{_s(beaten)} {bar}.")
        else:
            parts.append(f"None clearly beats {bar}.")
    return " ".join(parts)


def _names(labels: Sequence[str]) -> str:
    words = [escape(label) for label in labels]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _s(labels: Sequence[str]) -> str:
    return "" if len(labels) > 1 else "s"


def _head(board: Board) -> str:
    run = board.runs[0]
    seeds = {row.estimate.n for row in board.rows}
    hardware = board.distinct("hardware")[0] or {}
    device = hardware.get("gpu") or f"{hardware.get('cpu') or 'CPU'}, {hardware.get('threads', '?')} threads"
    science = run.science
    facts = {
        "mixers": str(len(board.rows)),
        "seeds each": " or ".join(map(str, sorted(seeds))),
        "parameters without embeddings": _range([row.count("params_non_embedding") for row in board.rows]),
        "training tokens each": si(run.counts["tokens"]),
        "window": f"{science.get('data.seq_len', '?')} {science.get('tokenizer.kind', 'token')}"
        + ("" if science.get("tokenizer.kind") == "bytes" else " tokens"),
        "training time, all runs": duration(board.seconds),
        "hardware": device,
    }
    listed = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
    about = f'<p class="note">{escape(board.description)}</p>' if board.description else ""
    return (
        f'<header><p class="kicker"><b>isomix</b>study {escape(board.study)}</p><h1>{escape(question(board))}</h1>'
        f'<p class="lead">{answer(board)}</p>{about}<dl class="facts">{listed}</dl></header>'
    )


def _range(values: Sequence[float]) -> str:
    low, high = si(min(values)), si(max(values))
    return low if low == high else f"{low} \N{EN DASH} {high}"


# ---- the rest --------------------------------------------------------------------------------------------------------


def _warnings(board: Board) -> str:
    items = [escape(warning) for warning in board.warnings]
    items += [f"{escape(name)}: <b>{escape(state)}</b> ({escape(why)})" for name, state, why in board.unfinished]
    if not items:
        return ""
    listed = "".join(f"<li>{item}</li>" for item in items)
    return f'<aside class="warnings"><h3>To keep in mind</h3><ul>{listed}</ul></aside>'


def _figures(figures: Sequence[Picture]) -> str:
    by_name = {figure.name: _figure(figure) for figure in figures}
    small = "".join(by_name.pop(name) for name in SMALL if name in by_name)
    state = by_name.pop("quality_state", "")
    memory = by_name.pop("drift", "")
    curves = "".join(by_name.values()) + (f'<div class="pair">{small}</div>' if small else "")
    learning = f"<section><h2>How they learn</h2>{curves}</section>" if curves else ""
    kept = f"<section><h2>What they keep</h2>{state}</section>" if state else ""
    return learning + kept + (f"<section><h2>Where the recurrence goes</h2>{memory}</section>" if memory else "")


def _figure(figure: Picture) -> str:
    wide = "" if figure.name in SMALL else ' class="wide"'
    return (
        f'<figure id="{figure.name}"{wide}><figcaption><h3>{escape(figure.title)}</h3>'
        f'<p class="caption">{escape(figure.caption)}</p></figcaption>{figure.svg}</figure>'
    )


def _origin(board: Board, content: dict[str, Any]) -> str:
    commits = [_commit(commit) for commit in content["commits"]]
    hardware = [", ".join(f"{k} {v}" for k, v in (one or {}).items() if v is not None) for one in content["hardware"]]
    versions = [", ".join(f"{k} {v}" for k, v in (one or {}).items() if v) for one in content["versions"]]
    made = content["made_by"]
    rows = {
        "runs": _codes(made[:3]) + (f"<br>and {len(made) - 3} more commands" if len(made) > 3 else ""),
        "this page": _codes([content["command"]]) if content["command"] else "",
        "commit": _codes(commits),
        "hardware": "<br>".join(map(escape, hardware)),
        "versions": "<br>".join(map(escape, versions)),
        "training time": f"{duration(board.seconds)} in all, {len(board.all_runs)} runs, tuning included",
    }
    listed = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in rows.items() if value)
    bar = (
        f"<p>The yardstick is an interpolated modified Kneser&ndash;Ney {escape(board.bar.name)} over bytes, counted "
        f"on {si(board.bar.train_bytes, 'B')} of the train split and scored on exactly the bytes that the models were "
        "graded on. It is the same whatever the tokenizer.</p>"
        if board.bar is not None
        else ""
    )
    return (
        '<section><h2>How this was made</h2><dl class="made">'
        f"{listed}</dl></section><section><h2>How to read the intervals</h2>"
        "<p>With two or more seeds, intervals are 95 % Student t intervals over seeds: the chance of another "
        "initialisation and another order of the training data, on these test documents. With one seed they are over "
        "test documents (ratio estimator, delta method), and seed noise is <em>not</em> in them.</p>"
        "<p>Differences are paired: same seed, same data, same documents. A mixer is called better or worse only if "
        "neither retraining nor another choice of test documents would explain the difference: the larger of the two "
        "p-values counts, corrected for the number of mixers compared (Holm), at 5 %. The intervals shown are not "
        "corrected. Points are chosen on validation; the test split is read once, at the end.</p>"
        f"{bar}</section>"
    )


def _commit(commit: str | None) -> str:
    if not commit:
        return "not from a checkout"
    return commit[:12] + (" with changes" if "+" in commit else "")


def _codes(words: Sequence[str]) -> str:
    return "<br>".join(f"<code>{escape(str(word))}</code>" for word in words)
