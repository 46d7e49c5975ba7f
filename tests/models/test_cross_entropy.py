"""The fused cross-entropy against autograd through the whole logits."""

import pytest
import torch
import torch.nn.functional as F

from models.cross_entropy import cross_entropy_sum, soft_capped


def case(dtype=torch.float64, rows=23, ignored=(3, 7, 22)):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    w = torch.randn(31, 8, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, 31, (rows,), generator=generator)
    targets[list(ignored)] = -100
    return x, w, targets


@pytest.mark.parametrize("cap", [None, 2.0, 30.0])
@pytest.mark.parametrize("rows", [None, 1, 5, 23, 100])
@pytest.mark.parametrize("ignored", [(), (3, 7, 22)], ids=str)
def test_value_and_gradients(cap, rows, ignored):
    x, w, targets = case(ignored=ignored)
    got = cross_entropy_sum(x, w, targets, cap=cap, rows=rows)
    want = F.cross_entropy(soft_capped(x @ w.T, cap), targets, reduction="sum")
    torch.testing.assert_close(got, want)
    upstream = torch.tensor(0.37, dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(got, (x, w), upstream), torch.autograd.grad(want, (x, w), upstream))


def test_gradcheck():
    x, w, targets = case()
    assert torch.autograd.gradcheck(lambda x, w: cross_entropy_sum(x, w, targets, cap=3.0, rows=4), (x, w))


def test_large_logits_stay_finite_and_exact():
    x, w, targets = case()
    got = cross_entropy_sum(1e4 * x, w, targets, rows=4)
    torch.testing.assert_close(got, F.cross_entropy(1e4 * x @ w.T, targets, reduction="sum"))
    assert all(g.isfinite().all() for g in torch.autograd.grad(got, (x, w)))


def test_bf16_features_are_summed_in_float32():
    x, w, targets = case(torch.bfloat16)
    w32 = w.detach().float().requires_grad_()
    got = cross_entropy_sum(x, w32, targets, cap=30.0, rows=4)
    want = F.cross_entropy(soft_capped(x.float() @ w32.bfloat16().float().T, 30.0), targets, reduction="sum")
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-2, atol=0)
    dx, dw = torch.autograd.grad(got, (x, w32))
    wanted = torch.autograd.grad(want, (x, w32))
    assert dx.dtype == torch.bfloat16 and dw.dtype == torch.float32
    for g, ww in zip((dx.float(), dw), (wanted[0].float(), wanted[1]), strict=True):
        assert (g - ww).norm() < 0.02 * ww.norm()


def test_frozen_inputs_cost_no_gradient():
    x, w, targets = case()
    with torch.no_grad():
        assert not cross_entropy_sum(x, w, targets).requires_grad
