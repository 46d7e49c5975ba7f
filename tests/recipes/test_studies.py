"""Every study in `sweeps/`: it can be read, and each of its jobs is valid at full size."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from functools import cache

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from runs.identity import canonical, digest, science
from runs.validate import mixer_node, validate
from sweeps.jobs import Job, Locator, as_overrides, seed_jobs, tune_jobs
from sweeps.study import Point, Study
from tests.recipes.common import ROOT

STUDIES = sorted(path.stem for path in (ROOT / "sweeps").glob("*.yaml"))
MIXERS = {path.stem for path in (ROOT / "conf" / "mixer").glob("*.yaml")}


@pytest.fixture(autouse=True, scope="module")
def conf():
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield


@cache
def composed(name: str, *groups: str) -> DictConfig:
    """A run of a study with whatever mixer it begins with, and with these choices of groups."""
    return compose("config", [f"study={name}", *groups])


@cache
def study_of(name: str) -> Study:
    return Study.parse(OmegaConf.to_container(composed(name).study))


def checked_points(study: Study, row: str) -> list[Point]:
    """The points of a row, one of those that differ in their learning rate alone."""
    kept: dict[str, Point] = {}
    for point in study.points(row):
        rate = point.get("optimizer.lr", 1e-3)
        assert 0 < rate < 1, f"{row}: optimizer.lr={rate}"
        kept.setdefault(canonical({key: value for key, value in point.items() if key != "optimizer.lr"}), point)
    return list(kept.values())


def configs(name: str) -> Iterator[tuple[str, DictConfig]]:
    """(row, composed config) of each of these points.

    Hydra takes 0.1 s for one. Where nothing in the study touches the mixer, its rows are one config with the file of one mixer
    or another in place: put there here.
    """
    study = study_of(name)
    locate = Locator(name, [f"study={name}"], lambda overrides: compose("config", overrides))
    for row in study.mixers:
        for point in checked_points(study, row):
            values = {key: value for key, value in point.items() if "." in key and "@" not in key}
            groups = as_overrides({key: value for key, value in point.items() if key not in values})
            first = composed(name, *groups)
            if is_a_file(first.mixer):
                config = copy.deepcopy(first)
                config.mixer = copy.deepcopy(mixer_node(study.base(row)))
                for key, value in values.items():
                    OmegaConf.update(config, key, value, merge=True)  # struct mode refuses what is no key
                yield row, config
            else:
                yield row, locate.config(Job("seeds", row, point, study.seeds[0], study.variants.get(row)))


def is_a_file(mixer: DictConfig) -> bool:
    """Is it one of `conf/mixer/` as it stands?"""
    return mixer.kind in MIXERS and OmegaConf.to_container(mixer) == OmegaConf.to_container(mixer_node(mixer.kind))


@pytest.mark.parametrize("name", STUDIES)
def test_every_job_is_valid(name):
    """And no point is there twice under two names of its values."""
    study = study_of(name)
    ids: dict[str, set[str]] = {row: set() for row in study.mixers}
    for number, (row, config) in enumerate(configs(name)):
        if number:  # what is matched is the same for all, and takes as long to check as the rest
            config.update(match="none", match_len=None)
        ids[row].add(digest(science(validate(config))))
    assert {row: len(runs) for row, runs in ids.items()} == {row: len(checked_points(study, row)) for row in ids}


@pytest.mark.parametrize("name", [name for name in STUDIES if name.startswith(("mesanet", "tmm"))])
def test_the_first_line_says_how_many_runs(name):
    study = study_of(name)
    said = [int(n) for n in re.findall(r"\d+", (ROOT / "sweeps" / f"{name}.yaml").read_text().split("runs of")[0])]
    tuning = len(tune_jobs(study))
    reported = len(seed_jobs(study, {row: study.points(row)[0] for row in study.mixers}))
    assert said == ([tuning, reported] if tuning else [reported])


def test_the_short_cut_composes_what_hydra_composes():
    study = study_of("tmm_fineweb")
    whole = Locator(study.name, [f"study={study.name}"], lambda overrides: compose("config", overrides))
    for row, config in configs(study.name):
        if row in ("swa_w64", "toeplitz_kernel8"):
            job = Job("seeds", row, checked_points(study, row)[0], 0, study.variants[row])
            assert science(validate(config)) == science(validate(whole.config(job)))
