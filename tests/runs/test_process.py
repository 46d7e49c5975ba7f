"""What runs leave behind in the process that they share with others."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.runs.commands import ROOT, command, environment

AFTERWARDS = """
import atexit, gc, os, runpy, signal, sys

def told():
    from data.packed import PackedDataset
    from models.module import TrainingModule
    kept = [type(thing).__name__ for thing in gc.get_objects() if type(thing) in (PackedDataset, TrainingModule)]
    print("kept", kept, "SIGTERM", signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, flush=True)

atexit.register(told)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_runs_of_one_process_leave_neither_memory_nor_handlers_of_signals(tmp_path: Path) -> None:
    """A study of hundreds of runs must not keep their models and data, and a run that is being tested must end when it is
    told to: Lightning's handler of SIGTERM only makes a note for its own loop."""
    python, *words = command(tmp_path, "-m", "mixer=swa", "seed=0,1", "logger=none")
    done = subprocess.run(
        [python, "-c", AFTERWARDS, *words], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "kept [] SIGTERM True"
    assert len(list(tmp_path.glob("runs/*/*/status.json"))) == 2
