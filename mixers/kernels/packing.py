"""Documents for kernels of variable length: (B,T) with borders as one row of B * T tokens and where each document begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Packing(NamedTuple):
    """Where the N documents of all rows lie; a document never goes on in the next row."""

    cu_seqlens: Tensor  # (N + 1,) int64: first token of each document among B * T, then B * T
    first_B: Tensor  # (B,) int64: number of each row's first document
    last_B: Tensor  # (B,) int64: number of each row's last document


_latest: tuple[Tensor, Packing] | None = None


def packing(segment_ids: Tensor) -> Packing:
    """The documents of (B,T) ids, which nobody may overwrite.

    Their number is data: the CPU waits for the device. All layers of a pass share one tensor of ids, so that the answer
    for the latest is kept; the same ``cu_seqlens`` also lets flash-linear-attention keep what it derives from it.
    """
    global _latest
    if _latest is not None and _latest[0] is segment_ids:
        return _latest[1]
    begins_BT = torch.ones_like(segment_ids, dtype=torch.bool)
    begins_BT[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    number_BT = begins_BT.flatten().cumsum(0).view_as(begins_BT) - 1
    begins = begins_BT.flatten().nonzero().flatten()
    cu_seqlens = torch.cat((begins, begins.new_tensor([segment_ids.numel()])))
    result = Packing(cu_seqlens, number_BT[:, 0], number_BT[:, -1])
    _latest = segment_ids, result
    return result


def by_document(
    kernel: Callable[..., tuple[Tensor, ...]],
    tokens: Sequence[Tensor | None],
    states: Sequence[Tensor | None],
    segment_ids: Tensor | None,
) -> tuple[Tensor, ...]:
    """``kernel(*tokens, *states, cu_seqlens=...)`` with nothing crossing a border.

    Args:
        kernel: maps tensors (B,T,...) and states (B,...) to an output (B,T,...) and as many final states; with
            ``cu_seqlens`` all tokens are one row and there is a state for each document.
        tokens: (B,T,...) or None.
        states: (B,...) before the first token, of each row's first document; None for zero.
        segment_ids: (B,T); None where each row is one document.

    Returns:
        The output (B,T,...) and the final state (B,...) of each row's last document, for each state.
    """
    if segment_ids is None:
        return kernel(*tokens, *states, cu_seqlens=None)
    documents = packing(segment_ids)
    count = documents.cu_seqlens.shape[0] - 1
    packed = [None if x is None else x.flatten(0, 1)[None] for x in tokens]
    begun = [
        None if x is None else x.new_zeros(count, *x.shape[1:]).index_copy(0, documents.first_B, x) for x in states
    ]
    o, *finals = kernel(*packed, *begun, cu_seqlens=documents.cu_seqlens)
    return o[0].unflatten(0, segment_ids.shape), *(x.index_select(0, documents.last_B) for x in finals)
