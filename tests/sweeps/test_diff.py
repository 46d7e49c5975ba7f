"""python -m sweeps.diff: what differs, grouped, and a last line that says whether the runs may be compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runs.identity import flatten
from sweeps.diff import main, science_groups
from sweeps.reports.collect import Run, compact, read_run
from tests.sweeps.synthetic_runs import science, write_run


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.strip().splitlines()[-1]


def test_mixer_and_seed_alone_may_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run(tmp_path, "transformer", seed=0), write_run(tmp_path, "swa", seed=1)
    assert main([str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert out.strip().splitlines()[-1] == "may be compared"
    for word in ("mixer.kind", "mixer.window", "init_seed", "everything else: equal"):
        assert word in out


def test_groups() -> None:
    def run(mixer: str, seed: int, free: dict, **changes: object) -> Run:
        facts = science(mixer, seed, 1e-3, **changes)
        flat = {k: v for k, v in flatten(facts).items() if not k.startswith("mixer.")} | free
        return Run(Path(), {"run_id": mixer, "mixer": mixer, "science": facts, "comparison": flat}, {})

    free = dict.fromkeys(("seed", "init_seed", "data_seed", "optimizer.lr"), "<free>")
    a = run("transformer", 0, free)
    b = run("swa", 1, free, optimizer__lr=5e-3, model__n_layers=3)
    groups = science_groups(a, b)
    assert set(groups["mixer"]) == {"mixer.kind", "mixer.window"}
    assert set(groups["seeds"]) == {"seed", "init_seed", "data_seed"}
    assert groups["tuned"] == {"optimizer.lr": (1e-3, 5e-3)}
    assert groups["everything else"] == {"model.n_layers": (2, 3)}
    untuned = run("mesa", 0, dict.fromkeys(("seed", "init_seed", "data_seed"), "<free>"), optimizer__lr=5e-3)
    assert "optimizer.lr" in science_groups(a, untuned)["everything else"]
    assert science_groups(a, untuned)["tuned"] == {}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model__d_model": 128}, "model.d_model"),
        ({"lr": 1e-2}, "optimizer.lr"),
        ({"code": {"shared": "other", "mixer": "own-mesa"}}, "code.shared"),
        ({"fingerprint": "beef"}, "data fingerprint"),
        ({"tuned": ["optimizer.lr"]}, "optimizer.lr"),
    ],
)
def test_a_difference_that_forbids_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict, named: str
) -> None:
    a, b = write_run(tmp_path, "swa"), write_run(tmp_path, "mesa", **change)
    assert main([str(a), str(b)]) == 1
    assert last_line(capsys) == f"may NOT be compared: {named}"


def test_tuned_keys_can_be_freed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run(tmp_path, "swa", lr=1e-3), write_run(tmp_path, "mesa", lr=1e-2)
    assert main([str(a), str(b), "tuned=[optimizer.lr]"]) == 0
    assert last_line(capsys) == "may be compared"


def test_the_same_run_twice_and_a_rerun_with_other_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a")
    assert main([str(a), str(a)]) == 0
    b = write_run(tmp_path / "b", code={"shared": "5a4ed0000001", "mixer": "rewritten"})
    assert a.name == b.name
    assert main([str(a), str(b)]) == 1
    assert last_line(capsys) == "may NOT be compared: code.mixer of swa"


def test_host_facts_are_information(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path, "swa")
    b = write_run(tmp_path, "mesa", record={"hardware": {"cpu": "Another CPU"}})
    assert main([str(a), str(b)]) == 0
    assert "Another CPU" in capsys.readouterr().out


def test_a_compact_record_will_do(tmp_path: Path) -> None:
    a, b = write_run(tmp_path, "swa"), write_run(tmp_path, "mesa")
    small = tmp_path / "small.json"
    small.write_text(json.dumps(compact(read_run(b))))
    assert main([str(a), str(small)]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{a}", "{tmp}/nothing"], "no such folder"),
        (["{a}", "{tmp}"], "not a run folder"),
        (["{a}"], "name two run folders"),
        (["{a}", "{a}", "{a}"], "not key=value"),
        (["{a}", "{a}", "tunde=[x]"], "Did you mean 'tuned'?"),
        (["{a}", "{a}", "tuned=[optimizer.lrr]"], "no run has this key"),
        (["{a}", "{a}", "--verbose"], "unknown flag"),
    ],
)
def test_nonsense_is_answered_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    a = write_run(tmp_path, "swa")
    assert main([word.format(a=a, tmp=tmp_path) for word in arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1


def test_a_damaged_record_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path, "swa")
    (a / "run.json").write_text('{"run_id": "x", ')
    assert main([str(a), str(a)]) == 2
    assert "run.json: damaged" in capsys.readouterr().err
    (a / "run.json").write_text('{"run_id": "x"}')
    assert main([str(a), str(a)]) == 2
    assert "lacks mixer, science, comparison" in capsys.readouterr().err
