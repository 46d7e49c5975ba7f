"""Before training: every kernel that a model would use against its torch form, on the device at hand.

A kernel may be missing, refuse a width, be miscompiled, or be right only for gradients of a certain size. All of that is
found here, in the few shapes that count, rather than in a loss curve.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mixers.kernels import KERNELS, Call, Kernel, use

log = logging.getLogger(__name__)

STEPS = 130  # three chunks of 64, and not a multiple of any
BATCH, HEADS = 2, 2
UPSTREAM = (1.0, 1e-5)
"""Sizes of the upstream gradient: the textbook's, and what a mean over some ten thousand tokens leaves."""

AXES = {
    "q": "BTHK",
    "k": "BTHK",
    "v": "BTHV",
    "beta": "BTH",
    "g": "BTHK",  # or BTH: as many as it has
    "lam": "HK",
    "x": "BTHV",
    "dt": "BTH",
    "A": "H",
    "B": "BTGK",
    "C": "BTGK",
    "segment_ids": "BT",
}
GATES = ("beta", "g", "lam", "dt", "A")

# Relative RMS errors of (results, gradients of activations, gradients of gates). bfloat16 inputs with float32 gates: what
# flash-linear-attention asks of itself, and a little more for the delta rule's triangular solve (baselines 4.3).
# Attention also rounds its weights to bfloat16, as every fused form does. Mesa's kernel solves twice with float16 factors
# and keeps one state in bfloat16: with float32 values alone that is 1.5e-3 in its gradients (tests/kernels), and its own
# tests allow 7e-3 for results and 1.5e-2 for dlambda; a factor of two for other widths and gates.
HALF = {
    "chunk_linear_attention": (5e-3, 8e-3, 2e-2),
    "ssd": (5e-3, 8e-3, 2e-2),
    "chunk_delta_rule": (8e-3, 1e-2, 2e-2),
    "chunk_mesa": (1e-2, 3e-2, 3e-2),
    "attention": (1e-2, 2e-2, 2e-2),
}
# A run that asks for float32 means it. TF32 products (1e-3) do not pass, nor does Mesa's float16 solver.
FULL = (1e-4, 1e-4, 1e-3)


class KernelRefused(RuntimeError):
    """A kernel that cannot be used, in strict mode; one sentence."""


@dataclass(frozen=True)
class Case:
    """What decides whether a kernel is right, beside its device: widths, dtypes, options; not batch, length or heads."""

    torch_form: Callable
    tensors: tuple[tuple[str, str, torch.dtype], ...]  # name, axes, dtype
    widths: tuple[tuple[str, int], ...]  # K, V and groups per head
    options: tuple[tuple[str, Any], ...]

    def describe(self) -> str:
        """For messages and run.json."""
        dtypes = dict.fromkeys(
            str(dtype).removeprefix("torch.") for _, _, dtype in self.tensors if dtype.is_floating_point
        )
        documents = [name for name, _, _ in self.tensors if name == "segment_ids"]
        options = (f"{name}={value}" for name, value in (*self.widths, *self.options))
        return ", ".join((*options, *documents, "/".join(dtypes)))


def case_of(call: Call) -> Case:
    """The case of a recorded call. Raises KeyError for an argument whose axes are not known."""
    tensors, options = [], []
    sizes: dict[str, int] = {}
    for name, value in call.arguments.items():
        if isinstance(value, Tensor):
            axes = AXES[name][: value.ndim]
            tensors.append((name, axes, value.dtype))
            sizes.update(zip(axes, value.shape, strict=True))
        elif value is not None:
            options.append((name, value))
    widths = [(axis, sizes[axis]) for axis in "KV" if axis in sizes]
    if "G" in sizes:
        widths.append(("G", HEADS if sizes["G"] == sizes["H"] else 1))
    return Case(call.torch_form, tuple(tensors), tuple(widths), tuple(options))


def preflight(
    calls: Sequence[Call],
    mode: str,
    device: torch.device,
    *,
    autocast: torch.dtype | None,
    kernels: Mapping[str, Kernel] = KERNELS,
) -> dict[str, Any]:
    """Check the kernels for these calls and put those that pass to use on this type of device.

    Args:
        calls: what a model does, from ``recording()`` around one forward pass in the run's precision.
        mode: ``strict`` or ``fallback``.
        device: where the run will be.
        autocast: dtype of autocast in the run; None for float32.
        kernels: the known kernels; operations without one keep their torch form.

    Returns:
        For run.json: versions, and for each operation its library, whether it is used, and the errors measured.

    Raises:
        KernelRefused: in strict mode, for the first kernel that cannot run or is not right.
    """
    cases: dict[str, list[Case]] = {}
    for call in calls:
        op = call.torch_form.__name__
        if op in kernels and (case := case_of(call)) not in cases.setdefault(op, []):
            cases[op].append(case)
    passed: dict[str, Callable] = {}
    report: dict[str, Any] = {}
    for op, those in cases.items():
        kernel = kernels[op]
        reason, checks = _check(op, kernel, those, device, autocast)
        report[op] = {"library": kernel.library, "used": reason is None, "checks": checks}
        if reason is None:
            passed[op] = kernel.load(op)
            log.info("%s: kernel of %s (%s)", op, kernel.library, "; ".join(case.describe() for case in those))
            continue
        report[op]["reason"] = reason
        if mode == "strict":
            raise KernelRefused(
                f"{op}: {reason}. trainer.kernels=torch runs the torch form of every operation, trainer.kernels=fallback "
                "that of this one"
            )
        log.warning("%s: %s; the torch form runs", op, reason)
    use(passed, device.type)
    packages = dict.fromkeys(("torch", *(name for op in report for name in kernels[op].packages)))
    return {"mode": mode, "versions": {name: _version(name) for name in packages}, "ops": report}


