"""Masked mixer (arXiv 2409.01482): a free weight for every pair of positions, what Toeplitz mixers tie along diagonals.

    y_t = sum_{s <= t} W[t, s] x_s + c_t

Of the L x L weights the upper half is masked in every forward pass: it stays at zero and is never used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mixers import register
from mixers.base import Context, Mixer, State
from mixers.fixed_mix import FixedMix, FixedMixConfig
from mixers.ops._documents import apart, segments_with_past

_BLOCK = 256  # rows of a product: what lies right of a block's last row is skipped


@register
@dataclass
class MaskedMixerConfig(FixedMixConfig):
    """The frame's fields are all: heads, expansion and position bias as for Toeplitz mixers."""

    kind: str = "masked_mixer"

    def weights_per_operator(self) -> int:
        return self.length**2

    def build(self, layer_index: int, n_layers: int) -> Mixer:
        return MaskedMixer(self)


class MaskedMixer(FixedMix):
    """y_t = sum_s W[t, s] x_s + c_t for each head."""

    config: MaskedMixerConfig

    def __init__(self, config: MaskedMixerConfig):
        super().__init__(config)
        c = config
        self.weight_OHLL = nn.Parameter(torch.empty(c.operators, c.groups, c.length, c.length))

    def mix(self, operator: int, x_BTHV: Tensor, state: State | None, context: Context) -> tuple[Tensor, Tensor | None]:
        weight_HLL, segments, steps = self.weight_OHLL[operator], context.segment_ids, x_BTHV.shape[1]
        if state is None:
            return apart(lambda rows: _lower(weight_HLL, rows, rows.shape[1]), x_BTHV, segments), None
        length = int(state["length"][0])
        history = _appended(state["memory"], x_BTHV, length, context.donate_state)
        all_BTHV = history[:, : length + steps].unflatten(-1, x_BTHV.shape[2:]).to(x_BTHV.dtype)
        if steps == 1:
            return _one(weight_HLL, all_BTHV, state["start"]), history
        segments = segments_with_past(segments, state["start"], length, steps, x_BTHV.device)
        if segments is None:
            return _lower(weight_HLL, all_BTHV, steps), history
        y_BTHV = apart(lambda rows: _lower(weight_HLL, rows, rows.shape[1]), all_BTHV, segments)
        return y_BTHV[:, length:], history

    def memory(self, batch_size: int, max_len: int, device: torch.device, dtype: torch.dtype) -> State:
        inner = self.config.groups * self.config.width
        return {
            "memory": torch.zeros(batch_size, max_len, inner, device=device, dtype=dtype),
            "length": torch.zeros(batch_size, dtype=torch.int64),
            "start": torch.zeros(batch_size, dtype=torch.int64),
        }

    def cell_flops_per_token(self, seq_len: int) -> float:
        """A multiply-add per channel and token in the past, itself included, and the biases."""
        c = self.config
        return c.operators * c.groups * c.width * (seq_len + 1 + c.position_bias)

    def state_bytes(self, seq_len: int, dtype: torch.dtype) -> int:
        """Every input of each operator, in the activations' dtype."""
        c = self.config
        return c.operators * seq_len * c.groups * c.width * dtype.itemsize

    def init_parameters(self, generator: torch.Generator) -> None:
        """Row t from N(0, 1/(t + 1)): inputs of unit variance give outputs of unit variance, at every position."""
        super().init_parameters(generator)
        with torch.no_grad():
            scale_L = torch.arange(1, self.config.length + 1, device=self.weight_OHLL.device).rsqrt()
            self.weight_OHLL.normal_(generator=generator).mul_(scale_L[:, None]).tril_()

    def no_decay(self) -> set[str]:
        """Weights too: Toeplitz filters are not decayed either."""
        return {"weight_OHLL"} | super().no_decay()


def _lower(weight_HLL: Tensor, x_BTHV: Tensor, count: int) -> Tensor:
    """The last ``count`` outputs, in blocks of rows."""
    batch, steps, heads, width = x_BTHV.shape
    x_HTX = x_BTHV.permute(2, 1, 0, 3).reshape(heads, steps, batch * width)
    outputs = []
    for first in range(steps - count, steps, _BLOCK):
        end = min(first + _BLOCK, steps)
        outputs.append(weight_HLL[:, first:end, :end].tril(first) @ x_HTX[:, :end])
    return torch.cat(outputs, dim=1).unflatten(-1, (batch, width)).permute(2, 1, 0, 3)


def _one(weight_HLL: Tensor, x_BTHV: Tensor, start_B: Tensor) -> Tensor:
    """The output at the last token, O(t) per channel; each row's document begins at ``start``."""
    steps = x_BTHV.shape[1]
    place_BT = (torch.arange(steps) - start_B[:, None]).to(x_BTHV.device)
    weight_HBT = weight_HLL[:, place_BT[:, -1:], place_BT.clamp(min=0)]
    weight_HBT = torch.where(place_BT >= 0, weight_HBT, 0.0)
    return torch.einsum("hbt,bthv->bhv", weight_HBT, x_BTHV.to(weight_HBT.dtype))[:, None].to(x_BTHV.dtype)


def _appended(history_BSX: Tensor, x_BTHV: Tensor, length: int, donate_state: bool) -> Tensor:
    history_BSX, steps = (history_BSX if donate_state else history_BSX.clone()), x_BTHV.shape[1]
    if length + steps > history_BSX.shape[1]:
        raise ValueError(f"the state was made for max_len={history_BSX.shape[1]} tokens, {length + steps} are needed")
    history_BSX[:, length : length + steps] = x_BTHV.flatten(2).to(history_BSX.dtype)
    return history_BSX
