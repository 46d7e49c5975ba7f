"""The language model around a backbone: loss, prefill, step. It owns the positions."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.dataset import Batch, Dataset, right, total_variation
from data.randomness import key
from mixers.base import Context, MixerConfig, State
from models.backbone import Backbone, Block
from models.config import Model
from models.cross_entropy import IGNORED, cross_entropy_sum, graded_positions, soft_capped, squared_errors
from models.init import initialise, initialise_part

if TYPE_CHECKING:
    from runs.schema import Config  # runs are built on models, not the other way round


@dataclass
class LMState:
    """What generation carries: the state of each block and the number of tokens seen."""

    layers: list[State]
    length: int


class Graded(NamedTuple):
    """How a model did at each position; where the target is not graded: 0 nats, not correct."""

    nats_BT: Tensor  # -log p of the target; of real numbers the squared error
    correct_BT: Tensor  # bool: the likeliest token is right
    variation_BT: Tensor | None = None  # total variation distance from the true distribution, where the batch tells it


GRADED_LOGITS = 2**26
"""Logits that exist at once where a model is graded: a quarter of a GiB, whatever batch and vocabulary are."""


class LastReadout(nn.Module):
    """All positions decoded from the features at the last one: an MLP is told the position that is wanted (MAD's
    compression, arXiv 2403.17844). It is the same for every mixer."""

    def __init__(self, width: int, seq_len: int):
        super().__init__()
        self.place_TD = nn.Parameter(torch.empty(seq_len, width))
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, features_BTD: Tensor) -> Tensor:
        wanted_BTD = features_BTD[:, -1:] + self.place_TD[: features_BTD.shape[1]]
        return self.down(F.gelu(self.up(wanted_BTD)))


class LanguageModel(nn.Module):
    """Backbone, tied or own output matrix, soft cap.

    Beside text it serves tasks: with ``input_width`` positions are real numbers and one real number is predicted at each,
    by its squared error; with ``readout_len`` T all is decoded from the features at the last position.
    """

    def __init__(
        self,
        config: Model,
        mixer: MixerConfig,
        vocab_size: int,
        *,
        seed: int = 0,
        activation_checkpointing: bool = False,
        loss_chunk: int | None = None,
        input_width: int | None = None,
        readout_len: int | None = None,
    ):
        super().__init__()
        self.config, self.vocab_size, self.loss_chunk = config, vocab_size, loss_chunk
        self.continuous = input_width is not None
        self.backbone = Backbone(config, mixer, vocab_size, activation_checkpointing, input_width)
        outputs = 1 if self.continuous else vocab_size
        self.head = None if config.tied and not self.continuous else nn.Linear(config.d_model, outputs, bias=False)
        self.readout = None if readout_len is None else LastReadout(config.d_model, readout_len)
        self.add_parts(mixer)
        if self.backbone.embed.weight.device.type != "meta":
            self.initialise(seed)

    def add_parts(self, mixer: MixerConfig) -> None:
        """What a subclass has beside backbone and output matrix."""

    def initialise(self, seed: int) -> None:
        """Draw all weights."""
        initialise(self.backbone, self.head, seed)
        if self.readout is not None:
            initialise_part(self.readout, self.config, seed, prefix="readout")
            nn.init.normal_(
                self.readout.place_TD, generator=torch.Generator().manual_seed(key("init", seed, "readout.place"))
            )

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
        """(V, D); the embedding where the two are tied. Of real numbers (1, D)."""
        return self.backbone.embed.weight if self.head is None else self.head.weight

    def graded(self, features_BTD: Tensor, batch: Batch) -> Graded:
        """Features against a batch's targets."""
        targets_BT = batch.targets_BT
        if self.readout is not None:
            features_BTD = self.readout(features_BTD)
        if self.continuous:
            errors_BT = squared_errors(self.predictions(features_BTD), targets_BT)
            return Graded(errors_BT, torch.zeros_like(errors_BT, dtype=torch.bool))
        rows = max(1, GRADED_LOGITS // self.vocab_size)
        answers = None if batch.answers_BT is None else batch.answers_BT.flatten().split(rows)
        nats, likeliest, variation = [], [], []
        parts = zip(features_BTD.flatten(0, -2).split(rows), targets_BT.flatten().split(rows), strict=True)
        for number, (part_ND, targets_N) in enumerate(parts):
            logits = self.logits(part_ND)
            nats.append(F.cross_entropy(logits, targets_N, ignore_index=IGNORED, reduction="none"))
            likeliest.append(logits.argmax(-1))
            if answers is not None:
                variation.append(total_variation(logits.softmax(-1), answers[number]))
        correct_BT = right(batch, torch.cat(likeliest).view(targets_BT.shape)) & graded_positions(targets_BT)
        variation_BT = torch.cat(variation).view(targets_BT.shape) if variation else None
        return Graded(torch.cat(nats).view(targets_BT.shape), correct_BT, variation_BT)

    def predictions(self, features_BTD: Tensor) -> Tensor:
        """(B, T): the real number that is predicted at each position."""
        return F.linear(features_BTD, self.output_matrix.to(features_BTD.dtype))[..., 0]

    def grade(self, batch: Batch, mode: str | None = None) -> Graded:
        """Every target of a batch, in one of ``modes`` (default: the first)."""
        return self.graded(self.features(batch.inputs_BT, batch.segment_ids_BT), batch)

    def mean_loss(self, features_BTD: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy in nats (of real numbers: squared error), summed over these rows and divided by the graded targets
        of the whole global batch."""
        if self.readout is not None:
            features_BTD = self.readout(features_BTD)
        if self.continuous:
            return squared_errors(self.predictions(features_BTD), batch.targets_BT).sum() / batch.n_targets
        total = cross_entropy_sum(
            features_BTD.flatten(0, 1),
            self.output_matrix,
            batch.targets_BT.flatten(),
            cap=self.config.logit_cap,
            rows=self.loss_chunk,
        )
        return total / batch.n_targets

    def loss(self, batch: Batch, step: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """What is minimised in an optimizer step (from 0), and its named terms, ``cross_entropy`` always among them.

        Cross-entropy in nats, summed over these rows and divided by the graded targets of the whole *global* batch: the
        sum over micro batches and devices is then the same however the batch is cut.
        """
        cross_entropy = self.mean_loss(self.features(batch.inputs_BT, batch.segment_ids_BT), batch)
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
        states = self.init_state(*tokens_BT.shape[:2]).layers
        _, after = self.backbone(tokens_BT, states, Context(positions=positions, segment_ids=segment_ids_BT))
        assert after is not None
        return after

    def prefill(self, tokens_BT: Tensor, state: LMState, *, donate_state: bool = False) -> tuple[Tensor, LMState]:
        """Logits (B, T, vocabulary) of the tokens and the state after them. The passed-in state stays as it is unless
        it is donated."""
        features_BTD, state = self.read(tokens_BT, state, donate_state=donate_state, assisted=True)
        return self.logits(features_BTD), state

    def read(
        self,
        tokens_BT: Tensor,
        state: LMState,
        segment_ids_BT: Tensor | None = None,
        *,
        donate_state: bool = False,
        assisted: bool = False,
    ) -> tuple[Tensor, LMState]:
        """As ``prefill``, but the features (B, T, D): their logits need not exist all at once.

        ``segment_ids_BT``: the tokens' documents, if they must not see each other. The state that comes in is of the first
        column's document, the one that goes out of the last column's. ``assisted``: a shortcut that the config chose for
        prompts may be taken; what is measured is read without it.
        """
        steps = tokens_BT.shape[1]
        positions = torch.arange(state.length, state.length + steps, device=tokens_BT.device)
        context = Context(positions, segment_ids_BT, donate_state)
        features_BTD, layers = self.backbone(tokens_BT, state.layers, context)
        assert layers is not None
        return features_BTD, LMState(layers, state.length + steps)

    def step(self, tokens_B: Tensor, state: LMState, *, donate_state: bool = False) -> tuple[Tensor, LMState]:
        """One token of each row: logits (B, vocabulary) of the next one."""
        logits_B1V, state = self.prefill(tokens_B[:, None], state, donate_state=donate_state)
        return logits_B1V[:, 0], state

    # ---- counts ----

    def counts(self, seq_len: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """Parameters, FLOPs per token at ``seq_len`` and state bytes after ``seq_len`` tokens.

        ``params`` are those of the deployed model; ``params_training_only`` come on top in training. ``params_scaling``
        are those that scaling laws count: matrices, the output matrix among them, but not the looked-up embeddings and
        the gates of those of the values.
        """
        config = self.config
        total = sum(p.numel() for p in self.parameters())
        vectors = sum(p.numel() for p in self.parameters() if p.ndim < 2)
        embeddings = self.backbone.embed.weight.numel() + (0 if self.head is None else self.head.weight.numel())
        tables = self.backbone.value_embeds
        values = 0 if tables is None else sum(p.numel() for p in tables.parameters())
        value_gates = sum(b.value_gate.weight.numel() for b in self.backbone.layers if b.value_gate is not None)
        mixers = [block.mixer for block in self.backbone.layers]
        mlps = sum(2 * m.weight.numel() for b in self.backbone.layers if b.mlp for m in (b.mlp.up, b.mlp.down))
        outside = mlps + 2 * self.output_matrix.numel()  # looking up a row of an embedding is free
        if value_gates:  # a linear map to the gates; then gate and add each channel
            assert config.head_dim is not None
            outside += 2 * value_gates + 2 * config.n_heads * config.head_dim * len(config.value_layers())
        if self.continuous:
            outside += 2 * self.backbone.embed.weight.numel()
        if self.readout is not None:
            outside += sum(2 * m.weight.numel() for m in (self.readout.up, self.readout.down))
        return {
            "params": total,
            "params_non_embedding": total - embeddings - values,
            "params_scaling": total
            - self.backbone.embed.weight.numel() * (not config.tied)
            - values
            - value_gates
            - vectors,
            "params_training_only": 0,
            "params_mixer": sum(p.numel() for m in mixers for p in m.parameters()),
            "flops_per_token": outside + sum(m.flops_per_token(seq_len) for m in mixers),
            "train_flops_per_token": 3 * outside + sum(m.train_flops_per_token(seq_len) for m in mixers),
            "state_bytes": sum(m.state_bytes(seq_len, dtype) for m in mixers),
        }


def model_for(config: Config, dataset: Dataset) -> LanguageModel:
    """The model of a checked config for the inputs and outputs of a data set."""
    readout_len = dataset.seq_len if dataset.readout == "last" else None
    return build_model(config, dataset.vocab_size, input_width=dataset.input_width, readout_len=readout_len)


def build_model(
    config: Config, vocab_size: int, *, input_width: int | None = None, readout_len: int | None = None
) -> LanguageModel:
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
        input_width=input_width,
        readout_len=readout_len,
    )
