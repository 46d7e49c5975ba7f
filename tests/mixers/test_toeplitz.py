"""Toeplitz and masked mixers: what each option does, sizes by formula, and the Fredholm index."""

import itertools

import numpy
import pytest
import torch
import torch.nn.functional as F

from mixers.base import Context
from mixers.masked_mixer import MaskedMixerConfig
from mixers.ops.fredholm import fredholm_index
from mixers.toeplitz import ToeplitzConfig

SIZE = {"d_model": 12, "n_heads": 2, "head_dim": 6}


def layer(cls=ToeplitzConfig, length=40, seed=0, **fields):
    """A float64 layer with random weights everywhere, also where it would start from zero."""
    config = cls(**SIZE, length=length, **fields)
    config.check("mixer")
    built = config.build(0, 1).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(generator=generator)
    return built


def inputs(steps=40, batch=2, seed=1):
    return torch.randn(batch, steps, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def literal(built, x_BTD):
    """The layer in plain loops over outputs, lags and neighbours."""
    c = built.config
    x = x_BTD if built.project is None else built.project(x_BTD)
    x = x.unflatten(-1, (c.groups, c.width))
    if not isinstance(c, MaskedMixerConfig):
        taps = (1 + built.filter_OHJL.exp()).log() if c.normaliser == "positive" else built.filter_OHJL
    for o in range(c.operators):
        x = F.silu(x) if o else x
        y = torch.zeros_like(x)
        for t, h in itertools.product(range(x.shape[1]), range(c.groups)):
            for s in range(t + 1):
                if isinstance(c, MaskedMixerConfig):
                    y[:, t, h] += built.weight_OHLL[o, h, t, s] * x[:, s, h]
                    continue
                for j, v in itertools.product(range(c.kernel), range(c.width)):
                    channel = v + j - (c.kernel - 1)
                    if channel >= 0 and t - s < c.length:
                        y[:, t, h, v] += taps[o, h, j, t - s] * x[:, s, h, channel]
            if not isinstance(c, MaskedMixerConfig) and c.normaliser != "none":
                y[:, t, h] /= sum(taps[o, h, 0, k] for k in range(min(t + 1, c.length)))
            if c.position_bias:
                y[:, t, h] += built.bias_OHL[o, h, min(t, c.length - 1)]
        x = y
    y_BTD = x.flatten(2)
    return y_BTD if built.out is None else built.out(y_BTD)


OPTIONS = [
    {},
    {"headed": False},
    {"kernel": 3},
    {"kernel": 4, "headed": False},
    {"expanded": True},
    {"expanded": True, "kernel": 2, "headed": False},
    {"position_bias": False},
    {"extend": "zero", "length": 5},
    {"normaliser": "sum"},
    {"normaliser": "positive", "headed": False, "expanded": True},
    {"normaliser": "positive", "extend": "zero", "length": 5},
    {"extend": "zero", "length": 1, "expanded": True, "kernel": 2},
    {"cls": MaskedMixerConfig},
    {"cls": MaskedMixerConfig, "headed": False, "expanded": True},
    {"cls": MaskedMixerConfig, "position_bias": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@torch.no_grad()
def test_equals_plain_loops(options):
    built, x = layer(**options), inputs(12)
    torch.testing.assert_close(built(x)[0], literal(built, x), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@torch.no_grad()
def test_pieces_steps_and_documents_with_every_option(options):
    built, x = layer(**{"length": 100, **options}), inputs(100)
    whole = built(x)[0]
    for cuts in ((30, 31, 32, 90), tuple(range(1, 100))):
        state, parts = built.init_state(2, 110, torch.device("cpu"), torch.float64), []
        for a, b in itertools.pairwise((0, *cuts, 100)):
            y, state = built(x[:, a:b], state)
            parts.append(y)
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-10, atol=1e-10)
    segments = torch.zeros(2, 100, dtype=torch.int64)
    segments[0, 40:], segments[0, 45:], segments[1, 90:] = 1, 2, 4
    state, parts = built.init_state(2, 100, torch.device("cpu"), torch.float64), []
    for a, b in itertools.pairwise((0, 20, 42, 44, 93, 94, 95, 100)):
        y, state = built(x[:, a:b], state, Context(segment_ids=segments[:, a:b]))
        parts.append(y)
    packed = built(x, None, Context(segment_ids=segments))[0]
    torch.testing.assert_close(torch.cat(parts, dim=1), packed, rtol=1e-10, atol=1e-10)
    for row, a, b in ((0, 0, 40), (0, 40, 45), (0, 45, 100), (1, 0, 90), (1, 90, 100)):
        alone = built(x[row : row + 1, a:b])[0][0]
        torch.testing.assert_close(packed[row, a:b], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_parameters_by_formula(options):
    built = layer(**options)
    assert sum(p.numel() for p in built.parameters()) == built.config.n_parameters()


def test_published_size_of_the_multi_head_layer():
    """2 d^2 + 2 d projections; n taps and n biases per head."""
    config = ToeplitzConfig(d_model=512, n_heads=4, head_dim=128, length=512)
    assert config.n_parameters() == 2 * 512**2 + 2 * 512 + 4 * 2 * 512


@torch.no_grad()
def test_inits():
    built = {init: layer(length=4000, init=init) for init in ("paper", "shift", "zeros")}
    for one in built.values():
        one.init_parameters(torch.Generator().manual_seed(0))
        assert (one.bias_OHL == 0).all()
    assert built["paper"].filter_OHJL.std().item() == pytest.approx((2 / 4000) ** 0.5, rel=0.05)
    assert (built["zeros"].filter_OHJL == 0).all()
    shift = built["shift"].filter_OHJL.clone()
    assert (shift[..., 1] - 1).abs().max() < 0.01
    shift[..., 1] -= 1
    assert shift.std().item() == pytest.approx(0.1 * (2 / 4000) ** 0.5, rel=0.05)


@torch.no_grad()
def test_masked_mixer_starts_with_outputs_of_unit_variance_everywhere():
    built = layer(MaskedMixerConfig, length=300, headed=False)
    built.init_parameters(torch.Generator().manual_seed(0))
    assert (built.weight_OHLL.triu(1) == 0).all()
    y = built(inputs(300, batch=64))[0]
    for part in y[:, 1:].chunk(3, dim=1):
        assert part.square().mean().item() == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize(
    "freeze, frozen",
    [("none", set()), ("toeplitz", {"filter_OHJL"}), ("all_but_projections", {"filter_OHJL", "bias_OHL"})],
)
def test_freeze(freeze, frozen):
    built = layer(freeze=freeze)
    built(inputs())[0].square().sum().backward()
    assert {name for name, p in built.named_parameters() if p.grad is None} == frozen


@pytest.mark.parametrize("cls", [ToeplitzConfig, MaskedMixerConfig])
def test_too_long_is_an_error_that_names_the_key(cls):
    built, x = layer(cls, length=10), inputs(11)
    state = built.init_state(2, 30, torch.device("cpu"), torch.float64)
    with pytest.raises(ValueError, match=r"mixer.length=10: a document has 11 tokens"):
        built(x)
    with pytest.raises(ValueError, match=r"mixer.length=10: a document has 11 tokens"):
        _, after = built(x[:, :10], state)
        built(x[:, 10:], after)
    # what counts is the length of documents
    segments = torch.zeros(2, 11, dtype=torch.int64)
    segments[:, 10:] = 1
    packed = built(x, None, Context(segment_ids=segments))[0]
    torch.testing.assert_close(packed[:, 10:], built(x[:, 10:])[0])
    with pytest.raises(ValueError, match="max_len=5"):
        built(x[:, :6], built.init_state(2, 5, torch.device("cpu"), torch.float64))


@pytest.mark.parametrize("backend", ["dense", "blocked", "fft"])
def test_backends(backend):
    x, want = inputs(), layer()(inputs())[0]
    torch.testing.assert_close(layer(backend=backend)(x)[0], want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"init": "random"}, "mixer.init=random: must be one of paper, shift, zeros"),
        ({"freeze": "all"}, "mixer.freeze=all: must be one of"),
        ({"extend": "crop"}, "mixer.extend=crop: must be one of"),
        ({"backend": "cuda"}, "mixer.backend=cuda: must be one of"),
        ({"kernel": 7}, "mixer.kernel=7: must be from 1 .* to 6"),
        ({"kernel": 0}, "mixer.kernel=0"),
        ({"length": 0}, "mixer.length=0"),
        ({"length": 1, "init": "shift"}, "mixer.length=1: init=shift"),
        ({"init": "zeros", "expanded": True}, "mixer.init=zeros: two zero operators"),
        ({"normaliser": "mean"}, "mixer.normaliser=mean: must be one of none, sum, positive"),
        ({"normaliser": "sum", "kernel": 2}, "mixer.normaliser=sum: is for one filter .* kernel=2"),
        ({"normaliser": "sum", "init": "zeros"}, "mixer.init=zeros: normaliser=sum would divide by zero"),
        ({"freeze": "all_but_projections", "headed": False}, "mixer.freeze=all_but_projections: headed=false"),
    ],
)
def test_values_that_cannot_work(fields, message):
    with pytest.raises(ValueError, match=message):
        layer(**fields)


# ---- Fredholm index ----


def zeros_inside(v):
    """Minus the number of roots of sum_k v_k w^k in the open unit disc."""
    return -int((numpy.abs(numpy.roots(v.flip(0).numpy())) < 1).sum())


@pytest.mark.parametrize("n", [1, 2, 3, 17, 64, 128])
def test_index_counts_polynomial_roots(n):
    for seed in range(6):
        v = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        index, margin = fredholm_index(v)
        assert index == zeros_inside(v)
        assert 0 < margin <= v.sum().abs() * (1 + 1e-9)  # the symbol at z = 1


def test_index_of_known_filters():
    lags = torch.arange(64, dtype=torch.float64)
    for shift in (0, 1, 5):
        index, margin = fredholm_index((lags == shift).double())
        assert (index, margin) == (-shift, pytest.approx(1))
    assert fredholm_index(0.9**lags)[0] == 0  # minimum phase
    assert fredholm_index(1 / (1 + lags))[0] == 0
    assert fredholm_index(-2.0 * (lags == 1))[0] == -1


@pytest.mark.parametrize("n", [2, 48, 64, 100])
def test_index_of_all_ones_is_undefined(n):
    index, margin = fredholm_index(torch.ones(n), most_samples=1 << 16)
    assert index is None and margin < 0.01
    assert fredholm_index(torch.zeros(n)) == (None, 0.0)


def test_index_refuses_what_is_no_vector():
    with pytest.raises(ValueError, match=r"\(n,\)"):
        fredholm_index(torch.ones(2, 3))


def test_indices_of_a_layer():
    built = layer(kernel=2, expanded=True)
    with torch.no_grad():
        built.filter_OHJL.zero_()
        built.filter_OHJL[..., 0] = 1
        built.filter_OHJL[1, 0, 1] = F.one_hot(torch.tensor(3), 40)
    indices = built.fredholm_indices()
    assert len(indices) == 2 * 2 * 2
    assert {key: index for key, (index, _) in indices.items() if index} == {(1, 0, 1): -3}
