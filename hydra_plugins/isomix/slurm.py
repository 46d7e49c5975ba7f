"""``hydra/launcher=slurm``: submits to SLURM and returns. The logic is in `sweeps/`.

Why not submitit: its handler requeues in the middle of a step, as often as a counter allows; it asks `sacct`, without
which a killed job is waited for for ever; and its jobs are pickles. Here a job is a YAML file, the run itself saves at
the end of a step, and the shell around it asks for the requeue (`sweeps.slurm`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


class SlurmLauncher(Launcher):
    """Its settings are the keys of ``conf/hydra/launcher/slurm.yaml``, checked by `sweeps.slurm.Slurm`."""

    def __init__(self, **settings: Any) -> None:
        self.returns = not settings.get("wait")  # before its jobs have run
        self.retries = settings.get("retries", 0)
        self.follows = settings.get("follow")
        self.submitted: list[str] = []
        self.config: DictConfig | None = None
        self.hydra_context: HydraContext | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context = config, hydra_context

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Returns nothing: what becomes of the runs is in their folders."""
        from hydra.core.utils import setup_globals

        from runs.validate import ConfigError
        from sweeps.submit import submit, wait

        assert self.config is not None and self.hydra_context is not None
        if self.config.hydra.job.name != "train":
            raise ConfigError(f"hydra/launcher=slurm: its jobs train; it cannot run {self.config.hydra.job.name}.py")
        setup_globals()
        loader, master = self.hydra_context.config_loader, self.config
        # Composed now: a file of conf/ that changes while a job is queued does not change the job.
        configs = [loader.load_sweep_config(master, list(overrides)) for overrides in job_overrides]
        jobs = submit(configs, self._results())
        self.submitted += jobs
        if not self.returns:
            wait(jobs)
        return []

    def follow(self, jobs: Sequence[str], after: str, tries: int) -> str:
        """Submit the same command again for when these jobs have ended; returns the id of its job."""
        from sweeps.slurm import Slurm
        from sweeps.submit import follow, given

        assert self.config is not None
        overrides = given(self.config)
        settings = Slurm.parse(OmegaConf.to_container(self.config.hydra.launcher, resolve=True))  # type: ignore[arg-type]
        fresh = bool(self.submitted)
        return follow(settings, self._results(), overrides, jobs, after=after, tries=tries, fresh=fresh)

    def _results(self) -> Path:
        assert self.config is not None
        return Path(self.config.paths.results).absolute()
