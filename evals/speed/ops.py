"""Each operation against its fastest peer on a CPU, forward and backward, and its time against the length."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from evals.peers import fla_naive, version
from evals.speed.measure import Curve, Pass, Row, compare, forward_backward, random, seconds

HEADS, WIDTH = 4, 64
LENGTHS = (512, 1024, 2048, 4096, 8192)
Make = Callable[[int], Pass]  # length -> one forward and backward pass


def setting(steps: int) -> str:
    """As printed."""
    return f"B=1 T={steps} H={HEADS} K=V={WIDTH}, float32, forward + backward"


def qkv(steps: int) -> list[Tensor]:
    """Unit queries and keys that resemble text: they share a direction, as neighbouring tokens do."""
    common = 0.5 * random(1, 1, HEADS, WIDTH, seed=9)
    q, k = (F.normalize(F.silu(random(1, steps, HEADS, WIDTH, seed=i) + common), dim=-1) for i in range(2))
    return [q, k, random(1, steps, HEADS, WIDTH, seed=2)]


def gate(steps: int, offset: float, seed: int) -> Tensor:
    """Pre-activations (1,T,H)."""
    return random(1, steps, HEADS, seed=seed) + offset


def log_decay(steps: int) -> Tensor:
    """Half-lives around 14 tokens."""
    return F.logsigmoid(gate(steps, 3.0, 4))


# ---- ours, by length -------------------------------------------------------------------------------------------------


def attention(steps: int, window: int | None = None) -> Pass:
    from mixers.ops.attention import attention

    return forward_backward(lambda q, k, v: attention(q, k, v, window=window)[0], qkv(steps))


def linear(steps: int) -> Pass:
    from mixers.ops.linear import chunk_linear_attention

    return forward_backward(lambda q, k, v, g: chunk_linear_attention(q, k, v, g)[0], [*qkv(steps), log_decay(steps)])


def vector_linear(steps: int) -> Pass:
    from mixers.ops.linear import chunk_linear_attention

    g = F.logsigmoid(random(1, steps, HEADS, WIDTH, seed=4)) / 16
    return forward_backward(lambda q, k, v, g: chunk_linear_attention(q, k, v, g)[0], [*qkv(steps), g])


def delta(steps: int) -> Pass:
    from mixers.ops.delta import chunk_delta_rule

    beta = gate(steps, 0.0, 3).sigmoid()
    return forward_backward(lambda q, k, v, b: chunk_delta_rule(q, k, v, b)[0], [*qkv(steps), beta])


def gated_delta(steps: int) -> Pass:
    from mixers.ops.delta import chunk_delta_rule

    inputs = [*qkv(steps), gate(steps, 0.0, 3).sigmoid(), log_decay(steps)]
    return forward_backward(lambda *x: chunk_delta_rule(*x)[0], inputs)


def mlstm(steps: int) -> Pass:
    from mixers.ops.mlstm import chunk_mlstm

    q, k, v = (random(1, steps, HEADS, WIDTH, seed=i) for i in range(3))
    return forward_backward(lambda *x: chunk_mlstm(*x)[0], [q, k, v, gate(steps, 0.0, 3), gate(steps, 3.0, 4)])


def mesa_inputs(steps: int, offset: float) -> list[Tensor]:
    """q, k, v, beta, g after the gamma correction, lambda = 1."""
    beta = gate(steps, 0.0, 3).sigmoid()
    g = F.logsigmoid(gate(steps, offset, 4)) + torch.log1p(-0.0025 * beta.square())
    return [*qkv(steps), beta, g, torch.ones(HEADS, WIDTH)]


def mesa(steps: int, offset: float = 3.0, **options: Any) -> Pass:
    from mixers.ops.mesa import chunk_mesa

    return forward_backward(lambda *x: chunk_mesa(*x, **options)[0], mesa_inputs(steps, offset))


def pcg(steps: int, offset: float = 3.0) -> Pass:
    """At a relative residual of 1e-5."""
    return mesa(steps, offset, solver="pcg", tol=1e-5)


def toeplitz(steps: int) -> Pass:
    from mixers.ops.long_conv import causal_conv

    x, taps = random(1, steps, HEADS, WIDTH), random(HEADS, steps, seed=1) * (2 / steps) ** 0.5
    return forward_backward(lambda x, taps: causal_conv(x, taps), [x, taps])


def hyena(steps: int) -> Pass:
    from mixers.ops.long_conv import causal_conv

    x, taps = random(1, steps, HEADS * WIDTH), random(HEADS * WIDTH, steps, seed=1) * steps**-0.5
    return forward_backward(lambda x, taps: causal_conv(x, taps), [x, taps])


def scan(steps: int) -> Pass:
    from mixers.ops.scan import linear_scan

    return forward_backward(lambda a, u: linear_scan(a, u)[0], scan_inputs(steps))


def scan_inputs(steps: int) -> list[Tensor]:
    return [F.logsigmoid(random(1, steps, HEADS * WIDTH) + 3), random(1, steps, HEADS * WIDTH, seed=1)]


# ---- peers -----------------------------------------------------------------------------------------------------------


def sdpa(steps: int, **options: Any) -> Pass:
    def act(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    return forward_backward(act, qkv(steps))


def rfft(steps: int, heads: bool) -> Pass:
    """The plain form under autograd, at a power of two."""
    n = 2 * steps

    def act(x: Tensor, taps: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(taps, n).T
        spectrum = spectrum[None, :, :, None] if heads else spectrum[None]
        return torch.fft.irfft(torch.fft.rfft(x, n, dim=1) * spectrum, n, dim=1)[:, :steps]

    if heads:
        inputs = [random(1, steps, HEADS, WIDTH), random(HEADS, steps, seed=1) * (2 / steps) ** 0.5]
    else:
        inputs = [random(1, steps, HEADS * WIDTH), random(HEADS * WIDTH, steps, seed=1) * steps**-0.5]
    return forward_backward(act, inputs)


def rfft_time_last(steps: int) -> Pass:
    """As above with time brought to the end for the transform: the faster of the two."""
    n = 2 * steps

    def act(x: Tensor, taps: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x.permute(0, 2, 3, 1).contiguous(), n) * torch.fft.rfft(taps, n)[:, None]
        # the next layer reads tokens one after another, so the result is brought back to that order
        return torch.fft.irfft(spectrum, n)[..., :steps].permute(0, 3, 1, 2).contiguous()

    return forward_backward(act, [random(1, steps, HEADS, WIDTH), random(HEADS, steps, seed=1) * (2 / steps) ** 0.5])


def step_scan(steps: int) -> Pass:
    from mixers.ops.scan import recurrent_scan

    return forward_backward(lambda a, u: recurrent_scan(a, u)[0], scan_inputs(steps))


def mamba2_scan(steps: int, chunk: int = 64) -> Pass:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    q, k, v = qkv(steps)

    def act(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        # the same recurrence: decay exp(dt A) with A = -1; its input is dt x, so x is divided by dt once
        out = mamba2_chunk_scan(v / -g[..., None], -g, -torch.ones(HEADS), k, q, chunk)
        return out[0] if isinstance(out, tuple) else out

    return forward_backward(act, [q, k, v, log_decay(steps)])


def head_first(act: Callable[..., Any]) -> Callable[..., Tensor]:
    """(B,H,T,.) code called with (B,T,H,.)."""

    def run(*x: Tensor) -> Tensor:
        out = act(*(y.transpose(1, 2) for y in x))
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return run


def mlstm_native(name: str, steps: int) -> Pass:
    from mlstm_kernels.torch import get_mlstm_kernel

    kernel = get_mlstm_kernel(f"chunkwise--{name}")
    q, k, v = (random(1, steps, HEADS, WIDTH, seed=i) for i in range(3))
    return forward_backward(head_first(kernel), [q, k, v, gate(steps, 0.0, 3), gate(steps, 3.0, 4)])


# ---- the tables ------------------------------------------------------------------------------------------------------


Comparison = tuple[str, str, float, Make, Make, int]


def comparisons() -> Iterator[Comparison]:
    """(name, peer, asked ratio, ours, theirs, length); the peers that are not installed are left out."""
    gap = torch.arange(2048)[:, None] - torch.arange(2048)
    window = (gap >= 0) & (gap < 256)
    yield "attention", "torch SDPA, causal", 0.9, attention, partial(sdpa, is_causal=True), 2048
    yield (
        "sliding-window attention, W=256",
        "torch SDPA with a mask",
        2.0,
        partial(attention, window=256),
        partial(sdpa, attn_mask=window),
        2048,
    )
    if found := version("transformers"):
        for chunk in (64, 256):
            name = f"transformers {found} mamba2_chunk_scan, chunk {chunk}"
            yield "mamba2: linear attention with decay", name, 1.2, linear, partial(mamba2_scan, chunk=chunk), 2048
    if found := version("fla-core"):
        yield from fla_comparisons(found)
    if found := version("mlstm_kernels"):
        for name in ("native_autograd", "native_custbw"):
            yield (
                "xlstm: mLSTM",
                f"mlstm_kernels {found} {name}",
                1.5,
                mlstm,
                partial(mlstm_native, name),
                2048,
            )
    yield "toeplitz", "rfft at a power of two", 1.1, toeplitz, partial(rfft, heads=True), 2048
    yield "toeplitz", "rfft at a power of two, time last", 1.1, toeplitz, rfft_time_last, 2048
    yield "hyena: a filter for each channel", "rfft at a power of two", 1.0, hyena, partial(rfft, heads=False), 2048
    yield "hawk: scan", "loop over steps", 5.0, scan, step_scan, 2048


def fla_comparisons(found: str) -> Iterator[Comparison]:
    """Against the plain-torch code of flash-linear-attention."""
    delta_code, gated_code, mesa_code = fla_naive("delta_rule"), fla_naive("gated_delta_rule"), fla_naive("mesa_net")

    def delta_peer(steps: int) -> Pass:
        inputs = [*qkv(steps), gate(steps, 0.0, 3).sigmoid()]
        return forward_backward(head_first(delta_code.delta_rule_chunkwise), inputs)

    def gated_peer(steps: int) -> Pass:
        inputs = [*qkv(steps), gate(steps, 0.0, 3).sigmoid(), log_decay(steps)]
        rule = gated_code.naive_chunk_gated_delta_rule
        return forward_backward(lambda q, k, v, beta, g: rule(q, k, v, g, beta)[0], inputs)

    def mesa_peer(steps: int, offset: float) -> Pass:
        def act(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, lam: Tensor) -> Tensor:
            return mesa_code.naive_mesa_net_CG(q, k, v, g, lam, beta, 64, max_CG_iteration=30)[0]

        return forward_backward(act, mesa_inputs(steps, offset))

    for steps in (2048, 8192):
        yield "deltanet", f"fla {found} delta_rule_chunkwise", 2.0, delta, delta_peer, steps
        yield "gated_deltanet", f"fla {found} naive chunk", 2.5, gated_delta, gated_peer, steps
    for offset, memory in ((3.0, "half-life 14"), (6.0, "half-life 280"), (9.0, "gamma near 1")):
        peer = f"fla {found} naive CG, 30 steps"

        theirs = partial(mesa_peer, offset=offset)
        yield f"mesa, cg, 30 steps ({memory})", peer, 4.0, partial(mesa, offset=offset), theirs, 2048
        yield f"mesa, cg, residual 1e-5 ({memory})", peer, 8.0, partial(mesa, offset=offset, tol=1e-5), theirs, 2048
        yield f"mesa, pcg, residual 1e-5 ({memory})", peer, 8.0, partial(pcg, offset=offset), theirs, 2048


def rows(repeats: int, only: str) -> Iterator[Row]:
    """Every comparison whose name contains ``only``."""
    for name, peer, goal, ours, theirs, steps in comparisons():
        if only in name:
            count = repeats if steps <= 2048 else max(3, repeats // 2)
            yield compare(name, peer, setting(steps), goal, ours(steps), theirs(steps), count)


CURVES: dict[str, tuple[Make, float]] = {
    "mamba2": (linear, 1.1),
    "gla, vector decay": (vector_linear, 1.1),
    "deltanet": (delta, 1.1),
    "gated_deltanet": (gated_delta, 1.1),
    "xlstm": (mlstm, 1.1),
    "mesa, cg": (mesa, 1.1),
    "mesa, pcg": (pcg, 1.1),
    "swa, W=128": (partial(attention, window=128), 1.1),
    "toeplitz": (toeplitz, 1.3),
    "hyena": (hyena, 1.3),
    "hawk": (scan, 1.3),
    "transformer": (attention, 2.1),
}


def curves(repeats: int, only: str) -> Iterator[Curve]:
    """Median time of forward and backward at each length."""
    for name, (make, goal) in CURVES.items():
        if only not in name:
            continue
        ms = []
        for steps in LENGTHS:
            act = make(steps)
            act()
            ms.append(1e3 * statistics.median(seconds(act) for _ in range(max(3, repeats // 2))))
        yield Curve(name, list(LENGTHS), ms, goal)
