"""What a study or a recipe will cost, before any job: parameters, FLOPs, state, memory, hours, and how well budgets match.

python -m sweeps.plan study=quickstart
python -m sweeps.plan experiment=mesanet_140m mixer=transformer,mesa trainer=gpu trainer.micro_batch=32
python -m sweeps.plan mixer=transformer,maglev match=flops,params calibrate=20

Words are those of train.py: a study, or overrides with values to sweep. Beside them
       calibrate=SECONDS   train and score each mixer here for so long, and take its speed from that
       vocab_size=N        of a tokenizer that is not on this machine
Flags: --json        print the rows as JSON instead of the table
       --no-memory   leave the memory out, which takes longest

Hours are those of a whole run: training, validations, test. They come from a calibration, else from finished runs of the
same mixer (<paths.results>/runs), else from `python -m evals.speed`, else they are assumed; each row says which.

Exit code: 0 done, 2 the question makes no sense.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runs.cli import patient_threads
from runs.validate import ConfigError

patient_threads()  # as train.py has them: a calibration should be as fast; set before torch is imported

FLAGS = ("--json", "--no-memory")
OWN = {"calibrate": float, "vocab_size": int}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "-h" in arguments or "--help" in arguments or not arguments:
        sys.stdout.write(f"{__doc__}")
        return 0
    logging.basicConfig(level=logging.WARNING)
    console = Console(stderr="--json" in arguments)
    try:
        words, own, flags = _parsed(arguments)
        plan, rows, content = make(words, flags, console, **own)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if "--json" in flags:
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
    else:
        show(plan, rows, console)
    return 0


def make(
    words: Sequence[str],
    flags: set[str],
    console: Console,
    *,
    calibrate: float | None = None,
    vocab_size: int | None = None,
) -> tuple[Any, list[Any], dict[str, Any]]:
    """The plan, its rows, and what ``--json`` prints. Raises ConfigError."""
    from sweeps.planning.rows import build, reference_row
    from sweeps.planning.runs import read

    plan = read(words)
    with console.status("composing") as status:
        rows = build(
            plan,
            results=Path(plan.runs[0].config.paths.results),
            vocab_size=vocab_size,
            calibration=calibrate,
            memory="--no-memory" not in flags,
            say=lambda name: status.update(f"counting {name}"),
        )
    reference = reference_row(plan, rows)
    known = [row.hours * row.n_runs for row in rows if row.hours is not None]
    content = {
        "plan": plan.name,
        "reference": plan.reference,
        "match": plan.runs[0].config.match,
        "rows": [row.plain(reference) for row in rows],
        "runs": round(sum(row.n_runs for row in rows), 6),
        "hours": sum(known),
    }
    return plan, rows, content


def _parsed(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any], set[str]]:
    """(words for Hydra, own values, flags)"""
    own: dict[str, Any] = {}
    words, flags = [], set()
    for word in arguments:
        key, equals, value = word.partition("=")
        if word.startswith("-"):
            if word not in FLAGS:
                raise ConfigError(f"{word}: unknown flag. Flags: {', '.join(FLAGS)}")
            flags.add(word)
        elif key in OWN and equals:
            try:
                own[key] = OWN[key](value)
            except ValueError:
                own[key] = -1
            if not own[key] > 0:
                raise ConfigError(f"{word}: must be a number above 0")
        else:
            words.append(word)
    return words, own, flags


# ---- the table -------------------------------------------------------------------------------------------------------


def show(plan: Any, rows: list[Any], console: Console) -> None:
    """Table, what the hours rest on, and whether the budgets match."""
    from sweeps.planning.rows import off, reference_row
    from sweeps.reports.format import duration, si

    reference = reference_row(plan, rows)
    table = Table(title=f"{plan.name}: one run of each", title_justify="left", title_style="bold", box=None)
    table.add_column("mixer", no_wrap=True)
    names = ("params", "no embedding", "train FLOPs/token", "state", "memory", "tokens", "time", "runs", "all runs")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)

    def cell(row: Any, by: str, text: str) -> Text:
        share = off(row, reference, by)
        if share is None or row is reference:
            return Text(text)
        return Text(text).append(f" {100 * share:+.1f}%", "dim")

    for row in rows:
        if not row.counts:
            table.add_row(row.label, *["n/a"] * 5, si(row.tokens), "n/a", f"{row.n_runs:g}", "n/a")
            continue
        mark = "" if row.speed.measured else " assumed"
        table.add_row(
            Text(row.label, "bold"),
            si(row.counts["params"]),
            cell(row, "params", si(row.counts["params_non_embedding"])),
            cell(row, "flops", si(row.counts["train_flops_per_token"])),
            cell(row, "state", si(row.counts["state_bytes"], "B", 1024)),
            si(row.memory.total, "B") if row.memory else "",
            si(row.tokens),
            duration(3600 * row.hours) + mark,
            f"{row.n_runs:g}",
            duration(3600 * row.hours * row.n_runs),
        )
    console.print(table)
    total = sum(row.hours * row.n_runs for row in rows if row.hours is not None)
    tuned = f" ({plan.n_tuning} of them tuning)" if plan.n_tuning else ""
    console.print(f"{sum(row.n_runs for row in rows):g} runs{tuned}, {duration(3600 * total)} one after another")
    for source in dict.fromkeys(row.speed.source for row in rows if row.speed):
        who = ", ".join(row.label for row in rows if row.speed and row.speed.source == source)
        console.print(Text(f"time {source}: {who}", "dim"), soft_wrap=True)
    _show_budgets(plan, rows, console)


def _show_budgets(plan: Any, rows: list[Any], console: Console) -> None:
    from models.budget import LIMITS
    from sweeps.planning.rows import off, reference_row

    reference = reference_row(plan, rows)
    for row in rows:
        if row.unmet:
            console.print(Text(f"! {row.label}: {row.unmet}", "yellow"), soft_wrap=True)
        elif row.match:
            console.print(Text(f"{row.label}: {row.match}", "dim" if row.match.met else "yellow"), soft_wrap=True)
    if any(row.match or row.unmet for row in rows) or reference is None or len(rows) < 2:
        return
    for by, limit in LIMITS.items():
        beyond = [row.label for row in rows if abs(off(row, reference, by) or 0.0) > limit]
        words = f"more than {100 * limit:g} % from {reference.label}: {', '.join(beyond)}" if beyond else "equal"
        console.print(Text(f"{by}: {words}", "dim"), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
