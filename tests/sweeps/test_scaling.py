"""Power laws over the sizes of a mixer: what is found in made-up losses, and what the report says of it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from scipy.stats import linregress

from models.budget import counts, meet
from runs.identity import ROOT, identify
from runs.validate import validate
from sweeps.jobs import Locator, seed_jobs
from sweeps.planning.rows import shape_of
from sweeps.report import make
from sweeps.reports import scaling_text
from sweeps.reports.collect import collect
from sweeps.reports.compare import ALPHA
from sweeps.reports.power_law import Line, Pair
from sweeps.reports.scaling import Scaling, find
from sweeps.reports.table import build
from sweeps.study import Study
from tests.sweeps.synthetic_runs import write_run

SIZES = {"d32x2": 9e10, "d32x4": 3e11, "d64x3": 2e12, "d96x3": 9e12}
"""Size -> training FLOPs, about those of `sweeps/ladder.yaml`."""

X = np.log(list(SIZES.values()))
MIDDLE = float(X[0] + X[-1]) / 2
DRAWS = 200


def slack(share: float, n: int = DRAWS) -> float:
    """Three standard errors of a share found in ``n`` tries."""
    return 3 * math.sqrt(share * (1 - share) / n)


# ---- lines -----------------------------------------------------------------------------------------------------------


def test_a_line_agrees_with_scipy() -> None:
    """A second opinion on slope, intercept and both standard errors."""
    y = np.random.default_rng(0).normal(1.0, 0.1, len(X)) - 0.07 * X
    known, line = linregress(X, y), Line(X, y)
    assert line.slope().mean == pytest.approx(known.slope, rel=1e-9)
    assert line.at(0.0).mean == pytest.approx(known.intercept, rel=1e-9)
    t = 4.302652729911275  # of two degrees of freedom, from a table
    for found, error in ((line.slope(), known.stderr), (line.at(0.0), known.intercept_stderr)):
        assert found.high is not None and found.high - found.mean == pytest.approx(t * error, rel=1e-9)
    assert line.slope().p == pytest.approx(known.pvalue, rel=1e-9)


def test_the_line_is_that_through_all_runs_and_its_interval_is_not() -> None:
    """Seeds that share the misfit of their size would make an interval through all runs far too narrow."""
    rng = np.random.default_rng(1)
    runs = -0.07 * X[:, None] + rng.normal(0, 0.02, (len(X), 1)) + rng.normal(0, 0.002, (len(X), 5))
    naive, line = linregress(np.repeat(X, 5), runs.ravel()), Line(X, runs.mean(1))
    assert line.slope().mean == pytest.approx(naive.slope, rel=1e-9)
    low, high = line.slope().low, line.slope().high
    assert low is not None and high is not None and (high - low) / 2 > 3 * 1.96 * naive.stderr


def test_an_exact_power_law_is_found_exactly() -> None:
    line = Line(X, math.log(30.0) - 0.1 * X)
    assert line.slope().mean == pytest.approx(-0.1, abs=1e-12)
    assert math.exp(line.at(MIDDLE).mean) == pytest.approx(30.0 * math.exp(MIDDLE) ** -0.1)
    assert line.misfit < 1e-12 and line.slope().ci95 == pytest.approx([-0.1, -0.1], abs=1e-9)


@pytest.mark.parametrize(
    "x", [np.array([1.0, 2.0]), np.array([1.0, 1.0, 1.0]), np.array([1.0])], ids=["two", "one compute", "one"]
)
def test_too_few_sizes_are_refused(x: np.ndarray) -> None:
    with pytest.raises(ValueError, match="needs 3 sizes of different compute"):
        Line(x, np.zeros_like(x))


def test_pairs_need_the_same_sizes() -> None:
    with pytest.raises(ValueError, match="4 and 3 sizes"):
        Pair(Line(X, -X), Line(X[:3], -X[:3]))


def test_with_equal_compute_a_pair_is_the_line_of_differences() -> None:
    rng = np.random.default_rng(2)
    mine, theirs = rng.normal(0, 0.1, (2, len(X)))
    pair, line = Pair(Line(X + 0.3, mine), Line(X, theirs)), Line(X, mine - theirs)  # 0.3: one factor at every size
    assert pair.slopes().ci95 == pytest.approx(line.slope().ci95) and pair.slopes().p == pytest.approx(line.slope().p)
    same = Pair(Line(X, mine), Line(X, theirs))
    assert same.at(MIDDLE).ci95 == pytest.approx(line.at(MIDDLE).ci95)


def draws(mine: tuple[float, float], theirs: tuple[float, float], factor: float = 1.0) -> list[Pair]:
    """``DRAWS`` pairs of ladders (constant, exponent), the first with ``factor`` times the compute at each size. Sizes have misfits,
    two thirds of whose variance both share, and three seeds their own noise on top."""
    rng = np.random.default_rng(3)
    out = []
    for _ in range(DRAWS):
        shared, own = rng.normal(0, 0.008, len(X)), rng.normal(0, 0.0056, (2, len(X)))
        seeds = rng.normal(0, 0.003, (2, len(X), 3)).mean(2)
        x = [X + math.log(factor), X]
        y = [c + b * x[i] + shared + own[i] + seeds[i] for i, (c, b) in enumerate((mine, theirs))]
        out.append(Pair(Line(x[0], y[0]), Line(x[1], y[1])))
    return out


def held(pairs: list[Pair], get: Callable[[Pair], Any], truth: float) -> float:
    """The share of draws whose interval holds the truth."""
    found = [get(pair) for pair in pairs]
    return sum(e.low <= truth <= e.high for e in found) / len(found)


MINE, THEIRS, FACTOR = (1.9, -0.075), (1.95, -0.07), 1.5
GAP = MINE[0] - THEIRS[0] + (MINE[1] - THEIRS[1]) * MIDDLE
QUESTIONS: dict[str, tuple[Callable[[Pair], Any], float]] = {
    "exponent": (lambda pair: pair.mine.slope(), MINE[1]),
    "loss": (lambda pair: pair.mine.at(MIDDLE), MINE[0] + MINE[1] * MIDDLE),
    "exponents": (lambda pair: pair.slopes(), MINE[1] - THEIRS[1]),
    "losses": (lambda pair: pair.at(MIDDLE), GAP),
    "multiplier": (lambda pair: pair.multiplier(MIDDLE), GAP / THEIRS[1]),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_intervals_hold_the_truth_as_often_as_they_say(name: str) -> None:
    get, truth = QUESTIONS[name]
    share = held(draws(MINE, THEIRS, FACTOR), get, truth)
    assert 1 - ALPHA - slack(ALPHA) <= share
    assert share <= 1 - ALPHA + slack(ALPHA), "wider than they say"


def test_an_interval_from_all_runs_would_be_wrong_far_more_often() -> None:
    """The planted fault: seeds as independent draws around the line."""
    rng = np.random.default_rng(4)
    wrong = 0
    for _ in range(DRAWS):
        runs = -0.07 * X[:, None] + rng.normal(0, 0.01, (len(X), 1)) + rng.normal(0, 0.003, (len(X), 5))
        found = linregress(np.repeat(X, 5), runs.ravel())
        wrong += abs(found.slope + 0.07) > 2.1 * found.stderr
    assert wrong / DRAWS > 0.2


def test_equal_mixers_are_rarely_told_apart_and_pairing_helps() -> None:
    pairs = draws(THEIRS, THEIRS)
    assert held(pairs, lambda pair: pair.at(MIDDLE), 0.0) >= 1 - ALPHA - slack(ALPHA)
    paired = np.mean([pair.at(MIDDLE).high - pair.at(MIDDLE).mean for pair in pairs])
    alone = np.mean([math.sqrt(2) * (pair.mine.at(MIDDLE).high - pair.mine.at(MIDDLE).mean) for pair in pairs])
    assert paired < 0.8 * alone


def test_a_planted_multiplier_is_found() -> None:
    """Mine is the reference's law with a third less compute: the reference needs 1.5 times as much."""
    pairs = draws((THEIRS[0] + THEIRS[1] * math.log(1.5), THEIRS[1]), THEIRS, FACTOR)
    found = [pair.multiplier(MIDDLE) for pair in pairs]
    assert all(e is not None for e in found)
    assert math.exp(np.median([e.mean for e in found if e])) == pytest.approx(1.5, rel=0.03)
    for pair, e in zip(pairs, found, strict=True):  # it holds 1 just where the losses are not told apart
        gap = pair.at(MIDDLE)
        assert e is not None and (e.low <= 0 <= e.high) == (gap.low <= 0 <= gap.high)  # type: ignore[operator]


