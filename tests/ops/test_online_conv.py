"""Carried-on convolution == the whole one over any schedule of calls, at a cost that grows as it should."""

import math

import pytest
import torch

from mixers.ops.long_conv import causal_conv, recurrent_conv
from mixers.ops.online_conv import init_conv_state, online_conv
from tests.ops.oracles import assert_close
from tests.ops.test_long_conv import LAYOUTS, NAMES, Transforms, make_inputs, value_and_gradients

SCHEDULES = {
    "steps": (1,) * 300,
    "prefill, then steps": (37,) + (1,) * 263,
    "mixed": (1, 1, 5) + (1,) * 130 + (40,) + (1,) * 70 + (2, 3) + (1,) * 48,
    "pieces": (64, 100, 136),
}


def online(x, filter, schedule, max_len, donate=False, segment_ids=None):
    state = init_conv_state(x.shape[0], max_len, tuple(x.shape[2:]), dtype=x.dtype)
    outputs, at = [], 0
    for steps in schedule:
        ids = None if segment_ids is None else segment_ids[:, at : at + steps]
        y, state = online_conv(x[:, at : at + steps], filter, state, segment_ids=ids, donate_state=donate)
        outputs.append(y)
        at += steps
    assert at == x.shape[1]
    return torch.cat(outputs, dim=1), state


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_online_equals_whole(schedule, layout):
    for donate, max_len, taps in ((True, 300, 300), (True, 417, 90), (False, 310, 1)):
        x, filter = make_inputs(300, layout, taps)
        padded = torch.nn.functional.pad(filter, (0, 300 - taps))
        expected = causal_conv(x, padded, backend="dense")
        y, state = online(x, filter, SCHEDULES[schedule], max_len, donate)
        assert_close([y], [expected], 1e-12, "y")
        assert_close([state["buffer"][:, :300]], [x], 1e-15, "history")
        assert int(state["length"][0]) == 300


def test_online_gradients_reach_over_pushes_and_prefills():
    inputs = make_inputs(200, taps=210)
    expected = value_and_gradients(recurrent_conv, inputs)
    schedule = (10,) + (1,) * 70 + (20,) + (1,) * 100
    actual = value_and_gradients(lambda x, f: online(x, f, schedule, 205)[0], inputs)
    assert_close(actual, expected, 1e-12, NAMES)


def test_online_documents_in_rows_of_their_own():
    x, filter = make_inputs(200)
    segments = torch.zeros(2, 200, dtype=torch.int64)
    segments[0, 50:], segments[0, 120:], segments[1, 45:] = 1, 2, 1
    y, state = online(x, filter, (30, 30) + (1,) * 58 + (10,) + (1,) * 72, 220, segment_ids=segments)
    assert_close([y], [recurrent_conv(x, filter, segment_ids=segments)], 1e-12, "y")
    assert state["start"].tolist() == [120, 45]
    assert (state["buffer"][0, :120] == 0).all() and torch.equal(state["buffer"][0, 120:200], x[0, 120:])


def test_online_work_grows_with_the_square_of_the_logarithm():
    """Of the transforms, by their formula, per token: levels times logarithms; a plain cache is linear in the length."""
    per_token = []
    for steps in (512, 2048):
        x, filter = torch.zeros(1, steps, 1), torch.zeros(1, steps)
        with Transforms() as seen:
            online(x, filter, (1,) * steps, steps, donate=True)
        assert all(n & (n - 1) == 0 for n in seen.lengths)
        per_token.append(seen.work / steps)
    assert per_token[1] < 3 * per_token[0]
    assert per_token[1] < 6 * math.log2(2048) ** 2


def test_taps_are_asked_for_as_far_as_they_are_needed():
    asked = []
    x, filter = make_inputs(200)

    def taps(count):
        asked.append(count)
        return filter[:, :count]

    y, _ = online(x, taps, (1,) * 200, 200)
    assert_close([y], [causal_conv(x, filter)], 1e-12, "y")
    assert max(asked[:64]) == 64 and sorted(asked)[-3:] == [72, 128, 200]


@pytest.mark.parametrize("steps", [1, 30])
def test_inputs_and_passed_state_are_unchanged(steps):
    x, filter = make_inputs(100, taps=140)
    _, state = online(x[:, :63], filter, (63,), 140)
    before = {key: value.clone() for key, value in state.items()}
    copies = [x.clone(), filter.clone()]
    online_conv(x[:, 63 : 63 + steps], filter, state)
    assert all(torch.equal(state[key], before[key]) for key in before)
    assert torch.equal(x, copies[0]) and torch.equal(filter, copies[1])
    _, donated = online_conv(x[:, 63 : 63 + steps], filter, state, donate_state=True)
    assert donated["buffer"].data_ptr() == state["buffer"].data_ptr()


def test_half_precision_state_is_wide():
    x, filter = make_inputs(150)
    y, state = online(x.bfloat16(), filter.float(), (20,) + (1,) * 130, 150)
    assert (y.dtype, state["buffer"].dtype) == (torch.bfloat16, torch.float32)
    assert_close([y], [recurrent_conv(x.bfloat16().double(), filter)], 3e-3, "y")


def test_errors_say_what_is_wrong():
    x, filter = make_inputs(10)
    for message, call in {
        "max_len=9 tokens, 10": lambda: online(x, filter, (10,), 9),
        "does not fit x": lambda: online_conv(x[..., 0], filter, init_conv_state(2, 10, (3, 4))),
        "at least 1": lambda: init_conv_state(1, 0, (1,)),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
