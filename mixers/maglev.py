"""Maglev: sliding-window attention whose keys and values carry a recurrent memory (arXiv 2608.02870).

Trained in two parallel passes over all layers (`models/two_pass.py`); here is the layer, which mixes into its keys and
values those of the memory of the token before (eqs. 6 to 9):

    k_rec_t = RMSNorm(W_k m_{t-1})        v_rec_t = W_v m_{t-1}              W_k, W_v shared by all layers
    g_local = 2 sigmoid(G_local x_t)      g_memory = 2 sigmoid(G_memory x_t)    per head and layer; 1 at the start
    k_t <- g_local k_t + g_memory k_rec_t,   v_t likewise;   then attention over the last W of them

The recurrent key at slot t is rotated as position t. Nothing is added to the cache: old memories live in the mixed keys
and values.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from mixers import register
from mixers.base import NO_CONTEXT, Context, Knob, Memory, Mixer, MixerConfig, State
from mixers.kernels import chosen
from mixers.maglev_checks import INJECTIONS, check_effect, check_numbers, check_together, check_words
from mixers.ops.attention import attention, init_attention_state, restart_attention
from mixers.ops.strided_attention import strided_attention
from mixers.parts import FusedLinear, ResidualLinear, rms_normalise, rotary, wide_linear


@register
@dataclass
class MaglevConfig(MixerConfig):
    """The layer, the two passes and their loss; `conf/mixer/maglev.yaml` says what each field is for."""

    kind: str = "maglev"
    n_layers: int = 2
    qk_norm: bool = False
    rope_base: float = 10_000.0
    window: int = 64
    q_pattern: str = "SLSL"
    p_pattern: str = "S"
    training: str = "two_pass"
    bptt_len: int | None = None
    sharing: str = "shared"
    sep_resid: bool = True
    sep_x0: bool = True
    injection: list[str] = field(default_factory=lambda: ["k", "v"])
    inject_layers: list[int] | None = None
    rec_proj: str = "shared"
    rec_init: str = "kv"
    rec_key_norm: str = "head"
    mix_order: str = "maglev"
    gate_shape: str = "head"
    gates_for: str = "both"
    gate_input: str = "normed"
    gate_init_std: float = 0.0
    residual_init: float = 0.1
    source_layer: int | None = None
    m0: str = "zero"
    subsets: int = 1
    q_ce_weight: float | None = 0.0
    lam: float | None = None
    consistency: str = "rms"
    consistency_at: str = "targets"
    detach: str = "none"
    cons_eps: float = 1e-8
    prefill: str = "recurrent"
    prefill_passes: int = 1
    lam_start: float = 0.0
    lam_steps: int = 0
    own_memory_prob: float = 0.0
    extra_passes: int = 0
    memory_residual: float = 0.0

    model_class: ClassVar[str] = "models.two_pass:TwoPassModel"
    state_knob: ClassVar[Knob | str] = Knob("mixer.window")
    recurrent_only: ClassVar[bool] = True  # the decoder's state must not grow with the sequence
    prefiller_gated: ClassVar[bool] = False  # pass 1 is the decoder with a memory of zero, its gates at work
    test_overrides: ClassVar[dict] = {"window": 5, "gate_init_std": 0.5}

    # ---- checks ----

    def check(self, path: str) -> None:
        """Also fills in what null leaves to the other fields, ``lam`` and ``q_ce_weight``, and puts ``injection`` in order.
        A checked config is read back from its run's folder: checked again it must stay as it is."""
        if self.head_dim % 2:
            raise ValueError(f"{path}.head_dim={self.head_dim}: rotary positions turn pairs, so it must be even")
        if self.rope_base <= 1:
            raise ValueError(f"{path}.rope_base={self.rope_base}: must be above 1 (10000 is usual)")
        for name in ("window", "subsets", "prefill_passes", "n_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{path}.{name}={getattr(self, name)}: must be at least 1")
        check_words(self, path)
        check_numbers(self, path)
        self._fill()
        check_together(self, path)
        check_effect(self, path)

    def _fill(self) -> None:
        unrolled = self.training == "bptt"
        if self.lam is None:
            # What the paper finds best for each; a memory without a norm must not be drawn together.
            best = 0.1 if self.sharing == "shared" else 1.0
            self.lam = 0.0 if unrolled or self.source_layer is not None else best
        if self.q_ce_weight is None:
            self.q_ce_weight = 0.0 if unrolled else 1 / self.subsets
        self.injection = [word for word in INJECTIONS if word in self.injection]

    # ---- layers ----

    def for_layer(self, layer_index: int) -> MaglevConfig:
        """The config of one layer: its letters of the patterns, and what is injected into it."""

        def letter(pattern: str) -> str:
            return pattern[layer_index % len(pattern)]

        injected = self.inject_layers is None or layer_index in self.inject_layers
        return dataclasses.replace(
            self,
            q_pattern=letter(self.q_pattern),
            p_pattern=letter(self.p_pattern),
            injection=[*self.injection] if injected else [],
            inject_layers=None,
        )

    @property
    def mixed(self) -> list[str]:
        """What the layer itself mixes in; the residual stream is the model's business."""
        return [word for word in self.injection if word != "residual"]

    @property
    def n_gates(self) -> int:
        """Gates of one head (of one layer with gate_shape=scalar)."""
        return 4 if self.gates_for == "separate_kv" and self.mixed == ["k", "v"] else 2

    @property
    def gate_width(self) -> int:
        """Numbers that the gate map puts out."""
        each = {"head": self.n_heads, "element": self.n_heads * self.head_dim, "scalar": 1}[self.gate_shape]
        return self.n_gates * each if self.mixed else 0

    def window_of(self, prefiller: bool) -> int | None:
        """Of a layer's own config: keys in reach; None: all."""
        return self.window if (self.q_pattern if prefiller else self.p_pattern)[0] == "S" else None

    def projection_parameters(self) -> int:
        """Of one pair of maps from the memory to its key and value."""
        inner = self.n_heads * self.head_dim
        return self.d_model * inner * (2 if self.mixed == ["cross"] else len(self.mixed))

    def n_parameters(self) -> int:
        own = 4 * self.d_model * self.n_heads * self.head_dim + self.d_model * self.gate_width
        return own + (self.projection_parameters() if self.rec_proj == "layerwise" else 0)

    def build(self, layer_index: int, n_layers: int) -> Mixer:
        return InjectedAttention(self)

    def takes_value_embeds(self) -> bool:
        return True

    def accessories(self) -> dict[str, str]:
        return {
            "positions": f"rotary, base {self.rope_base:g}",
            "q/k norm": "rms" if self.qk_norm else "none",
            "window": f"{self.window} keys with self",
            "passes": "unrolled" if self.training == "bptt" else f"{self.q_pattern}, then {self.p_pattern}",
            "blocks of the passes": self.sharing,
            "memory into": ", ".join(self.injection),
            "memory from": "final norm" if self.source_layer is None else f"layer {self.source_layer}",
            "lambda": f"{self.lam:g}" if self.lam is not None else "",
        }


