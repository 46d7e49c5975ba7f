"""A mixer is causal, its three forms are one function, documents are apart, and what is passed in stays as it is."""

import itertools

import pytest
import torch

from mixers.base import Context
from tests.contract.cases import LENGTHS, NAMES, TOLERANCE, close, inputs, mixer, start, stepped

pytestmark = pytest.mark.parametrize("name", NAMES)


@pytest.mark.parametrize("cut", [1, 20, 70])
def test_causal(name, cut):
    layer, x = mixer(name), inputs(2, 90)
    changed = x.clone()
    changed[:, cut:] = 3 * inputs(2, 90 - cut, seed=1)
    before, after = layer(x)[0], layer(changed)[0]
    close(after[:, :cut], before[:, :cut], 1e-12)
    assert not torch.allclose(after[:, cut], before[:, cut]), "the output must depend on its own input"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("steps", LENGTHS)
def test_whole_equals_steps(name, steps, dtype):
    layer, x = mixer(name, dtype), inputs(3, steps, dtype)
    whole, nothing = layer(x)
    assert nothing is None and whole.shape == x.shape and whole.dtype == dtype
    close(stepped(layer, x)[0], whole, TOLERANCE[dtype])


@pytest.mark.parametrize("cuts", [(1,), (64,), (37, 38, 101), (2, 129)])
def test_whole_equals_split_with_carried_state(name, cuts):
    layer, x = mixer(name), inputs(3, 130)
    whole, state = layer(x, start(layer, 3, 200))
    close(layer(x)[0], whole, 1e-10)
    carried, parts = start(layer, 3, 200), []
    for a, b in zip((0, *cuts), (*cuts, 130), strict=True):
        y, carried = layer(x[:, a:b], carried)
        parts.append(y)
    close(torch.cat(parts, dim=1), whole, 1e-10)
    # What is carried out goes on alike, whichever way it came about.
    more = inputs(3, 5, seed=2)
    close(layer(more, carried)[0], layer(more, state)[0], 1e-10)


def test_donated_state_gives_the_same(name):
    layer, x = mixer(name), inputs(2, 80)
    whole = layer(x)[0]
    state, parts = start(layer, 2, 80), []
    for a, b in ((0, 50), (50, 51), (51, 52), (52, 80)):
        y, state = layer(x[:, a:b], state, Context(donate_state=True))
        parts.append(y.clone())
    close(torch.cat(parts, dim=1), whole, 1e-10)


BORDERS = [(30, 31, 95), (1,), (64, 128)]


@pytest.mark.parametrize("borders", BORDERS, ids=str)
def test_packed_documents_equal_the_documents_apart(name, borders):
    layer = mixer(name)
    packed = inputs(2, 130).requires_grad_()
    apart = inputs(2, 130).requires_grad_()
    edges = (0, *borders, 130)
    segments = torch.zeros(2, 130, dtype=torch.int64)
    for border in borders:
        segments[:, border:] += 1
    weights = inputs(2, 130, seed=3)
    together = layer(packed, None, Context(segment_ids=segments))[0]
    alone = torch.cat([layer(apart[:, a:b])[0] for a, b in itertools.pairwise(edges)], dim=1)
    close(together, alone, 1e-10)
    parameters = list(layer.parameters())
    got = torch.autograd.grad((together * weights).sum(), [packed, *parameters])
    want = torch.autograd.grad((alone * weights).sum(), [apart, *parameters])
    for g, w in zip(got, want, strict=True):
        close(g, w, 1e-9)


def test_rows_may_have_their_own_borders(name):
    layer, x = mixer(name), inputs(2, 70)
    segments = torch.zeros(2, 70, dtype=torch.int64)
    segments[0, 20:], segments[1, 65:] = 1, 1
    packed = layer(x, None, Context(segment_ids=segments))[0]
    close(packed[0, 20:], layer(x[:1, 20:])[0][0], 1e-10)
    close(packed[1, :65], layer(x[1:, :65])[0][0], 1e-10)
    close(packed[1, 65:], layer(x[1:, 65:])[0][0], 1e-10)


@pytest.mark.parametrize("border", [1, 30, 38, 39])  # also where a convolution's tail reaches over it
def test_state_belongs_to_the_first_and_the_last_document(name, border):
    layer, x = mixer(name), inputs(2, 90)
    _, before = layer(x[:, :25], start(layer, 2, 200))
    segments = torch.zeros(2, 40, dtype=torch.int64)
    segments[:, border:] = 1
    begin = 25 + border
    got, after = layer(x[:, 25:65], before, Context(segment_ids=segments))
    close(got[:, :border], layer(x[:, :begin])[0][:, 25:], 1e-10)
    close(got[:, border:], layer(x[:, begin:65])[0], 1e-10)
    close(layer(x[:, 65:], after)[0], layer(x[:, begin:])[0][:, 65 - begin :], 1e-10)
    # One document that goes on: segment ids change nothing.
    same = Context(segment_ids=torch.full((2, 40), 7))
    close(layer(x[:, 25:65], before, same)[0], layer(x[:, :65])[0][:, 25:], 1e-10)


@pytest.mark.parametrize("steps", [1, 70])
def test_inputs_and_passed_in_state_are_unchanged(name, steps):
    layer, x = mixer(name), inputs(2, 20 + steps)
    _, state = layer(x[:, :20], start(layer, 2, 100))
    before, x_before = {key: value.clone() for key, value in state.items()}, x.clone()
    layer(x[:, 20:], state)
    assert torch.equal(x, x_before)
    assert state.keys() == before.keys()
    for key in state:
        assert torch.equal(state[key], before[key]), key


def test_batch_rows_are_independent(name):
    layer, x = mixer(name), inputs(3, 40)
    close(layer(x)[0][1:2], layer(x[1:2])[0], 1e-12)
    _, state = layer(x[:, :20], start(layer, 3, 40))
    picked = {key: value[[2, 0]] for key, value in state.items()}  # the batch is the first axis of every tensor
    close(layer(x[[2, 0], 20:], picked)[0], layer(x)[0][[2, 0], 20:], 1e-10)
