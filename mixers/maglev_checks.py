"""What a config of `mixer=maglev` or `mixer=lrt` may be: each refusal is one sentence with key, value and what would be right."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mixers.maglev import MaglevConfig

INJECTIONS = ("k", "v", "cross", "residual")


def _one_of(path: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{path}.{name}={value}: must be one of {', '.join(choices)}")


def check_words(config: MaglevConfig, path: str) -> None:
    for name in ("q_pattern", "p_pattern"):
        pattern = getattr(config, name)
        if not pattern or set(pattern) - {"S", "L"}:
            raise ValueError(
                f"{path}.{name}={pattern}: must be a word of S (sliding window) and L (full attention), repeated "
                "over the layers, such as SLSL"
            )
    if config.recurrent_only and "L" in config.p_pattern:
        raise ValueError(
            f"{path}.p_pattern={config.p_pattern}: an L is full attention, and the deployed decoder must go on with a "
            "fixed state: S in every layer (full attention belongs into q_pattern; mixer=lrt may have it)"
        )
    _one_of(path, "training", config.training, ("two_pass", "bptt"))
    _one_of(path, "sharing", config.sharing, ("shared", "separate"))
    _one_of(path, "rec_proj", config.rec_proj, ("shared", "layerwise"))
    _one_of(path, "rec_init", config.rec_init, ("kv", "zero_v", "zero"))
    _one_of(path, "rec_key_norm", config.rec_key_norm, ("head", "full", "none"))
    _one_of(path, "mix_order", config.mix_order, ("maglev", "lrt"))
    _one_of(path, "gate_shape", config.gate_shape, ("head", "element", "scalar"))
    _one_of(path, "gates_for", config.gates_for, ("both", "separate_kv"))
    _one_of(path, "gate_input", config.gate_input, ("normed", "raw"))
    _one_of(path, "m0", config.m0, ("zero", "learned"))
    _one_of(path, "consistency", config.consistency, ("rms", "mse", "cosine", "huber"))
    _one_of(path, "consistency_at", config.consistency_at, ("targets", "all"))
    _one_of(path, "detach", config.detach, ("none", "target", "decoder"))
    _one_of(path, "prefill", config.prefill, ("recurrent", "q_assisted"))
    for word in config.injection:
        _one_of(path, "injection", word, INJECTIONS)
    if not config.injection or len(set(config.injection)) < len(config.injection):
        raise ValueError(
            f"{path}.injection={config.injection}: name each way once, at least one of k, v, cross, residual"
        )
    for layer in config.inject_layers or []:
        if not 0 <= layer < config.n_layers:
            raise ValueError(f"{path}.inject_layers={config.inject_layers}: the layers are 0 to {config.n_layers - 1}")
    if config.inject_layers == []:
        raise ValueError(f"{path}.inject_layers=[]: name a layer; null injects into all of them")


def check_numbers(config: MaglevConfig, path: str) -> None:
    for name in ("lam", "q_ce_weight", "gate_init_std", "lam_start", "lam_steps", "extra_passes", "cons_eps"):
        value = getattr(config, name)
        if value is not None and not value >= 0:
            raise ValueError(f"{path}.{name}={value}: must be at least 0")
    for name in ("own_memory_prob", "memory_residual"):
        if not 0 <= getattr(config, name) < 1 + (name == "own_memory_prob") * 1e-9:
            raise ValueError(f"{path}.{name}={getattr(config, name)}: must be a share from 0 (off) to 1")
    if config.bptt_len is not None and config.bptt_len < 1:
        raise ValueError(f"{path}.bptt_len={config.bptt_len}: must be at least 1; null goes back to the first token")
    if config.source_layer is not None and not 1 <= config.source_layer <= config.n_layers:
        raise ValueError(
            f"{path}.source_layer={config.source_layer}: must be from 1 to model.n_layers={config.n_layers}; null takes "
            "the state after the last layer and a norm without gain"
        )


def check_together(config: MaglevConfig, path: str) -> None:
    if "cross" in config.injection and {"k", "v"} & set(config.injection):
        raise ValueError(f"{path}.injection={config.injection}: cross attends to the memories apart; leave out k and v")
    for name in ("lam", "lam_start"):
        if config.source_layer is not None and getattr(config, name):
            raise ValueError(
                f"{path}.{name}={getattr(config, name)}: the state after source_layer={config.source_layer} has no norm, so "
                f"training could shrink the distance for nothing; set {name}=0, or source_layer=null"
            )
    if config.subsets > 1:
        for name, off in (("extra_passes", 0), ("own_memory_prob", 0), ("memory_residual", 0)):
            if getattr(config, name) != off:
                raise ValueError(
                    f"{path}.{name}={getattr(config, name)}: is for one full second pass; set subsets=1 with it"
                )
        if "cross" in config.injection:
            raise ValueError(f"{path}.injection={config.injection}: cross needs subsets=1")
        if config.sharing == "separate":
            raise ValueError(
                f"{path}.sharing=separate: refinement in subsets={config.subsets} goes on with the keys of pass 1, which "
                "must come from the same blocks; set sharing=shared or subsets=1"
            )
    if config.training == "bptt":
        without: tuple[tuple[str, tuple], ...] = (
            ("lam", (0.0,)),
            ("lam_start", (0.0,)),
            ("q_ce_weight", (0.0,)),
            ("own_memory_prob", (0.0,)),
            ("extra_passes", (0,)),
            ("sharing", ("shared",)),
            ("prefill", ("recurrent",)),
            ("subsets", (1,)),
        )
        for name, values in without:
            if getattr(config, name) not in values:
                raise ValueError(
                    f"{path}.{name}={getattr(config, name)}: needs the prefiller, and training=bptt has none; set "
                    f"{name}={values[-1]}"
                )


def check_effect(config: MaglevConfig, path: str) -> None:
    """A field that does nothing beside the others stays at its default: no two runs compute the same under two ids."""
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    for idle, names, why in _without_effect(config):
        for name in names:
            value, default = getattr(config, name), defaults[name]
            if idle and value != default:
                unset = "null" if default is None else default
                raise ValueError(f"{path}.{name}={value}: has no effect with {why}; leave it at {unset}")


def _without_effect(config: MaglevConfig) -> list[tuple[bool, tuple[str, ...], str]]:
    """(is it so, the fields that then do nothing, why)."""
    scalars = ("sep_resid", "sep_x0")
    of_distance = ("lam_steps", "consistency", "consistency_at", "detach", "cons_eps")
    of_gates = ("gate_shape", "gates_for", "gate_input", "gate_init_std")
    ways = f"injection=[{','.join(config.injection)}]"
    return [
        (config.training != "bptt", ("bptt_len",), f"training={config.training}"),
        (config.training == "bptt", (*scalars, *of_distance), "training=bptt, which has no prefiller"),
        (config.prefiller_gated, scalars, f"kind={config.kind}, whose pass 1 is the network itself"),
        (config.sharing == "separate", scalars, "sharing=separate, where each pass has blocks of its own"),
        (config.prefill != "q_assisted", ("prefill_passes",), f"prefill={config.prefill}"),
        (config.lam_steps == 0, ("lam_start",), "lam_steps=0"),
        (config.lam == config.lam_start, ("lam_steps",), f"lam_start=lam={config.lam}"),
        # The distance is measured all the same, so its form is seen in the metrics.
        (config.lam == config.lam_start == 0, ("detach",), "lam=0, where no gradient comes from the distance"),
        (not config.mixed, (*of_gates, "rec_proj", "rec_init"), ways),
        (not {"k", "cross"} & set(config.injection), ("rec_key_norm",), f"{ways}, which has no key"),
        (not {"k", "v"} <= set(config.injection), ("gates_for",), f"{ways}, which has not both k and v"),
        ("residual" not in config.injection, ("residual_init",), f"{ways}, which has no residual"),
        (not config.qk_norm, ("mix_order",), "model.qk_norm=false"),
    ]
