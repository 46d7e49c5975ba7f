"""What adapters do without their libraries: packing, standard gradients, Mamba's layout, FlexAttention's masks."""

import sys
import types

import pytest
import torch

from mixers.kernels import flex, mamba
from mixers.kernels.packing import by_document, packing
from mixers.kernels.rescale import LARGEST, with_standard_gradients
from mixers.ops.attention import attention
from mixers.ops.linear import recurrent_linear_attention
from mixers.ops.ssd import recurrent_ssd
from tests.ops.oracles import assert_close, documents


def test_packing_numbers_the_documents_of_each_row():
    result = packing(torch.tensor([[3, 3, 5, 5], [0, 0, 0, 0], [1, 2, 2, 9]]))
    assert result.cu_seqlens.tolist() == [0, 2, 4, 8, 9, 11, 12]
    assert (result.first_B.tolist(), result.last_B.tolist()) == ([0, 2, 3], [1, 2, 5])


def test_packed_rows_equal_rows_with_borders():
    generator = torch.Generator().manual_seed(0)
    q, v = (torch.randn(3, 30, 2, d, generator=generator, dtype=torch.float64).requires_grad_() for d in (4, 5))
    state = torch.randn(3, 2, 4, 5, generator=generator, dtype=torch.float64).requires_grad_()
    segments = documents(3, 30)

    def variable_length(q, v, states, cu_seqlens):
        assert q.shape[0] == 1 and states.shape[0] == len(cu_seqlens) - 1
        parts = [
            recurrent_linear_attention(q[:, a:b], q[:, a:b], v[:, a:b], initial_state=states[n : n + 1])
            for n, (a, b) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True))
        ]
        return torch.cat([o for o, _ in parts], dim=1), torch.cat([s for _, s in parts])

    actual = by_document(variable_length, (q, v), (state,), segments)
    expected = recurrent_linear_attention(q, q, v, initial_state=state, segment_ids=segments)
    for results in (actual, expected):
        assert results[0].shape == (3, 30, 2, 5)
    gradients = [torch.autograd.grad([o.sum(), s.square().sum()], (q, v, state)) for o, s in (actual, expected)]
    assert_close([*actual, *gradients[0]], [*expected, *gradients[1]], 1e-12, "o state dq dv dstate")


class _Guarded(torch.autograd.Function):
    """y = w x per head, with a backward pass that is right for gradients of a middling size only."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w[:, None]

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        sizes = dy.abs().amax((0, 1, 3))
        assert ((sizes == 0) | ((sizes > LARGEST / 2) & (sizes < LARGEST * 2))).all()
        return dy * w[:, None], (dy * x).sum((0, 1, 3))


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1.0, 1e8])
def test_kernel_sees_standard_gradients_and_nobody_else_does(size):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 3, 4, generator=generator, dtype=torch.float64).requires_grad_()
    w = torch.rand(3, generator=generator, dtype=torch.float64).requires_grad_()
    dy = size * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    dy[:, :, 1] *= 1e-4  # heads differ
    dy[:, :, 2] = 0

    def rule(x, nothing, w):
        assert nothing is None
        return (_Guarded.apply(x, w),)

    (y,) = with_standard_gradients(rule, (x, None, w), (2, 0, 0), (2,))
    expected = torch.autograd.grad(x * w[:, None], (x, w), dy)
    for _ in range(2):  # a second backward pass finds its own size
        actual = torch.autograd.grad(y, (x, w), dy, retain_graph=True)
        assert_close(list(actual), list(expected), 1e-15, "dx dw")


def test_gradients_that_are_not_finite_stay_so():
    x = torch.ones(1, 2, 1, 2, requires_grad=True)
    (y,) = with_standard_gradients(lambda x: (x * 2,), (x,), (2,), (2,))
    (dx,) = torch.autograd.grad(y, x, torch.tensor([[[[1.0, float("inf")]], [[1.0, 1.0]]]]))
    assert not dx.isfinite().all()


def fake_scan(x, dt, A, B, C, chunk_size, *, initial_states, seq_idx, return_final_states, state_dtype):
    """mamba-ssm's call as documented: states (B,H,V,K), the initial one belongs to document 0."""
    assert seq_idx is None or (seq_idx.dtype == torch.int32 and (seq_idx[:, 0] == 0).all())
    initial = None if initial_states is None else initial_states.mT
    y, state = recurrent_ssd(x, dt, A, B, C, initial_state=initial, segment_ids=seq_idx)
    return y, state.mT


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("carried", [False, True])
def test_mamba_adapter_speaks_the_library_s_layout(monkeypatch, packed, carried):
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "mamba_ssm.ops.triton.ssd_combined"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["mamba_ssm.ops.triton.ssd_combined"].mamba_chunk_scan_combined = fake_scan
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    x, dt, B, C = randn(2, 20, 4, 5), randn(2, 20, 4).exp(), randn(2, 20, 2, 3), randn(2, 20, 2, 3)
    A, state = -randn(4).exp(), randn(2, 4, 3, 5)
    options = {"segment_ids": documents(2, 20) if packed else None, "initial_state": state if carried else None}
    actual = mamba.ssd(x, dt, A, B, C, **options)
    assert_close(list(actual), list(recurrent_ssd(x, dt, A, B, C, **options)), 1e-5, "o state")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 1, 7, 64])
def test_flex_masks_show_what_the_torch_form_shows(window, packed):
    """Forward only: FlexAttention has no backward pass on a CPU."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 40, 2, 8, generator=generator) for _ in range(3))
    for seed in (0, 1):  # another tensor of ids has another mask
        segments = documents(2, 40, seed) if packed else None
        o, state = flex.attention(q, k, v, window=window, segment_ids=segments)
        expected, _ = attention(q, k, v, window=window, segment_ids=segments)
        assert state is None
        assert_close([o], [expected], 1e-6, "o")


def test_flex_leaves_decoding_to_the_torch_form():
    from mixers.ops.attention import init_attention_state

    q = torch.randn(1, 5, 2, 8)
    state = init_attention_state(1, 9, 2, 8, 8, window=3)
    o, after = flex.attention(q, q, q, window=3, initial_state=state)
    assert after is not None and int(after["length"][0]) == 5
    assert_close([o], [attention(q, q, q, window=3)[0]], 1e-6, "o")
