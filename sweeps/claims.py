"""The claims ledger: what the papers claim, what our studies found, and a verdict for each claim.

python -m sweeps.claims            # writes results/CLAIMS.md and claims.json, and README.md, which lists the studies
python -m sweeps.claims --check    # are they what the reports give?

Keys:  paths.results=results             where the studies' reports are, and the ledger
       claims=FOLDER  studies=FOLDER     other folders than sweeps/ledger (the claims) and sweeps (the studies, with their controls)
Flags: --check   write nothing: exit code 1 if a file differs from what the reports give, or a figure is in no report

Exit code: 0 done, 1 the check failed, 2 a claim names what its report lacks, or a file is damaged.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from runs.folder import write_atomic
from runs.identity import ROOT
from sweeps.cli import UsageError, parse
from sweeps.ledger.check import stale, unsupported
from sweeps.ledger.index import INDEX, index
from sweeps.ledger.statements import FOLDER, ClaimError, read_papers
from sweeps.ledger.verdicts import VERDICTS, judge_all
from sweeps.ledger.write import MARKDOWN, RECORD, markdown, record

KEYS = ("paths.results", "claims", "studies")


def make(results: Path, claims: Path = FOLDER, studies: Path = ROOT / "sweeps") -> tuple[str, str]:
    """The content of CLAIMS.md and of claims.json. Raises ClaimError."""
    ledger = judge_all(read_papers(claims), results, studies)
    return markdown(ledger), json.dumps(record(ledger), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def check(results: Path, text: str, content: str) -> list[str]:
    """What is wrong with the files on disk, one sentence each; nothing if they are what the reports give."""
    return [*stale(results, {MARKDOWN: text, RECORD: content}), *unsupported(results, text, content)]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "-h" in arguments or "--help" in arguments:
        sys.stdout.write(f"{__doc__}")
        return 0
    try:
        given = parse(arguments, keys=KEYS, flags=("--check",))
        results = Path(str(given.values.get("paths.results", "results")))
        claims, studies = given.values.get("claims", FOLDER), given.values.get("studies", ROOT / "sweeps")
        text, content = make(results, Path(str(claims)), Path(str(studies)))
        listing = index(results, Path(str(studies)))
    except (UsageError, ClaimError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if "--check" in given.flags:
        problems = [*check(results, text, content), *stale(results, {INDEX: listing})]
        sys.stderr.write("".join(f"{problem}\n" for problem in problems))
        return 1 if problems else 0
    problems = unsupported(results, text, content)
    if problems:
        sys.stderr.write("".join(f"{problem}\n" for problem in problems))
        return 1
    results.mkdir(parents=True, exist_ok=True)
    for name, written in ((MARKDOWN, text), (RECORD, content), (INDEX, listing)):
        write_atomic(results / name, written)
    counts = json.loads(content)["counts"]
    for paper, found in counts.items():
        sys.stdout.write(f"{paper}: {', '.join(f'{found[verdict]} {verdict}' for verdict in VERDICTS)}\n")
    sys.stdout.write(f"{results / MARKDOWN}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
