"""Configs of the backbone, the optimizer and the schedule. Light imports: no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from omegaconf import MISSING

POLAR_STEPS = 5  # of which `models/muon.py` knows the coefficients


def one_of(path: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not among the choices."""
    if value not in choices:
        raise ValueError(f"{path}={value}: must be one of {', '.join(choices)}")


def at_least(path: str, value: float | None, low: float, why: str = "") -> None:
    """Refuse a number below ``low``; None passes."""
    if value is not None and not value >= low:
        raise ValueError(f"{path}={value}: must be at least {low:g}{', ' + why if why else ''}")


def above_zero(path: str, value: float | None, usual: str) -> None:
    """Refuse a number that is not positive and finite; None passes."""
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{path}={value}: must be above 0 ({usual})")


@dataclass
class Model:
    """The backbone: everything of a model but its mixers."""

    d_model: int = MISSING
    n_layers: int = MISSING
    n_heads: int = MISSING
    head_dim: int | None = None
    mlp: str = "swiglu"
    mlp_ratio: float = 3.0
    mlp_width: int | None = None
    mlp_bias: bool = False
    norm: str = "rms"
    norm_eps: float = 1e-6
    order: str = "mixer_first"
    final_norm: bool = True
    embed_norm: bool = False
    embed_scale: bool = True
    tied: bool = True
    logit_cap: float | None = 30.0
    qk_norm: bool = False
    residual_scalars: bool = False
    value_embeds: str = "none"
    dropout: float = 0.0
    init: str = "fan_in"
    init_std: float = 0.02

    def check(self, path: str) -> None:
        for name in ("d_model", "n_layers", "n_heads", "head_dim", "mlp_width"):
            at_least(f"{path}.{name}", getattr(self, name), 1)
        one_of(f"{path}.mlp", self.mlp, ("swiglu", "geglu", "silu", "gelu", "relu2", "none"))
        one_of(f"{path}.norm", self.norm, ("rms", "rms_plain", "layer"))
        one_of(f"{path}.order", self.order, ("mixer_first", "mlp_first"))
        one_of(f"{path}.value_embeds", self.value_embeds, ("none", "alternate", "all"))
        one_of(f"{path}.init", self.init, ("fan_in", "normal", "kaiming", "nanochat"))
        above_zero(f"{path}.mlp_ratio", self.mlp_ratio, "3 is usual; mlp=none for no MLP")
        above_zero(f"{path}.logit_cap", self.logit_cap, "30 is usual; null for none")
        above_zero(f"{path}.init_std", self.init_std, "0.02 is usual")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"{path}.dropout={self.dropout}: must be in [0, 1)")

    def value_layers(self) -> range:
        """The layers that have a value embedding; with alternate every other one, the last among them."""
        first, step = {"none": (self.n_layers, 1), "alternate": ((self.n_layers - 1) % 2, 2), "all": (0, 1)}[
            self.value_embeds
        ]
        return range(first, self.n_layers, step)

    def derive(self, path: str) -> None:
        """Fill in what follows from other keys."""
        if self.head_dim is None:
            if self.d_model % self.n_heads:
                good = [h for h in range(1, min(self.d_model, 64) + 1) if self.d_model % h == 0]
                raise ValueError(
                    f"{path}.d_model={self.d_model}: {path}.n_heads={self.n_heads} does not divide it; heads that do: "
                    f"{', '.join(map(str, good))} (or set {path}.head_dim)"
                )
            self.head_dim = self.d_model // self.n_heads
        if self.mlp_width is None:
            self.mlp_width = max(1, round(self.mlp_ratio * self.d_model))


MUON_ONLY = (
    "momentum",
    "momentum_start",
    "momentum_steps",
    "polar_steps",
    "variance_beta",
    "cautious",
    "weight_decay_final",
    "embedding_lr",
    "value_lr",
    "head_lr",
    "keep_lr",
    "input_lr",
    "input_betas",
    "other_lr",
    "tuned_width",
    "tuned_depth",
)
MAY_BE_NULL = ("variance_beta", "tuned_width", "tuned_depth")


