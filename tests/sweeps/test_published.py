"""Every report in the repository is what its committed records give, byte for byte."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from sweeps.report import make
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
