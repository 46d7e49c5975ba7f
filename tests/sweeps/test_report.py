"""python -m sweeps.report, on run folders in the real formats: the JSON, the page, the figures, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evals import ngram
from sweeps.report import main, make
from sweeps.reports import bar
from sweeps.reports.collect import CollectError, read_run, thinned
from sweeps.reports.format import decimals, digits_for, duration, si, signed
from sweeps.reports.style import FIXED, looks
from tests.sweeps.synthetic_runs import DOCUMENT_BYTES, write_run, write_study

FIGURES = ("curve_tokens", "curve_flops", "curve_seconds", "quality_state", "quality_params", "sensitivity")
MEANS = {"transformer": 2.0, "mesa": 1.9, "swa": 2.2}


@pytest.fixture(autouse=True)
def small_yardstick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The synthetic documents are those of no corpus: a yardstick of 2.05 bits per byte, hard where runs find it."""
    n = DOCUMENT_BYTES.sum()
    per_byte = np.repeat(np.linspace(0.9, 1.1, len(DOCUMENT_BYTES)), DOCUMENT_BYTES)
    nats = (per_byte * (2.05 * np.log(2) * n / per_byte.sum())).astype(np.float32)
    monkeypatch.setattr(bar, "yardstick", lambda cfg, cache, share: ngram.Yardstick(nats, DOCUMENT_BYTES, 1000))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A study of three mixers and three seeds, the same noise in all."""
    root = tmp_path / "results"
    noise = (0.0, 0.011, -0.012)
    shape = np.linspace(0.9, 1.1, len(DOCUMENT_BYTES))
    runs = {
        mixer: [
            write_run(
                root, mixer, study="demo", seed=seed, bits=bits + noise[seed] + 1e-4 * seed * i,
                document_bits=shape, tuned=["optimizer.lr"], lr=1e-3 if mixer == "mesa" else 3e-3,
            )
            for seed in range(3)
        ]
        for i, (mixer, bits) in enumerate(MEANS.items())
    }  # fmt: skip
    trials = {mixer: [(1e-3, bits + 0.02), (3e-3, bits), (1e-2, bits + 0.1)] for mixer, bits in MEANS.items()}
    write_study(root, "demo", runs, trials=trials, reference="transformer")
    return root


def report(results: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report.json of a command line over the study."""
    code = main(["study=demo", f"paths.results={results}", f"paths.cache={results}/cache", *words])
    path = results / "demo" / "report.json"
    return code, json.loads(path.read_text()) if path.exists() else {}


def row(content: dict[str, Any], mixer: str) -> dict[str, Any]:
    return next(row for row in content["rows"] if row["mixer"] == mixer)


# ---- figures of the JSON ---------------------------------------------------------------------------------------------


def test_rows_are_ranked_and_complete(results: Path) -> None:
    code, content = report(results)
    assert code == 0
    assert [row["mixer"] for row in content["rows"]] == ["mesa", "transformer", "swa"]
    assert [row["rank"] for row in content["rows"]] == [1, 2, 3]
    first = content["rows"][0]
    record = json.loads((results / "runs" / "demo" / first["runs"][0] / "run.json").read_text())
    assert first["mean"] == pytest.approx(np.mean([1.9, 1.9 + 0.0111, 1.9 - 0.012 + 0.0002]))
    assert first["ci95"][0] < first["mean"] < first["ci95"][1]
    assert (first["n"], first["interval_over"], first["unit"]) == (3, "seeds", "bits per byte")
    assert (first["metric"], first["mode"]) == ("test/bits_per_byte", "parallel")
    for key in ("params", "params_non_embedding", "flops_per_token", "train_flops", "state_bytes"):
        assert first[key] == record["counts"][key]
    assert first["tokens_per_s"] == record["timing"]["tokens_per_s"]
    assert content["comparison_key"] == record["comparison_key"]
    assert content["commits"] == [record["commit"]] and content["made_by"] == ["python train.py study=demo"]
    assert content["hardware"] == [record["hardware"]] and content["command"].startswith("python -m sweeps.report")


