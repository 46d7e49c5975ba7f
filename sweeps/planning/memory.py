"""Memory of a run, by a dry run: a training step and an evaluation pass on tensors that have shapes and no numbers.

Each tensor counts from when an operation makes it until nothing refers to it any more, and the peak is kept. So what a
mixer saves for its backward pass, what activation checkpointing drops and what evaluation needs are all in it, at the
true batch and length, without computing anything. Deep models are continued in a straight line from two shallow ones;
so are the few mixers that walk token by token, from two short lengths.

On a GPU it is the memory of the forms in plain torch: kernels usually need less.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data.dataset import Batch
from models.budget import Shape, activation_dtype
from models.evaluate import autocast, batch_size
from models.lm import LanguageModel, build_model
from models.optim import parameter_groups
from models.two_pass import BLOCK

if TYPE_CHECKING:
    from runs.schema import Config

PROCESS = {"cpu": 0.7e9, "gpu": 0.6e9}
"""Bytes of a process before there is a model: the libraries; on a GPU the context, and its libraries' workspaces."""

SLACK = 1.1
"""What allocators hold beyond what is in use."""

SHALLOW = 4  # layers that are run as they are
OPERATIONS = 20_000  # a pass of more is continued from shorter lengths: each takes a part of a millisecond
PROBES = (128, 256)
TOKENS = (8, 16)  # of a token-by-token evaluation


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    weights: float
    gradients: float
    moments: float  # AdamW's two, Muon's one
    training: float  # peak of a step beyond weights and moments, gradients included
    evaluation: float  # peak of scoring beyond weights, moments and gradients
    process: float

    @property
    def total(self) -> float:
        """The peak of the whole run."""
        live = max(self.training, self.gradients + self.evaluation)
        return self.process + SLACK * (self.weights + self.moments + live)


def estimate(config: Config, shape: Shape, windows: int | None = None) -> Memory:
    """Peak memory of one device of a run. ``windows``: the most that a split has, where that is known."""
    trainer = config.trainer
    weights = _weights(config, shape)
    training = _in_depth(config, lambda c: _in_length(c, lambda d: _step(d, shape)))
    evaluation = max(_evaluation(config, shape, mode, windows) for mode in modes(config, shape))
    parts = trainer.devices * trainer.nodes if trainer.strategy == "fsdp" else 1
    saved = weights * (1 - 1 / parts)  # of the gradients, which a device keeps a part of
    return Memory(
        weights=weights / parts,
        gradients=weights / parts,
        moments=_moments(config, shape) / parts,
        training=max(weights / parts, training - saved),
        evaluation=evaluation,
        process=PROCESS[trainer.accelerator],
    )


# ---- what is run -----------------------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive, and the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.operations = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1  # a number is asked for, and there is none: "is every target graded?"
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())
        return out

    def _add(self, storage: Any) -> None:
        name, size = storage._cdata, storage.nbytes()
        if name not in self._known:
            self._known.add(name)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, name, size)

    def _drop(self, name: int, size: int) -> None:
        self._known.discard(name)
        self.now -= size


def _model(config: Config, shape: Shape) -> LanguageModel:
    """The model with tensors of the mode that is on, its weights not drawn."""
    with torch.device("meta"):
        model = build_model(config, **shape._asdict())
    made: dict[int, Any] = {}  # tied weights stay tied
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                empty = torch.empty(p.shape, dtype=p.dtype)
                module._parameters[name] = made.setdefault(id(p), nn.Parameter(empty, requires_grad=p.requires_grad))
        for name, b in module._buffers.items():
            if b is not None:
                module._buffers[name] = made.setdefault(id(b), torch.empty(b.shape, dtype=b.dtype))
    return model


def _batch(config: Config, shape: Shape, rows: int, length: int) -> Batch:
    ids_BT = torch.zeros(rows, length, dtype=torch.int64)
    inputs, targets = ids_BT, ids_BT
    if shape.input_width is not None:
        inputs, targets = torch.zeros(rows, length, shape.input_width), torch.zeros(rows, length)
    resets = getattr(config.data, "packing", "bos") == "bos_reset"
    return Batch(inputs, targets, ids_BT if resets else None, n_targets=rows * length, document_BT=None)


def _step(config: Config, shape: Shape) -> Live:
    """One optimizer step up to its gradients; two micro batches where there are several."""
    assert config.trainer.micro_batch is not None
    with FakeTensorMode(), Live() as live:
        model = _model(config, shape).train()
        batch = _batch(config, shape, config.trainer.micro_batch, config.data.seq_len)
        weights = live.now
        for _ in range(min(2, config.accumulate)):
            with autocast(torch.device("cpu"), config.precision):
                loss = model.loss(batch)[0]
            loss.backward()
            del loss
    live.peak -= weights
    return live


