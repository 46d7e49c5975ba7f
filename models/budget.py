"""Equal budgets: one field of a model is turned until it meets what the reference mixer's model has.

    match=params   non-embedding parameters of the deployed model                    within 0.5 %
    match=flops    training FLOPs per token at the training length                   within 1 %
    match=state    bytes kept after ``match_len`` tokens, activations in the run's precision   within 1 %

For parameters and FLOPs the field is the MLP's width; for the state it is what the mixer declares (``state_knob``).
Everything is counted on the meta device, which holds no numbers, and a count is a straight line in the field: two counts
give it, and one more checks the answer. That takes tens of milliseconds, whatever the size.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from data.dataset import Dataset
from mixers.base import Knob
from models.lm import build_model

if TYPE_CHECKING:
    from runs.schema import Config

LIMITS = {"params": 0.005, "flops": 0.01, "state": 0.01}
"""How far from the reference, as a share of it, still counts as equal."""

COUNTS = {"params": "params_non_embedding", "flops": "train_flops_per_token", "state": "state_bytes"}
UNITS = {"params": "parameters", "flops": "training FLOPs per token", "state": "bytes of state"}
MULTIPLES = (64, 32, 16, 8)
"""Widths that hardware likes; a coarser one is taken where it costs at most a fifth of the limit."""


class CannotMeet(ValueError):
    """A budget that a mixer cannot meet: n/a. One sentence with the key."""


class Shape(NamedTuple):
    """What a model takes from its data beside the length."""

    vocab_size: int
    input_width: int | None = None
    readout_len: int | None = None


@dataclass(frozen=True)
class Match:
    """How a budget was met; ``residual`` is (reached - target) / target."""

    kind: str
    reference: str
    length: int
    target: float
    reached: float
    residual: float
    limit: float
    met: bool
    knob: str | None  # None: the model met the budget as it was
    before: float | None
    value: float | None
    without: float  # what the model had before

    def plain(self) -> dict[str, Any]:
        """For run.json."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        turned = "as it is" if self.knob is None else f"{self.knob} {self.before:g} -> {self.value:g}"
        words = f"{100 * self.residual:+.3f} % from the {self.target:,.0f} {UNITS[self.kind]} of {self.reference} ({turned})"
        return words if self.met else f"{words}: beyond the {100 * self.limit:g} % that count as equal"


def shape_of(dataset: Dataset) -> Shape:
    """Of an opened data set."""
    readout_len = dataset.seq_len if dataset.readout == "last" else None
    return Shape(dataset.vocab_size, dataset.input_width, readout_len)


