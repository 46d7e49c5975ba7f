"""Which form of an operation runs: the torch form of `mixers/ops`, or a library's kernel on a GPU.

The choice is by the tensor's device and by what the run asked for (`trainer.kernels`), never by what happens to be
importable. A mixer writes ``chosen(chunk_delta_rule, q)(q, k, v, ...)``; on a CPU that is ``chunk_delta_rule`` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

F = TypeVar("F", bound=Callable)

_IN_USE: dict[str, Callable] = {}  # name of a torch form -> kernel, once the preflight has passed


def chosen(torch_form: F, like: Tensor) -> F:
    """The kernel in use for ``torch_form`` if ``like`` is on a GPU, else ``torch_form``. Same signature, same result."""
    return _IN_USE.get(torch_form.__name__, torch_form) if like.is_cuda else torch_form  # type: ignore[return-value]
