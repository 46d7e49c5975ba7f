"""Inside a SLURM job: run one composed config. ``python -m sweeps.job <folder of the launch> <number>``

A config comes as plain YAML: no pickle that a change of code or version could break, and nothing is composed again.
"""

from __future__ import annotations

import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from runs.run import STOPPED

SIGNALS = (signal.SIGUSR2, signal.SIGTERM)


def _stop(number: int, _frame: Any) -> None:
    """Before training has begun and after it has ended there is nothing to save: leave at once and be requeued."""
    sys.exit(STOPPED)


def load(path: Path) -> Any:
    """The composed config, with Hydra's part as Hydra wants it."""
    from hydra.conf import HydraConf
    from hydra.core.utils import setup_globals
    from omegaconf import OmegaConf

    setup_globals()
    config = OmegaConf.load(path)
    typed = OmegaConf.structured(HydraConf)
    OmegaConf.set_struct(typed, False)  # groups of Hydra's own that its dataclass does not list
    typed.pop("defaults")  # done with
    config.hydra = OmegaConf.merge(typed, config.hydra)
    OmegaConf.set_struct(config, True)
    return config


def main(arguments: list[str]) -> None:
    """Run a job. Exits with code 75 where a signal stopped it, 1 where it failed."""
    try:
        _run(arguments)
    except SystemExit as end:
        if end.code == STOPPED:
            # As soon as one task of the job has left, srun tells the others to terminate. One that died of that on its way
            # out would hide the code that has the job requeued. What is ignored stays so while the interpreter ends.
            for sign in SIGNALS:
                signal.signal(sign, signal.SIG_IGN)
        raise


def _run(arguments: list[str]) -> None:
    for sign in SIGNALS:
        signal.signal(sign, _stop)
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.utils import configure_log
    from omegaconf import OmegaConf

    from runs.cli import explained
    from runs.folder import RunFolder
    from runs.host import is_first_process
    from runs.identity import identify
    from runs.run import RunFailed, run
    from runs.validate import validate

    launch, number = arguments
    with explained():
        config = load(Path(launch) / f"{number}.yaml")
        HydraConfig.instance().set_config(config)
        configure_log(config.hydra.job_logging, config.hydra.verbose)
        science = OmegaConf.masked_copy(config, [str(name) for name in config if name != "hydra"])
        folder = RunFolder(identify(science, validate(science), config.hydra.runtime.choices["mixer"]).folder)
        try:
            run(science)
        except Exception as error:
            if is_first_process() and not isinstance(error, RunFailed):
                # From before the run had its folder, such as a missing device. Told in the folder all the same.
                folder.set_status(state="failed", error="".join(traceback.format_exception_only(error)).strip())
            raise
        if is_first_process() and folder.status().get("state") != "done":
            # Another process has it; on a file system without locks perhaps the sign of life of this job's last attempt,
            # killed a moment ago. Requeued, the job looks again later.
            sys.exit(STOPPED)


if __name__ == "__main__":
    main(sys.argv[1:])
