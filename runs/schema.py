"""What a config may hold. Light imports: no torch, so that a wrong key is answered at once.

`conf/` is plain YAML; Hydra refuses keys that no file lists. Types, values and everything that depends on two keys are
checked here, before anything starts, and each error names the key, its value and what would be right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from models.config import Model, Optimizer, Schedule, at_least, one_of


@dataclass
class Evaluation:
    """How quality is measured."""

    every: int = 100
    val_tokens: int | None = 65536
    test_tokens: int | None = None

    def check(self, path: str) -> None:
        at_least(f"{path}.every", self.every, 0, "0 validates only at the end")
        at_least(f"{path}.val_tokens", self.val_tokens, 1, "null takes the whole split")
        at_least(f"{path}.test_tokens", self.test_tokens, 1, "null takes the whole split")


@dataclass
class Trainer:
    """Host settings."""

    accelerator: str = "cpu"
    devices: int = 1
    nodes: int = 1
    strategy: str = "auto"
    micro_batch: int | None = None
    eval_batch: int = 32
    recurrent_batch: int = 256
    threads: int | None = None
    compile: bool = False
    activation_checkpointing: bool = False
    loss_chunk: int | None = 512
    kernels: str = "torch"
    log_every: int = 10
    checkpoint_every: int = 100
    keep_every: int | None = None
    progress: bool = True

    def check(self, path: str) -> None:
        one_of(f"{path}.accelerator", self.accelerator, ("cpu", "gpu"))
        one_of(f"{path}.strategy", self.strategy, ("auto", "ddp", "fsdp"))
        one_of(f"{path}.kernels", self.kernels, ("torch", "strict", "fallback"))
        for name in (
            "devices",
            "nodes",
            "micro_batch",
            "eval_batch",
            "recurrent_batch",
            "threads",
            "loss_chunk",
            "log_every",
            "checkpoint_every",
            "keep_every",
        ):
            at_least(f"{path}.{name}", getattr(self, name), 1)
        if self.strategy == "auto" and self.devices * self.nodes > 1:
            raise ValueError(
                f"{path}.strategy=auto: {self.devices * self.nodes} processes need ddp or fsdp (trainer=ddp)"
            )
        if self.strategy == "fsdp" and self.accelerator == "cpu":
            raise ValueError(f"{path}.strategy=fsdp: needs {path}.accelerator=gpu; on CPUs use trainer=ddp")


@dataclass
class Logger:
    """Where the projection of metrics.jsonl goes."""

    wandb: str = "offline"
    project: str = "isomix"
    entity: str | None = None
    diagnostics: bool = False

    def check(self, path: str) -> None:
        one_of(f"{path}.wandb", self.wandb, ("offline", "online", "disabled"))


@dataclass
class Paths:
    """Folders, relative to the working directory or absolute."""

    results: str = "results"
    cache: str = ".cache"


@dataclass
class Config:
    """The whole of a run, checked and resolved."""

    mixer: Any = MISSING
    model: Model = field(default_factory=Model)
    data: Any = MISSING
    tokenizer: Any = MISSING
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    evaluation: Evaluation = field(default_factory=Evaluation)
    trainer: Trainer = field(default_factory=Trainer)
    logger: Logger = field(default_factory=Logger)
    paths: Paths = field(default_factory=Paths)
    steps: int | None = None
    tokens: int | None = None
    global_batch: int = MISSING
    precision: str = "fp32"
    seed: int = 0
    init_seed: int = 0
    data_seed: int = 0
    match: str = "none"
    match_reference: str | None = "transformer"
    match_len: int | None = None
    study: Any = None

    def check(self) -> None:
        """What depends on several groups."""
        if self.mixer.d_model != self.model.d_model:
            raise ValueError(
                f"mixer.d_model={self.mixer.d_model}: the residual stream has model.d_model={self.model.d_model}; set that"
            )
        longest = self.mixer.max_len()
        if longest is not None and longest < self.data.seq_len:
            raise ValueError(
                f"data.seq_len={self.data.seq_len}: mixer {self.mixer.kind} takes at most {longest} tokens; set "
                f"mixer.length={self.data.seq_len} or a shorter data.seq_len"
            )
        self._check_value_embeds()
        if self.optimizer.kind == "muon" and self.trainer.strategy == "fsdp":
            raise ValueError(
                "optimizer.kind=muon: needs whole matrices, and trainer.strategy=fsdp cuts them up; use trainer=ddp"
            )
        at_least("global_batch", self.global_batch, 1)
        one_of("precision", self.precision, ("fp32", "bf16"))
        at_least("tokens", self.tokens, 1)
        self._check_match()
        if self.tokens is not None:
            self.steps = math.ceil(self.tokens / (self.global_batch * self.data.seq_len))
        if self.steps is None:
            raise ValueError("steps=null: set steps or tokens")
        at_least("steps", self.steps, 1)
        if self.schedule.warmup_steps >= self.steps and self.schedule.warmup_steps > 0:
            raise ValueError(
                f"schedule.warmup_steps={self.schedule.warmup_steps}: must be below steps={self.steps}, or the peak "
                "learning rate is never reached"
            )
        processes = self.trainer.devices * self.trainer.nodes
        micro = self.trainer.micro_batch or max(1, self.global_batch // processes)
        if self.global_batch % (processes * micro):
            raise ValueError(
                f"global_batch={self.global_batch}: trainer.devices x trainer.nodes x trainer.micro_batch = "
                f"{self.trainer.devices} x {self.trainer.nodes} x {micro} does not divide it; the next that fits is "
                f"{math.ceil(self.global_batch / (processes * micro)) * processes * micro}"
            )
        self.trainer.micro_batch = micro

    def _check_value_embeds(self) -> None:
        embeds = self.model.value_embeds
        if embeds != "none" and not self.mixer.takes_value_embeds():
            raise ValueError(
                f"model.value_embeds={embeds}: is added to the values of attention, which mixer {self.mixer.kind} does not "
                "have in every layer; set model.value_embeds=none, or use transformer, swa, slsl, maglev or lrt"
            )
        if embeds != "none" and getattr(self.data, "input_width", None) is not None:
            raise ValueError(
                f"model.value_embeds={embeds}: is looked up by tokens, and the inputs of data {self.data.kind} are real "
                "numbers; set model.value_embeds=none"
            )

    def _check_match(self) -> None:
        """Fills in ``match_len``, and empties what is not used: it is no part of the run then."""
        one_of("match", self.match, ("none", "params", "flops", "state"))
        at_least("match_len", self.match_len, 1, "null takes data.seq_len")
        if self.match_len is not None and self.match != "state":
            raise ValueError(
                f"match_len={self.match_len}: is the length at which match=state compares states; with "
                f"match={self.match} it must be null"
            )
        if self.match == "none":
            self.match_reference = None
        elif self.match_reference is None:
            raise ValueError("match_reference=null: name the mixer whose budget is met, as in transformer")
        if self.match == "state" and self.match_len is None:
            self.match_len = self.data.seq_len

    @property
    def accumulate(self) -> int:
        """Micro batches that a device runs for one optimizer step."""
        assert self.trainer.micro_batch is not None
        return self.global_batch // (self.trainer.devices * self.trainer.nodes * self.trainer.micro_batch)

    @property
    def tokens_per_step(self) -> int:
        """Positions of one global batch."""
        return self.global_batch * self.data.seq_len
