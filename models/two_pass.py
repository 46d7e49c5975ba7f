"""Models that are trained in two parallel passes and deployed as a recurrence: Maglev (arXiv 2608.02870) and LRT.

    pass 1   m'_t = Q(x_1..t)                 the prefiller, with a wider view; it is dropped after training
    shift    position t receives m'_{t-1},    m'_0 = 0
    pass 2   m_t  = P(x_1..t, m'_0..t-1)      the decoder, sliding windows only; its features are what is predicted from
    loss     CE(P) + lambda |m - m'| / sqrt(D), mean over graded positions       (eq. 5; the distance is not squared)

Deployed, P is fed its own memory, token by token (eq. 10). Both are measured: **recurrent** is the number that counts,
**teacher_forced** (P with Q's memory, in parallel) shows what the recurrence loses.

The memory is the state after the last block under a norm without gain, even where the model's own final norm has one: a
learned gain would let training shrink the distance for nothing. LRT takes the plain state after an inner block instead.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.dataset import Batch
from mixers.base import Context, Memory, MixerConfig, State
from mixers.maglev import InjectedAttention, MaglevConfig, MemoryProjection
from models.backbone import Block, Stack, Trace
from models.cross_entropy import graded_positions
from models.init import initial_input_scalar, initialise_part
from models.lm import Graded, LanguageModel, LMState
from models.memory_distance import distance
from models.two_pass_counts import two_pass_counts

RECURRENT, TEACHER_FORCED = "recurrent", "teacher_forced"
BLOCK = 64  # tokens whose logits are made at once where tokens go one by one


@dataclass
class TwoPassState(LMState):
    """What generation carries: beside the blocks' states the memory (B,D) of the last token."""

    memory_BD: Tensor


class Pass(NamedTuple):
    """One parallel pass over all positions."""

    features_BTD: Tensor  # after the model's final norm
    memory_BTD: Tensor
    states: list[State] | None


