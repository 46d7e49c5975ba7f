"""Causal softmax attention, full or over a sliding window of keys.

    o_t = sum_j softmax_j(q_t . k_j / sqrt(K)) v_j,   j <= t;   with a window of W keys, self included, also j > t - W

(Attention Is All You Need, arXiv 1706.03762, eq. 1; Longformer, arXiv 2004.05150, section 3.1, for the window.)
Positions are the caller's: rotate q and k before. ``recurrent_attention`` is the specification.

A state to carry on from is a dict, batch first in every tensor:

    k (B,S,H,K), v (B,S,H,V)   keys and values; token i lies in slot i mod S, with S = max_len, or min(W, max_len)
    length (B,) int64, CPU     tokens seen so far, the same in every row
    start (B,) int64, CPU      first token of the row's current document; keys before it are invisible

``length`` and ``start`` steer slicing in Python and stay on the CPU, so that decoding never waits for the device.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mixers.ops._chunks import compute_dtype

# Query blocks of the banded form: at least 16 rows or calls dominate, at most 256 or masked-out products do (CPU).
_MIN_BLOCK, _MAX_BLOCK = 16, 256


def init_attention_state(
    batch_size: int,
    max_len: int,
    n_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    window: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """An empty state for sequences of up to ``max_len`` tokens; with a window a ring of min(window, max_len) slots.

    A ring of ``window`` slots never fills up: it serves sequences of any length.
    """
    size = max_len if window is None else min(window, max_len)
    if size < 1:
        raise ValueError(f"max_len and window must be at least 1, got max_len={max_len}, window={window}")
    return {
        "k": torch.zeros(batch_size, size, n_heads, key_dim, device=device, dtype=dtype),
        "v": torch.zeros(batch_size, size, n_heads, value_dim, device=device, dtype=dtype),
        "length": torch.zeros(batch_size, dtype=torch.int64, device="cpu"),
        "start": torch.zeros(batch_size, dtype=torch.int64, device="cpu"),
    }


def restart_attention(state: dict[str, Tensor], rows_B: Tensor) -> dict[str, Tensor]:
    """The state of rows that begin a new document where ``rows_B`` (bool, CPU) says so: they see no earlier key.

    For callers that go on token by token; within one call ``segment_ids`` say the same.
    """
    return {**state, "start": torch.where(rows_B, state["length"], state["start"])}


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
    """Causal softmax attention; O(T^2) time without a window, O(T W) time and memory with one.

    Args:
        q: queries (B,T,H,K).
        k: keys (B,T,H,K).
        v: values (B,T,H,V).
        window: W, how many keys a query sees, itself included; None for all.
        segment_ids: integers (B,T), non-decreasing; a query sees its own document only.
        initial_state: from ``init_attention_state`` or an earlier call with the same window; its current document is
            that of the first column. None: nothing came before and no state is returned.
        donate_state: the tensors of ``initial_state`` may be overwritten and returned, which makes a decoding step
            O(t), or O(W), without copying the cache. Otherwise the passed state is unchanged.

    Returns:
        (B,T,H,V) in the dtype of q, and the state after the last token (of the last column's document) or None.

    Raises:
        ValueError: shapes that do not fit together, window < 1, or more tokens than the state has room for.
    """
    _check(q, k, v, window, segment_ids, initial_state)
    if initial_state is None:
        return _attend(q, k, v, window, segment_ids), None
    state, steps = initial_state, q.shape[1]
    length = int(state["length"][0])
    if steps == 1 and segment_ids is None:
        state = _append(state, k, v, segment_ids, donate_state)
        return _attend_one(q, state, window), state
    if window is None:
        state = _append(state, k, v, segment_ids, donate_state)
        past = length
        keys, values = (k, v) if length == 0 else (state["k"][:, : length + steps], state["v"][:, : length + steps])
    else:
        past = min(length, window - 1)
        keys = torch.cat((*_latest(state["k"], length, past), k), dim=1)
        values = torch.cat((*_latest(state["v"], length, past), v), dim=1)
        state = _append(state, k, v, segment_ids, donate_state)
    segments = _segments_of_keys(segment_ids, initial_state["start"], length, past, steps, q.device)
    return _attend(q, keys.to(q.dtype), values.to(q.dtype), window, segments), state


def recurrent_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    segment_ids: Tensor | None = None,
    initial_state: dict[str, Tensor] | None = None,
    donate_state: bool = False,
) -> tuple[Tensor, dict[str, Tensor] | None]:
    """``attention`` one token at a time, softmax in float32 or wider: the specification. Same arguments and result."""
    _check(q, k, v, window, segment_ids, initial_state)
    steps, dtype = q.shape[1], compute_dtype(q, k, v)
    past, keys, values, state = 0, k.to(dtype), v.to(dtype), None
    begin_B1 = torch.zeros(q.shape[0], 1, dtype=torch.int64, device=q.device)  # of each row's document, in ``keys``
    if initial_state is not None:
        length = int(initial_state["length"][0])
        past = min(length, initial_state["k"].shape[1])
        keys = torch.cat((*_latest(initial_state["k"], length, past), k), dim=1).to(dtype)
        values = torch.cat((*_latest(initial_state["v"], length, past), v), dim=1).to(dtype)
        begin_B1 = (initial_state["start"].to(q.device)[:, None] - (length - past)).clamp_(min=0)
        state = _append(initial_state, k, v, segment_ids, donate_state)
    index = torch.arange(past + steps, device=q.device)
    outputs = []
    with torch.autocast(q.device.type, enabled=False):
        for t in range(past, past + steps):
            if segment_ids is not None and t > past:
                restarts = segment_ids[:, t - past] != segment_ids[:, t - past - 1]
                begin_B1 = torch.where(restarts[:, None], t, begin_B1)
            first_B1 = begin_B1 if window is None else begin_B1.clamp(min=t - window + 1)
            query_BHK = q[:, t - past].to(dtype) * q.shape[-1] ** -0.5
            scores_BTH = (query_BHK[:, None] * keys[:, : t + 1]).sum(-1)
            hidden_BT1 = (index[: t + 1] < first_B1)[..., None]
            weights_BTH = scores_BTH.masked_fill(hidden_BT1, float("-inf")).softmax(dim=1)
            outputs.append((weights_BTH[..., None] * values[:, : t + 1]).sum(1))
    return torch.stack(outputs, dim=1).to(q.dtype), state


def _check(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, segment_ids: Tensor | None, state: dict[str, Tensor] | None
) -> None:
    if q.ndim != 4 or q.shape[1] < 1 or k.shape != q.shape or v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"need q, k (B,T,H,K) and v (B,T,H,V) with T >= 1, got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if window is not None and window < 1:
        raise ValueError(f"window={window}: must be at least 1, which is the token itself alone")
    if segment_ids is not None and segment_ids.shape != q.shape[:2]:
        raise ValueError(f"segment_ids must be {tuple(q.shape[:2])}, got {tuple(segment_ids.shape)}")
    if state is None:
        return
    (batch, steps, heads, key_dim), size = q.shape, state["k"].shape[1]
    expected = (batch, size, heads, key_dim), (batch, size, heads, v.shape[-1])
    if (state["k"].shape, state["v"].shape) != expected:
        raise ValueError(
            f"the state holds k {tuple(state['k'].shape)}, v {tuple(state['v'].shape)}, but q {tuple(q.shape)} and "
            f"v {tuple(v.shape)} need {expected[0]}, {expected[1]}"
        )
    if window is not None and size > window:
        raise ValueError(f"the state has {size} slots, more than window={window}: it was made for another window")
    needed = int(state["length"][0]) + steps
    if needed > size and size != window:
        raise ValueError(f"the state was made for max_len={size} tokens, {needed} are needed")


def _attend(q: Tensor, k: Tensor, v: Tensor, window: int | None, segments_BT: Tensor | None) -> Tensor:
    """Queries are the last tokens of the sequence that k, v and ``segments_BT`` describe."""
    n_queries, n_keys = q.shape[1], k.shape[1]
    if window is None or window >= n_keys:
        window = n_keys
    elif n_queries > window:
        # at most window - 1 rows of padding: not worth blocks that start in the middle
        past = n_keys - n_queries
        padded = F.pad(q, (0, 0, 0, 0, past, 0)) if past else q
        return _attend_banded(padded, k, v, window, segments_BT)[:, past:]
    if segments_BT is None and n_queries == n_keys <= window:
        return _sdpa(q, k, v, causal=True)
    if segments_BT is None and n_queries == 1 and n_keys <= window:
        return _sdpa(q, k, v)
    return _sdpa(q, k, v, mask=_visible(n_queries, n_keys, window, segments_BT, q.device))


def _attend_banded(q: Tensor, k: Tensor, v: Tensor, window: int, segments_BT: Tensor | None) -> Tensor:
    """O(T W): blocks of queries against the blocks of keys in their reach.

    The first tokens, who have fewer keys than the others, are one ordinary call; the rest is one call with blocks in
    place of batch rows, and the same small mask for each of them (with documents, one per block).
    """
    batch, steps = q.shape[:2]
    block = min(max(window, _MIN_BLOCK), _MAX_BLOCK)
    reach = -(-(window - 1) // block)  # blocks before its own that a query may look into
    head = min(reach * block, steps)
    n_blocks = -(-(steps - head) // block)
    outputs = []
    if head:
        segments = None if segments_BT is None else segments_BT[:, :head]
        outputs.append(_attend_short(q[:, :head], k[:, :head], v[:, :head], window, segments))
    if n_blocks:
        missing = head + n_blocks * block - steps
        if missing:
            q, k, v = (F.pad(x, (0, 0, 0, 0, 0, missing)) for x in (q, k, v))

        def spans(x: Tensor) -> Tensor:
            """(B,T,...) to (B * n_blocks, (reach + 1) * block, ...): each block behind the ones in its reach."""
            starts = range(0, head + 1, block)
            shifted = [x[:, s : s + n_blocks * block].unflatten(1, (n_blocks, block)) for s in starts]
            return torch.cat(shifted, dim=2).flatten(0, 1)

        segments = None
        if segments_BT is not None:
            segments = spans(torch.cat((segments_BT, segments_BT[:, -1:].expand(-1, missing)), dim=1))
        o = _sdpa(
            q[:, head:].unflatten(1, (n_blocks, block)).flatten(0, 1),
            spans(k),
            spans(v),
            mask=_visible(block, head + block, window, segments, q.device),
        )
        outputs.append(o.unflatten(0, (batch, n_blocks)).flatten(1, 2)[:, : steps - head])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _attend_short(q: Tensor, k: Tensor, v: Tensor, window: int, segments_BT: Tensor | None) -> Tensor:
    """As many queries as keys, no more of them than a few windows."""
    steps = q.shape[1]
    if segments_BT is None and steps <= window:
        return _sdpa(q, k, v, causal=True)
    return _sdpa(q, k, v, mask=_visible(steps, steps, window, segments_BT, q.device))


def _attend_one(q: Tensor, state: dict[str, Tensor], window: int | None) -> Tensor:
    """The query of the newest token against the cache, in whatever order the slots are."""
    length, size = int(state["length"][0]), state["k"].shape[1]
    filled = min(length, size)
    hidden = state["start"] - (length - filled)  # how many of the oldest filled slots each row must not see
    mask = None
    if bool((hidden > 0).any()):
        age = (length - 1 - torch.arange(filled)) % size  # slot s holds the newest token with index = s mod size
        mask = (age < (filled - hidden)[:, None])[:, None, None].to(q.device, non_blocking=True)
    return _sdpa(q, state["k"][:, :filled].to(q.dtype), state["v"][:, :filled].to(q.dtype), mask=mask)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).transpose(1, 2)


def _visible(n_queries: int, n_keys: int, window: int, segments_BT: Tensor | None, device: torch.device) -> Tensor:
    """True where a query may look: (queries, keys), with documents (B,1,queries,keys). Every query sees itself."""
    diagonal = n_keys - n_queries
    near = torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril_(diagonal)
    if window < n_keys:
        near.triu_(diagonal - window + 1)
    if segments_BT is None:
        return near
    same = segments_BT[:, -n_queries:, None] == segments_BT[:, None, :]
    return (near & same)[:, None]


def _segments_of_keys(
    segment_ids: Tensor | None, start: Tensor, length: int, past: int, steps: int, device: torch.device
) -> Tensor | None:
    """Document ids (B, past + steps) of ``past`` remembered tokens and the new ones; None where all is one document.

    Remembered tokens of the current document belong to that of the first column; earlier ones to no visible one.
    """
    hidden = start - (length - past)
    if segment_ids is None and not bool((hidden > 0).any()):
        return None
    if segment_ids is None:
        segment_ids = torch.zeros(start.shape[0], steps, dtype=torch.int64, device=device)
    if not past:
        return segment_ids
    first = segment_ids[:, :1]
    current = torch.arange(past, device=device) >= hidden.to(device)[:, None]
    return torch.cat((torch.where(current, first, first - 1), segment_ids), dim=1)


def _latest(cache: Tensor, length: int, count: int) -> tuple[Tensor, ...]:
    """The last ``count`` of ``length`` tokens in a cache, in order, as at most two slices."""
    size = cache.shape[1]
    slot = (length - count) % size
    if slot + count <= size:
        return (cache[:, slot : slot + count],)
    return cache[:, slot:], cache[:, : slot + count - size]


def _append(
    state: dict[str, Tensor], k: Tensor, v: Tensor, segment_ids: Tensor | None, donate_state: bool
) -> dict[str, Tensor]:
    length, steps = state["length"], k.shape[1]
    start = state["start"]
    if segment_ids is not None:
        # tokens of this call before the last document; reading them costs a device sync, paid only with documents
        earlier = (segment_ids != segment_ids[:, -1:]).sum(1).cpu()
        start = torch.where(earlier > 0, length + earlier, start)
    return {
        "k": _write(state["k"], k, int(length[0]), donate_state),
        "v": _write(state["v"], v, int(length[0]), donate_state),
        "length": length + steps,
        "start": start if start is not state["start"] or donate_state else start.clone(),
    }


def _write(cache: Tensor, new: Tensor, first: int, donate_state: bool) -> Tensor:
    """Put tokens ``first``, ``first`` + 1, ... into their slots; of more tokens than slots the last ones stay."""
    size, count = cache.shape[1], min(new.shape[1], cache.shape[1])
    slot = (first + new.shape[1] - count) % size
    new = new[:, -count:].to(cache.dtype)
    cache = cache if donate_state else cache.clone()
    fits = min(count, size - slot)
    cache[:, slot : slot + fits] = new[:, :fits]
    if fits < count:
        cache[:, : count - fits] = new[:, fits:]
    return cache