def test_differences_are_paired_and_have_verdicts(results: Path) -> None:
    _, content = report(results)
    assert row(content, "transformer")["difference"] is None
    mesa, swa = row(content, "mesa")["difference"], row(content, "swa")["difference"]
    assert (mesa["verdict"], swa["verdict"]) == ("better", "worse")
    assert mesa["over_seeds"]["mean"] == pytest.approx(-0.1 + 1e-4)
    assert mesa["over_documents"]["n"] == 3 and mesa["p"] <= mesa["p_holm"] < 0.05
    wide = row(content, "mesa")["ci95"]
    narrow = mesa["over_seeds"]["ci95"]
    assert narrow[1] - narrow[0] < 0.1 * (wide[1] - wide[0])  # the seeds' noise is common to both


def test_yardstick(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, content = report(results)
    assert content["yardstick"]["bits_per_byte"] == pytest.approx(2.05)
    beats = {mixer: row(content, mixer)["beats_yardstick"] for mixer in MEANS}
    assert beats == {"mesa": True, "transformer": True, "swa": False}
    closer = np.full(DOCUMENT_BYTES.sum(), 1.9 * np.log(2), dtype=np.float32)
    monkeypatch.setattr(bar, "yardstick", lambda cfg, cache, share: ngram.Yardstick(closer, DOCUMENT_BYTES, 1000))
    assert row(report(results)[1], "mesa")["beats_yardstick"] is None  # on a par: not to be told apart
    _, without = report(results, "yardstick=false")
    assert row(without, "mesa")["beats_yardstick"] is None


def test_other_metric_and_reference(results: Path) -> None:
    code, content = report(results, "metric=test/loss", "reference=swa")
    assert code == 0 and content["unit"] == "nats per token" and content["reference"] == "swa"
    assert row(content, "mesa")["mean"] == pytest.approx(1.8997 * np.log(2), rel=1e-4)
    assert row(content, "transformer")["difference"]["verdict"] == "better"
    assert content["yardstick"]["test/loss"] == pytest.approx(2.05 * np.log(2))


def test_a_study_may_name_its_metric(results: Path) -> None:
    path = results / "runs" / "demo" / "study.json"
    content = json.loads(path.read_text())
    content["spec"]["report"] = {"metric": "test/perplexity"}
    path.write_text(json.dumps(content))
    assert report(results)[1]["metric"] == "test/perplexity"
    assert report(results, "metric=test/loss")[1]["metric"] == "test/loss"
    content["spec"]["report"] = {"metrics": "test/perplexity"}
    path.write_text(json.dumps(content))
    with pytest.raises(CollectError, match=r"report\.metrics: unknown key.*Did you mean 'metric'"):
        make(study="demo", results=results)


def test_one_seed_is_not_sold_as_a_finding(results: Path) -> None:
    for mixer in MEANS:
        for folder in (results / "runs" / "demo").glob(f"{mixer}-*"):
            if json.loads((folder / "run.json").read_text())["science"]["seed"] > 0:
                shutil.rmtree(folder)
    _, content = report(results)
    mesa = row(content, "mesa")
    assert (mesa["n"], mesa["interval_over"]) == (1, "documents")
    assert mesa["difference"]["verdict"] == "one seed: not decided" and mesa["difference"]["over_seeds"] is None
    assert any("one seed only" in warning for warning in content["warnings"])
    html = (results / "demo" / "report.html").read_text()
    assert "95 % interval over documents" in html and "no difference to transformer is decided" in html
    assert any("seed 1, 2" in item["why"] for item in content["unfinished"])


# ---- which runs ------------------------------------------------------------------------------------------------------


def test_runs_of_other_commands_in_the_folder_stay_out(results: Path) -> None:
    """A trial with fewer steps lies in the same folder, and is no part of the study."""
    write_run(results, "mesa", study="demo", seed=5, bits=0.1, tuned=["optimizer.lr"], steps=10)
    code, content = report(results)
    assert code == 0 and row(content, "mesa")["n"] == 3
    assert len(list((results / "demo" / "runs").glob("*.json"))) == 9


def test_trials_are_not_results(results: Path) -> None:
    """A finished trial at the chosen point is a run of the study, and no row counts it."""
    trial = write_run(results, "mesa", study="demo", seed=100, bits=0.1, lr=1e-3, tuned=["optimizer.lr"])
    path = results / "runs" / "demo" / "study.json"
    content = json.loads(path.read_text())
    content["mixers"]["mesa"]["trials"][0]["run"] = trial.name
    path.write_text(json.dumps(content))
    board, made, _ = make(study="demo", results=results, cache=results)
    assert trial.name in {run.name for run in board.all_runs}
    assert row(made, "mesa")["n"] == 3 and trial.name not in row(made, "mesa")["runs"]


def test_failed_and_missing_runs_are_told(results: Path) -> None:
    folder = next((results / "runs" / "demo").glob("swa-*"))
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "state": "failed", "error": "NotFinite: loss is nan"}))
    gone = next((results / "runs" / "demo").glob("mesa-*"))
    seed = json.loads((gone / "run.json").read_text())["science"]["seed"]
    shutil.rmtree(gone)
    code, content = report(results)
    assert code == 0 and row(content, "swa")["n"] == 2
    assert {"run": folder.name, "state": "failed", "why": "NotFinite: loss is nan"} in content["unfinished"]
    assert len(content["unfinished"]) == 2  # the failed one is not told twice
    assert {"run": "mesa", "state": "missing", "why": f"seed {seed}"} in content["unfinished"]
    html = (results / "demo" / "report.html").read_text()
    assert "NotFinite: loss is nan" in html


