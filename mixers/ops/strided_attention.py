"""Causal attention of every n-th token only, over the keys of all tokens: what a refining pass of the Latent Recurrent
Transformer computes (LRT, arXiv 2605.26797, interleaved parallel training)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Keys in a block of the banded form: at least 16, or calls dominate (CPU).
_MIN_BLOCK = 16


def strided_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    first: int,
    step: int,
    window: int | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """Softmax attention for the queries at positions first, first + step, ...

    O(T^2 / step) time without a window, O(T W / step) time and memory with one.

    Args:
        q: queries (B,S,H,K), S = ceil((T - first) / step).
        k: keys (B,T,H,K).
        v: values (B,T,H,V).
        first: position of the first query, below ``step``.
        step: distance of the queries.
        window: W, how many keys a query sees, itself included; None for all.
        segment_ids: integers (B,T), non-decreasing; a query sees its own document only.

    Returns:
        (B,S,H,V) in the dtype of q.

    Raises:
        ValueError: a number of queries that does not fit, or window < 1.
    """
    steps = k.shape[1]
    if not 0 <= first < step or q.shape[1] != -(-(steps - first) // step):
        raise ValueError(f"{q.shape[1]} queries from {first} on in steps of {step} do not fit {steps} keys")
    if window is not None and window < 1:
        raise ValueError(f"window={window}: must be at least 1, which is the token itself alone")
    if window is None or window >= steps:
        queries = torch.arange(first, steps, step, device=q.device)
        mask = _visible(queries, torch.arange(steps, device=q.device), window or steps)
        if segment_ids is not None:
            mask = (mask & (segment_ids[:, first::step, None] == segment_ids[:, None, :]))[:, None]
        return _sdpa(q, k, v, mask)

    # Blocks of queries against the blocks of keys in their reach, as rows of one batch.
    batch, size = q.shape[0], step * -(-max(window, _MIN_BLOCK) // step)
    n_blocks = -(-steps // size)
    rows = size // step

    def spans(x: Tensor) -> Tensor:
        """(B,T,...) to (B, n_blocks, 2 size, ...): each block behind the one before it."""
        padded = F.pad(x, (*(0, 0) * (x.ndim - 2), size, n_blocks * size - steps))
        blocks = padded.unflatten(1, (n_blocks + 1, size))
        return torch.cat((blocks[:, :-1], blocks[:, 1:]), dim=2)

    blocks_N1 = torch.arange(n_blocks, device=q.device)[:, None] * size
    queries_NR = blocks_N1 + torch.arange(first, size, step, device=q.device)
    keys_NC = blocks_N1 + torch.arange(-size, size, device=q.device)
    mask = _visible(queries_NR, keys_NC, window)[:, None]
    padded = F.pad(q, (0, 0, 0, 0, 0, n_blocks * rows - q.shape[1]))
    if segment_ids is not None:
        # Padding belongs to document -1, real ones count from 0 on: the shift makes room for it.
        theirs = spans(segment_ids + 1)
        mine = theirs[:, :, size + first :: step]
        mask = (mask & (mine[..., None] == theirs[:, :, None])[:, :, None]).flatten(0, 1)
        # Rows beyond the end must see something, or softmax gives NaN.
        mask = mask | ~mask.any(-1, keepdim=True)
    else:
        mask = mask.repeat(batch, 1, 1, 1)
    o = _sdpa(
        padded.unflatten(1, (n_blocks, rows)).flatten(0, 1),
        spans(k).flatten(0, 1),
        spans(v).flatten(0, 1),
        mask,
    )
    return o.unflatten(0, (batch, n_blocks)).flatten(1, 2)[:, : q.shape[1]]


def _visible(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """True where a query may look, by positions (..., Q) and (..., K)."""
    age = queries[..., :, None] - keys[..., None, :]
    return (age >= 0) & (age < window) & (keys >= 0)[..., None, :]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