class MemoryProjection(nn.Module):
    """The key and value of a memory, each (B,T,H,K); None for one that is not injected."""

    def __init__(self, config: MaglevConfig):
        super().__init__()
        self.config = config
        inner, cross = config.n_heads * config.head_dim, "cross" in config.mixed
        self.key = nn.Linear(config.d_model, inner, bias=False) if cross or "k" in config.mixed else None
        self.value = nn.Linear(config.d_model, inner, bias=False) if cross or "v" in config.mixed else None

    def init_parameters(self) -> None:
        """After the backbone's draw, which is that of the layers' own keys and values."""
        with torch.no_grad():
            if self.key is not None and self.config.rec_init == "zero":
                self.key.weight.zero_()
            if self.value is not None and self.config.rec_init != "kv":
                self.value.weight.zero_()

    def forward(self, memory_BTD: Tensor) -> tuple[Tensor | None, Tensor | None]:
        heads = (self.config.n_heads, self.config.head_dim)
        k_BTHK = v_BTHV = None
        if self.key is not None:
            k_BTD = self.key(memory_BTD)
            if self.config.rec_key_norm == "full":
                k_BTD = rms_normalise(k_BTD)
            k_BTHK = k_BTD.unflatten(-1, heads)
            if self.config.rec_key_norm == "head":
                k_BTHK = rms_normalise(k_BTHK)
        if self.value is not None:
            v_BTHV = self.value(memory_BTD).unflatten(-1, heads)
        return k_BTHK, v_BTHV


def _mixed(local: Tensor, memory: Tensor | None, gate: Tensor, memory_gate: Tensor) -> Tensor:
    return local * gate if memory is None else torch.addcmul(local * gate, memory, memory_gate)


