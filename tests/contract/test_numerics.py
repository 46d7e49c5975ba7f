"""No NaN under stress, and float32 where bf16 would lose what matters."""

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from tests.contract.cases import NAMES, close, inputs, mixer, start

pytestmark = pytest.mark.parametrize("name", NAMES)


def gradients(layer, x, scale=1.0):
    """Output, then gradients of the input and all parameters, for a fixed upstream gradient times ``scale``."""
    x = x.clone().requires_grad_()
    y = layer(x)[0]
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(y.dtype)
    return y.detach(), torch.autograd.grad(y, [x, *layer.parameters()], upstream * scale)


def repeated(x, steps):
    return x[:, :1].expand(-1, steps, -1)


STRESS = {
    "one repeated token": lambda x: repeated(x, 2048),
    "zero input, so zero keys": lambda x: torch.zeros_like(x),
    "zeros between tokens": lambda x: x * (torch.arange(x.shape[1]) % 7 == 0)[None, :, None],
    "gates far out": lambda x: 1e3 * x,
    "tiny input": lambda x: 1e-12 * x,
}


@pytest.mark.parametrize("stress", STRESS)
def test_finite_under_stress(name, stress):
    layer = mixer(name, torch.float32)
    y, grads = gradients(layer, STRESS[stress](inputs(2, 200, torch.float32)))
    assert y.isfinite().all()
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("bias", [-50.0, 50.0])
def test_finite_with_gates_shut_and_open(name, bias):
    layer = mixer(name, torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in layer.named_parameters():
            if "bias" in parameter_name:
                parameter.fill_(bias)
    for x in (inputs(2, 200, torch.float32), repeated(inputs(2, 1, torch.float32), 200)):
        y, grads = gradients(layer, x)
        assert y.isfinite().all()
        assert all(g.isfinite().all() for g in grads)


def test_small_upstream_gradients_keep_their_digits(name):
    """A guard with an absolute epsilon in a backward pass shows here."""
    layer, x = mixer(name, torch.float32), inputs(2, 130, torch.float32)
    for large, small in zip(gradients(layer, x)[1], gradients(layer, x, 1e-6)[1], strict=True):
        close(1e6 * small, large, 1e-3)


class NoGateInBf16(TorchFunctionMode):
    """Fails when a gate's function sees bf16: a decay of 0.999 rounds to 1 there."""

    GATES = frozenset({"sigmoid", "logsigmoid", "softplus", "exp", "expm1", "log", "cumsum"})

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "").replace("_", "") in self.GATES:
            assert all(not isinstance(a, torch.Tensor) or a.dtype != torch.bfloat16 for a in args), function.__name__
        return function(*args, **(kwargs or {}))


def test_the_watch_for_gates_in_bf16_sees_them(name):
    with NoGateInBf16(), pytest.raises(AssertionError):
        F.logsigmoid(torch.zeros(1, dtype=torch.bfloat16))


@pytest.mark.parametrize("steps", [1, 70])
def test_bf16_autocast_keeps_gates_and_matrix_states_wide(name, steps):
    layer, x = mixer(name, torch.float32), inputs(2, steps, torch.float32)
    before = start(layer, 2, 100, torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16), NoGateInBf16():
        y, after = layer(x.bfloat16(), before)
    assert y.dtype == torch.bfloat16
    for key, value in after.items():
        assert value.dtype == before[key].dtype, key
        if value.ndim == 4 and key not in ("k", "v"):  # (B, H, K, V); caches are in the activations' dtype
            assert value.dtype == torch.float32, key
    close(y.float(), layer(x)[0], 3e-2)
