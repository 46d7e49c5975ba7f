"""``study=<name>``: files of `sweeps/` as a config group, and the sweeper that runs them. The logic is in `sweeps/`.

`python train.py study=recall` composes ``sweeps/recall.yaml`` through `StudySource`; the config that comes back sets
``hydra.mode: MULTIRUN`` and ``hydra/sweeper: study``, and so hands the command to `StudySweeper`. Without a study
nothing here is used: a plain multirun keeps Hydra's own sweeper.

No ``from __future__ import annotations`` in here: Hydra's scanner runs a plugin module before it is in `sys.modules`,
where a dataclass with postponed annotations would look it up.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

GROUP = "study"
SWEEPS = Path(__file__).resolve().parents[2] / "sweeps"


class StudySource(ConfigSource):
    """``sweeps://<folder>``: the folder's YAML files as choices of the group ``study``; without a folder, `sweeps/`.

    Studies of your own: ``hydra.searchpath=[sweeps:///home/me/studies]``.
    """

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider=provider, path=path)
        self.path = self.path or str(SWEEPS)

    @staticmethod
    def scheme() -> str:
        return "sweeps"

    def _file(self, config_path: str) -> Path | None:
        group, _, name = config_path.rpartition("/")
        return Path(self.path) / f"{name.removesuffix('.yaml')}.yaml" if group == GROUP else None

    def load_config(self, config_path: str) -> ConfigResult:
        from sweeps import study  # where only the group's names are asked for, not even this is imported

        file = self._file(config_path)
        if file is None or not file.is_file():
            raise ConfigLoadError(f"Config not found: {self.full_path()}/{config_path}")
        return ConfigResult(
            provider=self.provider,
            path=self.full_path(),
            config=OmegaConf.create(study.read(file)),
            header={"package": "_global_"},
        )

    def available(self) -> bool:
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", GROUP) and self.available()

    def is_config(self, config_path: str) -> bool:
        file = self._file(config_path)
        return file is not None and file.is_file()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path == "" and results_filter != ObjectType.CONFIG:
            return [GROUP]
        if config_path == GROUP and results_filter != ObjectType.GROUP:
            return sorted(file.stem for file in Path(self.path).glob("*.yaml"))
        return []


class StudySearchPath(SearchPathPlugin):
    """Adds `sweeps/` to the places where Hydra looks for configs."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("isomix", "sweeps://")


@dataclass
class StudySweeperConf:
    """``hydra.sweeper`` of a study."""

    _target_: str = "hydra_plugins.isomix.study.StudySweeper"
    dry: bool = False  # list the runs and their overrides, launch nothing
    after: str | None = None  # set by a command that repeats itself: the phase whose jobs have ended
    tries: int = 0  # and how often that phase has been tried again


ConfigStore.instance().store(group="hydra/sweeper", name="study", node=StudySweeperConf, provider="isomix")


class StudySweeper(Sweeper):
    """Runs ``cfg.study`` through whatever launcher Hydra is given."""

    def __init__(self, dry: bool, after: str | None, tries: int) -> None:
        self.dry, self.after, self.tries = dry, after, tries
        self.config: DictConfig | None = None
        self.launcher: Launcher | None = None
        self.hydra_context: HydraContext | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from hydra.core.plugins import Plugins

        self.config, self.hydra_context = config, hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Called by Hydra with the overrides of the command line."""
        from runs.validate import ConfigError
        from sweeps.jobs import Locator, select
        from sweeps.phases import Following, conduct
        from sweeps.study import Study
        from sweeps.submit import given

        assert self.config is not None and self.launcher is not None and self.hydra_context is not None
        config, loader, launcher = self.config, self.hydra_context.config_loader, self.launcher
        if config.get(GROUP) is None:
            raise ConfigError("hydra/sweeper=study: needs a study, as in: python train.py study=quickstart")
        # Unresolved: what a grid interpolates is meant for the job's config, not for this one.
        study = Study.parse(OmegaConf.to_container(config[GROUP]))  # type: ignore[arg-type]
        selection = select(study, arguments, loader)
        locate = Locator(study.name, selection.common, lambda overrides: loader.load_sweep_config(config, overrides))
        following = None
        if getattr(launcher, "returns", False):  # before its jobs have run, as hydra/launcher=slurm does
            submit = launcher.follow if launcher.follows else None  # type: ignore[attr-defined]
            following = Following(submit, launcher.retries, self.after, self.tries)  # type: ignore[attr-defined]
        conduct(
            study,
            selection,
            locate,
            lambda jobs, first: launcher.launch(jobs, initial_job_idx=first),
            Path(config.paths.results).absolute(),
            dry=self.dry,
            following=following,
            command=given(config),
        )