def test_at_the_ends_of_its_interval_a_multiplier_just_explains_the_losses() -> None:
    """What Fieller's interval is: a reference with so many times less compute is told apart at exactly 5 %."""
    for pair in draws(MINE, THEIRS, FACTOR)[:20]:
        e = pair.multiplier(MIDDLE)
        assert e is not None
        for end in (e.low, e.high):
            moved = Pair(pair.mine, Line(pair.theirs.x_S - end, pair.theirs.y_S))
            assert moved.at(MIDDLE).p == pytest.approx(ALPHA, rel=1e-6)


def test_without_a_slope_there_is_no_multiplier() -> None:
    flat = Line(X, np.array([0.02, -0.03, 0.03, -0.02]))
    assert flat.slope().p is not None and flat.slope().p > 0.3
    assert Pair(Line(X, -0.07 * X), flat).multiplier(MIDDLE) is None


# ---- reports ---------------------------------------------------------------------------------------------------------

LAWS = {"transformer": (6.0, -0.05, 1.0), "mesa": (6.0 * 1.4**-0.05, -0.05, 2.0), "mamba2": (6.0, -0.05, 1.1)}
"""Mixer -> constant, exponent, and compute at a size in that of the transformer. Mesa's law needs 1.4 times less compute."""

WAVE = {"transformer": (1, -1, 0, 0.5), "mesa": (1, -1, 0.2, 0.3), "mamba2": (0.7, -1.2, 0.3, 0.4)}
"""Misfits of the sizes, in thousandths."""


