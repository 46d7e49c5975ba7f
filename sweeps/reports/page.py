"""The report as one HTML page that needs nothing else: question, answer, table, figures, tuning, proof, origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from sweeps.reports import budget, evaluations_text, failures, plots_evaluations, plots_scaling, scaling, scaling_text
from sweeps.reports.drawing import Picture
from sweeps.reports.format import decimals, duration, si
from sweeps.reports.leaderboard import leaderboard
from sweeps.reports.page_style import style_sheet
from sweeps.reports.proof import accessories, proof, tuning
from sweeps.reports.style import looks
from sweeps.reports.table import Board
from sweeps.reports.wording import open_questions, power_note, question, sentences

SMALL = ("curve_flops", "curve_seconds")
SECTIONS = {
    "How they learn": ("curve_tokens", *SMALL),
    "What they keep, and how large they are": ("quality_state", "quality_params"),
    "Where in the text": ("positions",),
    "Parts of the task": ("slices",),
    "Where the recurrence goes": ("drift",),
    "Inside the mixers": ("diagnostics",),
}
"""The figures' places on the page; the sensitivity to the learning rate stands under its table."""

NAMES = {"sensitivity", plots_scaling.NAME}.union(*SECTIONS.values(), plots_evaluations.NAMES)


def page(board: Board, content: dict[str, Any], figures: Sequence[Picture]) -> str:
    """The whole page."""
    style = looks([row.label for row in board.rows])
    by_name = {figure.name: _figure(figure) for figure in figures}
    sizes = scaling.find(board)
    colours = [*style.values(), *(sizes.looks.values() if sizes else ())]
    parts = [
        _head(board),
        leaderboard(board, style),
        _undecided(board),
        _warnings(board),
        _figures(by_name),
        scaling_text.section(sizes, by_name.get(plots_scaling.NAME, "")),
        evaluations_text.section(board.evaluations, _of_suites(by_name), style, board.reference),
        budget.section(
            None if sizes else board.equal_flops,
            board.reference,
            board.unit,
            decimals(board),
            style,
            board.lower_is_better,
        ),
        failures.section(board.incidents, len(board.all_runs)),
        tuning(board, style, by_name.get("sensitivity", "")),
        accessories(board, style),
        proof(board, style),
        _origin(board, content),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(board.study)} · isomix</title>\n<style>{style_sheet(colours)}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(parts)}\n</main>\n</body>\n</html>\n"
    )


# ---- question and answer ---------------------------------------------------------------------------------------------


def answer(board: Board) -> str:
    """The finding in words. HTML."""
    first, *rest = map(escape, sentences(board))
    label = escape(board.rows[0].label)
    return " ".join([first.replace(label, f"<b>{label}</b>", 1), *rest])


def _head(board: Board) -> str:
    run = board.runs[0]
    seeds = {row.estimate.n for row in board.rows}
    hardware = board.distinct("hardware")[0] or {}
    threads = hardware.get("threads", "?")
    device = hardware.get("gpu") or f"{hardware.get('cpu') or 'CPU'}, {threads} thread{'s' if threads != 1 else ''}"
    science = run.science
    facts = {
        "mixers": str(len(board.rows)),
        "seeds each": " or ".join(map(str, sorted(seeds))),
        "parameters without embeddings": _range([row.count("params_non_embedding") for row in board.rows]),
        "training tokens each": _range([one.counts["tokens"] for one in board.runs]),
        "window": f"{science.get('data.seq_len', '?')} {_tokens(science.get('tokenizer.kind'))}",
        "training time, all runs": duration(board.seconds),
        "hardware": device,
    }
    listed = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
    about = f'<p class="note">{escape(board.description)}</p>' if board.description else ""
    return (
        f'<header><p class="kicker"><b>isomix</b>study {escape(board.study)}</p><h1>{escape(question(board))}</h1>'
        f'<p class="lead">{answer(board)}</p>{about}<dl class="facts">{listed}</dl></header>'
    )


def _tokens(tokenizer: str | None) -> str:
    """A task has tokens of its own."""
    return "tokens" if tokenizer is None else "bytes" if tokenizer == "bytes" else f"{tokenizer} tokens"


def _range(values: Sequence[float]) -> str:
    low, high = si(min(values)), si(max(values))
    return low if low == high else f"{low} \N{EN DASH} {high}"


# ---- the rest --------------------------------------------------------------------------------------------------------


def _warnings(board: Board) -> str:
    items = [escape(warning) for warning in board.warnings]
    if board.unfinished:
        states: dict[str, int] = {}
        for _, state, _ in board.unfinished:
            states[state] = states.get(state, 0) + 1
        listed = ", ".join(f"{count} {escape(state)}" for state, count in states.items())
        items.append(f'not all is there: {listed}; see <a href="#failures">failures</a>')
    if not items:
        return ""
    listed = "".join(f"<li>{item}</li>" for item in items)
    return f'<aside class="warnings"><h3>To keep in mind</h3><ul>{listed}</ul></aside>'


def _undecided(board: Board) -> str:
    """What is not told apart, and what it would take."""
    found = open_questions(board)
    if not found:
        return ""
    listed = "".join(f"<li>{escape(text)}</li>" for text in found)
    return (
        f'<aside class="undecided"><h3>Not told apart from {escape(board.reference)}</h3><ul>{listed}</ul>'
        f'<p class="caption">{escape(power_note())}</p></aside>'
    )


def _figures(by_name: Mapping[str, str]) -> str:
    out = []
    for title, names in SECTIONS.items():
        small = "".join(by_name[name] for name in names if name in SMALL and name in by_name)
        large = "".join(by_name[name] for name in names if name not in SMALL and name in by_name)
        drawn = large + (f'<div class="pair">{small}</div>' if small else "")
        if drawn:
            out.append(f"<section><h2>{title}</h2>{drawn}</section>")
    return "".join(out)


def _of_suites(by_name: Mapping[str, str]) -> dict[str, str]:
    prefix = plots_evaluations.PREFIX
    return {name.removeprefix(prefix): html for name, html in by_name.items() if name.startswith(prefix)}


def _figure(figure: Picture) -> str:
    wide = "" if figure.name in SMALL else ' class="wide"'
    return (
        f'<figure id="{figure.name}"{wide}><figcaption><h3>{escape(figure.title)}</h3>'
        f'<p class="caption">{escape(figure.caption)}</p></figcaption>{figure.inline}</figure>'
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
        f"on {si(board.bar.train_bytes, 'B')} of the train split, no more than the models read, and scored on exactly the bytes "
        "that they were graded on. It is the same whatever the tokenizer.</p>"
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
