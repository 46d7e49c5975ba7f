"""What the chunked recurrences share: chunk layout, decays inside a chunk, the triangular inverse.

Axes: B batch, T time, H heads, C chunk, N chunks, K key width, V value width, and P = N * B * H, the batch of matrices
that ``torch.bmm`` works on. Chunks come first in memory, so that chunk n of every sequence and head is one contiguous
slice: the loop over chunks needs no copies and everything else is one large batched product.
"""

from typing import NamedTuple

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype of gates, states and chunk arithmetic: float64 if any input is float64, else float32."""
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in tensors) else torch.float32


def check_shapes(name: str, reference: Tensor, expected: dict[str, tuple[Tensor | None, tuple[int, ...]]]) -> None:
    """Raise ValueError for the first tensor (None: left out) whose shape is not what ``reference`` asks for."""
    for other, (tensor, shape) in expected.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{other} must be {tuple(shape)} for {name} {tuple(reference.shape)}, got {tuple(tensor.shape)}"
            )


def chunk_lengths(seq_len: int, chunk_size: int) -> tuple[int, int]:
    """(number of chunks, tokens per chunk): as few chunks as ``chunk_size`` allows, made equally long.

    65 tokens in chunks of at most 64 become 2 x 33, not 2 x 64, and 5 tokens one chunk of 5: little work is padding.
    """
    if seq_len < 1 or chunk_size < 1:
        raise ValueError(f"need at least one token and chunk_size >= 1, got T={seq_len}, chunk_size={chunk_size}")
    n_chunks = -(-seq_len // chunk_size)
    return n_chunks, -(-seq_len // n_chunks)


def to_chunks(x_BTHX: Tensor, out_NBHCX: Tensor) -> Tensor:
    """Copy (B,T,H,X) or (B,T,H) into chunk layout (N,B,H,C,X) or (N,B,H,C), converting the dtype on the way.

    Tokens past T become zeros, which every rule here takes as neutral: k = v = beta = 0 writes nothing, g = 0 decays
    nothing. ``out_NBHCX`` is filled and returned.
    """
    n_chunks, length = out_NBHCX.shape[0], out_NBHCX.shape[3]
    seq_len = x_BTHX.shape[1]
    target_BNCHX = out_NBHCX.transpose(0, 1).transpose(2, 3)
    whole = seq_len // length
    if whole:
        target_BNCHX[:, :whole].copy_(x_BTHX[:, : whole * length].unflatten(1, (whole, length)))
    if whole < n_chunks:
        rest = seq_len - whole * length
        target_BNCHX[:, whole, :rest].copy_(x_BTHX[:, whole * length :])
        target_BNCHX[:, whole, rest:].zero_()
    return out_NBHCX


def from_chunks(x_NBHCX: Tensor, seq_len: int, dtype: torch.dtype) -> Tensor:
    """The inverse of ``to_chunks``: a contiguous (B,T,H,X) or (B,T,H) tensor of ``dtype``, padding dropped."""
    n_chunks, batch, heads, length = x_NBHCX.shape[:4]
    source_BNCHX = x_NBHCX.transpose(0, 1).transpose(2, 3)
    out = x_NBHCX.new_empty((batch, seq_len, heads, *x_NBHCX.shape[4:]), dtype=dtype)
    whole = seq_len // length
    if whole:
        out[:, : whole * length].unflatten(1, (whole, length)).copy_(source_BNCHX[:, :whole])
    if whole < n_chunks:
        rest = seq_len - whole * length
        out[:, whole * length :].copy_(source_BNCHX[:, whole, :rest])
    return out


def by_chunk(x_PXX: Tensor, n_chunks: int) -> tuple[Tensor, ...]:
    """(N * B * H, ...) as N contiguous views (B * H, ...), for the loop over chunks."""
    return x_PXX.unflatten(0, (n_chunks, -1)).unbind(0)


class ChunkDecay(NamedTuple):
    """How much of what was written at one place is left at another; every factor is in [0, 1].

    With b the log decays summed from the start of the chunk up to and including a token, and 0 wherever a document
    border lies between the two places:

    within (P|1,C,C)   exp(b_i - b_j) for j <= i, else 0: from token j to token i
    entry  (P,C,1)     exp(b_i): from the state that enters the chunk to token i
    exit   (P,C,1)     exp(b_C - b_j): from token j to the state that leaves the chunk
    whole  (N,B*H,1,1) exp(b_C): from the state that enters to the state that leaves

    The last three are empty where nothing decays (no gates, no borders): see ``decays``.
    """

    within: Tensor
    entry: Tensor
    exit: Tensor
    whole: Tensor

    @property
    def decays(self) -> bool:
        """False: every factor is one."""
        return self.entry.numel() > 0


def chunk_decay(
    g_BTH: Tensor | None,
    segment_ids_BT: Tensor | None,
    *,
    shape_NBHC: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> ChunkDecay:
    """Decay factors of a scalar log decay ``g_BTH <= 0`` (None: 0) and of document borders, in chunk layout.

    Only differences of cumulative log decays are exponentiated, and they are clamped to at most 0 first: nothing
    overflows however strong the gates are. A document border multiplies by zero after the exponential, so that no
    infinity enters the arithmetic. ``g_BTH`` must be finite.
    """
    n_chunks, batch, heads, length = shape_NBHC
    matrices = n_chunks * batch * heads
    if g_BTH is None and segment_ids_BT is None:
        nothing = torch.empty(0, dtype=dtype, device=device)
        triangle = torch.ones(1, length, length, dtype=dtype, device=device).tril_()
        return ChunkDecay(triangle, nothing, nothing, nothing)
    if g_BTH is None:
        within = torch.ones((*shape_NBHC, length), dtype=dtype, device=device).tril_()
        entry = torch.ones(shape_NBHC, dtype=dtype, device=device)
        exit_, whole = entry, entry[..., -1]
    else:
        g_NBHC = to_chunks(g_BTH, torch.empty(shape_NBHC, dtype=torch.float64, device=device))
        b = g_NBHC @ torch.ones(length, length, dtype=torch.float64, device=device).triu_()
        # b may reach thousands, where float32 resolves only 1e-4: hold it as high + low part. The difference of the
        # high parts is exact or large, so D keeps full relative precision without a C x C table in float64.
        high = b.to(dtype)
        within = high[..., :, None] - high[..., None, :]
        if dtype != torch.float64:
            low = (b - high).to(dtype)
            within.add_(low[..., :, None]).sub_(low[..., None, :])
        within.clamp_(max=0).exp_().tril_()
        entry = b.exp().to(dtype)
        exit_ = (b[..., -1:] - b).clamp_(max=0).exp_().to(dtype)
        whole = entry[..., -1]
    if segment_ids_BT is not None:
        segments = _segments_in_chunks(segment_ids_BT, n_chunks, length)
        # the state that enters belongs to the document of the token before the chunk (chunk 0: of its first token)
        before = torch.cat((segments[:1, ..., :1], segments[:-1, ..., -1:]))
        last = segments[..., -1:]
        within.mul_(segments[..., :, None] == segments[..., None, :])
        entry = entry * (segments == before)
        exit_ = exit_ * (segments == last)
        whole = whole * (before == last)[..., 0]
    return ChunkDecay(
        within.view(matrices, length, length),
        entry.reshape(matrices, length, 1),
        exit_.reshape(matrices, length, 1),
        whole.reshape(n_chunks, batch * heads, 1, 1),
    )


def _segments_in_chunks(segment_ids_BT: Tensor, n_chunks: int, length: int) -> Tensor:
    """(N,B,1,C); padding belongs to the last document, so that the final state is that document's."""
    missing = n_chunks * length - segment_ids_BT.shape[1]
    padded = torch.cat((segment_ids_BT, segment_ids_BT[:, -1:].expand(-1, missing)), dim=1)
    return padded.unflatten(1, (n_chunks, length)).transpose(0, 1)[:, :, None]