TUNED = ["model.d_model", "model.n_heads", "model.n_layers", "steps"]


def write_ladder(
    root: Path,
    seeds: int = 3,
    sizes: dict[str, float] = SIZES,
    laws: dict[str, Any] = LAWS,
    suffix: str = "",
    **changes: Any,
) -> None:
    """Runs of three mixers at four sizes, on their laws but for known misfits."""
    for mixer, (constant, exponent, factor) in laws.items():
        for number, (size, flops) in enumerate(sizes.items()):
            width, depth = map(int, size[1:].split("x"))
            params = 13 * depth * width**2
            for seed in range(seeds):
                own = {"params": params + 1024 * width, "params_non_embedding": params, "flops_per_token": 1e5}
                own |= {"train_flops_per_token": flops * factor / (8 * params), "state_bytes": 4096, "params_mixer": 1}
                own |= {"tokens": 8 * params, "train_flops": flops * factor}
                bits = constant * (flops * factor) ** exponent
                bits *= 1 + 1e-3 * WAVE[mixer][number] + 2e-4 * (seed - (seeds - 1) / 2)
                write_run(
                    root, f"{mixer}_{size}{suffix}", seed=seed, bits=bits, record={"counts": own}, mixer__kind=mixer,
                    mixer__d_model=width, mixer__n_heads=width // 32, model__d_model=width, model__n_heads=width // 32,
                    model__n_layers=depth, steps=100 + 10 * number,
                    tuned=TUNED, **changes,
                )  # fmt: skip


def report(root: Path, **more: Any) -> tuple[dict[str, Any], Path]:
    _, content, folder = make(study="default", results=root, yardstick=False, **more)
    return content, folder


def found_in(root: Path, reference: str | None = None) -> Scaling | None:
    """Without page and figures."""
    return find(build(collect(root, "default")[0], name="default", reference=reference))


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Path]:
    root = tmp_path_factory.mktemp("ladder")
    write_ladder(root)
    return root, *report(root, reference="transformer_d64x3")


def by_mixer(content: dict[str, Any]) -> dict[str, Any]:
    return {one["mixer"]: one for one in content["scaling"]["mixers"]}


def test_a_ladder_is_recognised_and_its_laws_are_found(ladder: tuple[Path, dict[str, Any], Path]) -> None:
    _, content, _ = ladder
    found = content["scaling"]
    assert (found["reference"], found["metric"]) == ("transformer", "test/bits_per_byte")
    assert found["tokens_per_param"] == [8.0, 8.0]
    # Mesa begins at twice the smallest compute, the transformer ends at the largest.
    assert found["middle_train_flops"] == pytest.approx(math.sqrt(2 * 9e10 * 9e12))
    mixers = by_mixer(content)
    assert list(mixers) == ["mesa", "transformer", "mamba2"] or list(mixers) == ["mesa", "mamba2", "transformer"]
    for name, one in mixers.items():
        constant, exponent, _ = LAWS[name]
        assert one["exponent"]["mean"] == pytest.approx(exponent, abs=2e-3)
        low, high = one["exponent"]["ci95"]
        assert low < exponent < high
        assert one["loss_at_middle"]["mean"] == pytest.approx(
            constant * found["middle_train_flops"] ** exponent, rel=2e-3
        )
        assert [size["size"] for size in one["sizes"]] == list(SIZES) and {size["n"] for size in one["sizes"]} == {3}
        assert one["seed_sd"] == pytest.approx(2e-4, rel=0.05) and 5e-4 < one["misfit_sd"] < 2e-3
        assert sum(math.log1p(size["off_the_line"]) for size in one["sizes"]) == pytest.approx(0, abs=1e-9)
        rows = {row["mixer"]: row["mean"] for row in content["rows"]}
        for size in one["sizes"]:
            assert size["loss"] == pytest.approx(rows[size["row"]], rel=1e-6)