def test_tuning_is_shown_with_its_edges(results: Path) -> None:
    _, content = report(results)
    assert row(content, "mesa")["at_edge"] == {"optimizer.lr": "smallest"}
    assert any("mesa (0.001)" in w and "smallest optimizer.lr tried" in w for w in content["warnings"])
    assert not any("swa" in w and "tried" in w for w in content["warnings"])
    trials = row(content, "swa")["trials"]
    assert [t["point"]["optimizer.lr"] for t in trials if t["chosen"]] == [3e-3] and len(trials) == 3
    html = (results / "demo" / "report.html").read_text()
    assert "at the edge of the grid" in html


def test_unequal_parameters_are_told(results: Path) -> None:
    assert not any("parameters" in warning for warning in report(results)[1]["warnings"])
    for folder in (results / "runs" / "demo").glob("mesa-*"):
        record = json.loads((folder / "run.json").read_text())
        record["counts"]["params_non_embedding"] = round(1.05 * record["counts"]["params_non_embedding"])
        (folder / "run.json").write_text(json.dumps(record))
    warnings = report(results)[1]["warnings"]
    assert "parameters without embeddings differ from transformer's: mesa +5.0 %" in warnings


def test_unequal_trials_are_told(results: Path) -> None:
    path = results / "runs" / "demo" / "study.json"
    content = json.loads(path.read_text())
    content["mixers"]["swa"]["trials"].pop()
    path.write_text(json.dumps(content))
    assert any("unequal tuning" in w and "swa 2" in w for w in report(results)[1]["warnings"])


def test_spikes_divergence_and_code_changes_are_told(tmp_path: Path) -> None:
    write_run(tmp_path, "swa", seed=0, spikes=3, diverged=True, record={"code_changed": True})
    write_run(tmp_path, "swa", seed=1)
    _, content, _ = make(study="default", results=tmp_path, cache=tmp_path)
    text = " ".join(content["warnings"])
    assert "3 loss spikes" in text and "1 of 2 runs ended well above" in text and "changed code" in text
    assert (content["rows"][0]["spikes"], content["rows"][0]["diverged"]) == (3, 1)


def test_without_a_study_record_validation_chooses(tmp_path: Path) -> None:
    """Worse on validation but better on test: the test split must not choose."""
    for lr, bits, val in ((1e-3, 1.5, 2.5), (3e-3, 2.0, 2.0)):
        folder = write_run(tmp_path, "swa", lr=lr, bits=bits, tuned=["optimizer.lr"])
        record = json.loads((folder / "run.json").read_text())
        record["metrics"]["val/bits_per_byte"] = val
        (folder / "run.json").write_text(json.dumps(record))
    _, content, _ = make(study="default", results=tmp_path, cache=tmp_path)
    (only,) = content["rows"]
    assert only["point"] == {"optimizer.lr": 3e-3} and only["mean"] == pytest.approx(2.0)
    assert only["at_edge"] == {"optimizer.lr": "largest"}


