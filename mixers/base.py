"""The contract of a sequence mixer. Whoever implements it gets every test, count, sweep and report.

A mixer maps x_BTD to y_BTD causally. Training calls ``forward(x)``. To carry on from earlier tokens, start from
``init_state(...)`` and pass the returned state back in: prefill, chunked prefill and decoding are the same call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from omegaconf import MISSING
from torch import Tensor, nn

State = dict[str, Tensor]
"""What a mixer must keep to go on. Every tensor has the batch as its first axis. Integer tensors are bookkeeping
(positions); they live on the CPU, steer slices there and are not counted as state bytes."""


class Memory(NamedTuple):
    """What a two-pass model hands to the layers of its decoder: at each position, the memory of the token before."""

    state_BTD: Tensor
    key_BTHK: Tensor | None = None  # the model's projections of it, where all layers share them
    value_BTHV: Tensor | None = None


@dataclass(frozen=True)
class Context:
    """What a mixer may need beside its input; the language model fills it in."""

    positions: Tensor | None = None  # (T,) or (B, T) int64; None: counted from the state's length, or from 0
    segment_ids: Tensor | None = None  # (B, T) int64, non-decreasing: no information crosses a border
    donate_state: bool = False  # the passed-in state's buffers may be overwritten
    memory: Memory | None = None  # two-pass models: what is injected; None: zeros
    role: str | None = None  # two-pass models: which pass this is, prefiller or decoder (None)
    subset: tuple[int, int] | None = None  # two-pass models: the rows are positions first, first + step, ... only
    tokens: Tensor | None = None  # (B, T) int64, where the backbone has value embeddings
    value_BTHV: Tensor | None = None  # a value embedding: added to the layer's values before all that is done to them
    stream_BTD: Tensor | None = None  # for a mixer that ``reads_stream``: the residual stream before its block's norm


NO_CONTEXT = Context()


class Knob(NamedTuple):
    """A field that the budget solver (`models/budget.py`) may turn in whole steps from ``low`` to ``high``."""

    key: str  # of the model or the mixer, as in mixer.window
    low: float = 1
    high: float | None = None  # None: as far as it has an effect
    per_head_dim: bool = False  # the field is a share of head_dim, and a step is one channel


MLP_WIDTH = Knob("model.mlp_width")


@dataclass
class MixerConfig:
    """What every mixer's config has. Subclasses add fields; `conf/mixer/<name>.yaml` lists all with their reasons."""

    kind: str = MISSING
    d_model: int = MISSING
    n_heads: int = MISSING
    head_dim: int = MISSING

    # The class of `models` that is built around the layers, as module:name.
    model_class: ClassVar[str] = "models.lm:LanguageModel"
    # What `match=params` and `match=flops` turn until the model meets its budget, and what `match=state` turns; a sentence
    # where nothing sets the state without being something else.
    budget_knob: ClassVar[Knob] = MLP_WIDTH
    state_knob: ClassVar[Knob | str] = "its state is as wide as the layer itself"
    # Fields that the contract tests set, where the defaults do not fit a tiny model.
    test_overrides: ClassVar[dict] = {}

    def check(self, path: str) -> None:
        """Raise ValueError with one sentence (key, value, what would be right) for values that cannot work."""

    def n_parameters(self) -> int:
        """Parameters of one layer, by formula: known before anything is built."""
        raise TypeError(f"mixer {self.kind!r} must define n_parameters()")

    def build(self, layer_index: int, n_layers: int) -> Mixer:
        """The layer itself."""
        raise TypeError(f"mixer {self.kind!r} must define build()")

    def for_layer(self, layer_index: int) -> MixerConfig:
        """The config of one layer; a hybrid answers with one of its parts."""
        return self

    def max_len(self) -> int | None:
        """The longest document that the mixer can take; None: any."""
        return None

    def takes_value_embeds(self) -> bool:
        """Do its layers add ``context.value_BTHV`` to their values?"""
        return False

    def kinds(self) -> set[str]:
        """The kinds of mixers in use; a hybrid adds those of its parts."""
        return {self.kind}

    def accessories(self) -> dict[str, str]:
        """What the layer has beside its state rule (convolution, norms, gates, positions); reports print it."""
        return {}


class Mixer(nn.Module, ABC):
    """Base class of all mixers."""

    observed: dict[str, Tensor] | None = None  # a dict while diagnostics look at the layer
    reads_stream: bool = False  # wants ``context.stream_BTD``

    def observe(self, name: str, value: Tensor) -> None:
        """Show diagnostics what happens inside: ``log_decay`` (B,T,H) or (B,T,H,K), ``cg_steps`` (B,T,H)."""
        if self.observed is not None:
            self.observed[name] = value.detach()

    @abstractmethod
    def forward(
        self, x_BTD: Tensor, state: State | None = None, context: Context | None = None
    ) -> tuple[Tensor, State | None]:
        """Mix over time, for any T >= 1.

        ``state=None``: start at zero and return None. Otherwise the state after the last token is returned, and the
        one passed in is unchanged unless ``context.donate_state``.
        """

    @abstractmethod
    def init_state(self, batch_size: int, max_len: int, device: torch.device, dtype: torch.dtype) -> State:
        """The state before the first token, for at most ``max_len`` tokens in all; ``dtype`` is the activations'."""

    @abstractmethod
    def cell_flops_per_token(self, seq_len: int) -> float:
        """FLOPs of one forward pass outside the linear maps: mean over positions, causal halves taken, C = 64."""

    @abstractmethod
    def state_bytes(self, seq_len: int, dtype: torch.dtype) -> int:
        """Bytes that must be kept to go on after ``seq_len`` tokens, for one sequence."""

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of one forward pass per token (a multiply-add is 2): linear maps plus the cell."""
        linear = sum(2 * m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return linear + self.cell_flops_per_token(seq_len)

    def train_flops_per_token(self, seq_len: int) -> float:
        """Forward and backward. The default is three forward passes."""
        return 3 * self.flops_per_token(seq_len)

    def init_parameters(self, generator: torch.Generator) -> None:
        """Draw what needs an init of its own. Runs after the backbone's init of linear maps, which it may replace."""

    def no_decay(self) -> set[str]:
        """Names (relative to this module) that weight decay must not touch, beside biases, gains and norms."""
        return set()
