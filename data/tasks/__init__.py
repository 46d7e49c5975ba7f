"""Synthetic tasks: examples made on the fly, each a pure function of (seed, split, index), with a known best answer.

A task is one Python file here and one YAML file, ``conf/data/<kind>.yaml``. The table of them is docs/tasks.md.
This module is the registry and imports nothing heavy; the tasks themselves need numpy and are imported when asked for.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T", bound=type)

_CONFIGS: dict[str, type] = {}

_WITH_TORCH = ("dataset", "score")  # modules here that hold no task


def register(cls: T) -> T:
    """Class decorator: make a task's config dataclass known by its ``kind``."""
    _CONFIGS[cls.kind] = cls  # type: ignore[attr-defined]
    return cls


def configs() -> dict[str, type]:
    """kind -> config dataclass of every task. Imports all of their modules, and with them numpy."""
    for module in pkgutil.iter_modules(__path__):
        if module.name not in _WITH_TORCH:
            importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(_CONFIGS.items()))


class WithTasks(dict[str, type]):
    """A dict of config classes by kind that also holds the tasks, which are imported at the first kind that it does not
    know: a config of text is checked without numpy."""

    def __missing__(self, kind: str) -> type:
        return configs()[kind]

    def __contains__(self, kind: object) -> bool:
        return super().__contains__(kind) or kind in configs()

    def __iter__(self) -> Iterator[str]:
        yield from super().__iter__()
        yield from configs()
