"""Which runs a command evaluates: studies by their finished runs, and what is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval import arguments
from evals import targets
from evals.positions import PositionsConfig
from evals.run import Settings
from evals.suite import Subject
from tests.sweeps.synthetic_runs import write_run, write_study


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, list[Path]]:
    """A study of two mixers and two seeds with a trial; one run failed. Folders have what a check looks for."""
    found = {
        mixer: [
            write_run(
                tmp_path, mixer, study="demo", seed=seed, state="failed" if (mixer, seed) == ("mesa", 1) else "done"
            )
            for seed in (0, 1)
        ]
        for mixer in ("swa", "mesa")
    }
    trial = write_run(tmp_path, "mesa", study="demo", seed=100)
    write_study(tmp_path, "demo", found, trials={"mesa": [(3e-3, 2.0)]})
    for run in [*found["swa"], *found["mesa"], trial]:
        (run / "config.yaml").write_text("")
        (run / "checkpoints").mkdir()
        (run / "checkpoints" / "last.ckpt").write_text("")
    return found


def settings(root: Path, run: Any, **more: Any) -> Settings:
    made = Settings(run=run, results=str(root), **more)
    made.check("")
    return made


def test_a_study_stands_for_its_finished_runs(runs: dict[str, list[Path]], tmp_path: Path) -> None:
    done = [*runs["swa"], runs["mesa"][0]]
    assert targets.runs_of_study(tmp_path, "demo") == (done, [runs["mesa"][1].name])
    assert settings(tmp_path, "study:demo").folders == list(map(str, done))
    assert settings(tmp_path, "study:demo", mixers=["swa"]).folders == list(map(str, runs["swa"]))
    extra = [str(runs["swa"][0]), "study:demo", "hf:here/gpt2"]
    assert settings(tmp_path, extra).folders == [*map(str, done), "hf:here/gpt2"]  # each once


@pytest.mark.parametrize(
    ("run", "more", "message"),
    [
        ("study:nosuch", {}, "study=nosuch: no study was run under .* Studies there: demo"),
        ("study:demo", {"mixers": ["hyena"]}, "mixers=hyena: must be one of study demo: swa, mesa"),
        ("hf:gpt2", {"mixers": ["swa"]}, "mixers=.'swa'.: narrows a study, and none is named"),
        ("nowhere", {}, "run=nowhere: no run folder"),
    ],
)
def test_what_is_not_there_is_refused(
    runs: dict[str, list[Path]], tmp_path: Path, run: str, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        settings(tmp_path, run, **more)


def test_a_study_without_a_finished_run_is_refused(runs: dict[str, list[Path]], tmp_path: Path) -> None:
    for run in runs["mesa"]:
        (run / "status.json").write_text(json.dumps({"state": "running"}))
    with pytest.raises(ValueError, match="study=demo: none of its 2 runs is finished"):
        targets.runs_of_study(tmp_path, "demo", ["mesa"])


def test_a_run_without_a_checkpoint_is_refused(runs: dict[str, list[Path]], tmp_path: Path) -> None:
    (runs["swa"][0] / "checkpoints" / "last.ckpt").unlink()
    with pytest.raises(ValueError, match=r"run=.*: holds no checkpoint yet"):
        settings(tmp_path, "study:demo")
    with pytest.raises(ValueError, match=r"suite.positions.reference=.*: holds no checkpoint yet"):
        PositionsConfig(reference=str(runs["swa"][0])).check("suite.positions")


def test_a_reference_needs_a_checkpoint_at_the_same_step(
    runs: dict[str, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    like = Subject("mesa-1", None, None, None, 200)  # type: ignore[arg-type]
    monkeypatch.setattr(Subject, "device", "cpu")
    monkeypatch.setattr(targets, "subjects", lambda folder, device, step, **_: iter(()))
    with pytest.raises(ValueError, match=r"key=.*: has no checkpoint at step 200, at which mesa-1 is evaluated"):
        targets.at_step("key", runs["swa"][0], like)


def test_the_shorthand_for_a_study() -> None:
    assert arguments(["study=demo", "batch=2"]) == ["run=study:demo", "batch=2"]
    assert arguments(["-m", "study=a,b"]) == ["-m", "run=study:a,study:b"]
    assert arguments(["study=[a,b]"]) == ["run=[study:a,study:b]"]
    assert arguments(["run=here"]) == ["run=here"]
    with pytest.raises(SystemExit, match="name one of the two"):
        arguments(["study=demo", "run=here"])
