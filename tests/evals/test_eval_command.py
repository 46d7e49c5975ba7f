"""python eval.py on a finished run: files, skipping, what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from runs.folder import read_json
from sweeps.report import make
from tests.runs.commands import ROOT, environment, folders, train
from tests.runs.offline_wandb import read_offline
from tests.sweeps.synthetic_runs import write_study

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with a series of checkpoints."""
    results = tmp_path_factory.mktemp("evaluated")
    train(results, "mixer=maglev", "mixer.window=8", "trainer.keep_every=6", "logger=none")
    (folder,) = folders(results)
    return folder


def evaluate(folder, *words, code=0):
    command = [sys.executable, str(ROOT / "eval.py"), f"run={folder}", "threads=1", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == code, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done


SMALL = (
    "suite.perplexity.max_tokens=640",
    "suite.positions.sequences=5",
    "suite.extrapolation.tokens=256",
    "suite.extrapolation.factors=[1,2]",
)


def test_each_suite_is_a_file_with_its_settings_and_is_made_once(run):
    names = "suite=[perplexity,positions,extrapolation,fredholm,mesa]"
    evaluate(run, names, *SMALL)
    found = {path.name.rsplit("-", 1)[0]: json.loads(path.read_text()) for path in (run / "eval").glob("*.json")}
    assert set(found) == {"perplexity", "positions", "extrapolation", "fredholm", "mesa"}
    assert found["positions"]["settings"]["sequences"] == 5 and found["positions"]["modes"] == [
        "recurrent",
        "teacher_forced",
    ]
    assert {"test/loss", "test/teacher_forced/loss"} <= found["perplexity"]["metrics"].keys()
    assert found["mesa"]["metrics"] == {"loss": None} and "has no solver" in found["mesa"]["reasons"]["loss"]
    assert not list((run / "eval").glob("*.parts"))
    kept = read_json(run / "run.json")["positions"]
    assert kept["mean"] == found["positions"]["tables"]["recurrent"]["mean"]
    again = evaluate(run, names, *SMALL)
    assert again.stdout.count("is there") == 5 and "other code" not in again.stdout + again.stderr
    (one,) = (run / "eval").glob("fredholm-*.json")
    content = json.loads(one.read_text())
    one.write_text(json.dumps({**content, "code": {**content["code"], "evals": "another"}}))
    again = evaluate(run, names, *SMALL)
    said = [line for line in (again.stdout + again.stderr).splitlines() if "was made with other code" in line]
    assert len(said) == 1 and "(evals changed since)" in said[0] and one.name in said[0]
    assert json.loads(one.read_text())["code"]["evals"] == "another"
    one.write_text(json.dumps(content))


def test_a_series_of_checkpoints_is_evaluated(run):
    evaluate(run, "suite=[perplexity]", "suite.perplexity.max_tokens=320", "checkpoint=all")
    steps = sorted(read_json(path)["step"] for path in (run / "eval").glob("perplexity-*.json"))
    assert {6, 12} <= set(steps)


@pytest.fixture(scope="module")
def study(run):
    """The run and one of another mixer as a study; a third is not finished."""
    results = run.parents[2]
    train(results, "mixer=transformer", "logger=none")
    other = next(folder for folder in folders(results) if folder != run)
    write_study(results, "default", {"transformer": [other], "maglev": [run]})
    path = run.parent / "study.json"
    content = json.loads(path.read_text())
    content["mixers"]["swa"] = {"runs": [{"seed": 0, "run": "swa-notdone", "state": "failed"}]}
    path.write_text(json.dumps(content))
    return other


def test_a_study_is_evaluated_and_compared_with_a_reference(run, study):
    """All its finished runs, each with a W&B run, the difference to one of them, and the report of what was found."""
    results = run.parents[2]
    words = ["study=default", f"results={results}", "suite=[positions]", "suite.positions.sequences=5", "logger=wandb"]
    command = [sys.executable, str(ROOT / "eval.py"), *words, f"suite.positions.reference={study}", "threads=1"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "run 2 of 2" in done.stdout and "left out, since not finished: swa-notdone" in done.stdout
    found = {}
    for folder in (run, study):
        contents = [json.loads(path.read_text()) for path in (folder / "eval").glob("positions-*.json")]
        (found[folder],) = [one for one in contents if one["settings"].get("reference") == study.name]
        (made,) = (folder / "eval" / "wandb").glob("offline-run-*/*.wandb")
        sent = read_offline(made)
        assert sent["run"]["job_type"] == "eval" and sent["run"]["group"] == "default"
        assert sent["summary"]["positions/difference"] == found[folder]["metrics"]["difference"]
        assert sent["history"][-1]["tokens"] == 12 * 4 * 32
    tables = found[run]["tables"]
    assert set(found[study]["tables"]["difference"]["mean"]) == {0.0}
    own, other = (one["metrics"]["loss"] for one in (found[run], found[study]))
    assert tables["difference"]["overall"]["mean"] == pytest.approx(
        own - other, abs=0.02
    )  # of sequences, not of tokens
    assert tables["difference"]["overall"]["low"] < tables["difference"]["overall"]["mean"]
    _, content, _ = make(study="default", results=results, yardstick=False)
    measured = [table for table in content["evaluations"] if table["settings"].get("sequences") == 5]
    assert {row["mixer"] for table in measured for row in table["rows"] if table["suite"] == "positions"} >= {"maglev"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["suite=[perplexity]", "suite.perplexity.splits=[valid]"],
            "suite.perplexity.splits=valid: must be one of train, val, test",
        ),
        (["suite=[nosuch]"], "nosuch"),
        (["suite=[]"], "name at least one suite"),
        (["suite=[mesa]", "suite.mesa.tol=[2]"], "suite.mesa.tol=[2.0]: each must be between 0 and 1"),
        (["suite=[perplexity]", "logger=offline"], "logger=offline: no such choice"),
        (["suite=[perplexity]", "mixers=[mesa]"], "mixers=['mesa']: narrows a study, and none is named"),
        (
            ["suite=[positions]", "suite.positions.reference=nowhere"],
            "suite.positions.reference=nowhere: no run folder",
        ),
        (["suite=[perplexity]", "checkpoint=first"], "checkpoint=first: must be one of last, all"),
    ],
)
def test_bad_input_is_refused_by_its_key(run, words, message):
    done = evaluate(run, *words, code=1)
    assert message in done.stderr and "Traceback" not in done.stderr
