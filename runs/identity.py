"""What a run is: the science that is hashed, the host that is not, and the key of what must be equal to compare.

Two runs may stand in one table when they differ in their mixer, their seeds and the keys that their study tunes, and in
nothing else. `comparison` is that rest, key by key; its hash is the comparison key.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runs.schema import Config

ROOT = Path(__file__).resolve().parents[1]
HOST = ("trainer", "logger", "paths", "study")
SEEDS = ("seed", "init_seed", "data_seed")
SENTINEL = "<free>"
DERIVED = {
    "model.head_dim": ("model.d_model", "model.n_heads"),
    "model.mlp_width": ("model.d_model", "model.mlp_ratio"),
    "steps": ("tokens",),
}
"""Keys that are filled in from others: free where one of those is."""


def canonical(value: Any) -> str:
    """One JSON text for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def digest(value: Any, length: int = 10) -> str:
    """Short hash of the canonical JSON of a value."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:length]


def science(config: Config) -> dict[str, Any]:
    """All that decides what is computed, as plain values."""
    plain = dataclasses.asdict(config)
    for key in HOST:
        del plain[key]
    plain["tokens"] = None  # another way to write steps, which is filled in
    if config.data.kind != "corpus":
        plain["tokenizer"] = None  # a task has tokens of its own
    return plain


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict with dotted keys."""
    if isinstance(node, dict) and node:
        return {k: v for key, child in node.items() for k, v in flatten(child, f"{prefix}{key}.").items()}
    return {prefix[:-1]: node}


def comparison(raw: DictConfig, config: Config, free: Iterable[str] = ()) -> dict[str, Any]:
    """What must be equal between compared runs: flat science without mixer, seeds and the ``free`` (tuned) keys.

    Those are replaced *before* interpolation, so that a key which takes its value from them is free as well.
    """
    free = [*SEEDS, *free]
    plain = OmegaConf.to_container(raw, resolve=False)
    assert isinstance(plain, dict)
    plain.pop("hydra", None)
    leaves = flatten(plain)
    # A free key may be a group (`schedule`): all of its keys are free then.
    free = [leaf for key in free for leaf in ([k for k in leaves if k.startswith(f"{key}.")] or [key])]
    plain["mixer"] = _replaced(plain["mixer"])
    masked = OmegaConf.create(plain)
    for key in free:
        OmegaConf.update(masked, key, SENTINEL, force_add=True)
    followed = flatten(OmegaConf.to_container(masked, resolve=True))
    out = {}
    for key, value in flatten(science(config)).items():
        if key.startswith("mixer."):
            continue
        derived = followed.get(key) is None or key == "steps"  # tokens have the last word, whatever steps says
        sources = [key, *DERIVED.get(key, ())] if derived else [key]
        follows = any(SENTINEL in str(followed.get(source, "")) for source in sources)
        out[key] = SENTINEL if follows or key in free else value
    return out


def _replaced(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _replaced(child) for key, child in node.items()}
    return SENTINEL


def tuned_keys(study: dict | None) -> list[str]:
    """Keys outside the mixer that a study's grids vary."""
    grids = ((study or {}).get("mixers") or {}).values()
    return sorted({key for grid in grids for key in flatten(grid or {}) if key and not key.startswith("mixer.")})


@dataclasses.dataclass(frozen=True)
class Identity:
    """Who a run is and where it lives."""

    run_id: str
    mixer: str  # the name of its config, such as gated_deltanet_native, or what a study calls this variant of it
    study: str
    science: dict[str, Any]
    comparison: dict[str, Any]
    folder: Path

    @property
    def comparison_key(self) -> str:
        return digest(self.comparison)

    @property
    def name(self) -> str:
        return f"{self.mixer}-{self.run_id}"


def identify(raw: DictConfig, config: Config, mixer_name: str) -> Identity:
    """``raw`` is the composed config with its interpolations, ``config`` the checked one. A study's ``label`` for a variant
    of a mixer stands in place of the mixer's name."""
    facts = science(config)
    study = (config.study or {}).get("name", "default")
    label = (config.study or {}).get("label") or mixer_name
    run_id = digest(facts)
    folder = Path(config.paths.results).absolute() / "runs" / study / f"{label}-{run_id}"
    free = tuned_keys(config.study)
    return Identity(run_id, label, study, facts, comparison(raw, config, free), folder)


# ---- code ------------------------------------------------------------------------------------------------------------

SHARED = ("models", "data", "runs")


def code_hashes(*kinds: str) -> dict[str, str]:
    """Hashes of the code behind a run: ``shared`` by all mixers, and the ``own`` files of the mixers in it.

    Own is a mixer's module with the operations and kernels that it imports. Comments, docstrings and layout do not
    count.
    """
    own = {path for kind in kinds for path in _reachable(ROOT / "mixers" / f"{kind}.py")}
    shared = {p for folder in SHARED for p in (ROOT / folder).rglob("*.py")}
    shared |= {ROOT / "mixers" / name for name in ("__init__.py", "base.py", "parts.py")}  # the backbone's norms too
    return {"shared": hash_files(shared), "mixer": hash_files(own - shared)}


def _reachable(module: Path) -> set[Path]:
    """The module and what it imports from `mixers`, transitively."""
    found: set[Path] = set()
    todo = [module]
    while todo:
        path = todo.pop()
        if path in found or not path.exists():
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            todo += [ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith("mixers.")]
    return found


def hash_files(paths: Iterable[Path]) -> str:
    """Of Python files in the checkout; comments, docstrings and layout do not count."""
    return digest({str(p.relative_to(ROOT)): _hash_code(p, p.stat().st_mtime_ns) for p in sorted(paths)}, 12)


@cache
def _hash_code(path: Path, _changed: int) -> str:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            node.body = node.body[1:]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()
