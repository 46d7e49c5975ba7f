"""Packed documents as rows of their own, for operations that have no cheaper way to keep them apart."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def apart(function: Callable[[Tensor], Tensor], x: Tensor, segment_ids: Tensor | None) -> Tensor:
    """Apply a causal operation to each document alone; nothing crosses a border, in values or in gradients.

    Documents of similar length (within a factor of two) become the rows of one call, padded with zeros behind their
    ends, where a causal operation lets them do no harm. At most log2 T + 1 calls, and no T x T mask.

    Args:
        function: maps (R,L,...) to (R,L,...), row by row and causally, for any R and any L up to the longest document.
        x: (B,T,...).
        segment_ids: integers (B,T), non-decreasing; None: every row is one document.

    Returns:
        (B,T,...). Finding the borders costs a device sync.
    """
    return function(x) if segment_ids is None else _apart(function, x, segment_ids)


@torch.compiler.disable  # shapes follow the documents: every batch would be compiled anew
def _apart(function: Callable[[Tensor], Tensor], x: Tensor, segment_ids: Tensor) -> Tensor:
    batch, steps = x.shape[:2]
    starts, lengths = _borders(segment_ids)
    if len(starts) == batch:
        return function(x)
    # One zero token behind all others is what the padding reads.
    tokens = torch.cat((x.flatten(0, 1), x.new_zeros(1, *x.shape[2:])))
    place = torch.empty(batch * steps, dtype=torch.int64)  # where each token lies in the concatenated results
    results, filled = [], 0
    octave = torch.log2(lengths.double()).floor()
    for size in octave.unique():
        first, length = starts[octave == size][:, None], lengths[octave == size][:, None]
        width = int(length.max())
        offset = torch.arange(width)
        index, inside = first + offset, offset < length
        place[index[inside]] = filled + torch.arange(index.numel()).view_as(index)[inside]
        index = torch.where(inside, index, batch * steps)
        rows = tokens.index_select(0, index.flatten().to(x.device)).unflatten(0, index.shape)
        results.append(function(rows).flatten(0, 1))
        filled += index.numel()
    return torch.cat(results).index_select(0, place.to(x.device)).unflatten(0, (batch, steps))


def positions_in_documents(segment_ids: Tensor, before_B: Tensor) -> Tensor:
    """(B,T) int64: how many tokens of its own document came before each token.

    ``before_B``: tokens of the first column's document that came in earlier calls; (1,) if it is all rows' alike.
    """
    begins = torch.ones_like(segment_ids, dtype=torch.bool)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    index_T = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    position_BT = index_T - torch.where(begins, index_T, 0).cummax(dim=1).values
    return position_BT + before_B[:, None].to(segment_ids.device) * (segment_ids == segment_ids[:, :1])


def _borders(segment_ids: Tensor) -> tuple[Tensor, Tensor]:
    """First token (in the flattened batch) and length of every document, on the CPU."""
    begins = torch.ones_like(segment_ids, dtype=torch.bool, device="cpu")
    segments = segment_ids.cpu()
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts = begins.flatten().nonzero()[:, 0]
    return starts, torch.diff(starts, append=torch.tensor([segments.numel()]))


def segments_with_past(
    segment_ids: Tensor | None, start: Tensor, past: int, steps: int, device: torch.device
) -> Tensor | None:
    """Document ids (B, past + steps) of all tokens since a state was made; None where all is one document.

    ``start`` (B,) is each row's first token of the document that the first new column carries on.
    """
    if segment_ids is None:
        if not bool((start > 0).any()):
            return None
        segment_ids = torch.zeros(start.shape[0], steps, dtype=torch.int64, device=device)
    first = segment_ids[:, :1]
    current = torch.arange(past, device=device) >= start.to(device)[:, None]
    return torch.cat((torch.where(current, first, first - 1), segment_ids), dim=1)
