"""Two-pass models in the report: ranked as deployed, teacher-forced beside it; and all mixers at equal training FLOPs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from sweeps.report import main, make
from tests.sweeps.synthetic_runs import write_run

DRIFT = {
    "edges": [0, 8, 16, 64],
    "teacher_forced": [0.1, 0.1, 0.1],
    "recurrent": [0.1, 0.2, 0.4],
    "train_length": 32,
    "rows": 4,
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two seeds of attention with a window, and of a model that looks better teacher-forced than it is."""
    for seed in (0, 1):
        write_run(tmp_path, "swa", seed=seed, bits=2.0 + 0.01 * seed)
        folder = write_run(
            tmp_path, "maglev", seed=seed, bits=2.1 + 0.02 * seed, record={"mode": "recurrent", "drift": DRIFT}
        )
        record = json.loads((folder / "run.json").read_text())
        record["metrics"]["test/recurrent/bits_per_byte"] = record["metrics"]["test/bits_per_byte"]
        record["metrics"]["test/teacher_forced/bits_per_byte"] = 1.9 + 0.01 * seed
        record["counts"]["train_flops_per_token"] *= 2
        record["counts"]["train_flops"] *= 2
        (folder / "run.json").write_text(json.dumps(record))
    return tmp_path


def board_of(results: Path):
    return make(study="default", results=results, reference="swa", yardstick=False)


def test_the_deployed_number_is_ranked_and_the_other_stands_beside_it(results: Path) -> None:
    _, content, folder = board_of(results)
    rows = [(row["rank"], row["mixer"], row["mode"]) for row in content["rows"]]
    assert rows == [(1, "swa", "parallel"), (2, "maglev", "recurrent"), (None, "maglev", "teacher-forced")]
    deployed, forced = content["rows"][1:]
    assert deployed["mean"] == pytest.approx(2.11) and forced["mean"] == pytest.approx(1.905)
    assert forced["minus_deployed"]["mean"] == pytest.approx(-0.205)
    assert deployed["tokens"] == 200 * 16 * 256 and deployed["train_flops"] == 2 * content["rows"][0]["train_flops"]
    page = (folder / "report.html").read_text()
    assert page.index(">swa<") < page.index(">maglev<") < page.index('class="other">teacher-forced')
    assert "ranked by what is deployed" in page


def test_speed_of_recurrent_scoring_is_shown_where_it_was_measured(results: Path) -> None:
    assert "scored" not in board_of(results)[2].joinpath("report.html").read_text()
    for rate, path in zip((800.0, 900.0), sorted(results.glob("runs/default/maglev-*/run.json")), strict=True):
        record = json.loads(path.read_text())
        record["timing"]["scoring_recurrent_tokens_per_s"] = rate
        path.write_text(json.dumps(record))
    page = board_of(results)[2].joinpath("report.html").read_text()
    assert page.count("<small>scored 850</small>") == 1 and "token by token, many sequences side by side" in page


def test_terminal_says_that_it_is_not_deployed(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["study=default", f"paths.results={results}", "reference=swa", "yardstick=false"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "teacher-forced" in line]
    assert "1.905" in line and "not deployed" in line


def test_drift_is_drawn_where_it_was_measured(results: Path, tmp_path: Path) -> None:
    _, _, folder = board_of(results)
    assert (folder / "drift.png").stat().st_size > 5000
    assert "Drift of the memory" in (folder / "report.html").read_text()
    other = tmp_path / "other"
    write_run(other, "swa")
    assert not (make(study="default", results=other, yardstick=False)[2] / "drift.png").exists()


def test_equal_flops_are_read_off_the_validation_curves(results: Path) -> None:
    _, content, folder = board_of(results)
    found = content["equal_flops"]
    swa, maglev = found["rows"]
    assert found["train_flops"] == content["rows"][0]["train_flops"]
    assert swa["mean"] == pytest.approx(np.mean([2.0, 2.01]) + 4 * math.exp(-5)) and swa["share_of_schedule"] == 1
    # Half the tokens: the synthetic curve is validated at step 100 of 200, so nothing is interpolated.
    assert maglev["share_of_schedule"] == 0.5 and maglev["tokens"] == 100 * 16 * 256
    assert maglev["mean"] == pytest.approx(np.mean([2.1, 2.12]) + 4 * math.exp(-2.5))
    assert maglev["difference"] == pytest.approx(maglev["mean"] - swa["mean"])
    assert "At equal training FLOPs" in (folder / "report.html").read_text()
    assert any(
        "training FLOPs differ from swa's" in warning and "maglev +100 %" in warning for warning in content["warnings"]
    )


def test_another_number_of_steps_is_a_budget_of_its_own(tmp_path: Path) -> None:
    """Equal FLOPs by more steps: ``steps`` is free then, and the reader is told."""
    write_run(tmp_path, "maglev", tuned=["steps"])
    write_run(tmp_path, "swa", tuned=["steps"], steps=400)
    _, content, folder = make(study="default", results=tmp_path, yardstick=False)
    assert any("training tokens differ" in warning for warning in content["warnings"])
    page = (folder / "report.html").read_text()
    assert "<dt>training tokens each</dt><dd>819 k \N{EN DASH} 1.64 M</dd>" in page and "1 threads" not in page


def test_equal_budgets_need_no_lining_up(tmp_path: Path) -> None:
    for mixer in ("swa", "hyena"):
        write_run(tmp_path, mixer)
    _, content, folder = make(study="default", results=tmp_path, yardstick=False)
    assert content["equal_flops"] is None
    assert "At equal training FLOPs" not in (folder / "report.html").read_text()


def test_a_mixer_that_was_not_validated_so_early_has_no_number(results: Path) -> None:
    for path in results.glob("runs/default/maglev-*/metrics.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows if row["step"] > 100 or "val/loss" not in row))
    _, content, folder = board_of(results)
    maglev = content["equal_flops"]["rows"][1]
    assert (maglev["mean"], maglev["n"], maglev["difference"]) == (None, 0, None)
    assert "not validated so early" in (folder / "report.html").read_text()