def test_the_reference_is_compared_with_and_words_follow_the_intervals(
    ladder: tuple[Path, dict[str, Any], Path],
) -> None:
    _, content, folder = ladder
    mixers = by_mixer(content)
    assert mixers["transformer"]["versus"] is None
    mesa, mamba = mixers["mesa"]["versus"], mixers["mamba2"]["versus"]
    assert mesa["loss_ratio"]["verdict"] == "better" and mamba["loss_ratio"]["verdict"] == "not distinguishable"
    assert mesa["exponent_difference"]["verdict"] == mamba["exponent_difference"]["verdict"] == "not distinguishable"
    low, high = mesa["compute_multiplier"]["ci95"]
    assert 1 < low < 1.4 < high and mamba["compute_multiplier"]["ci95"][0] < 1 < mamba["compute_multiplier"]["ci95"][1]
    page, text = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    for shown in (page, text):
        assert "With size" in shown and "better: mesa; not distinguishable: mamba2." in shown
        assert "The line has no floor" in shown
    assert 'id="scaling"' in page and (folder / "scaling.svg").exists() and "--ladder-0:" in page
    table = [line for line in text.split("**With size**")[1].splitlines() if line.startswith("|")]
    assert len(table) == 5 and len({line.count("|") for line in table}) == 1


def test_the_report_is_made_again_byte_for_byte(ladder: tuple[Path, dict[str, Any], Path], tmp_path: Path) -> None:
    """From the compact records, as in a clone."""
    _, _, folder = ladder
    (tmp_path / "default").mkdir()
    for path in folder.rglob("*.json"):
        copy = tmp_path / "default" / path.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
    _, again = report(tmp_path, reference="transformer_d64x3")
    for path in sorted(folder.glob("*.*")):
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name


def test_plain_tables_and_short_ladders_have_no_such_section(tmp_path: Path) -> None:
    write_ladder(tmp_path, seeds=2, sizes=dict(list(SIZES.items())[:2]))
    content, folder = report(tmp_path)
    assert "scaling" not in content and not (folder / "scaling.png").exists()
    for name in ("report.html", "report.md"):
        assert "With size" not in (folder / name).read_text()


def test_one_mixer_alone_and_single_seeds(tmp_path: Path) -> None:
    write_ladder(tmp_path, seeds=1, sizes=dict(list(SIZES.items())[:3]), laws={"mesa": LAWS["mesa"]})
    write_run(tmp_path, "swa", tuned=TUNED)
    found = found_in(tmp_path, "swa")
    assert found is not None and found.reference == "mesa"
    (one,) = found.ladders
    assert one.versus is None and one.seed_sd is None and one.line.df == 1
    text = "\n".join(scaling_text.markdown(found))
    assert "Against mesa" not in text and "through 3 sizes" in text and "mesa" in scaling_text.section(found, "")
    assert scaling_text.section(None, "") == "" and scaling_text.markdown(None) == []


def test_only_seeds_and_sizes_of_both_are_paired(tmp_path: Path) -> None:
    """A seed that one mixer lacks is in its own line and not in the difference; so is a size."""
    write_ladder(tmp_path)
    whole = found_in(tmp_path, "transformer_d64x3")
    gone = [
        path
        for path in tmp_path.glob("runs/default/mesa_d32x4-*")
        if json.loads((path / "run.json").read_text())["science"]["seed"]
    ]
    shutil.rmtree(gone[0])
    shutil.rmtree(gone[1])
    for path in tmp_path.glob("runs/default/mamba2_d96x3-*"):
        shutil.rmtree(path)
    found = found_in(tmp_path, "transformer_d64x3")
    assert whole is not None and found is not None
    mesa, mamba = (next(one for one in found.ladders if one.label == name) for name in ("mesa", "mamba2"))
    assert mesa.versus is not None and mamba.versus is not None and mamba.versus.sizes == list(SIZES)[:3]
    before = next(one.versus for one in whole.ladders if one.label == "mesa")
    # The noise of a seed is the same for both mixers here, so that only pairs of equal seeds leave the difference as it was.
    assert before is not None and mesa.versus.exponent.estimate.mean == pytest.approx(
        before.exponent.estimate.mean, abs=2e-6
    )
    unpaired = mesa.line.slope().mean - next(
        one.line.slope().mean for one in found.ladders if one.label == "transformer"
    )
    assert abs(unpaired - before.exponent.estimate.mean) > 1e-5


