"""Parts of a report that some runs have: slices of tasks, positions, diagnostics, matched budgets, failures; and the
report as Markdown and CSV."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sweeps.report import main, make
from sweeps.reports.collect import CollectError, compact, public_command, read_run, settled, thinned
from sweeps.reports.export import report_json
from tests.sweeps.synthetic_runs import write_run

GAPS = (1, 4, 16)
MQAR = {"kind": "mqar", "seq_len": 64, "pairs": [4, 8]}


def change(folder: Path, **parts: Any) -> None:
    """Replace parts of run.json; ``metrics`` are added to those that there are."""
    record = json.loads((folder / "run.json").read_text())
    metrics = {**record.get("metrics", {}), **parts.pop("metrics", {})}
    (folder / "run.json").write_text(json.dumps({**record, **parts, "metrics": metrics}))


def write_task(root: Path, mixer: str, seed: int, accuracy: float) -> Path:
    """A run of a task with accuracies by gap."""
    folder = write_run(root, mixer, seed=seed)
    record = json.loads((folder / "run.json").read_text())
    record["science"]["data"] = MQAR
    record["science"]["tokenizer"] = None
    record["comparison"] = {
        key: value for key, value in record["comparison"].items() if not key.startswith(("data.", "tokenizer."))
    }
    record["metrics"] = {
        "test/accuracy": accuracy,
        "test/loss": 1 - accuracy,
        "val/accuracy": accuracy,
        **{f"test/accuracy/gap={gap}": accuracy - gap / 100 for gap in GAPS},
    }
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "test_documents.npz").unlink()
    return folder


def of_default(root: Path, **more: Any) -> tuple[dict[str, Any], Path, str]:
    """report.json, the folder and the page of the plain study of swa and mesa."""
    _, content, folder = make(study="default", results=root, yardstick=False, **more)
    return content, folder, (folder / "report.html").read_text()


# ---- slices ----------------------------------------------------------------------------------------------------------


def test_slices_have_means_intervals_and_chance(tmp_path: Path) -> None:
    for seed, noise in enumerate((0.0, 0.02)):
        write_task(tmp_path, "swa", seed, 0.5 + noise)
        write_task(tmp_path, "mesa", seed, 0.9 + noise)
    content, folder, page = of_default(tmp_path)
    (one,) = content["slices"]
    assert (one["slice"], one["metric"], one["labels"]) == ("gap", "test/accuracy", list(GAPS))
    assert one["chance"] == pytest.approx(2 / 12)  # of 4 or 8 pairs, one value is right
    assert one["mixers"]["mesa"]["mean"] == pytest.approx([0.91 - gap / 100 for gap in GAPS])
    assert one["mixers"]["mesa"]["values"][0] == pytest.approx([0.9 - GAPS[0] / 100, 0.92 - GAPS[0] / 100])
    low, high = one["mixers"]["swa"]["ci95"][0]
    assert low < 0.5 < high
    assert (folder / "slices.svg").exists() and 'id="slices"' in page and "0.167" in page
    assert content["metric"] == "test/accuracy" and content["rows"][0]["mixer"] == "mesa"
    assert "64 tokens" in page and "solves mqar" in page


def test_mixers_that_share_the_best_figure_are_all_named(tmp_path: Path) -> None:
    for mixer, accuracy in (("swa", 1.0), ("mesa", 1.0), ("mamba2", 0.4)):
        for seed in (0, 1):
            write_task(tmp_path, mixer, seed, accuracy)
    finding = of_default(tmp_path)[0]["finding"]
    assert finding[0] == "mesa and swa have the highest mean, 1.000 accuracy."


def test_seeds_that_disagree_are_listed(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.17, 1.0, 0.99)):
        write_task(tmp_path, "swa", seed, accuracy)
        write_task(tmp_path, "mesa", seed, 0.5 + 0.1 * seed)
    found = [one for one in of_default(tmp_path)[0]["warnings"] if "disagree" in one]
    assert len(found) == 1 and found[0].endswith("more than that: swa 0.17, 0.99, 1.00")


def test_regression_is_cut_by_its_excess(tmp_path: Path) -> None:
    for mixer in ("swa", "mesa"):
        change(
            write_run(tmp_path, mixer),
            metrics={
                "test/excess": 0.2,
                "test/excess/seen=10": 0.1,
                "test/excess/seen=2": 0.4,
                "test/loss/seen=2": 9.0,
            },
        )
    content, _, _ = of_default(tmp_path)
    (one,) = content["slices"]
    assert (one["metric"], one["labels"], one["chance"]) == ("test/excess", [2, 10], None)
    assert one["mixers"]["swa"]["mean"] == [0.4, 0.1]


def test_a_slice_that_one_seed_lacks_has_no_figure(tmp_path: Path) -> None:
    write_task(tmp_path, "swa", 0, 0.5)
    lacking = write_task(tmp_path, "swa", 1, 0.5)
    record = json.loads((lacking / "run.json").read_text())
    del record["metrics"]["test/accuracy/gap=4"]
    (lacking / "run.json").write_text(json.dumps(record))
    assert of_default(tmp_path)[0]["slices"][0]["mixers"]["swa"]["mean"] == [0.49, None, pytest.approx(0.34)]


def test_runs_of_text_have_no_such_sections(tmp_path: Path) -> None:
    write_run(tmp_path, "swa")
    content, folder, page = of_default(tmp_path)
    assert (content["slices"], content["positions"], content["diagnostics"], content["failures"]) == ([], {}, [], [])
    for name in ("slices", "positions", "diagnostics", "drift", "sensitivity"):
        assert not (folder / f"{name}.png").exists() and f'id="{name}"' not in page
    assert "None: all 1 runs finished" in page


# ---- positions -------------------------------------------------------------------------------------------------------


def test_positions_are_drawn_where_all_seeds_have_them(tmp_path: Path) -> None:
    places = {"edges": [0, 1, 2, 4, 512], "mean": [5.0, 4.0, 3.5, 3.0]}
    for seed in (0, 1):
        change(write_run(tmp_path, "swa", seed=seed), positions=places)
    change(write_run(tmp_path, "mesa", seed=0), positions=places)
    write_run(tmp_path, "mesa", seed=1)
    content, folder, page = of_default(tmp_path)
    assert content["positions"] == {"swa": [places, places]}
    assert (folder / "positions.png").exists() and "Loss by position" in page
    assert "training length" in (folder / "positions.svg").read_text()  # 512 is beyond it


@pytest.mark.parametrize(
    "places",
    [
        {"edges": [0, 1], "mean": [5.0, 4.0]},
        {"edges": [0, 2, 1], "mean": [5.0, 4.0]},
        {"edges": [0], "mean": []},
        {"mean": [1.0]},
    ],
)
def test_positions_of_another_form_are_refused(tmp_path: Path, places: dict) -> None:
    change(write_run(tmp_path, "swa"), positions=places)
    with pytest.raises(CollectError, match="growing edges from 0, one more than means"):
        of_default(tmp_path)


def test_figures_of_an_earlier_report_do_not_stay(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "swa")
    change(folder, positions={"edges": [0, 1, 2], "mean": [5.0, 4.0]})
    _, out, _ = of_default(tmp_path)
    assert (out / "positions.png").exists()
    change(folder, positions=None)
    of_default(tmp_path)
    assert not (out / "positions.png").exists() and not (out / "positions.svg").exists()
    assert (out / "curve_tokens.png").exists()


# ---- diagnostics -----------------------------------------------------------------------------------------------------


def test_diagnostics_are_of_the_last_row_by_layer_and_head(tmp_path: Path) -> None:
    for seed in (0, 1):
        folder = write_run(tmp_path, "mesa", seed=seed)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for row in (row for row in rows if "val/loss" in row):
            for head in (0, 1):
                row[f"diagnostics/half_life/layer0/head{head}"] = row["step"] + 10.0 * head + seed
                row[f"diagnostics/half_life/layer10/head{head}"] = 7.0
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_run(tmp_path, "swa", seed=0)
    content, out, page = of_default(tmp_path)
    (one,) = content["diagnostics"]
    assert one["what"] == "half_life" and list(one["mixers"]) == ["mesa"]
    layers = one["mixers"]["mesa"]
    assert layers[0] == [200.5, 210.5] and layers[10] == [7.0, 7.0] and layers[1] == []
    assert (out / "diagnostics.svg").exists() and "half-life of what is stored" in page


def test_a_compact_record_keeps_few_rows_with_diagnostics(tmp_path: Path) -> None:
    rows = [{"step": s, "val/loss": 1.0, "diagnostics/half_life/layer0/head0": 1.0} for s in range(100)]
    kept = thinned(rows)
    having = [row["step"] for row in kept if len(row) == 3]
    assert len(kept) == 100 and len(having) == 8 and having[-1] == 99


# ---- budgets ---------------------------------------------------------------------------------------------------------


def matched(kind: str, residual: float | None, width: int = 380) -> dict[str, Any]:
    return {"kind": kind, "reference": "swa", "residual": residual, "knob": "model.mlp_width", "value": width}


@pytest.mark.parametrize(
    ("kind", "residual", "warned"),
    [
        ("params", 0.004, None),
        (
            "params",
            -0.006,
            "mesa: misses the parameters without embeddings of swa by -0.60 %, more than the 0.5 % allowed",
        ),
        ("flops", 0.009, None),
        ("flops", 0.012, "mesa: misses the training FLOPs of swa by +1.20 %, more than the 1 % allowed"),
        ("state", None, "mesa: the state bytes of swa could not be met"),
    ],
)
def test_a_matched_budget_is_shown_and_a_miss_is_told(
    tmp_path: Path, kind: str, residual: float | None, warned: str | None
) -> None:
    change(write_run(tmp_path, "swa", model__mlp_width=192), match=matched(kind, 0.0, 192))
    folder = write_run(tmp_path, "mesa", bits=1.9, model__mlp_width=192)
    counts = json.loads((folder / "run.json").read_text())["counts"]
    change(folder, match=matched(kind, residual), counts={**counts, "params_non_embedding": 150_000})
    content, _, page = of_default(tmp_path)
    about = [w for w in content["warnings"] if "misses" in w or "could not be met" in w]
    assert about == ([] if warned is None else [warned])
    # Where parameters were matched the plain warning on them would only repeat or contradict it.
    assert any(w.startswith("parameters without") for w in content["warnings"]) == (kind != "params")
    assert content["rows"][0]["match"] == matched(kind, residual)
    assert "Budgets were matched to the" in page and "model.mlp_width = 380" in page
    # The configs say one width, the models have another: no proof that it was equal.
    assert content["proof"]["moved"] == {"model.mlp_width": [192, 380]}
    assert "model.mlp_width" not in content["proof"]["equal"]
    assert "Nothing but the mixer, and model.mlp_width to make budgets equal, differed" in page
    assert "For it model.mlp_width (192 to 380) was moved" in page


def test_budgets_matched_to_different_things_are_told(tmp_path: Path) -> None:
    change(write_run(tmp_path, "swa"), match=matched("params", 0.0))
    write_run(tmp_path, "mesa")
    warnings = of_default(tmp_path)[0]["warnings"]
    assert "not all budgets were matched alike: swa params of swa, mesa none" in warnings or (
        "not all budgets were matched alike: mesa none, swa params of swa" in warnings
    )


# ---- failures --------------------------------------------------------------------------------------------------------


def test_failures_and_divergences_have_their_place(tmp_path: Path) -> None:
    bad = write_run(tmp_path, "swa", seed=0, spikes=2, diverged=True)
    write_run(tmp_path, "swa", seed=1)
    broken = write_run(tmp_path, "mesa", state="failed")
    status = json.loads((broken / "status.json").read_text())
    (broken / "status.json").write_text(
        json.dumps({**status, "error": "OSError: /home/someone/runs/x.ckpt: disk full"})
    )
    content, _, page = of_default(tmp_path)
    found = [(one["who"], one["what"], one["counts"]) for one in content["failures"]]
    assert found == [(broken.name, "failed", True), (bad.name, "diverged", True), (bad.name, "spikes", True)]
    section = page[page.index('id="failures"') :]
    assert "x.ckpt: disk full" in section and "/home/someone" not in page


# ---- Markdown and CSV ------------------------------------------------------------------------------------------------


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """mesa better, hyena not told apart from swa, one mixer with an underscore."""
    for seed, noise in enumerate((0.0, 0.011, -0.012)):
        write_run(tmp_path, "swa", seed=seed, bits=2.0 + noise)
        write_run(tmp_path, "mesa", seed=seed, bits=1.9 + noise + 1e-4 * seed)
        write_run(tmp_path, "gated_deltanet", seed=seed, bits=2.0 + noise + (0.02, -0.01, 0.005)[seed])
    return tmp_path


def test_markdown_is_a_table_with_its_verdicts(three: Path) -> None:
    content, folder, page = of_default(three, reference="swa")
    text = (folder / "report.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1 and len(table) == 2 + len(content["rows"])
    assert "mesa has the lowest mean, 1.900 bits per byte." in text
    assert "better: mesa; not distinguishable: gated\\_deltanet" in text
    row = next(row for row in content["rows"] if row["mixer"] == "gated_deltanet")
    needed = row["difference"]["seeds_needed"]
    assert needed > 3 and f"{needed} seeds would tell" in text and f"{needed} seeds would tell" in page
    assert content["comparison_key"] in text and "report.html" not in text


def test_terminal_says_how_many_seeds_would_tell(three: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["study=default", f"paths.results={three}", "reference=swa", "yardstick=false"])
    content = json.loads((three / "default" / "report.json").read_text())
    (needed,) = [r["difference"]["seeds_needed"] for r in content["rows"] if r["mixer"] == "gated_deltanet"]
    assert f"? gated_deltanet: about {needed} seeds would tell" in capsys.readouterr().out


def test_csv_holds_the_figures_of_the_json(three: Path) -> None:
    content, folder, _ = of_default(three, reference="swa")
    with open(folder / "report.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["mixer"] for row in rows] == [row["mixer"] for row in content["rows"]]
    for row, known in zip(rows, content["rows"], strict=True):
        assert float(row["mean"]) == known["mean"] and float(row["ci95_low"]) == known["ci95"][0]
        assert int(row["n"]) == known["n"] and row["verdict"] == ((known["difference"] or {}).get("verdict") or "")
        if known["difference"]:
            assert float(row["difference"]) == known["difference"]["over_seeds"]["mean"]
            assert float(row["detectable"]) == known["difference"]["detectable"]


# ---- what belongs to one machine -------------------------------------------------------------------------------------


def test_command_lines_lose_what_belongs_to_one_machine() -> None:
    command = "/opt/env/bin/python /home/me/isomix/train.py -m mixer=swa paths.results=/scratch/me '+hydra.sweep.dir=/x y' seed=0"
    assert public_command(command) == "python train.py -m mixer=swa seed=0"


def test_compact_records_have_no_folders_of_this_machine(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path, "swa", state="failed", record={"overrides": ["mixer=swa", f"paths.results={tmp_path}"],
        "command": f"python train.py mixer=swa paths.results={tmp_path}"},
    )  # fmt: skip
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "error": f"OSError: {tmp_path}/x: 3 / 4 of it"}))
    small = compact(read_run(folder))
    assert str(tmp_path) not in json.dumps(small)
    assert small["status"]["error"] == "OSError: x: 3 / 4 of it" and small["record"]["overrides"] == ["mixer=swa"]


def test_a_running_run_is_still_running_when_its_record_is_read_back(tmp_path: Path) -> None:
    """A compact record has no heartbeat; that is no sign of death."""
    run = read_run(write_run(tmp_path, "swa", state="running"))
    assert settled(run).state == run.state == "running"


def test_ad_hoc_reports_name_runs_by_where_a_clone_has_them(tmp_path: Path) -> None:
    folders = [write_run(tmp_path, "swa"), write_run(tmp_path, "mesa")]
    listed = ",".join(map(str, folders))
    assert main([f"runs=[{listed}]", f"output={tmp_path / 'out'}", "yardstick=false"]) == 0
    content = json.loads((tmp_path / "out" / "report.json").read_text())
    assert str(tmp_path) not in json.dumps(content)
    assert f"results/runs/default/{folders[0].name}" in content["command"] and "yardstick=false" in content["command"]


def test_json_is_plain(three: Path) -> None:
    board, content, _ = make(study="default", results=three, reference="swa", yardstick=False)
    assert json.loads(json.dumps(report_json(board, ""))) == {**content, "command": ""}
    assert np.isfinite(content["rows"][0]["mean"])
