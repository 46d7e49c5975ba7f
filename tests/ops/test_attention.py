"""Softmax attention against the masked softmax, in all combinations of window, documents and state."""

import functools
import itertools

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mixers.ops.attention import attention, init_attention_state, recurrent_attention
from tests.ops.oracles import assert_close, documents, softmax_attention

RULES = [attention, recurrent_attention]
WINDOWS = (None, 1, 4, 16, 17, 100)
LENGTHS = (1, 3, 17, 65, 130)
NAMES = "o dq dk dv"


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_inputs(batch=2, steps=17, heads=2, key_dim=4, value_dim=3, seed=0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, steps, heads, key_dim), (batch, steps, heads, key_dim), (batch, steps, heads, value_dim)
    return [2 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def empty_state(inputs: list[Tensor], max_len: int, window: int | None = None) -> dict[str, Tensor]:
    q, _, v = inputs
    return init_attention_state(
        q.shape[0], max_len, q.shape[2], q.shape[3], v.shape[3], window=window, device=q.device, dtype=q.dtype
    )


def value_and_gradients(rule, inputs: list[Tensor], **options) -> list[Tensor]:
    """Output and gradients of q, k and v for a fixed random cotangent."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    result = rule(*leaves, **options)
    o = result[0] if isinstance(result, tuple) else result
    cotangent = torch.randn(o.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(o.dtype)
    return [o, *torch.autograd.grad(o, leaves, cotangent)]


@functools.cache
def oracle_result(steps: int, window: int | None, packed: bool) -> list[Tensor]:
    segments = documents(2, steps) if packed else None
    return value_and_gradients(softmax_attention, make_inputs(steps=steps), window=window, segment_ids=segments)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("rule", RULES)
def test_equals_masked_softmax(rule, window, packed):
    for steps in LENGTHS:
        segments = documents(2, steps) if packed else None
        actual = value_and_gradients(rule, make_inputs(steps=steps), window=window, segment_ids=segments)
        assert_close(actual, oracle_result(steps, window, packed), 1e-12, NAMES)


@pytest.mark.parametrize("packed", [False, True])
def test_windows_beyond_the_largest_block(packed):
    inputs = make_inputs(1, 600, 1, 2, 2)
    segments = documents(1, 600, borders=0.004) if packed else None
    for window in (256, 300):
        expected = value_and_gradients(softmax_attention, inputs, window=window, segment_ids=segments)
        actual = value_and_gradients(attention, inputs, window=window, segment_ids=segments)
        assert_close(actual, expected, 1e-12, NAMES)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 2, 5])
def test_gradients_are_derivatives(window, packed):
    inputs = [x.requires_grad_() for x in make_inputs(1, 20, 1, 2, 2)]
    segments = documents(1, 20) if packed else None
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, window=window, segment_ids=segments)[0], inputs)


SPLITS = {
    "step by step": [1] * 40,
    "prefill, then steps": [25, *[1] * 15],
    "chunks": [1, 7, 13, 2, 17],
    "chunks longer than the window": [3, 30, 7],
}


def in_parts(rule, lengths, *, window, max_len, donate_state=False, segments_while_decoding=True):
    """``rule`` called on consecutive parts with the state carried on."""

    def run(q, k, v, segment_ids=None):
        state, outputs, first = empty_state([q, k, v], max_len, window), [], 0
        for length in lengths:
            part = slice(first, first + length)
            segments = None if segment_ids is None else segment_ids[:, part]
            if segments is not None and first > 0:
                # the state belongs to the document of the first column: where that is a new one, hide the old one
                opens = segment_ids[:, first] != segment_ids[:, first - 1]
                state = {**state, "start": torch.where(opens, first, state["start"])}
                if length == 1 and not segments_while_decoding:
                    segments = None
            o, state = rule(
                q[:, part], k[:, part], v[:, part],
                window=window, segment_ids=segments, initial_state=state, donate_state=donate_state,
            )  # fmt: skip
            outputs.append(o)
            first += length
            assert state["length"].tolist() == [first] * q.shape[0]
        return torch.cat(outputs, dim=1)

    return run


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 100])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("rule", RULES)
def test_split_with_carried_state_equals_whole(rule, split, window, packed):
    options = {"segment_ids": documents(2, 40)} if packed else {}
    expected = oracle_result(40, window, packed)
    for max_len in (40, 64):
        parts = in_parts(rule, SPLITS[split], window=window, max_len=max_len)
        assert_close(value_and_gradients(parts, make_inputs(steps=40), **options), expected, 1e-12, NAMES)
    with torch.no_grad():
        for with_ids in (True, False):
            parts = in_parts(
                rule, SPLITS[split], window=window, max_len=40, donate_state=True, segments_while_decoding=with_ids
            )
            assert_close([parts(*make_inputs(steps=40), **options)], expected[:1], 1e-12, "o")


@pytest.mark.parametrize("rule", RULES)
def test_state_follows_the_last_document(rule):
    q, k, v = make_inputs(3, 6)
    segments = torch.tensor([[2, 2, 2, 2, 2, 2], [2, 2, 2, 5, 5, 5], [1, 2, 3, 4, 5, 6]])
    _, state = rule(q, k, v, segment_ids=segments, initial_state=empty_state([q, k, v], 20))
    assert state["start"].tolist() == [0, 3, 5]
    _, state = rule(q, k, v, segment_ids=segments, initial_state=state)
    assert state["start"].tolist() == [0, 9, 11]
    assert state["length"].tolist() == [12, 12, 12]
    _, state = rule(q[:, :1], k[:, :1], v[:, :1], initial_state=state)
    assert (state["start"].tolist(), state["length"].tolist()) == ([0, 9, 11], [13, 13, 13])


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("rule", RULES)
def test_inputs_and_passed_state_are_unchanged(rule, window):
    inputs = make_inputs(steps=9)
    state = rule(*inputs, window=window, initial_state=empty_state(inputs, 40, window))[1]
    before = {name: x.clone() for name, x in state.items()}
    copies = [x.clone() for x in inputs]
    segments = documents(2, 9)
    for steps in (1, 9):
        for segment_ids in (None, segments[:, :steps]):
            new = rule(*(x[:, :steps] for x in inputs), window=window, segment_ids=segment_ids, initial_state=state)[1]
            assert all(torch.equal(state[name], before[name]) for name in before)
            assert not {x.data_ptr() for x in new.values()} & {x.data_ptr() for x in state.values()}
    assert all(torch.equal(x, copy) for x, copy in zip(inputs, copies, strict=True))
    assert torch.equal(segments, documents(2, 9))


class LargestResult(TorchDispatchMode):
    """The largest tensor that any operation produced, views of the inputs aside."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                self.numel = max(self.numel, x.numel())
        return result


@pytest.mark.parametrize("packed", [False, True])
def test_window_never_makes_a_full_mask(packed):
    steps, window = 2048, 32
    inputs = [x.float().requires_grad_() for x in make_inputs(1, steps, 1, 4, 4)]
    segments = documents(1, steps, borders=0.01) if packed else None
    with LargestResult() as largest:
        o, _ = attention(*inputs, window=window, segment_ids=segments)
        o.sum().backward()
    assert 0 < largest.numel <= 2 * steps * window


@pytest.mark.parametrize("window", [None, 64])
def test_decoding_with_a_donated_state_copies_no_cache(window):
    inputs = make_inputs(1, 1, 1, 8, 8)
    state = empty_state(inputs, 512, window)
    for _ in range(3):
        with LargestResult() as largest, torch.no_grad():
            _, new = attention(*inputs, window=window, initial_state=state, donate_state=True)
        assert largest.numel < state["k"].numel() / 8
        assert new["k"].data_ptr() == state["k"].data_ptr()
        assert new["v"].data_ptr() == state["v"].data_ptr()
        state = new


@pytest.mark.parametrize("rule", RULES)
def test_more_tokens_than_max_len_is_an_error(rule):
    inputs = make_inputs(steps=6)
    _, state = rule(*inputs, initial_state=empty_state(inputs, 10))
    with pytest.raises(ValueError, match=r"max_len=10 tokens, 12 are needed"):
        rule(*inputs, initial_state=state)
    # a window wider than max_len has a ring of max_len slots, which must not lose keys in reach either
    _, state = rule(*inputs, window=50, initial_state=empty_state(inputs, 10, 50))
    with pytest.raises(ValueError, match="max_len=10"):
        rule(*inputs, window=50, initial_state=state)


@pytest.mark.parametrize("rule", RULES)
def test_impossible_arguments_are_errors(rule):
    q, k, v = make_inputs(steps=6)
    with pytest.raises(ValueError, match="window=0"):
        rule(q, k, v, window=0)
    with pytest.raises(ValueError, match="need q, k"):
        rule(q, k[:, :5], v)
    with pytest.raises(ValueError, match="segment_ids"):
        rule(q, k, v, segment_ids=documents(2, 5))
    with pytest.raises(ValueError, match="another window"):
        rule(q, k, v, window=4, initial_state=empty_state([q, k, v], 10))
    with pytest.raises(ValueError, match="the state holds"):
        rule(q, k, v, initial_state=empty_state([q[:1], k[:1], v[:1]], 10))
    with pytest.raises(ValueError, match="at least 1"):
        empty_state([q, k, v], 0)


def test_state_shapes():
    state = init_attention_state(2, 10, 3, 4, 5, window=None, device="cpu", dtype=torch.bfloat16)
    ring = init_attention_state(2, 10, 3, 4, 5, window=6, device="cpu", dtype=torch.bfloat16)
    assert (state["k"].shape, state["v"].shape) == ((2, 10, 3, 4), (2, 10, 3, 5))
    assert (ring["k"].shape, ring["v"].shape) == ((2, 6, 3, 4), (2, 6, 3, 5))
    assert init_attention_state(2, 10, 3, 4, 5, window=60)["k"].shape == (2, 10, 3, 4)
    assert state["k"].dtype == torch.bfloat16
    assert {state[name].dtype for name in ("length", "start")} == {torch.int64}


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("packed", [False, True])
def test_low_precision(window, packed):
    inputs = make_inputs(2, 50, 2, 16, 16)
    options = {"window": window, "segment_ids": documents(2, 50) if packed else None}
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        rounded = [x.to(dtype) for x in inputs]
        expected = value_and_gradients(softmax_attention, [x.double() for x in rounded], **options)
        for rule in RULES:
            actual = value_and_gradients(rule, rounded, **options)
            assert all(x.dtype == dtype for x in actual)
            assert_close(actual, expected, tolerance, NAMES)


def test_large_scores_and_repeated_tokens_stay_finite():
    inputs = [x[:, :1].expand(-1, 2048, -1, -1).float() for x in make_inputs(1, 1)]
    for size, window in itertools.product((1.0, 100.0), (None, 64)):
        actual = value_and_gradients(attention, [size * x for x in inputs], window=window)
        assert all(x.isfinite().all() for x in actual)
        assert_close(actual[:1], [size * inputs[2]], 1e-5, "o")


def test_the_past_does_not_see_the_future():
    inputs = make_inputs(steps=70)
    for window in (None, 9):
        o, _ = attention(*inputs, window=window)
        changed, _ = attention(*(torch.cat((x[:, :40], x[:, 40:] + 1), dim=1) for x in inputs), window=window)
        assert torch.equal(o[:, :40], changed[:, :40])
        assert not torch.allclose(o[:, 40:], changed[:, 40:])


def test_compiles_in_one_piece():
    inputs = [x.requires_grad_() for x in make_inputs(1, 40, 1)]
    segments = documents(1, 40)

    def layer(q, k, v):
        full, _ = attention(q, k, v)
        return full + attention(q, k, v, window=6)[0] + attention(q, k, v, window=6, segment_ids=segments)[0]

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_close(value_and_gradients(compiled, inputs), value_and_gradients(layer, inputs), 1e-12, NAMES)