def test_variants_of_a_mixer_are_rows_of_their_own(tmp_path: Path) -> None:
    folders = [write_run(tmp_path, "swa", mixer__window=w, bits=2 - w / 1000) for w in (32, 64)]
    _, content, folder = make(runs=[str(f) for f in folders], results=tmp_path, cache=tmp_path)
    assert [row["mixer"] for row in content["rows"]] == ["swa (window=64)", "swa (window=32)"]
    assert content["reference"] == "swa (window=32)" and folder == tmp_path / "ad_hoc"
    assert not (tmp_path / "ad_hoc" / "runs").exists()


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_incomparable_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run(tmp_path, "swa"), write_run(tmp_path, "mesa", lr=1e-2)
    words = [f"runs=[{a},{b}]", f"paths.results={tmp_path}"]
    assert main(words) == 1
    assert "optimizer.lr: 0.003" in capsys.readouterr().err
    assert not (tmp_path / "ad_hoc").exists()
    assert main([*words, "tuned=[optimizer.lr]"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["study=nothing"],
            r"study=nothing: no runs under .* Studies with runs: demo\. .*python train.py study=nothing",
        ),
        (["stduy=demo"], r"stduy: unknown key\. Did you mean 'study'\? Valid keys: study, runs"),
        ([], "study=NAME or runs="),
        (["study=demo", "runs=[x]"], "one of the two"),
        (
            ["study=demo", "metric=test/accuracy"],
            r"metric=test/accuracy: not in all runs\. Metrics that are: .*test/loss",
        ),
        (["study=demo", "reference=mamba2"], r"reference=mamba2: must be one of transformer, mesa, swa"),
        (["runs=[/nowhere]"], "/nowhere: no such folder"),
        (["study=demo", "--jsn"], r"--jsn: unknown flag\. Flags: --json"),
        (["demo"], "demo: not key=value"),
    ],
)
def test_errors_say_what_would_be_right(
    results: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main([*words, f"paths.results={results}"]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and len(error.strip().splitlines()) == 1


def test_a_study_without_finished_runs_says_what_there_is(tmp_path: Path) -> None:
    write_run(tmp_path, "swa", state="failed")
    write_run(tmp_path, "mesa", state="preempted")
    with pytest.raises(CollectError, match=r"none of 2 runs .* 1 failed, 1 preempted"):
        make(study="default", results=tmp_path)


def test_the_same_seed_twice_is_refused(tmp_path: Path) -> None:
    """Seeds 0 and 7 with the same init and data seeds are one draw, not two."""
    write_run(tmp_path, "swa", seed=0)
    write_run(tmp_path, "swa", seed=7, init_seed=0, data_seed=0)
    with pytest.raises(CollectError, match="have the same seed"):
        make(study="default", results=tmp_path, cache=tmp_path)


def test_a_dead_run_is_lost(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "swa", state="running")
    assert read_run(folder).state == "running"
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "heartbeat": status["heartbeat"] - 3600}))
    assert read_run(folder).state == "lost"


# ---- files -----------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Collects what a page loads, its ids, and whether tags are balanced."""

    VOID = ("meta", "br", "line", "path", "circle", "use", "rect", "image", "link", "img", "hr")

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "data") and value and not value.startswith("#"):
                self.loads.append(value)
            if name == "id" and value:
                self.ids.append(value)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else(results: Path) -> None:
    _, content = report(results)
    html = (results / "demo" / "report.html").read_text()
    page = Page()
    page.feed(html)
    assert page.open == [] and page.loads == []
    assert "url(http" not in html and "@import" not in html
    assert len(page.ids) == len(set(page.ids))
    assert html.count("<figure") == len(FIGURES)
    for word in (
        "Nothing but the mixer differed",
        content["comparison_key"],
        content["proof"]["shared_code"],
        content["proof"]["data_fingerprint"],
        "5-gram, the yardstick",
        "model.n_layers",
        "rotary, base 10000",
        "python train.py study=demo",
        "0123456789ab",
        "A CPU",
    ):
        assert word in html
    assert "secret-host" not in html


def test_names_from_configs_cannot_break_the_page(tmp_path: Path) -> None:
    write_run(
        tmp_path, "swa", record={"accessories": {"<b>": "<script>alert(1)</script>"}, "command": "python 'a=<b>&c'"}
    )
    make(study="default", results=tmp_path, cache=tmp_path)
    html = (tmp_path / "default" / "report.html").read_text()
    assert "<script" not in html and "&lt;script&gt;" in html and "a=&lt;b&gt;&amp;c" in html