class TwoPassModel(LanguageModel):
    """The language model of `mixer=maglev` and `mixer=lrt`; same interface as any other."""

    mixer: MaglevConfig

    def add_parts(self, mixer: MixerConfig) -> None:
        """The maps from the memory, and what only training needs of the prefiller."""
        config = self.config
        assert isinstance(mixer, MaglevConfig)
        self.mixer = mixer
        shared = mixer.mixed and mixer.rec_proj == "shared"
        self.projection = MemoryProjection(mixer) if shared else None
        self.m0_D = _vector(config.d_model, mixer.m0 == "learned")
        self.memory_gain_L = _vector(config.n_layers, "residual" in mixer.injection)
        self.keep_memory_D = _vector(config.d_model, mixer.memory_residual > 0)
        self.prefiller: Stack | None = None
        self.prefiller_keep_L = self.prefiller_input_L = None
        if mixer.training == "two_pass" and mixer.sharing == "separate":
            # Blocks behind the source of the memory would get no gradient.
            reach = config.n_layers if mixer.q_ce_weight else mixer.source_layer or config.n_layers
            plain = dataclasses.replace(mixer, injection=[], inject_layers=None)
            self.prefiller = Stack(config, plain, reach, self.backbone.recompute)
        elif mixer.training == "two_pass" and config.residual_scalars and not mixer.prefiller_gated:
            self.prefiller_keep_L = _vector(config.n_layers, mixer.sep_resid)
            self.prefiller_input_L = _vector(config.n_layers, mixer.sep_x0)

    def initialise(self, seed: int) -> None:
        super().initialise(seed)
        if self.projection is not None:
            initialise_part(self.projection, self.config, seed, prefix="projection")
            self.projection.init_parameters()
        if self.prefiller is not None:
            initialise_part(self.prefiller, self.config, seed, prefix="prefiller")
        values = (
            (self.m0_D, 0.0),
            (self.memory_gain_L, self.mixer.residual_init),
            (
                self.keep_memory_D,
                self.mixer.memory_residual and math.log(self.mixer.memory_residual / (1 - self.mixer.memory_residual)),
            ),
            (self.prefiller_keep_L, 1.0),
            (self.prefiller_input_L, initial_input_scalar(self.config)),
        )
        with torch.no_grad():
            for parameter, value in values:
                if parameter is not None:
                    parameter.fill_(value)

    @property
    def modes(self) -> tuple[str, ...]:
        return (RECURRENT,) if self.mixer.training == "bptt" else (RECURRENT, TEACHER_FORCED)

    @property
    def all_blocks(self) -> list[Block]:
        return self.backbone.layers + ([] if self.prefiller is None else self.prefiller.layers)

    # ---- the passes ----

    def first_memory(self, batch_size: int, like: Tensor) -> Tensor:
        """(B, D): what the first token of a sequence receives."""
        if self.m0_D is not None:
            return self.m0_D.to(like.dtype).expand(batch_size, -1)
        return like.new_zeros(batch_size, self.config.d_model)

    def shift(self, memory_BTD: Tensor, segment_ids_BT: Tensor | None = None) -> Tensor:
        """What each position receives: the memory of the token before it. The first token of a row, and of each document
        in it, receives ``first_memory``."""
        beginning_BD = self.first_memory(len(memory_BTD), memory_BTD)
        before_BTD = torch.cat((beginning_BD[:, None], memory_BTD[:, :-1]), dim=1)
        if segment_ids_BT is None:
            return before_BTD
        border_BT = F.pad(segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1], (1, 0))
        return torch.where(border_BT[..., None], beginning_BD[:, None], before_BTD)

    def _memory_of(self, trace: Trace, before_BTD: Tensor | None) -> Tensor:
        """The memory that a pass writes; ``before_BTD`` is what it has read."""
        if trace.source_BTD is not None:
            memory_BTD = trace.source_BTD
        else:
            memory_BTD = F.rms_norm(trace.last_BTD, (self.config.d_model,), eps=self.config.norm_eps)
        if self.keep_memory_D is not None and before_BTD is not None:
            keep_D, before_BTD = torch.sigmoid(self.keep_memory_D), before_BTD.to(memory_BTD.dtype)
            memory_BTD = torch.lerp(memory_BTD, before_BTD, keep_D.to(memory_BTD.dtype))
        return memory_BTD

    def whole(self, tokens_BT: Tensor, segment_ids_BT: Tensor | None = None) -> Context:
        """The context of a parallel pass over sequences from their first token on."""
        positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return Context(positions, segment_ids_BT, tokens=tokens_BT)

    def prefill_memory(
        self, embedded_BTD: Tensor, context: Context, *, features: bool = True, record: bool = False
    ) -> Pass:
        """Pass 1. Without ``features`` it ends where the memory is taken. ``record`` also returns each layer's keys and
        values of all positions."""
        context = dataclasses.replace(context, role="prefiller")
        tables = self.backbone.value_embeds  # both passes', whoever owns the blocks
        states: list[State] | None = [{} for _ in self.backbone.layers] if record else None
        source = self.mixer.source_layer
        stop = source if source is not None and not (features or record) else None
        if self.prefiller is not None:
            trace = self.prefiller.run(embedded_BTD, states, context, value_embeds=tables, source=source, stop=stop)
        else:
            scalars = None
            if self.config.residual_scalars:
                keep, into = self.prefiller_keep_L, self.prefiller_input_L
                stack = self.backbone
                scalars = (stack.keep_L if keep is None else keep, stack.input_L if into is None else into)
            trace = self.backbone.run(
                embedded_BTD, states, context, value_embeds=tables, scalars=scalars, source=source, stop=stop
            )
        last_BTD = self.backbone.final_norm(trace.last_BTD) if features else trace.last_BTD
        return Pass(last_BTD, self._memory_of(trace, None), trace.states)

    def decode(
        self,
        embedded_BTD: Tensor,
        before_BTD: Tensor,
        states: list[State] | None = None,
        *,
        context: Context,
    ) -> Pass:
        """Pass 2 at the positions of ``context``, which receive ``before_BTD``."""
        k_BTHK = v_BTHV = None
        if self.projection is not None:
            k_BTHK, v_BTHV = self.projection(before_BTD)
        trace = self.backbone.run(
            embedded_BTD,
            states,
            dataclasses.replace(context, memory=Memory(before_BTD, k_BTHK, v_BTHV)),
            value_embeds=self.backbone.value_embeds,
            memory_gain_L=self.memory_gain_L,
            source=self.mixer.source_layer,
        )
        return Pass(self.backbone.final_norm(trace.last_BTD), self._memory_of(trace, before_BTD), trace.states)

    def _second_pass(self, embedded_BTD: Tensor, first: Pass, context: Context) -> Pass:
        """Pass 2 over all positions, from pass 1's memory: at once, or in refined subsets (LRT)."""
        n = min(self.mixer.subsets, embedded_BTD.shape[1])
        positions, tokens_BT, segment_ids_BT = context.positions, context.tokens, context.segment_ids
        assert positions is not None and tokens_BT is not None
        if self.mixer.subsets == 1:
            return self.decode(embedded_BTD, self.shift(first.memory_BTD, segment_ids_BT), context=context)
        features_BTD, memory_BTD = torch.empty_like(first.features_BTD), first.memory_BTD.clone()
        states = first.states
        for s in range(n):
            context = Context(positions[s::n], segment_ids_BT, subset=(s, n), tokens=tokens_BT[:, s::n])
            before_BTD = self.shift(memory_BTD, segment_ids_BT)[:, s::n]
            part = self.decode(embedded_BTD[:, s::n], before_BTD, states, context=context)
            states = part.states
            features_BTD[:, s::n] = part.features_BTD
            memory_BTD = memory_BTD.clone()  # the one before was read, and its gradient needs it
            memory_BTD[:, s::n] = part.memory_BTD
        return Pass(features_BTD, memory_BTD, states)

    def both_passes(self, tokens_BT: Tensor, segment_ids_BT: Tensor | None = None) -> tuple[Pass, Pass]:
        """(pass 1, pass 2) as they are without any training aid: what teacher-forced numbers are made of."""
        embedded_BTD, context = self.backbone.embedded(tokens_BT), self.whole(tokens_BT, segment_ids_BT)
        first = self.prefill_memory(
            embedded_BTD, context, features=self.mixer.subsets > 1, record=self.mixer.subsets > 1
        )
        return first, self._second_pass(embedded_BTD, first, context)

    def features(self, tokens_BT: Tensor, segment_ids_BT: Tensor | None = None) -> Tensor:
        """(B, T, D) after the final norm, teacher-forced (training=bptt: recurrent)."""
        if self.mixer.training == "bptt":
            return self.deployed_features(tokens_BT, segment_ids_BT)
        return self.both_passes(tokens_BT, segment_ids_BT)[1].features_BTD

    def deployed_features(self, tokens_BT: Tensor, segment_ids_BT: Tensor | None = None) -> Tensor:
        return self._unrolled(tokens_BT, segment_ids_BT, donate_state=not torch.is_grad_enabled())[0]

    # ---- training ----

    def loss(self, batch: Batch, step: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """(CE(P) + w CE(Q)) / (1 + w) + lambda times the distance; w is ``q_ce_weight``.

        Terms: ``cross_entropy`` (of P), ``prefiller_cross_entropy`` where w > 0, ``distance`` (RMS of m - m'), and with
        another ``consistency`` than rms that term as well. Each is a mean over the graded targets of the global batch.
        """
        mixer, segments = self.mixer, batch.segment_ids_BT
        if mixer.training == "bptt":
            cross_entropy = self.mean_loss(self.deployed_features(batch.inputs_BT, segments), batch)
            return cross_entropy, {"cross_entropy": cross_entropy.detach()}
        embedded_BTD, context = self.backbone.embedded(batch.inputs_BT), self.whole(batch.inputs_BT, segments)
        weight = mixer.q_ce_weight or 0.0
        first = self.prefill_memory(
            embedded_BTD, context, features=weight > 0 or mixer.subsets > 1, record=mixer.subsets > 1
        )
        given = self._own_sometimes(embedded_BTD, first, context)
        second = self._second_pass(embedded_BTD, given, context)
        for _ in range(mixer.extra_passes):
            second = self._second_pass(embedded_BTD, second, context)
        loss = cross_entropy = self.mean_loss(second.features_BTD, batch)
        terms = {"cross_entropy": cross_entropy.detach()}
        if weight:
            of_prefiller = self.mean_loss(first.features_BTD, batch)
            loss = (cross_entropy + weight * of_prefiller) / (1 + weight)
            terms["prefiller_cross_entropy"] = of_prefiller.detach()
        weight_BT = self._weights(batch)
        with torch.no_grad():
            apart_BT = distance(second.memory_BTD, first.memory_BTD)
            terms["distance"] = (apart_BT * weight_BT).sum()
        strength = self.strength(step)
        if strength:
            ours, theirs = second.memory_BTD, first.memory_BTD
            ours = ours.detach() if mixer.detach == "decoder" else ours
            theirs = theirs.detach() if mixer.detach == "target" else theirs
            apart_BT = distance(ours, theirs, mixer.consistency, mixer.cons_eps)
            consistency = (apart_BT * weight_BT).sum()
            loss = loss + strength * consistency
            if mixer.consistency != "rms":
                terms["consistency"] = consistency.detach()
        return loss, terms

    def _weights(self, batch: Batch) -> Tensor:
        """(B, T) of each position's distance: all graded ones of the global batch alike (eq. 5), or all positions, each row
        with the share that its graded ones have."""
        graded_BT = graded_positions(batch.targets_BT).float()
        if self.mixer.consistency_at == "all":
            graded_BT = graded_BT.mean(dim=1, keepdim=True).expand_as(graded_BT)
        return graded_BT / batch.n_targets

    def strength(self, step: int) -> float:
        """lambda in an optimizer step (from 0): in a straight line from ``lam_start`` to ``lam`` over ``lam_steps``."""
        mixer = self.mixer
        assert mixer.lam is not None
        if step >= mixer.lam_steps:
            return mixer.lam
        return mixer.lam_start + (mixer.lam - mixer.lam_start) * step / mixer.lam_steps

    def _own_sometimes(self, embedded_BTD: Tensor, first: Pass, context: Context) -> Pass:
        """With probability ``own_memory_prob``, a position's memory is the decoder's own, made without a gradient."""
        if not (self.training and self.mixer.own_memory_prob):
            return first
        with torch.no_grad():
            own_BTD = self._second_pass(embedded_BTD, first, context).memory_BTD
        chance_BT1 = torch.rand(*own_BTD.shape[:2], 1, device=own_BTD.device)
        return first._replace(
            memory_BTD=torch.where(chance_BT1 < self.mixer.own_memory_prob, own_BTD, first.memory_BTD)
        )

    # ---- the recurrence ----

    def init_state(self, batch_size: int, max_len: int) -> TwoPassState:
        state = super().init_state(batch_size, max_len)
        dtype = self.state_dtype()
        memory_BD = self.first_memory(batch_size, self.backbone.embed.weight.detach()).to(dtype)
        return TwoPassState(state.layers, state.length, memory_BD)

    def _unrolled(
        self,
        tokens_BT: Tensor,
        segment_ids_BT: Tensor | None = None,
        state: TwoPassState | None = None,
        donate_state: bool = False,
        graded: Any = None,
    ) -> tuple[Tensor, Tensor, TwoPassState]:
        """Token by token, the decoder fed its own memory: (features, memories, state after them), exact.

        In training gradients go back through time, ``bptt_len`` tokens at a time where that is set. ``graded`` takes
        (features of a block of tokens, slice) and the features are not kept then.
        """
        batch_size, steps = tokens_BT.shape[:2]
        if state is None:
            state = self.init_state(batch_size, steps)
        embedded_BTD = self.backbone.embedded(tokens_BT)
        memory_BD, layers = state.memory_BD, state.layers
        borders_BT = None
        if segment_ids_BT is not None:
            borders_BT = F.pad(segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1], (1, 0)).cpu()
        positions = torch.arange(state.length, state.length + steps, device=tokens_BT.device)
        features: list[Tensor] = []
        memories: list[Tensor] = []
        begin = 0
        for t in range(steps):
            if borders_BT is not None and bool(borders_BT[:, t].any()):
                rows_B = borders_BT[:, t]
                beginning_BD = self.first_memory(batch_size, memory_BD)
                memory_BD = torch.where(rows_B.to(memory_BD.device)[:, None], beginning_BD, memory_BD)
                layers = [
                    cast(InjectedAttention, block.mixer).restart(layer, rows_B)
                    for block, layer in zip(self.backbone.layers, layers, strict=True)
                ]
            if self.mixer.bptt_len and t and t % self.mixer.bptt_len == 0:
                memory_BD = memory_BD.detach()
                layers = [{name: value.detach() for name, value in layer.items()} for layer in layers]
            context = Context(positions[t : t + 1], donate_state=donate_state, tokens=tokens_BT[:, t : t + 1])
            one = self.decode(embedded_BTD[:, t : t + 1], memory_BD[:, None], layers, context=context)
            assert one.states is not None
            # Kept in the activations' dtype, as the caches are, also where a pass writes it in float32 (autocast).
            memory_BD, layers = one.memory_BTD[:, 0].to(memory_BD.dtype), one.states
            features.append(one.features_BTD)
            memories.append(memory_BD)
            if graded is not None and (t + 1 == steps or len(features) == BLOCK):
                graded(torch.cat(features, dim=1), slice(begin, t + 1))
                begin = t + 1
                features.clear()
        after = TwoPassState(layers, state.length + steps, memory_BD)
        kept = torch.cat(features, dim=1) if features else embedded_BTD[:, :0]
        return kept, torch.stack(memories, dim=1), after

    def recurrent_memory(self, tokens_BT: Tensor, segment_ids_BT: Tensor | None = None) -> Tensor:
        """(B, T, D): the decoder's own memories."""
        return self._unrolled(tokens_BT, segment_ids_BT, donate_state=True, graded=lambda *_: None)[1]

    def grade(self, batch: Batch, mode: str | None = None) -> Graded:
        """As the base class says; ``mode`` recurrent (the default) or teacher_forced."""
        mode = mode or RECURRENT
        if mode not in self.modes:
            raise ValueError(f"mode={mode}: must be one of {', '.join(self.modes)}")
        if mode == TEACHER_FORCED:
            return self.graded(self.features(batch.inputs_BT, batch.segment_ids_BT), batch)
        if self.readout is not None:  # needs the last position before it can say anything of the first
            return self.graded(self.deployed_features(batch.inputs_BT, batch.segment_ids_BT), batch)
        parts: list[Graded] = []

        def take(features_BTD: Tensor, where: slice) -> None:
            answers_BT = None if batch.answers_BT is None else batch.answers_BT[:, where]
            part = batch._replace(targets_BT=batch.targets_BT[:, where], answers_BT=answers_BT)
            parts.append(self.graded(features_BTD, part))

        donate = not torch.is_grad_enabled()
        self._unrolled(batch.inputs_BT, batch.segment_ids_BT, donate_state=donate, graded=take)
        nats, correct, variation = zip(*parts, strict=True)
        known = None if batch.answers_BT is None else torch.cat(variation, dim=1)
        return Graded(torch.cat(nats, dim=1), torch.cat(correct, dim=1), known)

    def read(
        self,
        tokens_BT: Tensor,
        state: LMState,
        segment_ids_BT: Tensor | None = None,
        *,
        donate_state: bool = False,
        assisted: bool = False,
    ) -> tuple[Tensor, LMState]:
        """As the base class says: exact, token by token. With ``assisted`` and ``prefill=q_assisted`` the first tokens of a
        sequence are read at once instead: pass 1, then ``prefill_passes`` times the decoder on the memory of the pass
        before. That is as near as pass 1 is to the recurrence, and exact once there are as many passes as tokens."""
        assert isinstance(state, TwoPassState)
        steps = tokens_BT.shape[1]
        if not assisted or self.mixer.prefill == "recurrent" or state.length > 0 or steps == 1:
            features_BTD, _, after = self._unrolled(tokens_BT, segment_ids_BT, state, donate_state)
            return features_BTD, after
        embedded_BTD, context = self.backbone.embedded(tokens_BT), self.whole(tokens_BT, segment_ids_BT)
        memory_BTD = self.prefill_memory(embedded_BTD, context, features=False).memory_BTD
        for _ in range(self.mixer.prefill_passes - 1):
            before_BTD = self.shift(memory_BTD, segment_ids_BT)
            memory_BTD = self.decode(embedded_BTD, before_BTD, context=context).memory_BTD
        context = dataclasses.replace(context, donate_state=donate_state)
        last = self.decode(embedded_BTD, self.shift(memory_BTD, segment_ids_BT), state.layers, context=context)
        assert last.states is not None
        memory_BD = last.memory_BTD[:, -1].to(state.memory_BD.dtype)
        return last.features_BTD, TwoPassState(last.states, steps, memory_BD)

    def states_after(self, tokens_BT: Tensor, segment_ids_BT: Tensor | None = None) -> list[State]:
        """As the base class says, teacher-forced."""
        embedded_BTD, context = self.backbone.embedded(tokens_BT), self.whole(tokens_BT, segment_ids_BT)
        memory_BTD = torch.zeros_like(embedded_BTD)
        if self.mixer.training == "two_pass":
            memory_BTD = self.prefill_memory(embedded_BTD, context, features=False).memory_BTD
        states = self.init_state(*tokens_BT.shape[:2]).layers
        after = self.decode(embedded_BTD, self.shift(memory_BTD, segment_ids_BT), states, context=context).states
        assert after is not None
        return after

    def counts(self, seq_len: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """As the base class says, of the deployed decoder; more in `models.two_pass_counts`."""
        return two_pass_counts(self, super().counts(seq_len, dtype), seq_len, dtype)


def _vector(size: int, wanted: bool) -> nn.Parameter | None:
    return nn.Parameter(torch.empty(size)) if wanted else None
