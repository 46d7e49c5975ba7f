"""flash-linear-attention's Triton kernels on CPU tensors, by Triton's interpreter: tiny shapes, seconds.

``TRITON_INTERPRET=1`` alone is not enough for them, for two reasons:

- their autotuner times each configuration on a GPU; here all are called equally fast, and the first one runs;
- the interpreter's ``range`` yields plain integers, on which kernels call methods that only Triton's numbers have.

bfloat16 products are garbage in the interpreter: use float32, or float16 where a kernel refuses that. Mesa's kernel keeps
one of its states in bfloat16 whatever it is given; here that is float32 (a switch of the kernel's own).
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
from collections.abc import Iterator

import numpy as np
import triton.language as tl
from triton.runtime import autotuner, interpreter

assert os.environ.get("TRITON_INTERPRET") == "1", "read when triton is imported, which torch does early: set it outside"


def _equally_fast(*_: object, **__: object) -> list[float]:
    return [1.0] * 3


def _range_of_tensors(*bounds: object) -> Iterator[tl.tensor]:
    for i in builtins.range(*(int(x) for x in bounds)):  # type: ignore[call-overload]
        yield tl.tensor(interpreter.TensorHandle(np.array([i], dtype=np.int32), tl.int32), tl.int32)


def prepare(*modules: str) -> None:
    """Import ``fla.ops.<module>`` and make what they have pulled in run here."""
    autotuner.Autotuner._bench = _equally_fast
    autotuner.Autotuner.do_bench = None
    for module in modules:
        importlib.import_module(f"fla.ops.{module}")
    for name, loaded in list(sys.modules.items()):
        if name.startswith("fla.ops.") and not name.endswith(".naive"):
            loaded.__dict__["range"] = _range_of_tensors
    mesa = sys.modules.get("fla.ops.mesa_net.chunk")
    if mesa is not None:
        states = mesa.chunk_mesa_fwd_h
        mesa.__dict__["chunk_mesa_fwd_h"] = lambda **options: states(**{**options, "states_in_fp32": True})
