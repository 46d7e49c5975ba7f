"""The report as Markdown, made to be pasted into a pull request, and as CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

from sweeps.reports import evaluations, evaluations_text, scaling, scaling_text
from sweeps.reports.format import decimals, duration, half, over, si
from sweeps.reports.matching import summary, words
from sweeps.reports.proof import besides, moved
from sweeps.reports.table import Board, Row
from sweeps.reports.wording import needs, open_questions, power_note, question, sentences


def markdown(board: Board, command: str) -> str:
    """Question, verdicts, table, what to keep in mind, the proof in one line, the command."""
    digits = decimals(board)
    head = [
        "#",
        "mixer",
        f"{board.unit}",
        "seeds",
        f"minus {board.reference}",
        "verdict",
        "parameters",
        "train FLOPs",
        "state",
    ]
    lines = [f"### {board.study}: {question(board)}", "", " ".join(map(_escaped, sentences(board))), ""]
    lines += [_line(head), _line(["--:", "---", "---", "--:", "---", "---", "--:", "--:", "--:"])]
    for row in board.rows:
        lines.append(_line(_cells(row, digits)))
        for other in row.others:
            lines.append(
                _line(["", f"*{other.mode}*", f"*{half(other.estimate, digits)}*", "", "", "not deployed", "", "", ""])
            )
    if board.bar is not None:
        lines.append(_line(["", f"*byte {board.bar.name}*", f"*{board.bar.value:.{digits}f}*", *[""] * 6]))
    direction = "lower" if board.lower_is_better else "higher"
    lines += ["", f"`{board.metric}`, {direction} is better; 95 % intervals over {over(board)}, differences paired, verdicts after Holm's correction. Parameters without embeddings."]  # fmt: skip
    matched = summary([row.entry for row in board.rows])
    turned = f" For it {moved(board.proof)} was moved." if board.proof.moved else ""
    lines += [f"{matched}{turned}"] if matched else []
    undecided = open_questions(board)
    if undecided:
        lines += ["", "**Not told apart**", "", *(f"- {_escaped(text)}" for text in undecided), "", power_note()]
    lines += scaling_text.markdown(scaling.find(board))
    lines += evaluations_text.markdown(board.evaluations, board.reference)
    doubts = [*board.warnings, *(f"{name}: {state} ({why})" for name, state, why in board.unfinished)]
    if doubts:
        lines += ["", "**To keep in mind**", "", *(f"- {_escaped(text)}" for text in doubts)]
    proof = board.proof
    equal = f"comparison key `{proof.comparison_key}`, shared code `{proof.shared_code}`, data `{proof.fingerprint}`"
    lines += ["", f"Nothing but the mixer{besides(proof)} differed: {equal}; {len(proof.equal)} settings equal in all {len(board.runs)} runs. {duration(board.seconds)} of training in all."]  # fmt: skip
    lines += ["", f"`{command}`"] if command else []
    return "\n".join(lines) + "\n"


def _cells(row: Row, digits: int) -> list[str]:
    c = row.comparison
    needed = "" if c is None else needs(c, digits)
    verdict = "reference" if c is None else c.verdict + (f" ({needed})" if needed else "")
    mode = "" if row.mode == "parallel" else f" ({row.mode})"
    return [
        str(row.rank),
        f"**{_escaped(row.label)}**{mode}",
        half(row.estimate, digits),
        str(row.estimate.n),
        half(c.shown, digits, sign=True) if c and c.shown else "",
        verdict,
        si(row.count("params_non_embedding")),
        si(row.count("train_flops")),
        si(row.count("state_bytes"), "B", 1024),
    ]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _escaped(text: str) -> str:
    """Names have underscores, and no emphasis is meant."""
    return text.replace("_", "\\_").replace("*", "\\*").replace("<", "&lt;")


COLUMNS = (
    "study", "rank", "mixer", "mode", "metric", "unit", "n", "mean", "ci95_low", "ci95_high", "interval_over", "reference",
    "difference", "difference_low", "difference_high", "p", "p_holm", "verdict", "seeds_needed", "detectable", "params",
    "params_non_embedding", "flops_per_token", "tokens", "train_flops", "state_bytes", "tokens_per_s", "match", "spikes",
    "diverged",
)  # fmt: skip


def as_csv(board: Board, content: dict[str, Any]) -> str:
    """One line for each row of report.json, teacher-forced ones included; empty where there is no such number."""
    by_label = {row.label: row for row in board.rows}
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in content["rows"]:
        difference = row.get("difference") or {}
        shown = difference.get("over_seeds") or difference.get("over_documents") or {}
        match = by_label[row["mixer"]].entry.runs[0].match
        writer.writerow(
            {
                **row,
                "study": board.study,
                "match": words(match),
                "reference": difference.get("reference"),
                **_interval(row, "ci95"),
                "difference": shown.get("mean"),
                **_interval(shown, "difference"),
                **{key: difference.get(key) for key in ("p", "p_holm", "verdict", "seeds_needed", "detectable")},
            }
        )
    return out.getvalue()


def evaluations_csv(content: dict[str, Any]) -> str | None:
    """One line for each figure under ``evaluations`` of report.json; None where nothing was evaluated."""
    if not content.get("evaluations"):
        return None
    out = io.StringIO()
    writer = csv.DictWriter(out, ("study", *evaluations.COLUMNS), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in evaluations.csv_rows(content["evaluations"]):
        writer.writerow({"study": content["study"], **row})
    return out.getvalue()


def _interval(values: dict[str, Any], name: str) -> dict[str, Any]:
    low, high = values.get("ci95") or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}