def test_figures(results: Path) -> None:
    report(results)
    for name in FIGURES:
        assert (results / "demo" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "</svg>" in (results / "demo" / f"{name}.svg").read_text()
    drawn = {path.stem for path in (results / "demo").iterdir() if path.suffix in (".png", ".svg")}
    assert drawn == set(FIGURES)


def test_the_three_learning_curves_have_one_loss_axis(results: Path) -> None:
    report(results)
    ticks = []
    for axis in ("tokens", "flops", "seconds"):
        svg = (results / "demo" / f"curve_{axis}.svg").read_text()
        part = svg[svg.index('id="matplotlib.axis_2"') :]
        ticks.append(re.findall(r"text-anchor: end[^>]*>([\d.]+)</text>", part))
    assert len(ticks[0]) > 2 and ticks[0] == ticks[1] == ticks[2]


def test_curves_are_means_over_seeds_on_each_axis(results: Path) -> None:
    from sweeps.reports.plots import curve

    board, _, _ = make(study="demo", results=results, cache=results)
    mesa = board.rows[0]
    tokens, flops, seconds = (curve(mesa, axis, "val/bits_per_byte") for axis in ("tokens", "flops", "seconds"))
    assert tokens is not None and flops is not None and seconds is not None
    steps = [r["step"] for r in mesa.entry.runs[0].rows if "val/loss" in r]
    assert tokens.x.tolist() == [step * 16 * 256 for step in steps]
    assert flops.x == pytest.approx(tokens.x * mesa.count("train_flops_per_token"))
    assert seconds.x == pytest.approx(tokens.x / 9500.0, rel=1e-5)
    at_end = [[r for r in run.rows if "val/loss" in r][-1]["val/bits_per_byte"] for run in mesa.entry.runs]
    assert tokens.mean[-1] == pytest.approx(np.mean(at_end))
    assert (tokens.low[-1], tokens.high[-1]) == pytest.approx((min(at_end), max(at_end)))


def test_a_single_run_makes_a_page(tmp_path: Path) -> None:
    write_run(tmp_path, "swa")
    _, content, folder = make(study="default", results=tmp_path, cache=tmp_path)
    assert content["rows"][0]["difference"] is None and (folder / "report.html").exists()


def test_json_flag_prints_the_json_alone(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, content = report(results, "--json")
    assert json.loads(capsys.readouterr().out) == content


def test_terminal_table(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(results)
    out = capsys.readouterr().out
    lines = {line.split()[0]: line for line in out.splitlines() if line.split()[:1]}
    assert "better" in lines["mesa"] and "1.900 ±" in lines["mesa"] and "reference" in lines["transformer"]
    assert "yardstick: 5-gram 2.050; beaten by mesa, transformer" in out and "report.html" in out


# ---- a fresh clone ---------------------------------------------------------------------------------------------------


def test_the_report_is_made_again_byte_for_byte(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the compact records alone, in another folder, without the corpus."""
    before = report(results)[1]
    made = {path.name: path.read_bytes() for path in (results / "demo").iterdir() if path.is_file()}
    assert {"report.html", "report.json", "report.md", "report.csv", "curve_tokens.svg"} <= set(made)
    size = sum(path.stat().st_size for path in (results / "demo" / "runs").glob("*.json"))
    assert size < 9 * 20_000
    clone = tmp_path / "elsewhere" / "results" / "demo"
    clone.mkdir(parents=True)
    for name in ("runs", "study.json", "yardstick.json"):
        source = results / "demo" / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, clone / name)

    def missing(cfg: object, cache: object) -> None:
        raise FileNotFoundError("data.name=kjv: the embedded corpus needs the package")

    monkeypatch.setattr(bar, "yardstick", missing)
    assert main(["study=demo", f"paths.results={clone.parent}"]) == 0
    again = {path.name: path.read_bytes() for path in clone.iterdir() if path.is_file()}
    assert set(again) == set(made)
    assert [name for name in made if again[name] != made[name]] == []
    for text in (again["report.html"], again["report.json"], again["report.md"]):
        assert str(tmp_path).encode() not in text
    assert before["command"] == "python -m sweeps.report study=demo"


def test_a_kept_yardstick_is_used_only_for_the_same_bytes(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report(results)
    shutil.rmtree(results / "runs")
    kept = results / "demo" / "yardstick.json"
    content = json.loads(kept.read_text())
    kept.write_text(json.dumps({**content, "bytes": [1] * len(content["bytes"])}))

    def missing(cfg: object, cache: object, share: float) -> None:
        raise FileNotFoundError("data.name=kjv: the embedded corpus needs the package")

    monkeypatch.setattr(bar, "yardstick", missing)
    _, without = report(results)
    assert without["yardstick"] is None
    kept.write_text(json.dumps(content))
    assert report(results)[1]["yardstick"] is not None
    kept.write_text(json.dumps({**content, "share": 0.5}))  # of half as much text as these runs have read
    _, without = report(results)
    assert without["yardstick"] is None
    assert any("no yardstick: data.name=kjv" in warning for warning in without["warnings"])


def test_compact_records_hold_no_host_names_and_follow_the_runs(results: Path) -> None:
    report(results)
    folder = results / "demo" / "runs"
    assert len(list(folder.glob("*.json"))) == 9
    assert not any("secret-host" in path.read_text() for path in folder.glob("*.json"))
    (folder / "swa-gone.json").write_text("{}")
    report(results)
    assert not (folder / "swa-gone.json").exists()


def test_thinned_keeps_validations_and_both_ends() -> None:
    rows: list[dict[str, Any]] = []
    for step in range(1, 1001):
        rows.append({"step": step, "train/loss": 1.0})
        if step % 100 == 0:
            rows.append({"step": step, "val/loss": 1.0})
    kept = thinned(rows, 50)
    training = [row["step"] for row in kept if "train/loss" in row]
    assert (training[0], training[-1], len(training)) == (1, 1000, 50)
    assert [row["step"] for row in kept if "val/loss" in row] == list(range(100, 1001, 100))
    assert kept == sorted(kept, key=lambda row: row["step"])


# ---- small things ----------------------------------------------------------------------------------------------------


def test_numbers_for_readers() -> None:
    assert [si(v) for v in (0, 999, 1000, 999_950, 1_638_400, 0.5)] == ["0", "999", "1 k", "1 M", "1.64 M", "0.5"]
    assert [si(v, "B", 1024) for v in (512, 1023, 1024, 1048576)] == ["512 B", "1023 B", "1 KiB", "1 MiB"]
    assert [duration(s) for s in (12.4, 59, 60, 3599, 3600, 12000)] == [
        "12 s",
        "59 s",
        "1 min",
        "1 h",
        "1 h",
        "3 h 20 min",
    ]
    assert [signed(v) for v in (0.01, -0.01, -0.0001)] == ["+0.010", "\N{MINUS SIGN}0.010", "0.000"]
    assert [digits_for(s) for s in (0.3, 0.02, 3.0, 0.0)] == [3, 4, 2, 3]


def test_a_mixer_keeps_its_colour() -> None:
    alone, crowd = looks(["mesa"]), looks([*FIXED, "gla", "hawk"])
    assert alone["mesa"].light == crowd["mesa"].light and alone["mesa"].marker == crowd["mesa"].marker
    assert len({look.light for look in crowd.values()}) == len({look.css for look in crowd.values()}) == 12


def test_no_more_decimals_than_intervals_bear() -> None:
    def board(means: tuple[float, ...], half: float | None, metric: str = "test/bits_per_byte") -> Any:
        high = [None if half is None else mean + half for mean in means]
        estimates = [SimpleNamespace(mean=mean, high=top) for mean, top in zip(means, high, strict=True)]
        return SimpleNamespace(rows=[SimpleNamespace(estimate=e) for e in estimates], metric=metric)

    assert decimals(board((1.6748, 1.6805), 0.006)) == 4  # the spread alone would have five
    assert decimals(board((1.66, 1.73), 0.01)) == 3
    assert decimals(board((1.66, 1.73), 0.004)) == 4
    assert decimals(board((0.999999, 1.0), 1e-6, "test/accuracy")) == 4
    assert decimals(board((1.5,), None)) == 3
