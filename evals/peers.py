"""Other people's plain-torch code, for second opinions in tests and as peers in speed comparisons; never at run time."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path
from typing import Any


def fla_naive(module: str) -> Any:
    """A reference file of fla-core, loaded by its path: importing the package would need triton. None if not installed."""
    try:
        files = metadata.files("fla-core") or []
    except metadata.PackageNotFoundError:
        return None
    path = next(Path(str(f.locate())) for f in files if str(f).endswith(f"fla/ops/{module}/naive.py"))
    spec = importlib.util.spec_from_file_location(f"fla_naive_{module}", path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def version(package: str) -> str | None:
    """Of an installed package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