class InjectedAttention(Mixer):
    """Attention of either pass. In the decoder ``context.memory`` is mixed in; without one it is a memory of zeros."""

    def __init__(self, config: MaglevConfig):
        super().__init__()
        self.config = config
        inner = config.n_heads * config.head_dim
        self.qkv = FusedLinear(config.d_model, (inner,) * 3, bias=False)
        self.out = ResidualLinear(inner, config.d_model, bias=False)
        self.gate = nn.Linear(config.d_model, config.gate_width, bias=False) if config.mixed else None
        self.projection = MemoryProjection(config) if config.mixed and config.rec_proj == "layerwise" else None
        self.reads_stream = config.gate_input == "raw" and self.gate is not None

    def init_parameters(self, generator: torch.Generator) -> None:
        """Neutral gates: each is exactly 1."""
        if self.gate is not None:
            with torch.no_grad():
                self.gate.weight.normal_(0, 1, generator=generator).mul_(self.config.gate_init_std)
        if self.projection is not None:
            self.projection.init_parameters()

    def no_decay(self) -> set[str]:
        """Gates: decay would pull them to neutral. LRT keeps them with the scalars, which have none."""
        return {"gate.weight"} if self.gate is not None else set()

    def forward(
        self, x_BTD: Tensor, state: State | None = None, context: Context | None = None
    ) -> tuple[Tensor, State | None]:
        """Beside the contract: with ``context.role`` prefiller a passed-in state, be it empty, comes back holding all keys
        and values; with ``context.subset`` such a state is refined at these positions."""
        context, c = context or NO_CONTEXT, self.config
        prefiller = context.role == "prefiller"
        gates: list[Tensor] = []
        memory_k = memory_v = None
        if self.gate is not None and (not prefiller or c.prefiller_gated):
            gated_BTD = context.stream_BTD if self.reads_stream else x_BTD
            assert gated_BTD is not None
            gates = self._gates(gated_BTD)
            if context.memory is not None and not prefiller:
                memory_k, memory_v = self._memory(context.memory)
        q, k, v = self.qkv(x_BTD).unflatten(-1, (3, c.n_heads, c.head_dim)).unbind(2)
        if context.value_BTHV is not None:
            v = v + context.value_BTHV
        if c.qk_norm and c.mix_order == "maglev":
            q, k = rms_normalise(q), rms_normalise(k)
        positions = context.positions
        if positions is None:
            first = 0 if state is None else int(state["length"][0])
            positions = torch.arange(first, first + x_BTD.shape[1], device=x_BTD.device)

        # A gate that is one number for a head commutes with the rotation (eqs. 6 and 8 rotate first): mixed first, a key is
        # rotated once. One for each channel does not. Rotated first, attention would then depend on where in the text a
        # document stands, and packed documents would not equal the documents apart: here we leave the paper's order.
        if gates and "k" in c.mixed:
            k = _mixed(k, memory_k, gates[0], gates[1])
        if c.qk_norm and c.mix_order == "lrt":
            q, k = rms_normalise(q), rms_normalise(k)
        q, k = rotary(torch.cat((q, k), dim=2), positions, c.rope_base).chunk(2, dim=2)
        if gates and "v" in c.mixed:
            v = _mixed(v, memory_v, gates[-2], gates[-1])

        o, after = self._attend(q, k, v, state, context)
        if gates and "cross" in c.mixed:
            if memory_k is None or memory_v is None:
                memory_k, memory_v = torch.zeros_like(k), torch.zeros_like(v)
            memory_k = rotary(memory_k, positions, c.rope_base)
            o, after = self._cross(o, q, memory_k, memory_v, gates, state, after, context)
        return self.out(o.flatten(2)), after

    def _gates(self, x_BTD: Tensor) -> list[Tensor]:
        """Each broadcasts against (B,T,H,K): local, memory, and with gates_for=separate_kv the same again for values."""
        assert self.gate is not None
        c = self.config
        heads = {"head": (c.n_heads, 1), "element": (c.n_heads, c.head_dim), "scalar": (1, 1)}[c.gate_shape]
        wide = 2 * torch.sigmoid(wide_linear(self.gate, x_BTD)).unflatten(-1, (c.n_gates, *heads))
        if self.observed is not None:
            self.observe("gate_local", wide[:, :, 0].mean(-1))
            self.observe("gate_memory", wide[:, :, 1].mean(-1))
        # The activations' dtype is that of the projections' outputs, which under autocast is not the input's.
        narrow = torch.is_autocast_enabled(x_BTD.device.type)
        dtype = torch.get_autocast_dtype(x_BTD.device.type) if narrow else x_BTD.dtype
        return list(wide.to(dtype).unbind(2))

    def _memory(self, memory: Memory) -> tuple[Tensor | None, Tensor | None]:
        if self.projection is not None:
            return self.projection(memory.state_BTD)
        return memory.key_BTHK, memory.value_BTHV

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None, context: Context
    ) -> tuple[Tensor, State | None]:
        prefiller = context.role == "prefiller"
        window = self.config.window_of(prefiller)
        if context.subset is not None:
            assert state is not None
            first, step = context.subset
            keys, values = state["k"].clone(), state["v"].clone()
            keys[:, first::step], values[:, first::step] = k, v
            o = strided_attention(
                q, keys, values, first=first, step=step, window=window, segment_ids=context.segment_ids
            )
            return o, {"k": keys, "v": values}
        o, after = chosen(attention, q)(
            q,
            k,
            v,
            window=window,
            segment_ids=context.segment_ids,
            initial_state=None if prefiller else _only(state, "k", "v"),
            donate_state=context.donate_state,
        )
        return o, ({"k": k, "v": v} if prefiller and state is not None else after)

    def _cross(
        self,
        o: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: list[Tensor],
        state: State | None,
        after: State | None,
        context: Context,
    ) -> tuple[Tensor, State | None]:
        """Attention to the memories in the window, beside that to the tokens."""
        theirs, memories = attention(
            q,
            k,
            v,
            window=self.config.window_of(False),
            segment_ids=context.segment_ids,
            initial_state=_only(state, "memory_k", "memory_v"),
            donate_state=context.donate_state,
        )
        if after is not None and memories is not None:
            after = {**after, "memory_k": memories["k"], "memory_v": memories["v"]}
        return _mixed(o, theirs, gates[0], gates[1]), after

    # ---- state ----

    def init_state(self, batch_size: int, max_len: int, device: torch.device, dtype: torch.dtype) -> State:
        c = self.config
        window = c.window_of(False)
        state = init_attention_state(
            batch_size, max_len, c.n_heads, c.head_dim, c.head_dim, window=window, device=device, dtype=dtype
        )
        if "cross" in c.mixed:
            state |= {"memory_k": torch.zeros_like(state["k"]), "memory_v": torch.zeros_like(state["v"])}
        return state

    def restart(self, state: State, rows_B: Tensor) -> State:
        """The state of rows that begin a new document where ``rows_B`` (bool, CPU) says so."""
        return restart_attention(state, rows_B)

    def state_bytes(self, seq_len: int, dtype: torch.dtype) -> int:
        """Mixed keys and values of the tokens in reach; with cross the memories' as well."""
        c = self.config
        reach = min(c.window_of(False) or seq_len, seq_len)
        return (4 if "cross" in c.mixed else 2) * reach * c.n_heads * c.head_dim * dtype.itemsize

    # ---- counts ----

    def cell_flops_per_token(self, seq_len: int) -> float:
        """Of the decoder: 4 K per query and key in reach, and the mixing."""
        c, inner = self.config, self.config.n_heads * self.config.head_dim
        reads = 2 if "cross" in c.mixed else 1
        return reads * self._attention_flops(False, seq_len) + 3 * inner * len(c.mixed)

    def prefiller_flops_per_token(self, seq_len: int) -> float:
        """FLOPs of one forward pass of the prefiller per token."""
        own = (self.qkv, self.out, *((self.gate,) if self.gate is not None and self.config.prefiller_gated else ()))
        return sum(2 * m.weight.numel() for m in own) + self._attention_flops(True, seq_len)

    def _attention_flops(self, prefiller: bool, seq_len: int) -> float:
        c = self.config
        reach = min(c.window_of(prefiller) or seq_len, seq_len)
        keys = reach - reach * (reach - 1) / (2 * seq_len)  # mean over t of min(t, reach)
        return 4 * c.n_heads * c.head_dim * keys


def _only(state: State | None, k: str, v: str) -> State | None:
    """The part of a state that one attention reads."""
    if state is None:
        return None
    return {"k": state[k], "v": state[v], "length": state["length"], "start": state["start"]}
