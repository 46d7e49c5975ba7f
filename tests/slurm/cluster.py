"""A real SLURM of one node for the tests, and whole commands on it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from runs.folder import read_json, read_rows
from tests.runs.commands import ROOT, command, environment

SANDBOX = Path(__file__).with_name("sandbox.sh")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")


def obstacle() -> str | None:
    """Why no SLURM can be started here; None if one can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"SLURM is not installed ({', '.join(missing)}); on Debian: apt-get install slurm-wlm munge"
    return None if os.getuid() == 0 else "starting SLURM's daemons needs root"


def required() -> bool:
    """Under CI a missing SLURM is a failure, not a reason to skip."""
    return bool(os.environ.get("CI") or os.environ.get("ISOMIX_REQUIRE_SLURM"))


def _free_ports() -> int:
    """The first of two free ports in a row."""
    for port in range(26817, 27817, 10):
        with socket.socket() as one, socket.socket() as two:
            try:
                one.bind(("127.0.0.1", port))
                two.bind(("127.0.0.1", port + 1))
                return port
            except OSError:
                continue
    raise RuntimeError("no free ports for SLURM")


class Cluster:
    """Commands with its environment."""

    def __init__(self, folder: Path):
        self.folder = folder
        ours = {"SLURM_SANDBOX": str(folder), "SLURM_CONF": str(folder / "slurm.conf")}
        self.environment = {k: v for k, v in environment().items() if not k.startswith("SLURM_")} | ours
        self.environment["SLURM_SANDBOX_PORT"] = str(_free_ports())

    def up(self) -> None:
        self.call(str(SANDBOX), "up")

    def down(self) -> None:
        self.call(str(SANDBOX), "down")

    def call(self, *words: str, code: int = 0, cwd: Path = ROOT) -> str:
        """Run a command, check its exit code, return what it said."""
        # Into files, not pipes: daemons keep what they inherit open.
        said = self.folder / "said.log"
        with open(said, "w") as file:
            done = subprocess.run(
                words, cwd=cwd, env=self.environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=300
            )
        assert done.returncode == code, f"{words}: exit code {done.returncode}\n{said.read_text()[-3000:]}"
        return said.read_text()

    def train(self, results: Path, *overrides: str, code: int = 0) -> str:
        """A tiny run, multirun or study through hydra/launcher=slurm_local."""
        return self.call(*command(results, *overrides, "hydra/launcher=slurm_local"), code=code)

    def module(self, name: str, *words: str, code: int = 0) -> str:
        """``python -m <name>``"""
        return self.call(sys.executable, "-m", name, *words, code=code)

    def queue(self) -> str:
        """All jobs that have not ended."""
        return self.call("squeue", "-h", "-r", "-a", "-o", "%i %T %j")

    def wait(self, what: Callable[[], object], seconds: float = 240, every: float = 0.1) -> None:
        """Until ``what()`` is true."""
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, f"waited in vain\n{self.queue()}"
            time.sleep(every)


def trains(folder: Path, rows: int = 5) -> bool:
    """Is a process training here, with so many rows written?"""
    return (
        read_json(folder / "status.json").get("state") == "running" and len(read_rows(folder / "metrics.jsonl")) > rows
    )


def logs(results: Path) -> str:
    """What all jobs wrote."""
    return "\n".join(path.read_text() for path in sorted(results.glob("launches/*/*.log")))
