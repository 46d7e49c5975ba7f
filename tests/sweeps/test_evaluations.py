"""Evaluations in the report: what stands in one table, intervals and differences, n/a with reasons, figures, and that the
compact records give the same bytes."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from sweeps.report import main, make
from sweeps.reports.collect import CollectError, collect, read_run, settled
from sweeps.reports.compare import holm
from sweeps.reports.evaluations import direction, plain
from sweeps.reports.evaluations_text import blocks
from sweeps.reports.plots_evaluations import paired_by_place
from sweeps.reports.results import MOST_SEQUENCES
from sweeps.reports.table import build
from tests.sweeps.synthetic_runs import write_run
from tests.sweeps.test_report import Page

LOSS = {
    "swa": [2.0, 2.011, 1.988],
    "mesa": [1.9, 1.9105, 1.889],
    "hyena": [2.1, 2.16, 2.01],
    "toeplitz": [2.3, 2.31, 2.29],
}
RNG = np.random.default_rng(0)
EDGES = [0, 1, 2, 4]
TEXTS = {mixer: RNG.normal(2.0, 0.3, (3, 10, 3)).round(3) for mixer in LOSS}


def put(run: Path, suite: str, metrics: dict[str, float | None], *, name: str = "a", **parts: Any) -> Path:
    """A result file in a run folder."""
    content = {
        "suite": suite,
        "settings": {"split": "test"},
        "run": run.name,
        "step": 200,
        "modes": ["parallel"],
        "metrics": metrics,
        "reasons": {},
        "tables": {},
        "hardware": {"cpu": "A CPU", "threads": 2, "gpu": None},
        "hostname": "secret-host",
        **parts,
    }
    (run / "eval").mkdir(exist_ok=True)
    path = run / "eval" / f"{suite}-{name}.json"
    path.write_text(json.dumps(content))
    return path


def positions(mixer: str, seed: int) -> dict[str, Any]:
    rows: list[list[float | None]] = TEXTS[mixer][seed].tolist()
    rows[0][0] = None
    return {"parallel": {"edges": EDGES, "mean": [1, 1, 1], "sequences": rows, "each": [2.0] * 10, "loss": 2.0}}


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, list[Path]]:
    """Three seeds of four mixers, of which one is bound to its training length."""
    out: dict[str, list[Path]] = {}
    for mixer, losses in LOSS.items():
        for seed, loss in enumerate(losses):
            run = write_run(tmp_path, mixer, seed=seed, bits=loss)
            out.setdefault(mixer, []).append(run)
            put(run, "perplexity", {"test/loss": loss, "test/accuracy": 1 - loss / 4, "entropy": loss})
            put(run, "positions", {"loss": loss}, tables=positions(mixer, seed))
            bound = mixer == "toeplitz"
            put(
                run,
                "extrapolation",
                {"loss/length=256": loss, "loss/length=512": None if bound else loss + 0.1},
                reasons={"loss/length=512": "mixer toeplitz takes at most 256 tokens"} if bound else {},
            )
    return out


def report(root: Path, **more: Any) -> tuple[Any, dict[str, Any], Path]:
    return make(study="default", results=root, reference="swa", yardstick=False, **more)


def measured(root: Path) -> tuple[Any, dict[str, Any]]:
    """As `report`, without figures and files."""
    runs = [settled(run) for run in collect(root, "default")[0]]
    board = build(runs, name="default", reference="swa")
    return board, {"evaluations": json.loads(json.dumps(plain(board.evaluations), allow_nan=False))}


def of(content: dict[str, Any], suite: str) -> list[dict[str, Any]]:
    return [table for table in content["evaluations"] if table["suite"] == suite]


def row(table: dict[str, Any], mixer: str, metric: str, mode: str = "parallel") -> dict[str, Any]:
    (found,) = [r for r in table["rows"] if (r["mixer"], r["metric"], r["mode"]) == (mixer, metric, mode)]
    return found


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_means_have_intervals_and_differences_are_paired_and_corrected(
    runs: dict[str, list[Path]], tmp_path: Path
) -> None:
    (table,) = of(measured(tmp_path)[1], "perplexity")
    assert (table["settings"], table["step"], table["not_evaluated"]) == ({"split": "test"}, 200, [])
    p = {}
    for mixer, values in LOSS.items():
        found = row(table, mixer, "test/loss")
        wanted = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
        assert (found["mean"], found["n"]) == (pytest.approx(np.mean(values)), 3)
        assert found["ci95"] == pytest.approx(list(wanted)) and found["values"] == pytest.approx(values)
        if mixer != "swa":
            test = stats.ttest_rel(values, LOSS["swa"])
            assert found["difference"] == pytest.approx(np.mean(values) - np.mean(LOSS["swa"]))
            assert found["difference_ci95"] == pytest.approx(list(test.confidence_interval()))
            assert found["p"] == pytest.approx(test.pvalue) and found["pairs"] == 3
            p[mixer] = (test.pvalue, found["p_holm"])
    assert [corrected for _, corrected in p.values()] == pytest.approx(holm([raw for raw, _ in p.values()]))
    verdicts = {mixer: row(table, mixer, "test/loss")["verdict"] for mixer in LOSS}
    assert verdicts == {"swa": None, "mesa": "better", "hyena": "not distinguishable", "toeplitz": "worse"}


def test_what_is_better_depends_on_the_metric(runs: dict[str, list[Path]], tmp_path: Path) -> None:
    (table,) = of(measured(tmp_path)[1], "perplexity")
    assert row(table, "mesa", "test/accuracy")["verdict"] == "better"
    assert row(table, "mesa", "entropy")["verdict"] == "differs" and row(table, "mesa", "entropy")["better"] is None
    assert direction("retained/frozen/compute=0.5") == "higher" and direction("index/layer=0") is None
    assert direction("nats/frozen/compute=0.5") == "lower" and direction("squad/acc_per_token") == "higher"


def test_equal_differences_of_few_steps_are_no_finding(tmp_path: Path) -> None:
    for mixer, right in (("swa", 0.125), ("mesa", 0.25)):
        for seed in (0, 1):
            put(write_run(tmp_path, mixer, seed=seed), "niah", {"accuracy/length=64": right})
    found = row(measured(tmp_path)[1]["evaluations"][0], "mesa", "accuracy/length=64")
    assert (found["difference"], found["verdict"]) == (0.125, "not distinguishable")


def test_one_seed_has_a_difference_and_no_interval(tmp_path: Path) -> None:
    for mixer, loss in (("swa", 2.0), ("mesa", 1.5)):
        put(write_run(tmp_path, mixer), "perplexity", {"test/loss": loss})
    found = row(measured(tmp_path)[1]["evaluations"][0], "mesa", "test/loss")
    assert (found["n"], found["ci95"], found["difference"]) == (1, None, -0.5)
    assert (found["verdict"], found["difference_ci95"]) == ("one seed: not decided", None)


# ---- what stands in one table ----------------------------------------------------------------------------------------


def test_other_settings_and_other_steps_are_other_tables(runs: dict[str, list[Path]], tmp_path: Path) -> None:
    for mixer in ("swa", "mesa"):
        put(runs[mixer][0], "perplexity", {"test/loss": 9.0}, name="b", settings={"split": "val"})
        put(runs[mixer][0], "perplexity", {"test/loss": 8.0}, name="c", step=100)
    board, content, folder = report(tmp_path)
    tables = of(content, "perplexity")
    assert [(t["settings"]["split"], t["step"]) for t in tables] == [("test", 200), ("val", 200), ("test", 100)]
    assert tables[1]["not_evaluated"] == [r.label for r in board.rows if r.label in ("hyena", "toeplitz")]
    assert row(tables[1], "mesa", "test/loss")["values"] == [9.0] and row(tables[0], "mesa", "test/loss")["n"] == 3
    page = (folder / "report.html").read_text()
    assert "<summary>step 200, split=val</summary>" in page and "<summary>step 100</summary>" in page
    assert "2 more with other settings or at other steps" in (folder / "report.md").read_text()


def test_speed_on_other_hardware_is_another_table(tmp_path: Path) -> None:
    rows = [{"context": 64, "batch": 1, "cg_steps": None, "prefill_tokens_per_s": 1e4, "decode_tokens_per_s": 100.0,
             "first_token_s": 0.1, "peak_bytes": None, "state_bytes": 1024}]  # fmt: skip
    for mixer, cpu in (("swa", "A"), ("mesa", "A"), ("hyena", "B")):
        run = write_run(tmp_path, mixer)
        metrics: dict[str, float | None] = {"prefill_tokens_per_s/context=64/batch=1": 1e4}
        put(run, "speed", metrics, tables={"rows": rows}, hardware={"cpu": cpu, "threads": 1, "gpu": None})
    _, content, folder = report(tmp_path)
    assert [table["hardware"]["cpu"] for table in of(content, "speed")] == ["A", "B"]
    assert "on other hardware" in (folder / "report.html").read_text()
    assert (folder / "evaluation_speed.png").exists()


def test_a_run_compared_while_it_was_evaluated_stands_beside_those_that_were_not(
    runs: dict[str, list[Path]], tmp_path: Path
) -> None:
    for run in runs["mesa"]:
        path = run / "eval" / "positions-a.json"
        content = json.loads(path.read_text())
        content["settings"]["reference"] = "swa-1"
        content["metrics"]["difference"] = -0.1
        path.write_text(json.dumps(content))
    (table,) = of(measured(tmp_path)[1], "positions")
    assert {r["mixer"] for r in table["rows"]} == set(LOSS) and {r["metric"] for r in table["rows"]} == {"loss"}


def test_two_pass_models_are_compared_as_deployed(tmp_path: Path) -> None:
    for seed in (0, 1):
        put(write_run(tmp_path, "swa", seed=seed), "perplexity", {"test/loss": 2.0 + 0.1 * seed})
        put(
            write_run(tmp_path, "maglev", seed=seed, record={"mode": "recurrent"}),
            "perplexity",
            {"test/recurrent/loss": 1.9, "test/teacher_forced/loss": 1.5, "test/loss": 1.9},
            modes=["recurrent", "teacher_forced"],
        )
    _, content, folder = report(tmp_path)
    (table,) = of(content, "perplexity")
    assert len(table["rows"]) == 3
    assert row(table, "maglev", "test/loss", "recurrent")["difference"] == pytest.approx(-0.15)
    forced = row(table, "maglev", "test/loss", "teacher_forced")
    assert (forced["mean"], forced["difference"], forced["verdict"]) == (1.5, None, None)
    assert "teacher-forced" in (folder / "report.html").read_text()


def test_what_does_not_exist_has_its_reason(runs: dict[str, list[Path]], tmp_path: Path) -> None:
    put(runs["hyena"][1], "perplexity", {"test/loss": float("nan"), "test/accuracy": 0.5, "entropy": 1.0})
    _, content, folder = report(tmp_path)
    why = "mixer toeplitz takes at most 256 tokens"
    found = row(of(content, "extrapolation")[0], "toeplitz", "loss/length=512")
    assert (found["mean"], found["n"], found["reason"]) == (None, 0, why)
    lacking = row(of(content, "perplexity")[0], "hyena", "test/loss")
    assert (lacking["n"], lacking["pairs"], lacking["reason"]) == (2, 2, "not a finite number")
    for name in ("report.html", "report.md", "evaluations.csv"):
        assert why in (folder / name).read_text()


def test_a_mixer_of_which_a_suite_says_nothing_is_told_once(tmp_path: Path) -> None:
    put(write_run(tmp_path, "swa"), "mesa", {"loss": None}, reasons={"loss": "mixer swa has no solver"})
    figures = {f"{kind}/cg_steps={n}": float(n) for kind in ("loss", "steps") for n in (0, 1)}
    put(write_run(tmp_path, "mesa"), "mesa", figures)
    board, _, folder = report(tmp_path)
    assert [block.title for block in blocks(board.evaluations[0])] == ["loss by cg_steps", "steps by cg_steps"]
    for name in ("report.html", "report.md"):
        assert (folder / name).read_text().count("mixer swa has no solver") == 1
    assert (folder / "evaluation_mesa.png").exists()


# ---- positions -------------------------------------------------------------------------------------------------------


def test_positions_are_paired_by_text(runs: dict[str, list[Path]], tmp_path: Path) -> None:
    board, _, folder = report(tmp_path)
    (table,) = [table for table in board.evaluations if table.suite == "positions"]
    lines = {line.label: line for line in table.lines}
    found = paired_by_place(lines["mesa"], lines["swa"])
    assert found is not None and (folder / "evaluation_positions.svg").exists()
    gaps = (TEXTS["mesa"] - TEXTS["swa"]).mean(axis=0)
    for i, e in enumerate(found):
        column = gaps[1:, 0] if i == 0 else gaps[:, i]  # the first text has no figure at its first position
        wanted = stats.ttest_1samp(column, 0).confidence_interval()
        assert (e.mean, e.low, e.high) == pytest.approx((column.mean(), wanted.low, wanted.high))


def test_long_lists_of_texts_are_kept_as_means_of_neighbours(tmp_path: Path) -> None:
    run = write_run(tmp_path, "swa")
    values = np.random.default_rng(1).normal(size=(3 * MOST_SEQUENCES, 2)).round(3)
    table = {"edges": [0, 1, 2], "mean": [1, 1], "sequences": values.tolist(), "each": [], "loss": 1.0}
    put(run, "positions", {"loss": 1.0}, tables={"parallel": table})
    (kept,) = read_run(run).evals
    assert np.array(kept["tables"]["sequences"]) == pytest.approx(
        values.reshape(MOST_SEQUENCES, 3, 2).mean(axis=1), abs=1e-6
    )


# ---- files -----------------------------------------------------------------------------------------------------------


def test_the_report_is_made_again_from_its_records_byte_for_byte(runs: dict[str, list[Path]], tmp_path: Path) -> None:
    put(runs["swa"][0], "downstream", {"arc/acc": 0.5}, settings={"include_path": "/home/me/tasks"},
        reasons={"x": "no file /home/me/tasks/x"}, tables={"arc": [{"documents": [1.0] * 500}]})  # fmt: skip
    words = ["study=default", "reference=swa", "yardstick=false"]
    assert main([*words, f"paths.results={tmp_path}"]) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "default").iterdir() if path.is_file()}
    assert {"evaluations.csv", "evaluation_positions.png", "evaluation_extrapolation.svg"} <= set(before)
    clone = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "default" / "runs", clone / "default" / "runs")
    assert main([*words, f"paths.results={clone}"]) == 0
    after = {path.name: path.read_bytes() for path in (clone / "default").iterdir() if path.is_file()}
    assert set(after) == set(before) and [name for name in before if after[name] != before[name]] == []
    records = [path.read_text() for path in (clone / "default" / "runs").glob("*.json")]
    assert all("/home/me" not in text and "secret-host" not in text for text in [*records, str(before)])
    assert max(map(len, records)) < 20_000 and not any("documents" in json.loads(t).get("evals", "") for t in records)


def test_page_csv_and_json_have_the_same_figures(runs: dict[str, list[Path]], tmp_path: Path) -> None:
    _, content, folder = report(tmp_path)
    html = (folder / "report.html").read_text()
    page = Page()
    page.feed(html)
    assert page.open == [] and page.loads == [] and len(page.ids) == len(set(page.ids))
    assert {"evaluations", "evaluation-positions", "evaluation_positions"} <= set(page.ids)
    lines = list(csv.DictReader((folder / "evaluations.csv").open()))
    assert len(lines) == sum(len(table["rows"]) for table in content["evaluations"])
    mesa = next(line for line in lines if (line["mixer"], line["metric"]) == ("mesa", "test/loss"))
    found = row(of(content, "perplexity")[0], "mesa", "test/loss")
    assert float(mesa["mean"]) == found["mean"] and float(mesa["difference_low"]) == found["difference_ci95"][0]
    assert json.loads(mesa["settings"]) == {"split": "test"} and mesa["verdict"] == "better"
    assert f"<b>{found['mean']:.3f}</b>" in html


def test_results_of_different_code_are_told(runs: dict[str, list[Path]], tmp_path: Path) -> None:
    for runs_of_one, code in zip(runs.values(), ("a", "b", "b", "b"), strict=True):
        for run in runs_of_one:
            put(run, "perplexity", {"test/loss": 2.0}, code={"shared": code, "evals": "x", "mixer": code})
    _, _, folder = report(tmp_path)
    page = (folder / "report.html").read_text()
    assert page.count("Made by different code (shared)") == 1


def test_without_evaluations_nothing_of_them_is_left(runs: dict[str, list[Path]], tmp_path: Path) -> None:
    folder = report(tmp_path)[2]
    assert (folder / "evaluations.csv").exists() and "<h2>Evaluations" in (folder / "report.html").read_text()
    for found in runs.values():
        for run in found:
            shutil.rmtree(run / "eval")
    content = report(tmp_path)[1]
    assert "evaluations" not in content and not list(folder.glob("evaluation*"))
    assert "Evaluations" not in (folder / "report.html").read_text() + (folder / "report.md").read_text()


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    path = put(write_run(tmp_path, "swa"), "perplexity", {"test/loss": 2.0})
    path.write_text(path.read_text()[:40])
    with pytest.raises(CollectError, match=rf"{path}: no whole result of a suite .* eval.py makes it anew"):
        report(tmp_path)


def test_metrics_with_several_labels_are_laid_out_by_that_with_most_values(tmp_path: Path) -> None:
    figures: dict[str, float | None] = {f"accuracy/length={n}/depth={d}": 0.5 for n in (64, 128) for d in (0, 0.5, 1)}
    put(write_run(tmp_path, "swa"), "niah", {**figures, "accuracy/length=64": 0.5, "plain": 1.0})
    board, _ = measured(tmp_path)
    found = [(block.title, [heading for _, heading in block.columns]) for block in blocks(board.evaluations[0])]
    assert found == [
        ("", ["plain"]),
        ("accuracy by length", ["64"]),
        ("accuracy at length 64 by depth", ["0", "0.5", "1"]),
        ("accuracy at length 128 by depth", ["0", "0.5", "1"]),
    ]
