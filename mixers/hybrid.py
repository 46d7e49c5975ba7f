"""Hybrids as data: several mixers, tiled over the layers by a pattern. `conf/mixer/hawk_mesa.yaml` is one.

A part is any mixer's config with all of its fields; ``mixer.parts.a.window=32`` overrides one, and
``mixer@mixer.parts.a=swa`` puts another mixer in its place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from mixers import register
from mixers.base import Knob, Mixer, MixerConfig


@register
@dataclass
class HybridConfig(MixerConfig):
    """``pattern`` names the part of each layer, from the first one on, and starts again where it ends."""

    kind: str = "hybrid"
    parts: dict[str, Any] = field(default_factory=dict)
    pattern: list[str] = field(default_factory=list)

    state_knob: ClassVar[Knob | str] = "its parts have states of several kinds; choose their fields by hand"

    def check(self, path: str) -> None:
        if not self.parts:
            raise ValueError(f"{path}.parts={{}}: a hybrid needs parts, as in the defaults list: /mixer@parts.a: hawk")
        if not self.pattern:
            raise ValueError(
                f"{path}.pattern=[]: name the parts of the layers in order, such as [{', '.join(self.parts)}]"
            )
        for name in self.pattern:
            if name not in self.parts:
                raise ValueError(
                    f"{path}.pattern={self.pattern}: {name!r} is not one of the parts {', '.join(self.parts)}"
                )
        for name, part in self.parts.items():
            if part.model_class != self.model_class:
                raise ValueError(
                    f"{path}.parts.{name}.kind={part.kind}: {part.kind} is trained in two passes over all layers and "
                    f"cannot be a part of a hybrid; use mixer={part.kind} alone"
                )
            if part.d_model != self.d_model:
                raise ValueError(
                    f"{path}.parts.{name}.d_model={part.d_model}: the residual stream has model.d_model={self.d_model}"
                )

    def for_layer(self, layer_index: int) -> MixerConfig:
        part = self.parts[self.pattern[layer_index % len(self.pattern)]]
        return part.for_layer(layer_index)  # a part may be a hybrid itself

    def kinds(self) -> set[str]:
        return {self.kind}.union(*(part.kinds() for part in self.parts.values()))

    def takes_value_embeds(self) -> bool:
        return all(part.takes_value_embeds() for part in self.parts.values())

    def max_len(self) -> int | None:
        return min((n for part in self.parts.values() if (n := part.max_len()) is not None), default=None)

    def n_parameters(self) -> int:
        raise TypeError("a hybrid's layers differ: ask for_layer(i).n_parameters()")

    def build(self, layer_index: int, n_layers: int) -> Mixer:
        return self.for_layer(layer_index).build(layer_index, n_layers)

    def accessories(self) -> dict[str, str]:
        own = {
            f"{name}: {key}": value for name, part in self.parts.items() for key, value in part.accessories().items()
        }
        return {"pattern": " ".join(self.pattern), **own}
