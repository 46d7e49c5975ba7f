"""FlexAttention, which skips blocks that a window or a document border hides, with the signature of `attention`.

Plain causal attention and decoding stay with the torch form: scaled_dot_product_attention has a fused kernel for them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from mixers.ops import attention as torch_form


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    segment_ids: Tensor | None = None,
    initial_state: dict[str, Tensor] | None = None,
    donate_state: bool = False,
) -> tuple[Tensor, dict[str, Tensor] | None]:
    """Causal attention over a window, over documents, or both."""
    steps = q.shape[1]
    near = None if window is None or window >= steps else window
    if initial_state is not None or (near is None and segment_ids is None):
        return torch_form.attention(
            q,
            k,
            v,
            window=window,
            segment_ids=segment_ids,
            initial_state=initial_state,
            donate_state=donate_state,
        )
    if segment_ids is None:
        mask = _window_mask(steps, near, q.device)
    else:
        mask = _document_mask(segment_ids, near)
    dtype = torch.get_autocast_dtype(q.device.type) if torch.is_autocast_enabled(q.device.type) else q.dtype
    heads_first = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    return _flex(q.device.type)(*heads_first, block_mask=mask).transpose(1, 2).to(q.dtype), None


@functools.cache
def _flex(device_type: str) -> Any:
    # Uncompiled it builds the whole T x T table: right on a CPU, in tests, and useless on a GPU.
    return torch.compile(flex_attention, dynamic=False) if device_type == "cuda" else flex_attention


def _visible(window: int | None, segment_ids: Tensor | None) -> Any:
    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        sees = query >= key
        if window is not None:
            sees = sees & (query - key < window)
        if segment_ids is not None:
            sees = sees & (segment_ids[b, query] == segment_ids[b, key])
        return sees

    return visible


@functools.lru_cache(maxsize=32)
def _window_mask(steps: int, window: int | None, device: torch.device) -> BlockMask:
    return create_block_mask(_visible(window, None), None, None, steps, steps, device=str(device))


_latest: dict[int | None, tuple[Tensor, BlockMask]] = {}


def _document_mask(segment_ids: Tensor, window: int | None) -> BlockMask:
    """All layers of a pass share one tensor of ids, which nobody overwrites: the latest mask of each window is kept."""
    if window not in _latest or _latest[window][0] is not segment_ids:
        batch, steps = segment_ids.shape
        mask = create_block_mask(
            _visible(window, segment_ids), batch, None, steps, steps, device=str(segment_ids.device)
        )
        _latest[window] = segment_ids, mask
    return _latest[window][1]
