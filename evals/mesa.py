"""Mesa's solver in evaluation: quality and work against its steps and its tolerance, and what it works on.

``cg_steps=0`` takes q* = q, which is gated linear attention (MesaNet, arXiv 2506.05233, section 5 and Appendix).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from data.dataset import Batch
from evals.carried import scored, sequences
from evals.positions import edges_of
from evals.suite import Parts, Result, Subject, suite
from mixers.mesa import Mesa
from models.config import at_least, one_of
from models.evaluate import autocast, to_device


@dataclass
class MesaSuiteConfig:
    """See `conf/suite/mesa.yaml`."""

    split: str = "test"
    sequences: int = 32
    cg_steps: list[int] = field(default_factory=lambda: [0, 1, 2, 5, 10, 20, 30])
    tol: list[float] = field(default_factory=lambda: [1e-2, 1e-3, 1e-4, 1e-5])
    max_steps: int = 60
    observed: int = 4

    def check(self, path: str) -> None:
        one_of(f"{path}.split", self.split, ("val", "test"))
        for name in ("sequences", "max_steps", "observed"):
            at_least(f"{path}.{name}", getattr(self, name), 1)
        for steps in self.cg_steps:
            at_least(f"{path}.cg_steps", steps, 0)
        for tol in self.tol:
            if not 0 < tol < 1:
                raise ValueError(f"{path}.tol={self.tol}: each must be between 0 and 1")


@contextlib.contextmanager
def solver(mixers: list[Mesa], steps: int, tol: float | None) -> Iterator[None]:
    """All layers with other solver settings in evaluation."""
    before = [mixer.config for mixer in mixers]
    try:
        for mixer in mixers:
            mixer.config = dataclasses.replace(mixer.config, cg_steps=steps, eval_cg_steps=None, tol=tol, eval_tol=None)
        yield
    finally:
        for mixer, config in zip(mixers, before, strict=True):
            mixer.config = config


@suite("mesa", MesaSuiteConfig)
def evaluate(subject: Subject, config: MesaSuiteConfig, parts: Parts) -> Result:
    """Metrics ``loss/cg_steps=<n>``, ``loss/tol=<t>`` and ``steps/tol=<t>`` (mean over tokens, heads and layers), and
    ``loss/first_quarter/<setting>`` and ``loss/last_quarter/<setting>``: what few steps cost early and late. Tables:
    ``curves`` with the loss by position and the steps by layer, head and position of each setting; ``internals`` with the
    condition number of H + Lambda and the half-life by layer and head."""
    result = Result()
    mixers = [block.mixer for block in subject.model.backbone.layers if isinstance(block.mixer, Mesa)]
    if not mixers:
        result.metrics["loss"] = None
        result.reasons["loss"] = f"mixer {subject.config.mixer.kind} has no solver"
        return result
    edges = edges_of(subject.dataset.seq_len, 1)
    settings: list[tuple[str, int, float | None]] = [(f"cg_steps={n}", n, None) for n in config.cg_steps]
    settings += [(f"tol={tol:g}", config.max_steps, tol) for tol in config.tol]
    for name, steps, tol in settings:

        def compute(steps: int = steps, tol: float | None = tol) -> dict[str, Any]:
            with solver(mixers, steps, tol):
                nats, graded = scored(
                    subject,
                    subject.dataset,
                    config.split,
                    config.sequences,
                    subject.model.modes[0],
                    subject.dataset.seq_len,
                )
                taken = _steps(subject, mixers, config, edges)
            total = np.add.reduceat(np.where(graded, nats, 0.0).sum(0), edges[:-1])
            count = np.add.reduceat(graded.sum(0), edges[:-1])
            quarter = max(1, graded.shape[1] // 4)
            return {
                "loss": float(total.sum() / count.sum()),
                "first_quarter": _mean(nats[:, :quarter], graded[:, :quarter]),
                "last_quarter": _mean(nats[:, -quarter:], graded[:, -quarter:]),
                "edges": edges,
                "mean": (total / count).tolist(),
                "steps": taken,
            }

        found = parts(name, compute)
        result.tables.setdefault("curves", {})[name] = found
        result.metrics[f"loss/{name}"] = found["loss"]
        result.metrics[f"steps/{name}"] = float(np.mean(found["steps"]))
        for part in ("first_quarter", "last_quarter"):
            metric = f"loss/{part}/{name}"
            result.metrics[metric] = found[part]
            if found[part] is None:
                result.reasons[metric] = "no target is graded there"
    result.tables["internals"] = parts("internals", lambda: _internals(subject, mixers, config, edges))
    return result


def _mean(nats_NT: np.ndarray, graded_NT: np.ndarray) -> float | None:
    """Mean of the graded targets; None where there are none: a task asks late."""
    return float(nats_NT[graded_NT].mean()) if graded_NT.any() else None


def _observed(subject: Subject, config: MesaSuiteConfig) -> Batch:
    return to_device(
        next(iter(sequences(subject.dataset, config.split, config.observed, config.observed))), subject.device
    )


@torch.no_grad()
def _steps(subject: Subject, mixers: list[Mesa], config: MesaSuiteConfig, edges: list[int]) -> list[list[list[float]]]:
    """Steps that were taken, by layer, head and range of positions: means over a few sequences."""
    batch = _observed(subject, config)
    for mixer in mixers:
        mixer.observed = {}
    try:
        with autocast(subject.device, subject.config.precision):
            subject.model.features(batch.inputs_BT)
        out = []
        for mixer in mixers:
            assert mixer.observed is not None
            steps_TH = mixer.observed["cg_steps"].float().mean(0).cpu()
            out.append(
                [[float(part.mean()) for part in _ranges(steps_TH[:, h], edges)] for h in range(steps_TH.shape[1])]
            )
        return out
    finally:
        for mixer in mixers:
            mixer.observed = None


def _ranges(values_T: torch.Tensor, edges: list[int]) -> Iterator[torch.Tensor]:
    return (values_T[a:b] for a, b in zip(edges, edges[1:], strict=False))


@torch.no_grad()
def _internals(subject: Subject, mixers: list[Mesa], config: MesaSuiteConfig, edges: list[int]) -> dict[str, Any]:
    """By layer and head: condition number of H + Lambda after each of ``edges[1:]`` tokens, and the median half-life of
    the decay in tokens."""
    batch = _observed(subject, config)
    model, conditions = subject.model, []
    layers = [i for i, block in enumerate(model.backbone.layers) if isinstance(block.mixer, Mesa)]
    for length in edges[1:]:
        states = model.states_after(batch.inputs_BT[:, :length])
        row = []
        for layer, mixer in zip(layers, mixers, strict=True):
            covariance = states[layer]["covariance"].double()
            eigen_BHK = torch.linalg.eigvalsh(covariance + torch.diag_embed(mixer.ridge().double()))
            row.append((eigen_BHK[..., -1] / eigen_BHK[..., 0]).mean(0).tolist())
        conditions.append(row)
    for mixer in mixers:
        mixer.observed = {}
    try:
        model.features(batch.inputs_BT)
        half_lives: list[list[float] | None] = []
        for mixer in mixers:
            assert mixer.observed is not None
            g = mixer.observed.get("log_decay")
            if g is None:
                half_lives.append(None)
                continue
            half_life = -np.log(2) / g.float().clamp(max=-1e-9)
            half_lives.append(half_life.movedim(2, 0).flatten(1).median(dim=1).values.tolist())
    finally:
        for mixer in mixers:
            mixer.observed = None
    by_layer = [[[row[i][h] for row in conditions] for h in range(len(conditions[0][i]))] for i in range(len(mixers))]
    return {"positions": edges[1:], "layers": layers, "condition": by_layer, "half_life": half_lives}
