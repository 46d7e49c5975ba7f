"""Program of `test_fla_interpreter.py`: adapter against torch form in float64, relative errors as JSON on the last line.

Runs in an environment of its own (Triton on the path, TRITON_INTERPRET=1): see there.
"""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import Tensor

from mixers.kernels import fla
from mixers.ops.delta import chunk_delta_rule
from mixers.ops.linear import chunk_linear_attention
from mixers.ops.mesa import chunk_mesa
from tests.kernels import interpreter
from tests.ops.oracles import documents, relative_error

BATCH, STEPS, HEADS, WIDTH = 2, 70, 2, 16  # two chunks, the second one not whole
SEGMENTS = documents(BATCH, STEPS, borders=0.03)


def inputs() -> dict[str, Tensor]:
    """By the names of the torch forms' arguments; ``channels`` is a decay per channel."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tokens = (BATCH, STEPS, HEADS)
    factor = 0.3 * randn(BATCH, HEADS, WIDTH, WIDTH)
    return {
        "q": F.normalize(randn(*tokens, WIDTH), dim=-1),
        "k": F.normalize(randn(*tokens, WIDTH), dim=-1),
        "v": randn(*tokens, WIDTH),
        "beta": randn(*tokens).sigmoid(),
        "g": F.logsigmoid(randn(*tokens) + 2),
        "channels": F.logsigmoid(randn(*tokens, WIDTH) + 2),
        "lam": 0.25 + F.softplus(randn(HEADS, WIDTH)),
        "state": randn(BATCH, HEADS, WIDTH, WIDTH),
        "covariance": factor @ factor.mT,
    }


def run(rule, arguments, states, dtypes, upstream=1.0, **options) -> dict[str, Tensor]:
    """Results, and gradients of everything divided by the size of the upstream gradient."""
    leaves = {n: x.to(dtypes.get(n, dtypes[""])).requires_grad_() for n, x in {**arguments, **states}.items()}
    initial = tuple(leaves[n] for n in states)
    o, final = rule(
        *(leaves[n] for n in arguments), initial_state=initial if len(initial) > 1 else initial[0], **options
    )
    results = [o, *(final if isinstance(final, tuple) else (final,))]
    generator = torch.Generator().manual_seed(1)
    cotangents = [upstream * torch.randn(x.shape, generator=generator).to(x.dtype) for x in results]
    gradients = torch.autograd.grad(results, list(leaves.values()), cotangents)
    if "covariance" in leaves:  # symmetric: only the symmetric part of its gradient means anything
        gradients = (*gradients[:-1], (gradients[-1] + gradients[-1].mT) / 2)
    named = {f"d{n}": x.double() / upstream for n, x in zip(leaves, gradients, strict=True)}
    return {**dict(zip(("o", "final", "final covariance"), results, strict=False)), **named}


def errors(adapter, form, names: str, *, states=("state",), half=False, packed=False, upstream=1.0, **options):
    """Of each result and gradient."""
    data = inputs()
    if half:
        data |= {n: data[n].half().float() for n in "qkv"}
    arguments, initial = {n: data[n] for n in names.split()}, {n: data[n] for n in states}
    options["segment_ids"] = SEGMENTS if packed else None
    narrow = dict.fromkeys("qkv", torch.float16) if half else {}
    actual = run(adapter, arguments, initial, {"": torch.float32, **narrow}, upstream, **options)
    expected = run(form, arguments, initial, {"": torch.float64}, **options)
    return {name: relative_error(actual[name], x) for name, x in expected.items()}


def main() -> None:
    torch.set_num_threads(1)
    interpreter.prepare("simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda", "mesa_net")
    out: dict[str, dict[str, float]] = {}
    linear = (fla.chunk_linear_attention, chunk_linear_attention)
    delta = (fla.chunk_delta_rule, chunk_delta_rule)
    mesa = {"names": "q k v beta g lam", "states": ("state", "covariance")}
    for packed in (False, True):
        kind = {"packed": packed, "scale": 0.3}
        suffix = " packed" if packed else ""
        out["linear" + suffix] = errors(*linear, "q k v", **kind)
        out["scalar decay" + suffix] = errors(*linear, "q k v g", **kind)
        out["channel decay" + suffix] = errors(*linear, "q k v channels", **kind)
        out["delta float32" + suffix] = errors(*delta, "q k v beta", **kind)
        out["delta float16" + suffix] = errors(*delta, "q k v beta", half=True, **kind)
        out["gated delta" + suffix] = errors(*delta, "q k v beta g", **kind)
        out["mesa" + suffix] = errors(fla.chunk_mesa, chunk_mesa, packed=packed, **mesa)
        out["mesa small" + suffix] = errors(fla.chunk_mesa, chunk_mesa, packed=packed, upstream=1e-6, **mesa)
    fla.has_wrong_gated_backward = lambda like: True
    out["scalar decay, detour"] = errors(*linear, "q k v g", scale=0.3)
    out["gated delta, detour"] = errors(*delta, "q k v beta g", scale=0.3)
    fla.with_standard_gradients = lambda kernel, inputs, *_: kernel(*inputs)
    out["mesa small, library alone"] = errors(fla.chunk_mesa, chunk_mesa, upstream=1e-6, **mesa)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
