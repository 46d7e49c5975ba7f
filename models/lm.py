"""The language model around a backbone: loss, prefill, step. It owns the positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.dataset import Batch
from mixers.base import Context, MixerConfig, State
from models.backbone import Backbone
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
        if self.backbone.embed.weight.device.type != "meta":
            initialise(self.backbone, self.head, seed)

    # ---- training ----

    def features(self, tokens_BT: Tensor, segment_ids_BT: Tensor | None = None) -> Tensor:
        """(B, T, D) after the final norm, without a state."""
        positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return self.backbone(tokens_BT, None, Context(positions=positions, segment_ids=segment_ids_BT))[0]

    def logits(self, features: Tensor) -> Tensor:
        """(..., vocabulary) in float32 (or wider), soft-capped."""
        return soft_capped(F.linear(features, self.output_matrix.to(features.dtype)), self.config.logit_cap)

    @property
    def output_matrix(self) -> Tensor:
        """(V, D); the embedding where the two are tied."""
        return self.backbone.embed.weight if self.head is None else self.head.weight

    def token_nats(self, batch: Batch) -> Tensor:
        """(B, T) negative log-likelihood of each target in nats; 0 where it is not graded."""
        logits = self.logits(self.features(batch.inputs_BT, batch.segment_ids_BT))
        targets = batch.targets_BT.flatten()
        nats = F.cross_entropy(logits.flatten(0, -2), targets, ignore_index=IGNORED, reduction="none")
        return nats.view(batch.targets_BT.shape)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """What is minimised and its named terms.

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
        embed = self.backbone.embed.weight
        dtype = (
            torch.get_autocast_dtype(embed.device.type) if torch.is_autocast_enabled(embed.device.type) else embed.dtype
        )
        layers = [block.mixer.init_state(batch_size, max_len, embed.device, dtype) for block in self.backbone.layers]
        return LMState(layers, 0)

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
        """Parameters, FLOPs per token at ``seq_len`` and state bytes after ``seq_len`` tokens."""
        total = sum(p.numel() for p in self.parameters())
        embeddings = self.backbone.embed.weight.numel() + (0 if self.head is None else self.head.weight.numel())
        mixers = [block.mixer for block in self.backbone.layers]
        mlps = sum(2 * m.weight.numel() for b in self.backbone.layers if b.mlp for m in (b.mlp.up, b.mlp.down))
        outside = mlps + 2 * self.vocab_size * self.config.d_model  # the output matrix; looking up a row is free
        return {
            "params": total,
            "params_non_embedding": total - embeddings,
            "params_mixer": sum(p.numel() for m in mixers for p in m.parameters()),
            "flops_per_token": outside + sum(m.flops_per_token(seq_len) for m in mixers),
            "train_flops_per_token": 3 * outside + sum(m.train_flops_per_token(seq_len) for m in mixers),
            "state_bytes": sum(m.state_bytes(seq_len, dtype) for m in mixers),
        }


def build_model(config: Config, vocab_size: int) -> LanguageModel:
    """The model of a checked config."""
    return LanguageModel(
        config.model,
        config.mixer,
        vocab_size,
        seed=config.init_seed,
        activation_checkpointing=config.trainer.activation_checkpointing,
        loss_chunk=config.trainer.loss_chunk,
    )
