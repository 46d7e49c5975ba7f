"""What a study file may say, its errors, its jobs, and the choice of the best point."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from runs.identity import ROOT, tuned_keys
from runs.validate import ConfigError
from sweeps.jobs import Job, Locator, literal, seed_jobs, select, tune_jobs
from sweeps.study import Study, Trial, as_config, at_edge, choose, read

GRIDS = {
    "swa": {"optimizer.lr": [1e-3, 3e-3], "mixer.window": [32, 64]},
    "mesa": {"optimizer.lr": [1e-3, 2e-3, 3e-3, 4e-3]},
}


def content(**changes: Any) -> dict[str, Any]:
    """A study's file, with changes."""
    return {"mixers": GRIDS, "tune": {"seeds": [100, 101]}, "seeds": [0, 1, 2], **changes}


def study(**changes: Any) -> Study:
    return Study.parse({"name": "made_up", **content(**changes)})


@pytest.fixture
def hydra_compose():
    """Hydra's compose API over the project's configs, plugins included."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield lambda overrides: compose("config", overrides, return_hydra_config=True)


def selected(study: Study, *arguments: str):
    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, ConfigLoaderImpl)
    return select(study, list(arguments), loader)


# ---- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mixer": "swa"}, ["study.mixer: unknown key", "'mixers'", "equal_trials"]),
        ({"mixers": {}}, ["study.mixers={}"]),
        ({"mixers": {"swa": [1]}}, ["study.mixers.swa=[1]", "must be a grid"]),
        ({"mixers": {"swa": {"mixer.window": 64}}}, ["study.mixers.swa.mixer.window=64", "[64]"]),
        ({"mixers": {"swa": {"mixer.window": []}}}, ["study.mixers.swa.mixer.window=[]", "list"]),
        ({"mixers": {"swa": {"mixer.window": [64, 64]}}}, ["mixer.window=[64, 64]", "twice"]),
        ({"mixers": {"swa": {"mixer.window": [{"a": 1}]}}}, ["mixer.window=[{'a': 1}]", "numbers, words or lists"]),
        ({"mixers": {"swa": {"+mixer.window": [64]}}}, ["+mixer.window", "without signs"]),
        ({"mixers": {"swa": {"trainer.devices": [1, 2]}}}, ["trainer.devices=[1, 2]", "cannot be in a grid"]),
        ({"mixers": {"swa": {"trainer": ["cpu"]}}}, ["trainer=['cpu']", "cannot be in a grid"]),
        ({"mixers": {"swa": {"trainer": {"devices": [2]}}}}, ["trainer.devices=[2]", "cannot be in a grid"]),
        ({"mixers": {"swa": {"hydra/launcher": ["basic"]}}}, ["hydra/launcher", "cannot be in a grid"]),
        ({"mixers": {"swa": {"mixer": ["mesa"]}}}, ["swa.mixer=['mesa']", "the name of one mixer"]),
        ({"mixers": {"a/b": {"mixer": "mesa"}}}, ["mixers.a/b", "letters, digits"]),
        ({"mixers": {"swa": {"init_seed": [1]}}}, ["init_seed=[1]", "seeds"]),
        ({"mixers": {"swa": {"data.seq_len": [64]}}}, ["data.seq_len=[64]", "shared"]),
        ({"mixers": {"swa": {"steps": [10, 20]}}}, ["steps=[10, 20]", "a budget is not tuned", "one value"]),
        ({"mixers": {"swa": {"match": ["params"]}}}, ["match=['params']", "shared"]),
        ({"mixers": {**GRIDS, "swa": {}}}, ["unequal numbers of trials", "swa 1, mesa 4", "equal_trials: false"]),
        ({"tune": None}, ["study.tune=null", "swa 4, mesa 4", "val/bits_per_byte"]),
        ({"tune": [1]}, ["study.tune=[1]"]),
        ({"tune": {}}, ["study.tune.seeds=None"]),
        ({"tune": {"seeds": [1], "metrik": "val/loss"}}, ["study.tune.metrik: unknown key", "'metric'"]),
        ({"tune": {"seeds": [1], "metric": "test/loss"}}, ["study.tune.metric=test/loss", "validation"]),
        ({"tune": {"seeds": [1], "mode": "best"}}, ["study.tune.mode=best", "min or max"]),
        ({"seeds": None}, ["study.seeds=None", "[0, 1, 2]"]),
        ({"seeds": 3}, ["study.seeds=3"]),
        ({"seeds": [0, 0]}, ["study.seeds=[0, 0]", "different"]),
        ({"seeds": [True]}, ["study.seeds=[True]"]),
        ({"reference": "messa"}, ["study.reference=messa", "'mesa'", "swa, mesa"]),
        ({"equal_trials": "no"}, ["study.equal_trials=no"]),
        ({"report": 3}, ["study.report=3"]),
    ],
)
def test_errors_name_the_key_its_value_and_what_would_be_right(changes, words):
    with pytest.raises(ConfigError) as caught:
        study(**changes)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("shared", "words"),
    [([1], ["shared=[1]"]), ({"mixer": "swa"}, ["shared.mixer=swa", "`mixers`"]), ({"seed": 1}, ["`seeds`"])],
)
def test_errors_of_the_shared_part(shared, words):
    with pytest.raises(ConfigError) as caught:
        as_config("made_up", content(shared=shared))
    for word in words:
        assert word in str(caught.value)


def test_files_that_are_no_study(tmp_path: Path):
    for text in ("[1, 2]", "mixers: {swa: ", "mixers: {a: b: c}"):
        file = tmp_path / "wrong.yaml"
        file.write_text(text)
        with pytest.raises(ConfigError, match=str(file)):
            read(file)


def test_defaults_are_filled_in():
    made = study(tune={"seeds": [5]}, reference=None)
    assert made.reference == "swa" and made.equal_trials
    assert made.tune is not None and (made.tune.metric, made.tune.mode) == ("val/bits_per_byte", "min")
    assert study(mixers={"swa": None, "mesa": {}}, tune=None).points("swa") == [{}]


def test_unequal_grids_pass_when_asked_for_and_single_points_are_not_tuned():
    made = study(mixers={"swa": {"mixer.window": [64]}, "mesa": GRIDS["mesa"]}, equal_trials=False)
    assert {job.mixer for job in tune_jobs(made)} == {"mesa"}


def test_what_hydra_composes_is_read_back_as_the_same_study():
    """Grids are nested for the command line and flat for us; both are one study, with the same tuned keys."""
    config = as_config("made_up", content(shared={"model": "tiny", "model.d_model": 64, "data": {"seq_len": 32}}))
    assert Study.parse(dict(config["study"])) == study()
    assert config["study"]["mixers"]["swa"] == {"optimizer": {"lr": [1e-3, 3e-3]}, "mixer": {"window": [32, 64]}}
    assert tuned_keys(config["study"]) == ["optimizer.lr"]
    assert config["defaults"] == ["_self_", {"override /model": "tiny"}, {"override /hydra/sweeper": "study"}]
    assert config["model"] == {"d_model": 64} and config["data"] == {"seq_len": 32}
    overlap = {"swa": {"schedule": ["cosine", "linear"], "schedule.final": [0.0, 0.1]}, "mesa": GRIDS["mesa"]}
    assert Study.parse(as_config("made_up", content(mixers=overlap))["study"]) == study(mixers=overlap)


def test_numbers_are_read_as_hydra_reads_them(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text("mixers: {swa: {optimizer.lr: [3e-3]}}\nseeds: [0]\n")
    assert Study.parse(read(file)["study"]).points("swa") == [{"optimizer.lr": 0.003}]


@pytest.mark.parametrize("file", sorted((ROOT / "sweeps").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_study_of_the_project_composes(hydra_compose, file):
    config = hydra_compose([f"study={file.stem}"])
    made = Study.parse(OmegaConf.to_container(config.study))  # type: ignore[arg-type]
    assert made.name == file.stem and made.description
    assert config.study.phase is None and config.hydra.mode.name == "MULTIRUN"
    assert config.hydra.sweeper._target_.endswith("StudySweeper")


def test_the_command_line_overrides_what_is_shared(hydra_compose, tmp_path):
    mine = own_study(tmp_path, GRIDS)
    assert (hydra_compose(mine).model.d_model, hydra_compose(mine).steps) == (128, 50)
    changed = hydra_compose(
        [*mine, "model=small", "steps=20", "study.seeds=[7]", "study.mixers.swa.mixer.window=[8,16]"]
    )
    assert (changed.model.d_model, changed.steps) == (256, 20)
    again = Study.parse(OmegaConf.to_container(changed.study))  # type: ignore[arg-type]
    assert again.seeds == [7] and again.mixers["swa"]["mixer.window"] == [8, 16]


def test_variants_of_one_mixer_are_rows_of_their_own(hydra_compose, tmp_path):
    """Composed, overridden, parsed again, as jobs, and as folders."""
    rows = {
        "swa_w8": {"mixer": "swa", "mixer.window": [8], "optimizer.lr": [1e-3, 3e-3]},
        "swa": {"mixer.window": [8], "optimizer.lr": [1e-3, 3e-3]},
        "wide.swa": {"mixer": "swa", "model.n_heads": [2], "optimizer.lr": [1e-3, 3e-3]},
    }
    common = [*own_study(tmp_path, rows), f"paths.results={tmp_path}", "study.mixers.swa_w8.mixer.window=[4]"]
    config = OmegaConf.to_container(hydra_compose(common).study)
    made = Study.parse(config)  # type: ignore[arg-type]
    assert list(made.mixers) == list(rows) and made.variants == {"swa_w8": "swa", "wide.swa": "swa"}
    assert made.points("swa_w8")[1] == {"mixer.window": 4, "optimizer.lr": 3e-3}
    assert made == Study.parse(made.plain()) and tuned_keys(config) == ["model.n_heads", "optimizer.lr"]  # type: ignore[arg-type]
    locate = Locator("mine", common, hydra_compose)
    jobs = seed_jobs(made, {mixer: made.points(mixer)[0] for mixer in made.mixers})[::3]
    assert jobs[0].overrides()[0] == "mixer=swa" and jobs[0].overrides()[-2] == "study.label=swa_w8"
    assert not any("label" in word for word in jobs[1].overrides())
    narrow, plain, wide = (locate(job) for job in jobs)
    assert [run.name.rsplit("-", 1)[0] for run in (narrow, plain, wide)] == list(rows)
    assert locate.config(jobs[0]).mixer.window == 4 and locate.config(jobs[2]).model.n_heads == 2
    first, second = (locate(Job("seeds", row, made.points("swa")[0], 0, "swa")) for row in ("swa_w8", "swa"))
    assert first.name.split("-")[1] == second.name.split("-")[1], "the name is no part of what is computed"


def test_a_study_like_another_says_only_what_differs(tmp_path):
    base, other = tmp_path / "base.yaml", tmp_path / "other.yaml"
    OmegaConf.save(content(shared={"model": "tiny", "data.seq_len": 32}, description="a"), base)
    OmegaConf.save({"like": "base", "shared": {"data.seq_len": 64, "steps": 9}, "seeds": [5]}, other)
    made = read(other)
    assert (made["data"]["seq_len"], made["steps"], made["study"]["seeds"]) == (64, 9, [5])
    assert made["study"]["mixers"] == read(base)["study"]["mixers"] and made["study"]["description"] == "a"
    OmegaConf.save({"like": "bass"}, other)
    with pytest.raises(ConfigError, match="like=bass: no such study. Studies: base"):
        read(other)
    OmegaConf.save({"like": "other"}, base)
    OmegaConf.save({"like": "base"}, other)
    with pytest.raises(ConfigError, match="without `like`"):
        read(other)


# ---- overrides -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, -3, 10**12, 0.003, 1e-8, 1e30, -2.5, math.inf,
        "word", "two words", "a,b", "a=b", "[x]", "{x}", "x: y", "it's", 'say "hi"', "back\\slash", "ends\\", "\\'",
        "", " ", "null", "True", "1e-3", "007", "nan", "${seed}", "val/loss", "a-b", "/abs/path.txt", "*.txt", "é日",
        "line\nbreak", "#", "$x", "(y)", [0.9, 0.98], [], ["a b", None, [1]],
    ],
)  # fmt: skip
def test_every_value_survives_hydras_grammar(value):
    (parsed,) = OverridesParser.create().parse_overrides([f"some.key={literal(value)}"])
    assert not parsed.is_sweep_override()
    assert parsed.value() == value and type(parsed.value()) is type(value)


# ---- jobs ------------------------------------------------------------------------------------------------------------


def test_expansion():
    made = study()
    assert len(made.points("swa")) == len(made.points("mesa")) == 4
    assert made.points("swa")[1] == {"optimizer.lr": 1e-3, "mixer.window": 64}
    tuning = tune_jobs(made)
    assert len(tuning) == len(set(map(str, tuning))) == 2 * 4 * 2
    assert tuning[0].overrides() == [
        "mixer=swa",
        "optimizer.lr=0.001",
        "mixer.window=32",
        "seed=100",
        "study.phase=tune",
    ]
    final = seed_jobs(made, {"mesa": {"optimizer.lr": 2e-3}})
    assert [str(job) for job in final] == [f"mixer=mesa optimizer.lr=0.002 seed={seed}" for seed in (0, 1, 2)]


@pytest.mark.parametrize(
    ("argument", "mixers", "seeds"),
    [
        ("mixer=mesa", ["mesa"], [0, 1, 2]),
        ("mixer=mesa,swa", ["swa", "mesa"], [0, 1, 2]),
        ("mixer=glob(s*)", ["swa"], [0, 1, 2]),
        ("seed=1", ["swa", "mesa"], [1]),
        ("seed=2,0", ["swa", "mesa"], [0, 2]),
        ("seed=range(1,3)", ["swa", "mesa"], [1, 2]),
    ],
)
def test_narrowing(hydra_compose, argument, mixers, seeds):
    made = study()
    selection = selected(made, "study=made_up", argument, "trainer=gpu", "study.report={}")
    assert (selection.mixers, selection.seeds) == (mixers, seeds)
    assert selection.common == ["study=made_up", "trainer=gpu", "study.report={}"]
    inside = [job for job in tune_jobs(made) if job in selection]
    assert len(inside) == 8 * len(mixers), "seed= leaves the tune phase whole"
    assert {job.seed for job in seed_jobs(made, {"swa": {}, "mesa": {}}) if job in selection} == set(seeds)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("mixer=hyena", ["mixer=hyena is not in study made_up", "swa, mesa"]),
        ("mixer=glob(hy*)", ["nothing in the study fits", "swa, mesa"]),
        ("seed=7", ["seed=7", "study.seeds=[...]", "0, 1, 2"]),
        ("steps=1,2", ["steps=1,2", "only mixer= and seed= may be swept"]),
        ("model=tiny,small", ["model=tiny,small", "only mixer= and seed= may be swept"]),
        ("optimizer.lr=1", ["optimizer.lr=1", "no effect", "study.mixers.swa.optimizer.lr=[...]"]),
        ("study.phase=tune", ["study.phase=tune", "set by the sweeper"]),
        ("study.label=x", ["study.label=x", "set by the sweeper"]),
    ],
)
def test_what_a_command_line_may_not_say(hydra_compose, argument, words):
    with pytest.raises(ConfigError) as caught:
        selected(study(), argument)
    for word in words:
        assert word in str(caught.value)


def own_study(folder: Path, mixers: dict[str, Any]) -> list[str]:
    """A study file outside the project, and the overrides that find it."""
    file = content(mixers=mixers, shared={"model": "tiny", "steps": 50})
    OmegaConf.save(OmegaConf.create(file), folder / "mine.yaml")
    return [f"hydra.searchpath=[sweeps://{folder}]", "study=mine"]


def test_a_shared_composition_leads_to_the_folders_of_separate_ones(hydra_compose, tmp_path):
    grid = {
        "optimizer.lr": [1e-3, 3e-3],
        "schedule": ["cosine", "trapezoid"],
        "optimizer.betas": [[0.9, 0.95], [0.9, 0.98]],
        "model.logit_cap": [None, "${model.mlp_ratio}"],
    }
    common = [*own_study(tmp_path, {"gated_deltanet": grid}), f"paths.results={tmp_path}"]
    made = Study.parse(OmegaConf.to_container(hydra_compose(common).study))  # type: ignore[arg-type]
    calls: list[list[str]] = []

    def counting(overrides):
        calls.append(overrides)
        return hydra_compose(overrides)

    jobs = tune_jobs(made)[::3]
    shared = Locator("mine", common, counting)
    together = [shared(job).folder.path for job in jobs]
    assert len(calls) == 2 < len(jobs), "one for each value of the group"
    assert together == [Locator("mine", common, hydra_compose)(job).folder.path for job in jobs]
    assert len(set(together)) == len(jobs)
    assert together[0].parent == tmp_path / "runs" / "mine"


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ({"mixer.windw": [1]}, ["study mine", "mixer=gated_deltanet", "mixer.windw: unknown key"]),
        ({"optimizer.lr": [1e-3, -1]}, ["study mine", "optimizer.lr=-1", "must be above 0"]),
        ({"model.n_layers": ["many"]}, ["study mine", "model.n_layers=many"]),
        ({"schedule": ["wavy"]}, ["study mine", "schedule=wavy", "trapezoid"]),
    ],
)
def test_a_job_that_cannot_run_is_named_before_anything_starts(hydra_compose, tmp_path, grid, words):
    common = own_study(tmp_path, {"gated_deltanet": grid})
    locate = Locator("mine", common, hydra_compose)
    with pytest.raises(ConfigError) as caught:
        for job in [Job("tune", "gated_deltanet", {key: v}, 0) for key, values in grid.items() for v in values]:
            locate(job)
    for word in words:
        assert word in str(caught.value)


# ---- the choice ------------------------------------------------------------------------------------------------------

SMALL, MIDDLE, LARGE = ({"optimizer.lr": lr} for lr in (1e-3, 2e-3, 3e-3))


def trials(table: list[tuple[dict, list[float | None]]]) -> list[Trial]:
    return [
        Trial(point, seed, "", "failed" if value is None else "done", value)
        for point, values in table
        for seed, value in enumerate(values)
    ]


def test_the_mean_over_the_seeds_decides():
    table = trials([(SMALL, [1.0, 5.0]), (MIDDLE, [2.5, 2.6]), (LARGE, [2.4, 4.0])])
    assert choose(table, [0, 1], "min") == MIDDLE
    assert choose(table, [0, 1], "max") == LARGE


def test_of_equal_points_the_first_is_taken():
    assert choose(trials([(SMALL, [2.0]), (MIDDLE, [1.0]), (LARGE, [1.0])]), [0], "min") == MIDDLE
    assert choose(trials([(SMALL, [2.0]), (MIDDLE, [2.0])]), [0], "max") == SMALL


def test_points_without_all_their_seeds_are_out():
    assert (
        choose(trials([(SMALL, [0.1, None]), (MIDDLE, [2.0, 2.0]), (LARGE, [math.nan, 0.1])]), [0, 1], "min") == MIDDLE
    )
    assert choose(trials([(SMALL, [None])]), [0], "min") is None
    assert choose(trials([(SMALL, [math.inf])]), [0], "max") is None


def test_a_choice_at_the_edge_of_its_grid_is_marked():
    grid: dict[str, list] = {
        "optimizer.lr": [3e-3, 1e-3, 2e-3],
        "mixer.window": [64],
        "model.qk_norm": [False, True],
        "schedule": ["a", "b"],
    }
    point = {"mixer.window": 64, "model.qk_norm": True, "schedule": "a"}
    assert at_edge({**point, **SMALL}, grid) == {"optimizer.lr": "smallest"}
    assert at_edge({**point, **MIDDLE}, grid) == {}
    assert at_edge({**point, **LARGE}, grid) == {"optimizer.lr": "largest"}