def activation_dtype(precision: str) -> torch.dtype:
    """Of activations, and so of cached keys and values: ``bf16`` or ``fp32``."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def counts(config: Config, shape: Shape, length: int | None = None) -> dict[str, Any]:
    """``LanguageModel.counts`` of a config, without making its weights; ``length`` defaults to the training length."""
    with torch.device("meta"):
        model = build_model(config, **shape._asdict())
    return model.counts(length or config.data.seq_len, activation_dtype(config.precision))


def meet(config: Config, reference: Config, shape: Shape) -> tuple[Config, Match]:
    """``config`` with one field turned until its model meets the budget ``config.match`` of ``reference``.

    Where steps are coarse the nearest one is taken, ``met`` says whether that is near enough. Raises CannotMeet where no
    field can do it.
    """
    return _Solver(config, reference, shape).solve()


class _Solver:
    def __init__(self, config: Config, reference: Config, shape: Shape):
        assert config.match != "none" and config.match_reference is not None
        self.config, self.shape, self.by = config, shape, config.match
        self.name = config.match_reference
        self.length = config.match_len or config.data.seq_len
        self.target = self.count(reference)

    def count(self, config: Config) -> float:
        return counts(config, self.shape, self.length)[COUNTS[self.by]]

    def residual(self, count: float) -> float:
        return (count - self.target) / self.target

    def refuse(self, why: str) -> CannotMeet:
        return CannotMeet(
            f"match={self.by}: mixer {self.config.mixer.kind} cannot have the {self.target:,.0f} {UNITS[self.by]} of "
            f"match_reference={self.name}: {why}"
        )

    def solve(self) -> tuple[Config, Match]:
        own, limit = self.count(self.config), LIMITS[self.by]
        if abs(self.residual(own)) <= limit / 5:
            return self.config, self.match(own, own)
        knob = self.config.mixer.state_knob if self.by == "state" else self.config.mixer.budget_knob
        if isinstance(knob, str):
            raise self.refuse(knob)
        if knob.key == "model.mlp_width" and self.config.model.mlp == "none":
            raise self.refuse("model.mlp=none leaves no MLP whose width could change; choose an MLP")
        low, high = self.steps(knob)
        first, slope = self.line(knob, low)
        if slope <= 0:
            raise self.refuse(f"it does not depend on {knob.key}")
        exact = low + (self.target - first) / slope
        self.check_range(knob, exact, low, high, first, slope)
        nearest = max(round(exact), low) if exact < high else int(high)
        near = limit / 5 * self.target / slope  # in steps
        coarse = (multiple * round(exact / multiple) for multiple in MULTIPLES)
        step = next((n for n in coarse if abs(n - exact) <= near and low <= n <= high), nearest)
        turned = self.turned(knob, step)
        return turned, self.match(own, self.count(turned), knob.key, turned)

    def steps(self, knob: Knob) -> tuple[int, int | float]:
        """The least and the largest step."""
        per = self.config.mixer.head_dim if knob.per_head_dim else 1
        # Beyond the named length a window has no further effect on the state.
        last = self.length if self.by == "state" else math.inf
        return max(1, math.ceil(knob.low * per)), math.floor(knob.high * per) if knob.high is not None else last

    def line(self, knob: Knob, low: int) -> tuple[float, float]:
        """The count at the least step, and what a step adds."""
        first = self.count(self.turned(knob, low))
        return first, self.count(self.turned(knob, low + 1)) - first

    def check_range(self, knob: Knob, exact: float, low: int, high: float, first: float, slope: float) -> None:
        if exact < low - 0.5 and abs(self.residual(first)) > LIMITS[self.by]:
            raise self.refuse(f"with {knob.key}={self.value(knob, low):g}, its least, it still has {first:,.0f}")
        most = first + (high - low) * slope
        if exact > high + 0.5 and abs(self.residual(most)) > LIMITS[self.by]:
            raise self.refuse(f"with {knob.key}={self.value(knob, high):g}, its largest, it has only {most:,.0f}")

    def value(self, knob: Knob, step: float) -> float:
        return step / self.config.mixer.head_dim if knob.per_head_dim else step

    def turned(self, knob: Knob, step: int) -> Config:
        """The config with the knob at a step. Raises CannotMeet where the mixer refuses the value."""
        group, _, field = knob.key.partition(".")
        node = dataclasses.replace(getattr(self.config, group), **{field: self.value(knob, step)})
        try:
            node.check(group)
        except ValueError as error:
            raise self.refuse(str(error)) from None
        return dataclasses.replace(self.config, **{group: node})

    def match(self, own: float, reached: float, key: str | None = None, turned: Config | None = None) -> Match:
        def value_of(config: Config | None) -> float | None:
            if key is None or config is None:
                return None
            group, _, field = key.partition(".")
            return getattr(getattr(config, group), field)

        residual, limit = self.residual(reached), LIMITS[self.by]
        return Match(
            kind=self.by,
            reference=self.name,
            length=self.length,
            target=self.target,
            reached=reached,
            residual=residual,
            limit=limit,
            met=abs(residual) <= limit,
            knob=key,
            before=value_of(self.config),
            value=value_of(turned),
            without=own,
        )
