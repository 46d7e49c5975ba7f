"""The language model around a backbone: loss, prefill, step. It owns the positions."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.dataset import Batch
from mixers.base import Context, MixerConfig, State
from models.backbone import Backbone, Block
from models.config import Model
from models.cross_entropy import IGNORED, cross_entropy_sum, soft_capped
from models.init import initialise

if TYPE_CHECKING:
    from runs.schema import Config  # runs are built on models, not the other way round


@dataclass
class LMState:
    """What generation carries: the state of each block and the number of tokens seen."""

    layers: list[State]
    length: int


class Graded(NamedTuple):
    """How a model did at each position; where the target is not graded: 0 nats, not correct."""

    nats_BT: Tensor  # -log p of the target
    correct_BT: Tensor  # bool: the target is the likeliest token


class LanguageModel(nn.Module):
    """Backbone, tied or own output matrix, soft cap."""

    def __init__(
        self,
        config: Model,
        mixer: MixerConfig,
        vocab_size: int,
        *,
        seed: int = 0,
        activation_checkpointing: bool = False,
        loss_chunk: int | None = None,
    ):
        super().__init__()
        self.config, self.vocab_size, self.loss_chunk = config, vocab_size, loss_chunk
        self.backbone = Backbone(config, mixer, vocab_size, activation_checkpointing)
        self.head = None if config.tied else nn.Linear(config.d_model, vocab_size, bias=False)
        self.add_parts(mixer)
        if self.backbone.embed.weight.device.type != "meta":
            self.initialise(seed)

    def add_parts(self, mixer: MixerConfig) -> None:
        """What a subclass has beside backbone and output matrix."""

    def initialise(self, seed: int) -> None:
        """Draw all weights."""
        initialise(self.backbone, self.head, seed)

    @property
    def modes(self) -> tuple[str, ...]:
        """Ways to compute a quality number; the first one is what the deployed model does, and is ranked."""
        return ("parallel",)

    @property
    def all_blocks(self) -> list[Block]:
        """Every block that training runs."""
        return self.backbone.layers

    # ---- training ----

    def features(self, tokens_BT: Tensor, segment_ids_BT: Tensor | None = None) -> Tensor:
        """(B, T, D) after the final norm, without a state."""
        positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return self.backbone(tokens_BT, None, Context(positions=positions, segment_ids=segment_ids_BT))[0]

    def deployed_features(self, tokens_BT: Tensor, segment_ids_BT: Tensor | None = None) -> Tensor:
        """The same as the deployed model computes it: for two-pass models by the recurrence."""
        return self.features(tokens_BT, segment_ids_BT)

    def logits(self, features: Tensor) -> Tensor:
        """(..., vocabulary) in float32 (or wider), soft-capped."""
        return soft_capped(F.linear(features, self.output_matrix.to(features.dtype)), self.config.logit_cap)

    @property
    def output_matrix(self) -> Tensor:
        """(V, D); the embedding where the two are tied."""
        return self.backbone.embed.weight if self.head is None else self.head.weight

    def graded(self, features_BTD: Tensor, targets_BT: Tensor) -> Graded:
        """Features against targets."""
        logits = self.logits(features_BTD).flatten(0, -2)
        targets = targets_BT.flatten()
        nats = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
        return Graded(nats.view(targets_BT.shape), (logits.argmax(-1) == targets).view(targets_BT.shape))

    def grade(self, batch: Batch, mode: str | None = None) -> Graded:
        """Every target of a batch, in one of ``modes`` (default: the first)."""
        return self.graded(self.features(batch.inputs_BT, batch.segment_ids_BT), batch.targets_BT)

    def loss(self, batch: Batch, step: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """What is minimised in an optimizer step (from 0), and its named terms, ``cross_entropy`` always among them.

        Cross-entropy in nats, summed over these rows and divided by the graded targets of the whole *global* batch: the
        sum over micro batches and devices is then the same however the batch is cut.
        """
        features_BTD = self.features(batch.inputs_BT, batch.segment_ids_BT)
        nats = cross_entropy_sum(
            features_BTD.flatten(0, 1),
            self.output_matrix,
            batch.targets_BT.flatten(),
            cap=self.config.logit_cap,
            rows=self.loss_chunk,
        )
        cross_entropy = nats / batch.n_targets
        return cross_entropy, {"cross_entropy": cross_entropy.detach()}

    # ---- inference ----

    def init_state(self, batch_size: int, max_len: int) -> LMState:
        """The state before the first token; at most ``max_len`` tokens can follow."""
        device, dtype = self.backbone.embed.weight.device, self.state_dtype()
        layers = [block.mixer.init_state(batch_size, max_len, device, dtype) for block in self.backbone.layers]
        return LMState(layers, 0)

    def state_dtype(self) -> torch.dtype:
        """That of the activations."""
        embed = self.backbone.embed.weight
        narrow = torch.is_autocast_enabled(embed.device.type)
        return torch.get_autocast_dtype(embed.device.type) if narrow else embed.dtype

    def states_after(self, tokens_BT: Tensor, segment_ids_BT: Tensor | None = None) -> list[State]:
        """Each block's state after the tokens, read in one parallel pass: what diagnostics look at."""
        positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        states = self.init_state(*tokens_BT.shape).layers
        _, after = self.backbone(tokens_BT, states, Context(positions=positions, segment_ids=segment_ids_BT))
        assert after is not None
        return after

    def prefill(self, tokens_BT: Tensor, state: LMState, *, donate_state: bool = False) -> tuple[Tensor, LMState]:
        """Logits (B, T, vocabulary) of the tokens and the state after them. The passed-in state stays as it is unless
        it is donated."""
        steps = tokens_BT.shape[1]
        positions = torch.arange(state.length, state.length + steps, device=tokens_BT.device)
        context = Context(positions=positions, donate_state=donate_state)
        features_BTD, layers = self.backbone(tokens_BT, state.layers, context)
        assert layers is not None
        return self.logits(features_BTD), LMState(layers, state.length + steps)

    def step(self, tokens_B: Tensor, state: LMState, *, donate_state: bool = False) -> tuple[Tensor, LMState]:
        """One token of each row: logits (B, vocabulary) of the next one."""
        logits_B1V, state = self.prefill(tokens_B[:, None], state, donate_state=donate_state)
        return logits_B1V[:, 0], state

    # ---- counts ----

    def counts(self, seq_len: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """Parameters, FLOPs per token at ``seq_len`` and state bytes after ``seq_len`` tokens.

        ``params`` are those of the deployed model; ``params_training_only`` come on top in training. ``params_scaling``
        are those that scaling laws count: matrices, the output matrix among them, but not the looked-up embedding.
        """
        config = self.config
        total = sum(p.numel() for p in self.parameters())
        vectors = sum(p.numel() for p in self.parameters() if p.ndim < 2)
        embeddings = self.backbone.embed.weight.numel() + (0 if self.head is None else self.head.weight.numel())
        mixers = [block.mixer for block in self.backbone.layers]
        mlps = sum(2 * m.weight.numel() for b in self.backbone.layers if b.mlp for m in (b.mlp.up, b.mlp.down))
        outside = mlps + 2 * self.vocab_size * config.d_model  # the output matrix; looking up a row is free
        return {
            "params": total,
            "params_non_embedding": total - embeddings,
            "params_scaling": total - self.backbone.embed.weight.numel() * (not config.tied) - vectors,
            "params_training_only": 0,
            "params_mixer": sum(p.numel() for m in mixers for p in m.parameters()),
            "flops_per_token": outside + sum(m.flops_per_token(seq_len) for m in mixers),
            "train_flops_per_token": 3 * outside + sum(m.train_flops_per_token(seq_len) for m in mixers),
            "state_bytes": sum(m.state_bytes(seq_len, dtype) for m in mixers),
        }


def build_model(config: Config, vocab_size: int) -> LanguageModel:
    """The model of a checked config, of the class that its mixer asks for."""
    module, name = config.mixer.model_class.split(":")
    cls: type[LanguageModel] = getattr(importlib.import_module(module), name)
    return cls(
        config.model,
        config.mixer,
        vocab_size,
        seed=config.init_seed,
        activation_checkpointing=config.trainer.activation_checkpointing,
        loss_chunk=config.trainer.loss_chunk,
    )
