"""Hydra's errors, said so that a user can act on them: one sentence with the key and the valid choices."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
from collections.abc import Iterator

from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from runs.identity import ROOT
from runs.validate import unknown_key

ROW = re.compile(r"mixer=(\w+)")


def explain(error: BaseException) -> str:
    """The message of a configuration error. An override of a key that does not exist gets the keys that do."""
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        near = difflib.get_close_matches(choice, error.options, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return f"{group}={choice}: no such choice.{hint} Choices: {', '.join(error.options)}"
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException) and "not in struct" in str(cause):
        parent = cause.parent_node
        if isinstance(parent, DictConfig):
            return unknown_key(str(cause.full_key), [str(key) for key in parent])
    return str(error) if cause is None else f"{error}\n{cause}"


def study_rows(words: list[str]) -> list[str]:
    """``mixer=<row>`` beside ``study=`` where the row is no file of `conf/mixer` but a study's own name for a variant: as a sweep
    over that one row, since Hydra would look for the file before the study is asked."""
    if not any(word.startswith("study=") for word in words):
        return words

    def is_file(name: str) -> bool:
        return (ROOT / "conf" / "mixer" / f"{name}.yaml").exists()

    return [
        f"mixer=choice({found[1]})" if (found := ROW.fullmatch(word)) and not is_file(found[1]) else word
        for word in words
    ]


def patient_threads() -> None:
    """Let OpenMP threads that wait spin for some ten microseconds and then sleep. Set before torch is imported.

    By default they spin so long that, where another program takes a core for a moment, the working threads wait for the
    waiting ones: on two cores with one busy neighbour a training step took up to ten times as long. Sleeping at once
    costs a fifth to a half of the speed on a quiet machine. This bound costs nothing there that could be measured, and with the
    neighbour a step took three to four times as long.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Run a Hydra application: configuration errors are printed by `explain` and end the program with code 1; any other
    error keeps its traceback."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # so that Hydra hands its errors on to here
    patient_threads()
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        sys.stderr.write(f"{explain(error)}\n")
        sys.exit(1)
