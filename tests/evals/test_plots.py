"""Figures of results: what they show is what the JSON says, they are remade from it alone, and what cannot be is said."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from evals.drawing import looks
from evals.extrapolation import ExtrapolationConfig
from evals.extrapolation import evaluate as extrapolation
from evals.fredholm import FredholmConfig
from evals.fredholm import evaluate as fredholm
from evals.groups import GROUPS, Entry
from evals.information import InformationConfig
from evals.mesa import MesaSuiteConfig
from evals.mesa import evaluate as mesa
from evals.niah import NiahConfig
from evals.plots import draw, figures, main
from evals.positions import PositionsConfig
from evals.positions import evaluate as positions
from evals.shown import Shown, labels, load
from evals.suite import Parts, Result
from evals.throughput import SpeedConfig
from sweeps.reports import style
from tests.evals.test_suites import subject_of, texts  # noqa: F401 - a fixture

RUN = "{}-0123456789"


def written(
    folder: Path, suite: str, mixer: str, config: Any, result: Result, step: int = 10, modes: tuple = ("parallel",)
) -> Path:
    """A result's JSON in a run's folder, and the run's record beside it."""
    run = folder / RUN.format(mixer)
    (run / "eval").mkdir(parents=True, exist_ok=True)
    (run / "run.json").write_text(json.dumps({"comparison_key": "same", "data": {"fingerprint": "text"}}))
    content = {"suite": suite, "settings": asdict(config), "run": run.name, "step": step, "modes": list(modes)}
    path = run / "eval" / f"{suite}-{step}.json"
    path.write_text(json.dumps(content | {k: v for k, v in asdict(result).items() if k != "record"}))
    return path


