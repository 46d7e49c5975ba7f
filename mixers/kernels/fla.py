"""Triton kernels of flash-linear-attention (fla-core 0.6) with the signatures of our torch forms.

Arguments, results and errors are those of the torch form of the same name, except: ``chunk_size`` is the kernel's own
(64), float64 is refused, and what a kernel cannot do raises ValueError. q, k and v are computed in the activations'
dtype (under autocast that of autocast), gates and carried states in float32.

fla is imported at the first call: without a GPU neither it nor Triton needs to be there.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from mixers.kernels.packing import by_document
from mixers.kernels.rescale import with_standard_gradients


def _ops(module: str) -> Any:
    # fla may otherwise hand the call to whichever other backend it finds installed.
    os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
    return importlib.import_module(f"fla.ops.{module}")


@torch.compiler.disable
def chunk_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    segment_ids: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Linear attention: ``chunk_simple_gla`` without or with a decay of the head, ``chunk_gla`` with one per channel."""
    if g is not None and g.ndim == 3 and has_wrong_gated_backward(q):
        g = g[..., None].expand(q.shape)  # the same decay in each channel: another kernel, whose backward is right
    if g is not None and g.ndim == 4:
        kernel = _ops("gla").chunk_gla
    else:
        kernel = _ops("simple_gla").chunk_simple_gla

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None):
        return kernel(q, k, v, g, **_options(scale, initial, cu_seqlens))

    return _run(run, (q, k, v), (g,), initial_state, segment_ids)


@torch.compiler.disable
def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    segment_ids: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """The delta rule: ``chunk_gated_delta_rule`` with a decay, ``chunk_delta_rule`` without.

    The latter has no float32: there ``fused_recurrent_delta_rule`` runs, token by token and without tensor cores, which
    is slower and exact. Rounding the inputs of a float32 run to bfloat16 would be faster, and not what was asked for.
    """
    _at_most(q, 256)

    def ungated(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, _: None, initial: Tensor | None, cu_seqlens: Any):
        rule = _ops("delta_rule")
        kernel = rule.fused_recurrent_delta_rule if q.dtype == torch.float32 else rule.chunk_delta_rule
        return kernel(q, k, v, beta, **_options(scale, initial, cu_seqlens))

    def gated(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, initial: Tensor | None, cu_seqlens: Any):
        if has_wrong_gated_backward(q):
            # Kimi's rule has a decay per channel; equal ones are this rule, and its backward is another kernel.
            return _ops("kda").chunk_kda(
                q, k, v, g[..., None].expand(q.shape), beta, **_options(scale, initial, cu_seqlens)
            )
        return _ops("gated_delta_rule").chunk_gated_delta_rule(q, k, v, g, beta, **_options(scale, initial, cu_seqlens))

    return _run(ungated if g is None else gated, (q, k, v), (beta, g), initial_state, segment_ids)


@torch.compiler.disable
def chunk_mesa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    lam: Tensor,
    *,
    cg_steps: int = 30,
    tol: float | None = None,
    solver: str = "cg",
    initial_state: tuple[Tensor, Tensor] | None = None,
    segment_ids: Tensor | None = None,
    chunk_size: int = 32,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Mesa: ``chunk_mesa_net``, a fixed number of conjugate gradient steps from zero, float16 inside.

    Its guards against division by zero add 1e-5 whatever the size of the numbers, and its backward pass stores float16:
    right for gradients of order one, wrong by a third where a mean-reduced loss makes the right-hand side 1e-3, and
    zero below 1e-5. Hence the standard size; Lambda is shared by all rows, so that a head has one size.
    """
    if solver != "cg" or tol is not None or cg_steps < 1:
        raise ValueError(
            f"solver={solver}, tol={tol}, cg_steps={cg_steps}: flash-linear-attention's Mesa kernel runs a fixed number "
            "of conjugate gradient steps (solver=cg, tol=None, cg_steps >= 1)"
        )
    if q.shape[-1] != v.shape[-1]:
        raise ValueError(f"K={q.shape[-1]}, V={v.shape[-1]}: flash-linear-attention's Mesa kernel needs K = V")
    _at_most(q, 128)
    kv, kk = (None, None) if initial_state is None else (x.float() for x in initial_state)
    mesa = _ops("mesa_net").chunk_mesa_net

    def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, lam: Tensor, *states: Tensor | None):
        def kernel(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, kv: Any, kk: Any, cu_seqlens: Any):
            options = {"output_final_state": True, "max_CG_iteration": cg_steps, "cu_seqlens": cu_seqlens}
            o, kk, kv = mesa(q, k, v, g, beta, lam, kk, kv, **options)
            return o, kv, kk

        return by_document(kernel, (q, k, v, beta, g), states, segment_ids)

    g = torch.zeros_like(beta) if g is None else g
    inputs = (*_activations(q, k, v), beta.float(), g.float(), lam.float(), kv, kk)
    with torch.autocast(q.device.type, enabled=False):
        o, kv, kk = with_standard_gradients(run, inputs, (2, 2, 2, 2, 2, 0, 1, 1), (2, 1, 1))
    return o.to(q.dtype), (kv, kk)


def _run(
    kernel: Any,
    activations: tuple[Tensor, ...],
    gates: tuple[Tensor | None, ...],
    initial_state: Tensor | None,
    segment_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``kernel(*activations, *gates, initial, cu_seqlens=...)`` with dtypes and documents in order."""
    dtype, wide = activations[0].dtype, [None if x is None else x.float() for x in gates]
    initial = None if initial_state is None else initial_state.float()
    tokens = (*_activations(*activations), *wide)
    with torch.autocast(activations[0].device.type, enabled=False):
        o, state = by_document(kernel, tokens, (initial,), segment_ids)
    return o.to(dtype), state


def _options(scale: float, initial: Tensor | None, cu_seqlens: Tensor | None) -> dict[str, Any]:
    """What every kernel here takes by these names; left out, its scale would be 1 / sqrt(K)."""
    return {"scale": scale, "initial_state": initial, "output_final_state": True, "cu_seqlens": cu_seqlens}


def _activations(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All in one dtype: that of autocast where it is on, else the widest of theirs."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
    if dtype == torch.float64:
        raise ValueError("float64: flash-linear-attention has no such kernels; trainer.kernels=torch has")
    return tuple(x.to(dtype) for x in tensors)


def _at_most(q: Tensor, largest: int) -> None:
    if q.shape[-1] > largest:
        raise ValueError(f"K={q.shape[-1]}: this kernel of flash-linear-attention takes keys of at most {largest}")


def has_wrong_gated_backward(like: Tensor) -> bool:
    """Does the compiler here miscompile the backward pass of scalar-gated kernels (fla issue 640)?

    Hopper or newer with Triton 3.4.0 to 3.7.0; fla 0.6 raises there rather than return wrong gradients.
    """
    return like.is_cuda and torch.cuda.get_device_capability(like.device) >= (9, 0) and _triton_miscompiles()


@functools.cache
def _triton_miscompiles() -> bool:
    try:
        version = tuple(int(x) for x in re.findall(r"\d+", metadata.version("triton"))[:3])
    except metadata.PackageNotFoundError:
        return False
    return (3, 4, 0) <= version < (3, 7, 1)
