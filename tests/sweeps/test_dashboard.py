"""python -m sweeps.dashboard: the workspace's specification, without the network."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sweeps.dashboard import PLACEHOLDER, main
from sweeps.reports.style import looks
from tests.sweeps.synthetic_runs import write_run

pytest.importorskip("wandb_workspaces")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for mixer in ("swa", "mesa"):
        write_run(tmp_path, mixer, study="demo")
    return tmp_path


def made(results: Path, *words: str) -> dict[str, Any]:
    """The specification that the command line writes."""
    assert main(["study=demo", f"paths.results={results}", *words]) == 0
    return json.loads((results / "demo" / "dashboard.json").read_text())


def panels(content: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Panels by section."""
    sections = content["spec"]["section"]["panelBankConfig"]["sections"]
    return {section["name"]: section["panels"] for section in sections}


def test_it_has_the_panels_of_the_report(results: Path) -> None:
    content = made(results)
    found = panels(content)
    assert list(found) == ["Leaderboard", "How they learn", "What they keep, and how large they are", "Health"]
    axes = {panel["config"]["xAxis"] for panel in found["How they learn"]}
    assert axes == {"tokens", "train_flops", "seconds"}
    lines = [panel["config"]["metrics"] for panel in found["How they learn"]]
    assert lines[:3] == [["val/bits_per_byte"]] * 3
    text = json.dumps(found["What they keep, and how large they are"])
    for name in ("counts/state_bytes", "counts/params_non_embedding", "test/bits_per_byte"):
        assert name in text
    assert (content["entity"], content["project"], content["name"]) == (PLACEHOLDER, "isomix", "isomix: demo")


def test_it_shows_the_study_grouped_by_mixer_in_the_reports_colours(results: Path) -> None:
    section = made(results)["spec"]["section"]
    runset = json.dumps(section["runSets"])
    assert '"demo"' in runset and "mixer_name" in runset and '"train"' in runset
    colours = set(section["customRunColors"].values())
    assert colours == {look.light for look in looks(["mesa", "swa"]).values()}


def test_tables_and_diagnostics_come_with_the_runs_that_have_them(results: Path) -> None:
    folder = write_run(results, "mesa", study="demo", seed=1)
    record = json.loads((folder / "run.json").read_text())
    record["metrics"]["test/accuracy/gap=4"] = 0.5
    record["positions"] = {"edges": [0, 1], "mean": [5.0]}
    (folder / "run.json").write_text(json.dumps(record))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 201, "tokens": 1, "diagnostics/cg_steps/layer0/head1": 4.0}) + "\n")
    found = panels(made(results))
    assert "tables/slices" in json.dumps(found["Slices and positions"])
    assert "tables/positions" in json.dumps(found["Slices and positions"])
    assert "diagnostics/cg_steps/layer0/head1" in json.dumps(found["Inside the mixers"])


def test_two_pass_models_show_what_is_not_deployed_and_how_far_memories_are_apart(results: Path) -> None:
    assert "Two passes and a recurrence" not in panels(made(results))
    folder = write_run(results, "maglev", study="demo")
    row = {"val/teacher_forced/bits_per_byte": 1.9, "val/teacher_forced/accuracy/gap=4": 0.5, "train/distance": 0.1}
    row |= {f"val/{name}/{place}": 0.1 for name in ("distance", "drift") for place in ("0-7", "8-15", "128-255")}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 201, "tokens": 1, **row}) + "\n")
    found = panels(made(results))
    drawn = [panel["config"]["metrics"] for panel in found["Two passes and a recurrence"]]
    places = ("0-7", "8-15", "128-255")
    assert drawn == [
        ["val/teacher_forced/bits_per_byte"],
        ["train/distance"],
        [f"val/distance/{place}" for place in places],
        [f"val/drift/{place}" for place in places],
    ]
    assert "training loss (of two-pass models: teacher-forced)" in json.dumps(found["How they learn"])


def test_equal_studies_give_equal_files(results: Path) -> None:
    assert made(results) == made(results)


def test_an_accuracy_is_ranked_from_above(results: Path) -> None:
    for path in results.glob("runs/demo/*/run.json"):
        record = json.loads(path.read_text())
        record["metrics"] = {"test/accuracy": 0.5, "val/accuracy": 0.5}
        path.write_text(json.dumps(record))
    content = made(results)
    assert "val/accuracy" in json.dumps(panels(content)["How they learn"])
    assert "higher is better" in json.dumps(panels(content)["Leaderboard"])


def test_push_saves_it(results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import wandb_workspaces.workspaces as ws

    saved: list[Any] = []
    monkeypatch.setattr(ws.Workspace, "save", lambda self: saved.append((self.entity, self.project)))
    monkeypatch.setattr(ws.Workspace, "url", property(lambda self: "the address"))
    made(results, "entity=team", "project=p")
    assert saved == []
    made(results, "entity=team", "project=p", "--push")
    assert saved == [("team", "p")] and "the address" in capsys.readouterr().out

    def refuse(self: Any) -> None:
        raise PermissionError("no key")

    monkeypatch.setattr(ws.Workspace, "save", refuse)
    assert main(["study=demo", f"paths.results={results}", "entity=team", "--push"]) == 1
    assert "W&B: PermissionError: no key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "study: no value"),
        (["study=demo", "--push"], "entity: no value. --push needs to know whose workspace it is"),
        (["study=nothing"], "study=nothing: no runs under"),
        (["study=demo", "entty=x"], "entty: unknown key. Did you mean 'entity'?"),
    ],
)
def test_errors_say_what_would_be_right(
    results: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main([*words, f"paths.results={results}"]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1


def test_without_the_package_it_says_what_to_install(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("wandb_workspaces")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert main(["study=demo", f"paths.results={results}"]) == 2
    assert "wandb-workspaces is not installed: pip install" in capsys.readouterr().err