def lines(figure: Figure, panel: int) -> dict[str, tuple[list, list]]:
    """Curves of a panel by their names in the legend."""
    found = {str(line.get_label()): line for line in figure.axes[panel].get_lines()}
    return {
        name: (list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))) for name, line in found.items()
    }  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def results(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:  # noqa: F811
    """Suite -> files, of small untrained models."""
    folder = tmp_path_factory.mktemp("results")
    made: dict[str, list[Path]] = {}
    for name in ("transformer", "mesa", "toeplitz", "maglev"):
        subject = subject_of(name, texts)
        for suite, config, evaluate in (
            ("positions", PositionsConfig(sequences=6), positions),
            ("extrapolation", ExtrapolationConfig(factors=[1, 2, 4], tokens=512), extrapolation),
            ("mesa", MesaSuiteConfig(sequences=2, cg_steps=[0, 2], tol=[1e-2, 1e-4], observed=1), mesa),
            ("fredholm", FredholmConfig(), fredholm),
        ):
            result = evaluate(subject, config, Parts(None))  # type: ignore[operator]
            made.setdefault(suite, []).append(written(folder, suite, name, config, result, modes=subject.model.modes))
    return made


def test_a_mixer_has_the_colour_of_the_reports() -> None:
    names = [*style.FIXED, "hawk"]
    ours, theirs = looks(names), style.looks(names)
    assert {name: (ours[name].colour, ours[name].marker) for name in style.FIXED} == {
        name: (theirs[name].light, theirs[name].marker) for name in style.FIXED
    }
    many = looks([*style.FIXED, *(f"other{i}" for i in range(6))])
    assert len({look.colour for look in many.values()}) == 16


def test_positions_are_those_of_the_file_and_gaps_are_paired(results: dict) -> None:
    shown = load(results["positions"])["positions"]
    (figure,) = figures(shown).values()
    assert [one.label for one in shown] == ["transformer", "mesa", "toeplitz", "maglev"]
    for one in shown:
        for number, mode in enumerate(one.content["modes"]):
            name = one.label if number == 0 else f"{one.label}, teacher-forced"
            assert lines(figure, 0)[name][1] == pytest.approx(one.tables[mode]["mean"])
            assert lines(figure, 1)[name] == (one.tables[mode]["edges"][1:], pytest.approx(one.tables[mode]["so_far"]))
    assert "minus transformer" in figure.axes[2].get_title(loc="left")
    assert set(lines(figure, 2)) & set(style.FIXED) == {"mesa", "toeplitz", "maglev"}
    first, second = (one.tables["parallel"]["sequences"] for one in shown[:2])
    gap = [sum(b[i] - a[i] for a, b in zip(first, second, strict=True)) / len(first) for i in range(3)]
    assert lines(figure, 2)["mesa"][1][:3] == pytest.approx(gap)


def test_gaps_to_another_text_or_to_a_reference_of_the_suite(results: dict, tmp_path: Path) -> None:
    content = json.loads(results["positions"][1].read_text())
    shown = [Shown("a", looks("a")["a"], content, data="text"), Shown("b", looks("b")["b"], content, data="other")]
    assert len(next(iter(figures(shown).values())).axes) == 2, "not paired: they read different texts"
    table = content["tables"]["parallel"]
    n = len(table["mean"])
    content["tables"]["difference"] = {"reference": RUN.format("swa"), "edges": table["edges"], "mean": [0.5] * n, "low": [None] * n, "high": [None] * n}  # fmt: skip
    (figure,) = figures([Shown("mesa", looks(["mesa"])["mesa"], content)]).values()
    assert "minus swa" in figure.axes[2].get_title(loc="left") and lines(figure, 2)["mesa"][1] == [0.5] * n


def test_lengths_beyond_a_bound_are_said(results: dict) -> None:
    shown = load(results["extrapolation"])["extrapolation"]
    (figure,) = figures(shown).values()
    assert "toeplitz: in part n/a, mixer toeplitz takes at most 64 tokens" in figure.get_supxlabel()
    one = shown[0]
    assert lines(figure, 0)["transformer"] == ([1, 2, 4], [one.metrics[f"loss/length={n}"] for n in (32, 64, 128)])
    assert lines(figure, 1)["transformer"][1][0] == 0
    assert lines(figure, 0)["toeplitz"][1][2] != lines(figure, 0)["toeplitz"][1][2], "nothing is drawn where nothing is"


def test_mesa_and_fredholm_say_who_has_none(results: dict) -> None:
    made = figures(load(results["mesa"])["mesa"])
    assert set(made) == {"compute", "positions", "inside"}
    fixed = lines(made["compute"], 0)["a fixed number of steps"]
    content = json.loads(results["mesa"][1].read_text())
    assert fixed[1] == [content["metrics"][f"loss/cg_steps={n}"] for n in (0, 2)] and fixed[0][0] == 0
    assert "transformer: n/a, mixer transformer has no solver" in made["compute"].get_supxlabel()
    steps, condition = made["inside"].axes[:2]
    assert steps.images[0].get_array().shape == condition.images[0].get_array().shape == (4, 6)  # type: ignore[union-attr]
    (figure,) = figures(load(results["fredholm"])["fredholm"]).values()
    content = json.loads(results["fredholm"][2].read_text())
    for name, key in (("toeplitz", "index"), ("toeplitz, at the start", "initial_index")):
        assert lines(figure, 0)[name][1] == [content["metrics"][f"{key}/layer={layer}"] for layer in (0, 1)]
    assert figures(load(results["fredholm"][:1])["fredholm"]) == {}


def test_needles_speed_information_and_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needles = NiahConfig(lengths=[64, 128], depths=[0.0, 1.0])
    metrics = {f"accuracy/length=64/depth={d}": v for d, v in ((0, 0.25), (1, 1.0))}
    result = Result(metrics | {"accuracy/length=128": None}, {"accuracy/length=128": "too long"}, {"chance": 0.1})
    made = figures(load([written(tmp_path, "niah", "toeplitz", needles, result)])["niah"])
    said = [text.get_text() for text in made[""].axes[0].texts]
    assert said == ["0.25", "n/a", "1.00", "n/a"] and "chance is 0.1" in str(made[""]._suptitle)  # type: ignore[attr-defined]

    def row(context: int, batch: int, steps: int | None, peak: int | None) -> dict[str, Any]:
        speeds = {"prefill_tokens_per_s": 10.0 * context, "decode_tokens_per_s": 5.0 * batch, "first_token_s": 0.1}
        return {"context": context, "batch": batch, "cg_steps": steps, **speeds, "state_bytes": 7, "peak_bytes": peak}

    for peak, panels in ((None, 4), (100, 5)):
        rows = [row(c, b, n, peak) for c in (16, 64) for b in (1, 8) for n in (5, 10)]
        result = Result({}, {}, {"rows": rows, "device": "a CPU"})
        (figure,) = figures(load([written(tmp_path, "speed", "mesa", SpeedConfig(), result)])["speed"]).values()
        assert len(figure.axes) == 2 * panels
        assert lines(figure, 0)["mesa, 10 steps"] == ([16, 64], [160, 640]) and "a CPU" in figure.get_supxlabel()

    told = InformationConfig(steps=80, fractions=[0.5, 1.0], ways=["frozen"])
    result = Result({"nats/unigram": 3.0, "retained/frozen/compute=0.5": 0.2, "retained/frozen/compute=1": 0.6})
    (figure,) = figures(load([written(tmp_path, "information", "swa", told, result)])["information"]).values()
    assert lines(figure, 0)["swa"] == ([40, 80], [0.2, 0.6])

    monkeypatch.setitem(GROUPS, "local", (Entry("task", "bleu", shots=(0, 5)),))
    metrics = {"task/shots=0/bleu": 1.0, "task/shots=5/bleu": 3.0, "task/shots=5/bleu_std": 0.5}
    result = Result(metrics, {}, {"task/shots=0": [], "task/shots=5": []})
    made = figures(load([written(tmp_path, "downstream", "swa", told, result)])["downstream"])
    assert lines(made["fewshot"], 0)["swa"] == ([0, 1], [1, 3])
    assert [tick.get_text() for tick in made["fewshot"].axes[0].get_xticklabels()] == ["0", "5"]
    assert figures(load([written(tmp_path, "perplexity", "swa", told, result)])["perplexity"]) == {}


def test_files_are_made_again_to_the_byte(results: dict, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = results["positions"][0]
    files = draw([path])
    assert (
        sorted(file.name for file in files) == ["positions-10.png", "positions-10.svg"]
        and files[0].parent == path.parent
    )
    before = [file.read_bytes() for file in files]
    assert [file.read_bytes() for file in draw([path])] == before
    assert main([*map(str, results["mesa"]), f"output={tmp_path}"]) == 0
    assert len(list(tmp_path.glob("mesa-*.png"))) == 3 and not list(tmp_path.glob("*.tmp"))


def test_names_tell_results_apart() -> None:
    def named(*runs: tuple[str, int]) -> list[str]:
        return labels([{"run": run, "step": step} for run, step in runs])

    swa, other, mesa_run = RUN.format("swa"), "swa-abcdefabcd", RUN.format("mesa")
    assert named((swa, 1), (mesa_run, 1)) == ["swa", "mesa"]
    assert named((swa, 1), (swa, 2), (mesa_run, 1)) == ["swa, step 1", "swa, step 2", "mesa"]
    assert named((swa, 1), (other, 1)) == [swa, other]
    assert named((swa, 1), (other, 2)) == [f"{swa}, step 1", f"{other}, step 2"]
    assert named(("openai-community--gpt2", 0)) == ["openai-community--gpt2"]
    with pytest.raises(ValueError, match="the same run at the same step is there twice"):
        named((swa, 1), (swa, 1))


def test_what_cannot_be_is_one_sentence(results: dict, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = results["positions"][:2]
    with pytest.raises(ValueError, match="output: must name a folder, since 2 results of positions"):
        draw([first, second])
    content = json.loads(second.read_text())
    content["settings"]["sequences"] = 99
    changed = tmp_path / "run" / "eval" / "positions-x.json"
    changed.parent.mkdir(parents=True)
    changed.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"suite.positions.sequences=99 in .*, and 6 in .*: one figure shows results of equal"
    ):
        load([first, changed])
    (tmp_path / "x.json").write_text("{}")
    assert main([str(tmp_path / "x.json")]) == 2 and "must be a result of eval.py" in caplog.text
    assert main([]) == 2 and "name results" in caplog.text


def test_runs_that_differ_in_more_than_the_mixer_are_marked(results: dict) -> None:
    shown = load(results["positions"][:2])["positions"]
    assert "differ in more" not in next(iter(figures(shown).values())).get_supxlabel()
    changed = [shown[0], Shown("mesa", shown[1].look, shown[1].content, comparison="another")]
    assert "differ in more than their mixer" in next(iter(figures(changed).values())).get_supxlabel()
