"""Every mixer config of `conf/mixer/` at a size that a test can afford. A new YAML file is a new case of each test."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import torch
import yaml
from hydra import compose, initialize_config_dir
from torch import Tensor

from mixers import config_class
from mixers.base import NO_CONTEXT, Memory, Mixer, State
from models.lm import LanguageModel, build_model
from runs.schema import Config
from runs.validate import validate

ROOT = Path(__file__).resolve().parents[2]
_FILES = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / "conf" / "mixer").glob("*.yaml"))}
NAMES = [name for name, plain in _FILES.items() if plain["kind"] != "hybrid"]
HYBRIDS = [name for name, plain in _FILES.items() if plain["kind"] == "hybrid"]  # their layers are those of NAMES
TINY = (
    "model.d_model=16",
    "model.n_heads=2",
    "model.n_layers=2",
    "model.mlp_width=24",
    "logger=none",
    "data.seq_len=2048",
)
# No chunk (64, 32, 16) divides these; 130 needs three chunks of 64.
LENGTHS = (1, 3, 37, 130)


@cache
def config(name: str, overrides: bool = True) -> Config:
    """A whole checked config with the mixer ``name`` at tiny size. Without its ``test_overrides``: at a size at which
    costs look as they do in earnest (heads of width 64)."""
    small = _small("mixer", _FILES[name])
    size = (*TINY, *small) if overrides else (*TINY, "model.d_model=128")
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return validate(compose("config", overrides=[f"mixer={name}", *size]))


def _small(path: str, plain: dict) -> list[str]:
    """The ``test_overrides`` of a mixer, or of a hybrid's parts."""
    out = [f"{path}.{key}={value}" for key, value in config_class(plain["kind"]).test_overrides.items()]
    for group in plain.get("defaults", []):
        if isinstance(group, dict):
            ((where, part),) = group.items()
            out += _small(f"{path}.{where.split('@')[1]}", _FILES[part])
    return out


def language_model(name: str, seed: int = 0, overrides: bool = True) -> LanguageModel:
    """A tiny language model with the mixer, at its initial weights."""
    return build_model(dataclasses.replace(config(name, overrides), init_seed=seed), vocab_size=11)


def mixer(name: str, dtype: torch.dtype = torch.float64, seed: int = 0, overrides: bool = True) -> Mixer:
    """One layer as the language model initialises it."""
    model = language_model(name, seed, overrides)
    layer = model.backbone.blocks[1].mixer.to(dtype).eval()
    if model.modes != ("parallel",):  # a layer of a two-pass model: it gets a memory of its own at every position
        layer.register_forward_pre_hook(_with_memory, with_kwargs=True)
    return layer


def _with_memory(layer: Mixer, arguments: tuple, named: dict) -> tuple[tuple, dict]:
    """A memory that depends on the input at the same position, so that all relations of the contract stay as they are."""
    x, state, context = (*arguments, None, None)[:3]
    context = named.get("context", context) or NO_CONTEXT
    heads = (layer.config.n_heads, layer.config.head_dim)
    memory = Memory(x.flip(-1), 0.7 * x.flip(-1).unflatten(-1, heads), 0.9 * x.roll(3, -1).unflatten(-1, heads))
    return (x, named.get("state", state), dataclasses.replace(context, memory=memory)), {}


def inputs(batch: int, steps: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """(B, T, D) of unit variance."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, steps, 16, generator=generator, dtype=torch.float64).to(dtype)


def start(layer: Mixer, batch: int, max_len: int, dtype: torch.dtype = torch.float64) -> State:
    """The state before the first token."""
    return layer.init_state(batch, max_len, torch.device("cpu"), dtype)


def stepped(layer: Mixer, x_BTD: Tensor, max_len: int | None = None) -> tuple[Tensor, State]:
    """Token by token with carried state."""
    state: State | None = start(layer, x_BTD.shape[0], max_len or x_BTD.shape[1], x_BTD.dtype)
    outputs = []
    for t in range(x_BTD.shape[1]):
        y, state = layer(x_BTD[:, t : t + 1], state)
        outputs.append(y)
    assert state is not None
    return torch.cat(outputs, dim=1), state


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Relative RMS error; absolute where the expected value is (nearly) zero."""
    actual, expected = actual.detach(), expected.detach()
    error = (actual - expected).double().square().mean().sqrt()
    size = expected.double().square().mean().sqrt()
    assert error.isfinite() and error <= tolerance * max(float(size), 1e-3), f"{float(error):.3g} of {float(size):.3g}"


TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
