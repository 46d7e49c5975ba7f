"""What differs between two runs, and whether they may be compared: python -m sweeps.diff RUN_A RUN_B [tuned=[KEY,...]]

The last line is the verdict. Exit code: 0 they may be compared, 1 they may not, 2 the question makes no sense.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runs.identity import SEEDS, SENTINEL, flatten
from sweeps.cli import UsageError, as_list, parse
from sweeps.reports.collect import CollectError, Run, read_any
from sweeps.reports.gate import ABSENT, check_tuned, comparison_of, differences

Facts = dict[str, tuple[Any, Any]]
GROUPS = ("mixer", "seeds", "tuned", "everything else")


def differing(a: dict[str, Any], b: dict[str, Any]) -> Facts:
    """Keys whose values differ -> both values."""
    pairs = {key: (a.get(key, ABSENT), b.get(key, ABSENT)) for key in dict.fromkeys([*a, *b])}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def science_groups(a: Run, b: Run, tuned: Sequence[str] = ()) -> dict[str, Facts]:
    """The science that differs, by what it means for a comparison. Only the last group forbids one.

    A key that just one of the runs' studies tunes belongs to the last group: the other run did not tune it.
    """
    free_a, free_b = comparison_of(a, tuned), comparison_of(b, tuned)
    groups: dict[str, Facts] = {name: {} for name in GROUPS}
    for key, pair in differing(a.science, b.science).items():
        if key.startswith("mixer."):
            group = "mixer"
        elif key in SEEDS:
            group = "seeds"
        elif free_a.get(key) == free_b.get(key) == SENTINEL:
            group = "tuned"
        else:
            group = "everything else"
        groups[group][key] = pair
    for key, (x, y) in differing(free_a, free_b).items():
        groups["everything else"].setdefault(key, (x, y))
    return groups


def host_facts(run: Run) -> dict[str, Any]:
    """Where and how it was computed, which decides nothing here."""
    record = run.record
    facts = {key: record.get(key) for key in ("hardware", "versions", "host") if record.get(key)}
    return flatten(facts) | {"commit": record.get("commit"), "study": record.get("study")}


def _table(console: Console, title: str, facts: Facts, none: str, style: str) -> None:
    if not facts:
        console.print(Text.assemble((f"{title}: ", "bold"), (none, "dim")))
        return
    table = Table(title=title, title_justify="left", title_style=f"bold {style}", box=None, pad_edge=False)
    for column in ("key", "A", "B"):
        table.add_column(column, header_style="dim", overflow="fold")
    for key, pair in facts.items():
        table.add_row(Text(key), *(Text(_show(value)) for value in pair))
    console.print(table)


def _show(value: Any) -> str:
    if value is None:
        return "null"
    return "free (tuned by its study)" if value == SENTINEL else str(value)


def show(a: Run, b: Run, tuned: Sequence[str], console: Console) -> bool:
    """Print the whole difference; may they be compared?"""
    for letter, run in (("A", a), ("B", b)):
        line = f"{letter}  {run.name}  ({run.state}{', ' + str(run.path) if run.path else ''})"
        console.print(Text(line), soft_wrap=True)
        if run.record.get("code_changed"):
            console.print(Text("   continued with changed code: its weights are a mix of two versions", "yellow"))
    for name, facts in science_groups(a, b, tuned).items():
        _table(console, name, facts, "equal", "red" if name == "everything else" else "cyan")
    codes = differing(a.record.get("code", {}), b.record.get("code", {}))
    _table(console, "code (hashes)", codes, "equal", "cyan")
    data = differing(flatten(a.record.get("data", {})), flatten(b.record.get("data", {})))
    _table(console, "data", data, "equal", "cyan")
    _table(console, "host (information)", differing(host_facts(a), host_facts(b)), "equal", "dim")
    forbidding = [difference.key for difference in differences([a, b], tuned)]
    if forbidding:
        console.print(Text(f"may NOT be compared: {', '.join(forbidding)}", "bold red"), soft_wrap=True)
    else:
        console.print(Text("may be compared", "bold green"))
    return not forbidding


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or "-h" in arguments or "--help" in arguments:
        sys.stdout.write(f"{__doc__}\n")
        return 0 if arguments else 2
    try:
        given = parse(arguments, keys=["tuned"], positional=2)
        if len(given.positional) != 2:
            raise UsageError("name two run folders: python -m sweeps.diff RUN_A RUN_B")
        tuned = as_list(given.values.get("tuned"))
        a, b = (read_any(Path(word)) for word in given.positional)
        check_tuned([a, b], tuned)
        if a.name == b.name:  # the same science; two copies may still differ in code and data
            b = Run(b.path, {**b.record, "run_id": f"{b.run_id} (B)"}, b.status)
        return 0 if show(a, b, tuned, Console()) else 1
    except (UsageError, CollectError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
