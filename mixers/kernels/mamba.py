"""mamba-ssm's Triton kernel for Mamba2 (2.3.2) with the signature of `mixers/ops/ssd.py`; imported at the first call."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.compiler.disable
def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    initial_state: Tensor | None = None,
    segment_ids: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """``mamba_chunk_scan_combined`` without its skip, gate and softplus, which are the layer's business.

    Its state is (B,H,V,K), and states between chunks are as wide as C unless told otherwise. Chunks are 256 tokens, as
    in its authors' models, whatever ``chunk_size`` says.
    """
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    with torch.autocast(x.device.type, enabled=False):
        o_BTHV, state_BHVK = mamba_chunk_scan_combined(
            x.to(dtype),
            dt.float(),
            A.float(),
            B.to(dtype),
            C.to(dtype),
            256,
            initial_states=None if initial_state is None else initial_state.float().mT.contiguous(),
            seq_idx=None if segment_ids is None else _from_zero(segment_ids),
            return_final_states=True,
            state_dtype=torch.float32,
        )
    return o_BTHV.to(x.dtype), state_BHVK.float().mT


def _from_zero(segment_ids: Tensor) -> Tensor:
    """int32 ids that begin with 0 in each row: the kernel takes the initial state as that of document 0."""
    borders_BT = torch.zeros_like(segment_ids, dtype=torch.int32)
    borders_BT[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return borders_BT.cumsum(1, dtype=torch.int32)
