"""Sequence mixers: the contract (`base.py`), the registry (here), and one file for each mixer.

Tensors carry their axes as a suffix, as in ``q_BTHK``. The legend of the whole project:

    B batch    T time     D model width    H heads    K key width    V value width
    C chunk    N chunks   W window

Everything is token-major (B, T, H, ...). Log decays are natural logarithms ``g <= 0``. A recurrent matrix state is
(B, H, K, V) in float32 (float64 for float64 input).
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from typing import TypeVar

T = TypeVar("T", bound=type)

_CONFIGS: dict[str, type] = {}


def register(cls: T) -> T:
    """Class decorator: make a config dataclass known by its ``kind``, which is the name of the mixer's module."""
    _CONFIGS[cls.kind] = cls  # type: ignore[attr-defined]
    return cls


def kinds() -> list[str]:
    """Every registered kind. Imports all mixer modules."""
    for module in pkgutil.iter_modules(__path__):
        if not module.ispkg:
            importlib.import_module(f"{__name__}.{module.name}")
    return sorted(_CONFIGS)


def config_class(kind: str) -> type:
    """The config dataclass of a kind; its module is imported only now. Raises KeyError with the known kinds."""
    if kind not in _CONFIGS and kind.isidentifier():
        try:
            importlib.import_module(f"{__name__}.{kind}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{kind}":  # the mixer is there, but something that it imports is not
                raise
    if kind not in _CONFIGS:
        near = difflib.get_close_matches(kind, kinds(), 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise KeyError(f"{kind!r} is not a mixer.{hint} Mixers: {', '.join(kinds())}")
    return _CONFIGS[kind]