def _evaluation(config: Config, shape: Shape, mode: str, windows: int | None) -> float:
    """Peak of scoring. Without gradients layers do not add up: a shallow model shows it. Token by token the states do."""
    rows, length = batch_size(config.trainer, mode), config.data.seq_len
    rows = rows if windows is None else min(rows, windows)
    shallow = _with_depth(config, min(config.model.n_layers, _period(config)))
    if mode != "recurrent":
        return _score(shallow, shape, mode, rows, length)
    near, far = (_score(shallow, shape, mode, rows, tokens) for tokens in TOKENS)
    logits = near + (far - near) * (min(length, BLOCK) - TOKENS[0]) / (TOKENS[1] - TOKENS[0])
    dtype = activation_dtype(config.precision)
    with torch.device("meta"):
        state = build_model(config, **shape._asdict()).counts(length, dtype)["state_bytes"]
    embedded = 3 * length * config.model.d_model * dtype.itemsize  # tokens, and their memories twice
    return logits + rows * (state + embedded)


@torch.no_grad()
def _score(config: Config, shape: Shape, mode: str, rows: int, length: int) -> float:
    with FakeTensorMode(), Live() as live:
        model = _model(config, shape).eval()
        batch = _batch(config, shape, rows, length)
        weights = live.now
        with autocast(torch.device("cpu"), config.precision):
            model.grade(batch, mode)
    return live.peak - weights


def modes(config: Config, shape: Shape) -> tuple[str, ...]:
    """The model's ways to compute a quality number; each is scored."""
    with torch.device("meta"):
        return build_model(config, **shape._asdict()).modes


def _weights(config: Config, shape: Shape) -> float:
    with torch.device("meta"):
        return float(sum(p.numel() * p.itemsize for p in build_model(config, **shape._asdict()).parameters()))


def _moments(config: Config, shape: Shape) -> float:
    """Two numbers for each of AdamW's parameters, one for Muon's; its moving means by row are a thousandth of that."""
    with torch.device("meta"):
        model = build_model(config, **shape._asdict())
    groups = parameter_groups(model, config.optimizer)
    return float(
        sum((1 if name == "hidden" else 2) * p.numel() * p.itemsize for name, g in groups.items() for p in g.values())
    )


# ---- deep and long models --------------------------------------------------------------------------------------------


def _in_depth(config: Config, measure: Callable[[Config], float]) -> float:
    """``measure`` at the config's depth, continued from two shallower models where it is deep."""
    depth, period = config.model.n_layers, _period(config)
    near, far = period, 2 * period
    if depth <= max(SHALLOW, far):
        return measure(config)
    low, high = measure(_with_depth(config, near)), measure(_with_depth(config, far))
    return low + (high - low) * (depth - near) / (far - near)


def _period(config: Config) -> int:
    """After how many layers a hybrid's pattern, the two of a two-pass model, and value embeddings begin anew."""
    patterns = [getattr(config.mixer, name, "") for name in ("pattern", "q_pattern", "p_pattern")]
    return math.lcm(2 if config.model.value_embeds == "alternate" else 1, *(len(pattern) or 1 for pattern in patterns))


def _with_depth(config: Config, depth: int) -> Config:
    mixer: Any = config.mixer
    if hasattr(mixer, "n_layers"):
        kept = [layer for layer in mixer.inject_layers or [] if layer < depth]
        source = mixer.source_layer and min(mixer.source_layer, depth)
        mixer = dataclasses.replace(mixer, n_layers=depth, inject_layers=kept or None, source_layer=source)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, n_layers=depth), mixer=mixer)


def _in_length(config: Config, run: Callable[[Config], Live]) -> float:
    """The peak of ``run``; continued from two short lengths where a pass walks token by token."""
    length = config.data.seq_len
    if length <= 2 * PROBES[1]:
        return run(config).peak
    short, longer = (run(_with_length(config, probe)) for probe in PROBES)
    growth = (longer.operations - short.operations) / (PROBES[1] - PROBES[0])
    if longer.operations + growth * (length - PROBES[1]) <= OPERATIONS:
        return run(config).peak
    return longer.peak + (longer.peak - short.peak) * (length - PROBES[1]) / (PROBES[1] - PROBES[0])


def _with_length(config: Config, length: int) -> Config:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=length))