def test_variants_of_a_mixer_are_ladders_of_their_own(tmp_path: Path) -> None:
    """Other settings than sizes make another ladder; a size that is there twice makes none."""
    for window in (16, 32):
        write_ladder(tmp_path, seeds=1, laws={"mamba2": LAWS["mamba2"]}, suffix=f"_w{window}", mixer__window=window)
    found = found_in(tmp_path, "mamba2_d32x2_w32")
    assert found is not None and found.reference == "mamba2 (window=32)"
    assert sorted(one.label for one in found.ladders) == ["mamba2 (window=16)", "mamba2 (window=32)"]
    twin = next(tmp_path.glob("runs/default/mamba2_d32x2_w32-*/run.json"))
    record = json.loads(twin.read_text())
    record["science"]["model"]["n_layers"] = 4  # now two of width 32 and depth 4
    twin.write_text(json.dumps(record))
    found = found_in(tmp_path)
    assert found is not None and [one.label for one in found.ladders] == ["mamba2"]


def test_an_accuracy_has_no_power_law(tmp_path: Path) -> None:
    write_ladder(tmp_path, seeds=1)
    for path in tmp_path.glob("runs/default/*/run.json"):
        record = json.loads(path.read_text())
        record["metrics"]["test/accuracy"] = 0.5
        path.write_text(json.dumps(record))
    runs = collect(tmp_path, "default")[0]
    assert find(build(runs, name="default", metric="test/loss")) is not None
    assert find(build(runs, name="default", metric="test/accuracy")) is None


# ---- the study -------------------------------------------------------------------------------------------------------

KINDS = ("transformer", "gated_deltanet", "mesa", "toeplitz", "mamba2")


@pytest.fixture(scope="module")
def study() -> Study:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return Study.parse(OmegaConf.to_container(compose("config", ["study=ladder"]).study))  # type: ignore[arg-type]


def test_every_mixer_of_the_ladder_has_the_same_sizes_and_grids(study: Study) -> None:
    assert list(study.mixers) == [f"{kind}_{size}" for kind in KINDS for size in SIZES] and study.equal_trials
    for row, grid in study.mixers.items():
        kind, size = row.rsplit("_", 1)
        shared = {key: values for key, values in grid.items() if not key.startswith("mixer.")}
        assert study.base(row) == kind and shared == study.mixers[f"transformer_{size}"]
        own = {key: values for key, values in grid.items() if key.startswith("mixer.")}
        assert own == {k: v for k, v in study.mixers[f"{kind}_d32x2"].items() if k.startswith("mixer.")}
        width, depth = map(int, size[1:].split("x"))
        assert shared["model.d_model"] == [width] and shared["model.n_layers"] == [depth]


def test_the_ladder_has_four_tokens_per_parameter_and_one_table(study: Study, tmp_path: Path) -> None:
    """Within 2 % for every row, on the meta device; all may stand in one table; heads of width 32; a warm-up that fits.

    Composing is slow: every size once and every mixer once, which the test above allows.
    """
    keys, configs = set(), {}
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        words = ["study=ladder", f"paths.results={tmp_path}"]
        locate = Locator("ladder", words, lambda overrides: compose("config", overrides))
        points = {row: study.points(row)[0] for row in study.mixers}
        for job in seed_jobs(study, points):
            if job.seed == study.seeds[0] and (job.base == "transformer" or job.mixer.endswith("d64x3")):
                cfg = locate.config(job)
                configs[job.mixer] = config = validate(cfg)
                keys.add(identify(cfg, config, job.mixer).comparison_key)
    assert len(configs) == 8 and len(keys) == 1
    for kind in KINDS:
        for size in SIZES:
            whole = configs[f"transformer_{size}"]
            sizes = {key: getattr(whole.mixer, key) for key in ("d_model", "n_heads", "head_dim")}
            config = replace(whole, mixer=replace(configs[f"{kind}_d64x3"].mixer, **sizes))
            met, match = meet(config, whole, shape_of(config))
            assert match.met and config.steps is not None and config.match_reference == "transformer"
            params = counts(met, shape_of(met))["params_non_embedding"]
            assert config.steps * config.tokens_per_step / params == pytest.approx(4, rel=0.02), (kind, size)
            assert config.model.head_dim == 32 and config.schedule.warmup_steps * 4 < config.steps