def _check(
    op: str, kernel: Kernel, cases: Sequence[Case], device: torch.device, autocast: torch.dtype | None
) -> tuple[str | None, list[dict[str, Any]]]:
    """Why the kernel cannot be used (None: it can), and the errors of each case that ran."""
    checks: list[dict[str, Any]] = []
    for case in cases:
        try:
            errors = measure(kernel.load(op), case, device, autocast)
        except ImportError as error:
            return f"{kernel.library} cannot be imported ({error}); {kernel.install}", checks
        except Exception as error:  # noqa: BLE001 - compilers and drivers raise anything; all of it means no
            words = " ".join(str(error).split())[:300]
            return (
                f"the kernel of {kernel.library} fails with {case.describe()} ({type(error).__name__}: {words})",
                checks,
            )
        checks.append({"case": case.describe(), "errors": {name: float(f"{e:.2g}") for name, e in errors.items()}})
        limits = {name: tolerance(op, name, autocast) for name in errors}
        wrong = [f"{name} {e:.2g} ({limits[name]:g})" for name, e in errors.items() if not e <= limits[name]]
        if wrong:
            return (
                f"the kernel of {kernel.library} disagrees with the torch form at {case.describe()}: relative RMS error "
                f"(tolerance) {', '.join(wrong)}"
            ), checks
    return None, checks


def tolerance(op: str, name: str, autocast: torch.dtype | None) -> float:
    """Largest relative RMS error of a result (``o``, ``state``) or a gradient (``d`` + argument, then the size)."""
    values, gradients, gates = FULL if autocast is None else HALF.get(op, HALF["chunk_linear_attention"])
    if not name.startswith("d"):
        return values
    return gates if name.split()[0][1:] in GATES else gradients


def measure(kernel: Callable, case: Case, device: torch.device, autocast: torch.dtype | None) -> dict[str, float]:
    """Relative RMS errors of the kernel's results and gradients against the torch form in float32 on the same inputs."""
    inputs = {name: x.to(device) for name, x in draw(case).items()}
    options = dict(case.options)
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        actual_leaves, actual = _run(kernel, inputs, options)
    wide = {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}
    expected_leaves, expected = _run(case.torch_form, wide, options)
    names = ["o", *(f"state {i}" if i else "state" for i in range(len(expected) - 1))]
    errors = {name: _error(a, e) for name, a, e in zip(names, actual, expected, strict=True)}
    generator = torch.Generator().manual_seed(1)
    for size in UPSTREAM:
        upstream = size * torch.randn(expected[0].shape, generator=generator)
        do = upstream.to(device=device, dtype=actual[0].dtype)
        gradients = [
            torch.autograd.grad(out, list(leaves.values()), do.to(out.dtype), retain_graph=True, allow_unused=True)
            for out, leaves in ((actual[0], actual_leaves), (expected[0], expected_leaves))
        ]
        for name, a, e in zip(expected_leaves, *gradients, strict=True):
            label = f"d{name}" if size == 1 else f"d{name} at {size:g}"
            errors[label] = float("inf") if a is None or e is None else _error(a.double() / size, e.double() / size)
    return errors


def draw(case: Case) -> dict[str, Tensor]:
    """Inputs of a case on the CPU: unit keys, gates that forget slowly as well as fast, a few documents."""
    generator = torch.Generator().manual_seed(0)
    # A window must not hide behind a sequence that is shorter.
    steps = STEPS + (dict(case.options).get("window") or 0)
    sizes = {"B": BATCH, "T": steps, "H": HEADS, **dict(case.widths)}
    return {
        name: _draw(name, [sizes[axis] for axis in axes], generator).to(dtype) for name, axes, dtype in case.tensors
    }


def _draw(name: str, shape: list[int], generator: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=generator)
    if name in ("q", "k", "B", "C"):
        return F.normalize(x, dim=-1)
    if name == "g":
        return F.logsigmoid(2 * x + 2)
    if name == "segment_ids":
        return (x > 2).cumsum(1)  # one token in forty begins a document
    return {"beta": x.sigmoid(), "dt": F.softplus(x - 2), "A": -x.exp(), "lam": 0.25 + F.softplus(x)}.get(name, x)


def _run(rule: Callable, inputs: dict[str, Tensor], options: dict[str, Any]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Leaves that want a gradient, and the output followed by what tensors the final state has."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items() if x.is_floating_point()}
    o, state = rule(**{**inputs, **leaves}, **options)
    states = state if isinstance(state, tuple) else (state,)
    return leaves, [o, *(x for x in states if x is not None)]


def _error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||; the absolute error where nothing is expected."""
    actual, expected = actual.detach().double(), expected.detach().double()
    size = expected.norm().item()
    return (actual - expected).norm().item() / (size if size > 0 else 1.0)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