@dataclass
class Optimizer:
    """AdamW, or Muon with AdamW beside it, and the clipping of their gradients.

    ``conf/optimizer/<kind>.yaml`` says what each field is for; those of ``MUON_ONLY`` are null with AdamW alone.
    """

    kind: str = "adamw"
    lr: float = MISSING
    weight_decay: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.98])
    eps: float = 1e-8
    clip: float | None = 1.0
    momentum: float | None = None
    momentum_start: float | None = None
    momentum_steps: int | None = None
    polar_steps: int | None = None
    variance_beta: float | None = None
    cautious: bool | None = None
    weight_decay_final: float | None = None
    embedding_lr: float | None = None
    value_lr: float | None = None
    head_lr: float | None = None
    keep_lr: float | None = None
    input_lr: float | None = None
    input_betas: list[float] | None = None
    other_lr: float | None = None
    tuned_width: int | None = None
    tuned_depth: int | None = None

    def check(self, path: str) -> None:
        one_of(f"{path}.kind", self.kind, ("adamw", "muon"))
        above_zero(f"{path}.lr", self.lr, "1e-3 is a usual start")
        above_zero(f"{path}.eps", self.eps, "1e-8 is usual")
        above_zero(f"{path}.clip", self.clip, "1.0 is usual; null for no clipping")
        at_least(f"{path}.weight_decay", self.weight_decay, 0)
        _check_betas(f"{path}.betas", self.betas)
        for name in MUON_ONLY:
            value = getattr(self, name)
            if self.kind != "muon" and value is not None:
                raise ValueError(f"{path}.{name}={value}: is of kind=muon, and this is kind={self.kind}; leave it out")
            if self.kind == "muon" and value is None and name not in MAY_BE_NULL:
                raise ValueError(f"{path}.{name}=null: kind=muon needs it; optimizer=muon brings all of its fields")
        for name in ("momentum", "momentum_start", "variance_beta"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"{path}.{name}={value}: must be in [0, 1), such as 0.95")
        if self.weight_decay_final is not None and not 0 <= self.weight_decay_final <= 1:
            raise ValueError(
                f"{path}.weight_decay_final={self.weight_decay_final}: must be in [0, 1] (last weight decay / first; 1: constant)"
            )
        for name in ("embedding_lr", "value_lr", "head_lr", "keep_lr", "input_lr", "other_lr"):
            above_zero(f"{path}.{name}", getattr(self, name), "conf/optimizer/muon.yaml has nanochat's")
        for name, low in (("momentum_steps", 0), ("tuned_width", 1), ("tuned_depth", 1)):
            at_least(f"{path}.{name}", getattr(self, name), low)
        if self.polar_steps is not None and not 1 <= self.polar_steps <= POLAR_STEPS:
            raise ValueError(
                f"{path}.polar_steps={self.polar_steps}: must be from 1 to {POLAR_STEPS}: each step has coefficients of its own"
            )
        if self.input_betas is not None:
            _check_betas(f"{path}.input_betas", self.input_betas)


def _check_betas(path: str, betas: list[float]) -> None:
    if len(betas) != 2 or not all(0 <= b < 1 for b in betas):
        raise ValueError(f"{path}={list(betas)}: must be two numbers in [0, 1), such as [0.9, 0.98]")


@dataclass
class Schedule:
    """Learning rate over the steps, as a share of its peak."""

    kind: str = "cosine"
    warmup_steps: int = 20
    final: float = 0.1
    decay_fraction: float = 1.0

    def check(self, path: str) -> None:
        one_of(f"{path}.kind", self.kind, ("cosine", "linear", "trapezoid"))
        at_least(f"{path}.warmup_steps", self.warmup_steps, 0)
        if not 0 <= self.final <= 1:
            raise ValueError(f"{path}.final={self.final}: must be in [0, 1] (last learning rate / peak)")
        if not 0 < self.decay_fraction <= 1:
            raise ValueError(f"{path}.decay_fraction={self.decay_fraction}: must be in (0, 1]")