def log_decay_gradient(at_PC: Tensor, exits_PC: Tensor, whole_P: Tensor) -> Tensor:
    """dg (P,C) from the shares (decayed product times its cotangent) that each kind of decay factor has.

    Token t decays what passes it: dg_t = sum_{i >= t} at_i + sum_{j < t} exits_j + whole, with ``at`` the entry factors
    of token i and the pairs within the chunk (plus at the later, minus at the earlier token). As triangular products:
    unlike ``cumsum`` they are deterministic on CUDA, and exits are summed rather than cancelled against their total.
    """
    ones = torch.ones(at_PC.shape[-1], at_PC.shape[-1], dtype=at_PC.dtype, device=at_PC.device)
    return torch.addmm(at_PC @ ones.tril(), exits_PC, ones.triu_(1)).add_(whole_P[:, None])


def unit_lower_inverse(a_PCC: Tensor, *, block: int = 32) -> Tensor:
    """(I + tril(A, -1))^{-1} by forward substitution over row blocks; the diagonal and upper triangle are not read.

    Exact: a Neumann or repeated-squaring series would be off by 1e9 on correlated keys. Diagonal blocks are inverted by
    a triangular solve, what lies left of them follows from two products. Blocks of 32 because LAPACK handles the batch
    matrix by matrix, and forks threads for each one that is larger: slow where other programs share the cores.
    """
    length = a_PCC.shape[-1]
    if length <= block:
        return _solve_for_inverse(a_PCC)
    inverse_PCC = torch.empty_like(a_PCC)
    for start in range(0, length, block):
        rows = slice(start, start + block)
        diagonal = _solve_for_inverse(a_PCC[:, rows, rows])
        inverse_PCC[:, rows, rows] = diagonal
        inverse_PCC[:, rows, start + block :].zero_()
        if start:
            product = torch.bmm(a_PCC[:, rows, :start], inverse_PCC[:, :start, :start])
            inverse_PCC[:, rows, :start] = torch.bmm(diagonal, product).neg_()
    return inverse_PCC


def _solve_for_inverse(a_PCC: Tensor) -> Tensor:
    # as X (I + A)^T = I on transposed views, which are LAPACK's column-major order: no copies
    eye = torch.eye(a_PCC.shape[-1], dtype=a_PCC.dtype, device=a_PCC.device).expand_as(a_PCC)
    return torch.linalg.solve_triangular(a_PCC.mT, eye.mT, upper=True, left=False, unitriangular=True).mT
