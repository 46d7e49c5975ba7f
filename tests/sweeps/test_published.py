"""Every report in the repository is what its committed records give, byte for byte."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from sweeps.report import make
from sweeps.reports.format import si, signed
from tests.runs.commands import ROOT

TEXT = (".html", ".md", ".csv", ".json")


def published() -> list[Path]:
    """Folders of reports that git knows: what else lies under results/ is the user's."""
    listed = subprocess.run(
        ["git", "ls-files", "results/*/report.json", "docs/*/report.json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [(ROOT / line).parent for line in listed.stdout.split()]


@pytest.mark.parametrize("folder", published(), ids=lambda folder: folder.name)
def test_a_published_report_follows_from_its_records(folder: Path, tmp_path: Path):
    command = shlex.split(json.loads((folder / "report.json").read_text())["command"])
    words = command[command.index("sweeps.report") + 1 :]
    unpublished = tmp_path / folder.name
    unpublished.mkdir()
    for name in ("runs", "study.json", "yardstick.json"):
        if (folder / name).exists():
            (unpublished / name).symlink_to(folder / name)
    make(study=folder.name, results=tmp_path, output=tmp_path / "again", command=words)
    again = {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir() if path.suffix in TEXT}
    kept = {path.name for path in folder.iterdir() if path.suffix in TEXT and path.name != "study.json"}
    assert set(again) == kept
    for name, content in again.items():
        assert content == (folder / name).read_bytes(), f"{folder.name}/{name}"


def test_the_readmes_first_table_is_the_reports() -> None:
    """Every figure of it, row by row, in the report's order."""
    content = json.loads((ROOT / "results" / "text_bpe" / "report.json").read_text())

    def cell(mean: float, ci95: list[float], sign: bool = False) -> str:
        number = signed(mean, 4) if sign else f"{mean:.4f}"
        return f"{number} ± {(ci95[1] - ci95[0]) / 2:.4f}"

    wanted = []
    for row in content["rows"]:
        own = cell(row["mean"], row["ci95"])
        if row["rank"] is None:
            wanted.append(["", own, "", "", "", ""])
            continue
        difference = row["difference"]
        over = difference["over_seeds"] if difference else None
        against = cell(over["mean"], over["ci95"], sign=True) if over else "reference"
        verdict = difference["verdict"] if difference else ""
        wanted.append([row["mixer"], own, against, verdict, si(row["train_flops"]), si(row["state_bytes"], "B", 1024)])
    wanted.append(["", f"*{content['yardstick']['bits_per_byte']:.4f}*", "", "", "", ""])
    table = (
        (ROOT / "README.md").read_text(encoding="utf-8").split("| mixer | bits per byte, test |")[1].split("\n\n")[0]
    )
    shown = [[part.strip() for part in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    named = [re.match(r"`(\w+)`", row[0]) for row in shown]
    assert [[name[1] if name else "", *row[1:]] for name, row in zip(named, shown, strict=True)] == wanted
