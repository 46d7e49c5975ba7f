"""Which form of an operation runs: the torch form of `mixers/ops`, or a library's kernel on a GPU.

The choice is by the tensor's device and by what the run asked for (`trainer.kernels`), never by what happens to be
importable. A mixer writes ``chosen(chunk_delta_rule, q)(q, k, v, ...)``; on a CPU that is ``chunk_delta_rule`` itself.
A kernel is in use only after `preflight.py` has compared it with the torch form on the device at hand.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

F = TypeVar("F", bound=Callable)

MODES = ("torch", "strict", "fallback")
"""torch: no kernels. strict: a kernel that cannot run or is not right stops the run. fallback: the torch form then."""


@dataclass(frozen=True)
class Kernel:
    """A library's kernel behind a function of the torch form's name and signature."""

    module: str  # holds the function; imports the library at the first call
    library: str
    packages: tuple[str, ...]  # whose versions decide what runs
    install: str = "pip install -e '.[cuda]'"

    def load(self, op: str) -> Callable:
        """The function."""
        return getattr(importlib.import_module(self.module), op)


_FLA = Kernel("mixers.kernels.fla", "flash-linear-attention", ("fla-core", "triton"))

KERNELS: dict[str, Kernel] = {
    "chunk_linear_attention": _FLA,
    "chunk_delta_rule": _FLA,
    "chunk_mesa": _FLA,
    "ssd": Kernel("mixers.kernels.mamba", "mamba-ssm", ("mamba-ssm", "triton")),
    "attention": Kernel("mixers.kernels.flex", "FlexAttention", ("triton",)),
}
"""Torch form -> its kernel. What is not here has the torch form alone."""


@dataclass(frozen=True)
class Call:
    """One use of an operation: the torch form and its arguments by name."""

    torch_form: Callable
    arguments: dict[str, Any] = field(hash=False)


_in_use: dict[str, Callable] = {}  # name of a torch form -> kernel, once the preflight has passed
_device_type = "cuda"
_calls: list[Call] | None = None  # while recording


def chosen(torch_form: F, like: Tensor) -> F:
    """The kernel in use for ``torch_form`` if ``like`` is on a GPU, else ``torch_form``. Same signature, same result."""
    if _calls is not None:
        return _recorded(torch_form, _calls)
    if like.device.type != _device_type:
        return torch_form
    return _in_use.get(torch_form.__name__, torch_form)  # type: ignore[return-value]


def use(kernels: Mapping[str, Callable], device_type: str = "cuda") -> None:
    """From now on, ``kernels`` (name of a torch form -> kernel) and no others run on that type of device."""
    global _device_type
    _in_use.clear()
    _in_use.update(kernels)
    _device_type = device_type


@contextlib.contextmanager
def recording() -> Iterator[list[Call]]:
    """The operations that run inside are noted, in their torch form: whatever the device, no kernel runs."""
    global _calls
    calls: list[Call] = []
    _calls = calls
    try:
        yield calls
    finally:
        _calls = None


def _recorded(torch_form: F, calls: list[Call]) -> F:
    @functools.wraps(torch_form)
    def noted(*args: Any, **options: Any) -> Any:
        calls.append(Call(torch_form, dict(inspect.signature(torch_form).bind(*args, **options).arguments)))
        return torch_form(*args, **options)

    return noted  # type: ignore[return-value]
