"""Long convolutions: every form == the sum written out, in values and gradients; documents, costs."""

import itertools
import math

import pytest
import torch
import torch.utils.checkpoint
from scipy.linalg import matmul_toeplitz

from mixers.ops import long_conv
from mixers.ops._documents import apart, positions_in_documents
from mixers.ops.long_conv import causal_conv, conv_flops_per_token, fft_length, recurrent_conv
from tests.ops.oracles import assert_close, documents

FORMS = ("dense", "blocked", "fft")
NAMES = "y dx dfilter"
LAYOUTS = {"heads": ((3, 4), (3,)), "channels": ((5,), (5,)), "neighbours": ((2, 4), (2, 3))}


@pytest.fixture(autouse=True)
def small_blocks_and_one_thread(monkeypatch):
    monkeypatch.setattr(long_conv, "_BLOCK", 16)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_inputs(steps, layout="heads", taps=None, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    channels, filters = LAYOUTS[layout]
    x = torch.randn(batch, steps, *channels, generator=generator, dtype=torch.float64)
    return [x, torch.randn(*filters, taps or steps, generator=generator, dtype=torch.float64)]


def oracle(x, filter, segment_ids=None):
    """Loops over rows, outputs and lags, in words of the definition."""
    batch, steps = x.shape[:2]
    outputs = []
    for b, t in itertools.product(range(batch), range(steps)):
        total = torch.zeros_like(x[b, t])
        for k in range(t + 1):
            if segment_ids is not None and segment_ids[b, t - k] != segment_ids[b, t]:
                break
            past = x[b, t - k]
            if filter.ndim == 3:
                for j in range(filter.shape[1]):  # neighbour j is filter.shape[1] - 1 - j channels below
                    below = filter.shape[1] - 1 - j
                    moved = torch.cat((torch.zeros_like(past[:, :below]), past[:, : past.shape[1] - below]), dim=1)
                    total = total + filter[:, j, k, None] * moved
            else:
                total = total + (filter[:, k, None] if past.ndim == 2 else filter[:, k]) * past
        outputs.append(total)
    return torch.stack(outputs).view(x.shape)


def value_and_gradients(function, inputs, dtype=torch.float64, **options):
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    y = function(*leaves, **options)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(y.dtype)
    return [y, *torch.autograd.grad(y, leaves, weights)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_equals_oracle(layout, packed):
    segments = documents(2, 12) if packed else None
    inputs = make_inputs(12, layout, taps=15)
    expected = value_and_gradients(oracle, inputs, segment_ids=segments)
    assert_close(value_and_gradients(recurrent_conv, inputs, segment_ids=segments), expected, 1e-13, NAMES)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("steps", [1, 3, 16, 33, 100])
def test_every_form_equals_recurrent(layout, steps):
    for packed, extra in itertools.product((False, True), (0, 7)):
        segments = documents(2, steps, borders=0.08) if packed else None
        inputs = make_inputs(steps, layout, taps=steps + extra)
        expected = value_and_gradients(recurrent_conv, inputs, segment_ids=segments)
        for backend in (*FORMS, "auto"):
            actual = value_and_gradients(causal_conv, inputs, segment_ids=segments, backend=backend)
            assert_close(actual, expected, 1e-12, NAMES)


@pytest.mark.parametrize("backend", FORMS)
def test_second_opinion(backend):
    x, filter = make_inputs(50)
    y = causal_conv(x, filter, backend=backend)
    for b, h in itertools.product(range(2), range(3)):
        expected = matmul_toeplitz((filter[h].numpy(), torch.zeros(50).numpy()), x[b, :, h].numpy())
        assert_close([y[b, :, h]], [torch.as_tensor(expected)], 1e-12, "y")


@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_derivatives(backend, layout):
    inputs = [x.requires_grad_() for x in make_inputs(5, layout, taps=6)]
    segments = torch.tensor([[4, 4, 4, 7, 7], [0, 1, 2, 2, 2]])
    for ids in (None, segments):
        assert torch.autograd.gradcheck(lambda x, f, i=ids: causal_conv(x, f, segment_ids=i, backend=backend), inputs)


@pytest.mark.parametrize("backend", FORMS)
def test_documents_never_touch_each_other_not_even_in_the_last_digit(backend):
    x, filter = make_inputs(60)
    segments = documents(2, 60, borders=0.1)
    y = causal_conv(x, filter, segment_ids=segments, backend=backend)
    last = segments == segments[:, -1:]
    poisoned = torch.where(last[..., None, None], torch.nan, x).requires_grad_()
    after = causal_conv(poisoned, filter, segment_ids=segments, backend=backend)
    assert torch.equal(after[~last], y[~last]) and after[last].isnan().all()
    leaf = x.clone().requires_grad_()
    out = causal_conv(leaf, filter, segment_ids=segments, backend=backend)
    (dx,) = torch.autograd.grad(out[~last].square().sum(), leaf)
    assert (dx[last] == 0).all() and (dx[~last] != 0).all()


def test_few_calls_for_many_documents():
    widths = []

    def function(rows):
        widths.append(rows.shape[1])
        return rows

    x = make_inputs(300)[0]
    segments = documents(2, 300, borders=0.2)
    assert torch.equal(apart(function, x, segments), x)
    assert len(widths) <= 8 and len({w.bit_length() for w in widths}) == len(widths)


def test_positions_restart_at_borders():
    segments = torch.tensor([[2, 2, 2, 5, 5], [0, 1, 1, 1, 3]])
    expected = torch.tensor([[7, 8, 9, 0, 1], [7, 0, 1, 2, 0]])
    assert torch.equal(positions_in_documents(segments, torch.tensor([7])), expected)


@pytest.mark.parametrize("backend", FORMS)
def test_the_past_does_not_see_the_future(backend):
    x, filter = make_inputs(50)
    changed = x.clone()
    changed[:, 30:] *= -1000
    before, after = (causal_conv(z, filter, backend=backend) for z in (x, changed))
    if backend == "fft":  # up to rounding
        assert_close([after[:, :30]], [before[:, :30]], 1e-11, "y")
    else:
        assert torch.equal(after[:, :30], before[:, :30])
    assert not torch.allclose(after[:, 30], before[:, 30])


@pytest.mark.parametrize("backend", FORMS)
def test_float32_and_bfloat16(backend):
    inputs = make_inputs(300)
    expected = value_and_gradients(recurrent_conv, inputs)
    assert_close(value_and_gradients(causal_conv, inputs, torch.float32, backend=backend), expected, 1e-6, NAMES)
    x, filter = inputs[0].bfloat16(), inputs[1].float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = causal_conv(x, filter, backend=backend)
    assert y.dtype == torch.bfloat16
    assert_close([y], [recurrent_conv(x.double(), filter.double())], 3e-3, "y")
    assert torch.equal(y, causal_conv(x.float(), filter, backend=backend).bfloat16())


class Transforms:
    """Lengths of all real transforms while it is entered, and their work, by n log2 n for each."""

    def __enter__(self):
        self.lengths, self.work = [], 0.0
        self.patch = pytest.MonkeyPatch()
        for name in ("rfft", "irfft"):
            self.patch.setattr(torch.fft, name, self._counted(getattr(torch.fft, name)))
        return self

    def __exit__(self, *error):
        self.patch.undo()

    def _counted(self, transform):
        def counted(x, n=None):
            length = x.shape[-1] if n is None else n
            self.lengths.append(length)
            self.work += math.prod(x.shape[:-1]) * length * math.log2(length)
            return transform(x, n=n)

        return counted


@pytest.mark.parametrize("steps", [1, 100, 128, 129])
def test_transforms_are_powers_of_two_that_hold_both_factors(steps):
    inputs = make_inputs(steps)
    with Transforms() as seen:
        value_and_gradients(causal_conv, inputs, backend="fft")
    assert set(seen.lengths) == {fft_length(2 * steps - 1)}
    p = fft_length(2 * steps - 1)
    assert p & (p - 1) == 0 and 2 * steps - 1 <= p < 4 * steps


@pytest.mark.parametrize("trained", [(True, False), (False, True), (True, True)])
def test_backward_saves_inputs_alone_and_transforms_what_is_asked_for(trained):
    """2 rows of 12 channels in x and dy, 3 filters; the filter's gradient is one transform back per filter."""
    x, filter = (z.requires_grad_(grad) for z, grad in zip(make_inputs(200), trained, strict=True))
    y = causal_conv(x, filter, backend="fft")
    assert [t.data_ptr() for t in y.grad_fn.saved_tensors] == [x.data_ptr(), filter.data_ptr()]
    with Transforms() as seen:
        y.sum().backward()
    transforms = 24 + trained[0] * (3 + 24) + trained[1] * (24 + 3)
    assert seen.work == transforms * 512 * math.log2(512)


def test_backward_under_checkpointing_and_twice():
    inputs = [x.requires_grad_() for x in make_inputs(20)]

    def rule(x, filter):
        return causal_conv(x, filter, backend="fft")

    y = rule(*inputs)
    first = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    again = torch.autograd.grad(y.sum(), inputs)
    anew = torch.utils.checkpoint.checkpoint(rule, *inputs, use_reentrant=False)
    anew = torch.autograd.grad(anew.sum(), inputs)
    for gradients in (again, anew):
        assert all(torch.equal(a, e) for a, e in zip(gradients, first, strict=True))
    (dx,) = torch.autograd.grad(rule(*inputs).square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_errors_say_what_is_wrong():
    x, filter = make_inputs(10)
    for message, call in {
        "9 taps.*T=10": lambda: causal_conv(x, filter[:, :9]),
        "filter must be": lambda: causal_conv(x, filter[:2]),
        "x must be": lambda: causal_conv(x[:, :0], filter),
        "segment_ids must be": lambda: causal_conv(x, filter, segment_ids=torch.zeros(2, 9)),
        "backend=fast": lambda: causal_conv(x, filter, backend="fast"),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_costs_by_form():
    assert conv_flops_per_token(100, 2, 8) == 2 * 8 * 101
    p = 4096
    transforms = 2 * (16 * (2 * p * 12 - 4 * p + 6)) + 2 * (2 * p * 12 - 4 * p + 6)
    assert conv_flops_per_token(2048, 2, 8) == (transforms + 16 * 3 * p) / 2048


def test_compiles_in_one_piece():
    inputs = [x.requires_grad_() for x in make_inputs(200)]
    compiled = torch.compile(causal_conv, backend="aot_eager", fullgraph=True)
    expected = value_and_gradients(causal_conv, inputs)
    assert_close(value_and_gradients(compiled, inputs), expected, 1e-12, NAMES)
