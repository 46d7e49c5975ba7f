"""The frame of mixers whose weights depend on positions alone, never on what is mixed (no queries, no gates).

    x_BTHV = W_in x + b;   y_t = sum_{s <= t} W[t, s] x_s + c_t  for each head;   W_out y + b

A subclass brings the operator W; c is a bias per position, shared by all channels of a head. Without heads one operator
mixes all channels, and there are no projections. Expanded: operator, SiLU, operator. Positions count from the beginning
of a document. Toeplitz MLP mixers are arXiv 2605.06683, masked mixers arXiv 2409.01482 (toeplitz 1).

Beside the project's axes: O operators, L positions that have weights.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from omegaconf import MISSING
from torch import Tensor, nn

from mixers.base import NO_CONTEXT, Context, Knob, Mixer, MixerConfig, State
from mixers.ops._documents import positions_in_documents
from mixers.ops.online_conv import document_starts
from mixers.parts import ResidualLinear


@dataclass
class FixedMixConfig(MixerConfig):
    """``length``: positions that have weights."""

    length: int = MISSING
    headed: bool = True
    expanded: bool = False
    position_bias: bool = True

    state_knob: ClassVar[Knob | str] = "it keeps all tokens, as wide as the layer, up to its length"
    test_overrides: ClassVar[dict] = {"length": 2048}

    @property
    def groups(self) -> int:
        """H: operators side by side."""
        return self.n_heads if self.headed else 1

    @property
    def width(self) -> int:
        """V: channels that share an operator."""
        return self.head_dim if self.headed else self.d_model

    @property
    def operators(self) -> int:
        """O: operators behind one another."""
        return 2 if self.expanded else 1

    def check(self, path: str) -> None:
        if self.length < 1:
            raise ValueError(f"{path}.length={self.length}: must be at least 1 (usual is data.seq_len)")

    def weights_per_operator(self) -> int:
        """Of one head's operator, without its bias."""
        raise TypeError(f"mixer {self.kind!r} must define weights_per_operator()")

    def n_parameters(self) -> int:
        inner = self.groups * self.width
        projections = 2 * self.d_model * inner + inner + self.d_model if self.headed else 0
        bias = self.length if self.position_bias else 0
        return projections + self.operators * self.groups * (self.weights_per_operator() + bias)

    def max_len(self) -> int | None:
        return self.length

    def accessories(self) -> dict[str, str]:
        return {
            "projections": "in and out, with biases" if self.headed else "none",
            "positions": f"bias of each of {self.length}" if self.position_bias else "none",
            "operators": "two with SiLU between" if self.expanded else "one",
        }


class FixedMix(Mixer):
    """Projections, position bias and bookkeeping around an operator."""

    config: FixedMixConfig

    def __init__(self, config: FixedMixConfig):
        super().__init__()
        self.config = c = config
        inner = c.groups * c.width
        self.project = nn.Linear(c.d_model, inner) if c.headed else None
        self.out = ResidualLinear(inner, c.d_model) if c.headed else None
        bias = torch.empty(c.operators, c.groups, c.length)
        self.bias_OHL = nn.Parameter(bias) if c.position_bias else None

    @abstractmethod
    def mix(self, operator: int, x_BTHV: Tensor, state: State | None, context: Context) -> tuple[Tensor, Tensor | None]:
        """One operator on all heads: y_BTHV and what it remembers (``memory_shape``), None where ``state`` is.

        ``state``: its "memory", and the counters that all operators share.
        """

    def normalise(self, operator: int, y_BTHV: Tensor, position_T: Tensor) -> Tensor:
        """What an operator gives, divided as its position in the document (T,) or (B,T) demands."""
        return y_BTHV

    @abstractmethod
    def memory(self, batch_size: int, max_len: int, device: torch.device, dtype: torch.dtype) -> State:
        """Of one operator before the first token: "memory", and the counters length, start and any others."""

    def check_length(self, reached: int) -> None:
        """Raise ValueError where a document of ``reached`` tokens has no weights for them."""
        if reached > self.config.length:
            raise ValueError(
                f"mixer.length={self.config.length}: a document has {reached} tokens, and the operator weights for "
                "no more than mixer.length; it must be at least the longest sequence"
            )

    def forward(
        self, x_BTD: Tensor, state: State | None = None, context: Context | None = None
    ) -> tuple[Tensor, State | None]:
        c, context = self.config, context or NO_CONTEXT
        position_T = self._positions(x_BTD, state, context.segment_ids)
        x_BTHV = (x_BTD if self.project is None else self.project(x_BTD)).unflatten(-1, (c.groups, c.width))
        after: State = {}
        for operator in range(c.operators):
            if operator:
                x_BTHV = F.silu(x_BTHV)
            own = None if state is None else {**state, "memory": state[f"memory_{operator}"]}
            x_BTHV, memory = self.mix(operator, x_BTHV, own, context)
            if memory is not None:
                after[f"memory_{operator}"] = memory
            x_BTHV = self.normalise(operator, x_BTHV, position_T)
            if self.bias_OHL is not None:
                bias_TH = self.bias_OHL[operator].T[position_T.clamp(max=c.length - 1)]
                x_BTHV = x_BTHV + bias_TH[..., None].to(x_BTHV.dtype)
        y_BTD = x_BTHV.flatten(2)
        if self.out is not None:
            y_BTD = self.out(y_BTD)
        if state is None:
            return y_BTD, None
        return y_BTD, after | self.counters(state, x_BTD.shape[1], context.segment_ids)

    def counters(self, state: State, steps: int, segment_ids: Tensor | None) -> State:
        """The counters after ``steps`` more tokens."""
        start = document_starts(state, segment_ids)
        return {"length": state["length"] + steps, "start": start}

    def _positions(self, x_BTD: Tensor, state: State | None, segment_ids: Tensor | None) -> Tensor:
        """(T,) or (B,T): place in the document, which is not what ``context.positions`` counts."""
        steps, device = x_BTD.shape[1], x_BTD.device
        if state is None and segment_ids is None:  # on its own, as it compiles into one graph
            self.check_length(steps)
            return torch.arange(steps, device=device)
        before_B = torch.zeros(1, dtype=torch.int64) if state is None else state["length"] - state["start"]
        reached = steps if state is None else int(before_B.max()) + steps
        if segment_ids is None:
            self.check_length(reached)
            one_for_all = bool((before_B == before_B[0]).all())
            position_BT = before_B[:, None].to(device) + torch.arange(steps, device=device)
            return position_BT[0] if one_for_all else position_BT
        position_BT = positions_in_documents(segment_ids, before_B)
        if reached > self.config.length:  # documents may be shorter; looking costs a sync
            self.check_length(int(position_BT.max()) + 1)
        return position_BT

    def init_state(self, batch_size: int, max_len: int, device: torch.device, dtype: torch.dtype) -> State:
        states = [self.memory(batch_size, max_len, device, dtype) for _ in range(self.config.operators)]
        memories = {f"memory_{i}": state.pop("memory") for i, state in enumerate(states)}
        return memories | states[0]

    def init_parameters(self, generator: torch.Generator) -> None:
        """Position biases start at zero."""
        with torch.no_grad():
            if self.bias_OHL is not None:
                self.bias_OHL.zero_()

    def no_decay(self) -> set[str]:
        return set() if self.bias_OHL is None else {"bias_OHL"}
