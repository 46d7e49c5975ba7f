"""Building blocks against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from mixers.parts import RMSNorm, ShortConv
from tests.contract.cases import close


@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 4, 16)])
def test_rms_norm_equals_torchs(shape):
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(shape[-1], eps=1e-5).double()
    with torch.no_grad():
        norm.weight.normal_(generator=generator)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    upstream = torch.randn(shape, generator=generator, dtype=torch.float64)
    want = F.rms_norm(x, shape[-1:], norm.weight, 1e-5)
    close(norm(x), want, 1e-14)
    got, wanted = (torch.autograd.grad(y, (x, norm.weight), upstream) for y in (norm(x), want))
    for g, w in zip(got, wanted, strict=True):
        close(g, w, 1e-13)
    assert torch.autograd.gradcheck(norm, (x,))
    strided = torch.stack((x, 2 * x), dim=-2)[..., 0, :]
    assert not strided.is_contiguous()
    (gradient,) = torch.autograd.grad(norm(strided), x, upstream)
    close(gradient, wanted[0], 1e-13)


def test_rms_norm_of_zeros_and_of_small_numbers_is_finite():
    norm = RMSNorm(4, eps=1e-5)
    for size in (0.0, 1e-30, 1e15):
        x = torch.full((2, 4), size).requires_grad_()
        (gradient,) = torch.autograd.grad(norm(x).sum(), x)
        assert norm(x).isfinite().all() and gradient.isfinite().all()


@pytest.mark.parametrize("bias", [False, True])
def test_short_convolution_is_a_causal_depthwise_one(bias):
    conv = ShortConv(6, 4, bias=bias, activation=False)
    conv.init_parameters(torch.Generator().manual_seed(0))
    x = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(1))
    want = torch.zeros(2, 9, 6)
    for t in range(9):
        for j in range(min(4, t + 1)):
            want[:, t] += conv.taps_JD[j].detach() * x[:, t - j]
        if bias:
            want[:, t] += conv.bias_D.detach()
    close(conv(x)[0], want, 1e-6)
    close(conv(x, None, torch.zeros(2, 9, dtype=torch.int64))[0], want, 1e-6)
