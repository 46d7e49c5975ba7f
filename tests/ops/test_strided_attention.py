"""Every n-th token of plain attention."""

import pytest
import torch

from mixers.ops.attention import recurrent_attention
from mixers.ops.strided_attention import strided_attention


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("step", [2, 3, 4])
@pytest.mark.parametrize("window", [None, 1, 5, 17, 64])
@pytest.mark.parametrize("steps", [1, 3, 20, 37, 130])
def test_equals_the_rows_of_attention(steps, window, step, documents):
    generator = torch.Generator().manual_seed(steps)
    q, k, v = (torch.randn(2, steps, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    segments = (torch.rand(2, steps, generator=generator) < 0.1).long().cumsum(1) if documents else None
    whole, _ = recurrent_attention(q, k, v, window=window, segment_ids=segments)
    for first in range(min(step, steps)):
        got = strided_attention(q[:, first::step], k, v, first=first, step=step, window=window, segment_ids=segments)
        torch.testing.assert_close(got, whole[:, first::step], rtol=1e-10, atol=1e-12)


def test_gradients_are_finite_where_blocks_are_padded():
    q, k, v = (torch.randn(1, n, 1, 4, dtype=torch.float64, requires_grad=True) for n in (7, 20, 20))
    segments = (torch.arange(20) >= 11).long()[None]
    o = strided_attention(q, k, v, first=0, step=3, window=4, segment_ids=segments)
    assert all(g.isfinite().all() for g in torch.autograd.grad(o.sum(), (q, k, v)))


def test_what_does_not_fit_is_refused():
    q = torch.zeros(1, 4, 1, 2)
    with pytest.raises(ValueError, match="4 queries from 1 on in steps of 2 do not fit 7 keys"):
        strided_attention(q, torch.zeros(1, 7, 1, 2), torch.zeros(1, 7, 1, 2), first=1, step=2)
    with pytest.raises(ValueError, match="window=0"):
        strided_attention(q, torch.zeros(1, 8, 1, 2), torch.zeros(1, 8, 1, 2), first=1, step=2, window=0)
