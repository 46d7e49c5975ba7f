"""flash-linear-attention's own Triton kernels, through our adapters, forward and backward: on a CPU, interpreted.

Triton must not be in this environment (libraries that find it try its kernels, and fail without a GPU): it lies in
`.venv/interpreter`, where `make test` puts it, and the program that uses it is another process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRITON = Path(sys.prefix) / "interpreter"

FLOAT32, FLOAT16, MESA = 2e-6, 2e-3, 3e-3
TOLERANCES = {
    "linear": FLOAT32,
    "scalar decay": FLOAT32,
    "channel decay": FLOAT32,
    "delta float32": FLOAT32,
    "delta float16": FLOAT16,
    "gated delta": FLOAT32,
    "mesa": MESA,  # float16 factors in both of its solves, whatever it is given
    "mesa small": MESA,  # upstream gradients of 1e-6
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (TRITON / "triton").exists(), reason=f"no Triton in {TRITON}: make {TRITON.parent.name}/.interpreter"
    ),
]


@pytest.fixture(scope="module")
def errors():
    """Case -> result or gradient -> relative RMS error."""
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{TRITON}",
        "TRITON_INTERPRET": "1",
        "FLA_DISABLE_BACKEND_DISPATCH": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.fla_on_cpu"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("packed", ["", " packed"])
@pytest.mark.parametrize("case", TOLERANCES)
def test_adapter_equals_torch_form(errors, case, packed):
    """Output, final states, gradients of all inputs and initial states; ``packed``: with document borders."""
    wrong = {name: f"{e:.1e}" for name, e in errors[case + packed].items() if not e <= TOLERANCES[case]}
    assert not wrong, f"above {TOLERANCES[case]:.0e}: {wrong}"


@pytest.mark.parametrize("case", ["scalar decay", "gated delta"])
def test_detour_around_miscompiled_backward_equals_torch_form(errors, case):
    assert max(errors[f"{case}, detour"].values()) <= FLOAT32


def test_mesa_needs_the_standard_size(errors):
    """When this fails, the library has mended its guards and `rescale.py` can go."""
    assert errors["mesa small, library alone"]["dq"] > 0.5
