"""Hyena: sizes by the published formula, the filter by hand, errors."""

import math

import numpy
import pytest
import torch
import torch.nn.functional as F

from mixers.base import Context
from mixers.hyena import HyenaConfig

SIZE = {"d_model": 6, "n_heads": 2, "head_dim": 3}


def layer(length=50, seed=0, **fields):
    config = HyenaConfig(**{**SIZE, "length": length, "filter_width": 8, **fields})
    config.check("mixer")
    built = config.build(0, 1).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(generator=generator)
    built.init_parameters(generator)
    return built


def inputs(steps=50, width=6):
    return torch.randn(2, steps, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_parameters_by_the_published_formula():
    """Published count without features, of which L E numbers are trained in the authors' code."""
    config = HyenaConfig(d_model=512, n_heads=8, head_dim=64, length=1024, filter_features=5)
    d, e, f = 512, 5, 64
    assert config.n_parameters() == 4 * d**2 + 4 * d + 12 * d + (e * f + f) + 2 * (f**2 + f) + f * d + f + d
    assert config.n_parameters() + 1024 * e == 1_103_936
    assert sum(p.numel() for p in config.build(0, 1).parameters()) == config.n_parameters()


@torch.no_grad()
def test_window():
    """A hundredth is left after 1.5 lengths in the first channel and after 0.3 in the last."""
    window = layer(length=301, d_model=5)._window(301).numpy()
    assert window[0] == pytest.approx(1)
    assert window[60] == pytest.approx(numpy.exp(-0.2 * numpy.linspace(3.0701, 15.3506, 5)), rel=1e-4)
    assert window[90, -1] == pytest.approx(0.01)
    assert window[300, 0] == pytest.approx(0.01 ** (1 / 1.5))


@torch.no_grad()
def test_features():
    features = layer(length=20, filter_features=7)._features(20).numpy()
    lags = numpy.arange(20)
    omega = numpy.array([1e-4, (2 + 1e-4) / 2, 2.0])
    waves = numpy.exp(-1j * omega * 2 * math.pi * lags[:, None] / 20)
    assert features == pytest.approx(numpy.concatenate([lags[:, None] / 19, waves.real, waves.imag], axis=1))


@torch.no_grad()
def test_the_filter_of_a_prefix_is_a_prefix_of_the_filter():
    built = layer()
    assert torch.equal(built.taps(500), built.taps(50))
    torch.testing.assert_close(built.taps(20), built.taps(50)[:, :20], rtol=1e-13, atol=1e-14)
    # another length stretches it
    assert not torch.allclose(layer(length=51).taps(20), built.taps(20))


@torch.no_grad()
def test_one_sine_frequency_serves_all_layers():
    built = layer(filter_frequency=14.0)
    assert (built.filter_mlp[1].frequency_F == 14).all()
    assert built.filter_mlp[1] is built.filter_mlp[3] is built.filter_mlp[5]
    x = built._features(50)
    for i in (0, 2, 4):
        x = torch.sin(14.0 * F.linear(x, built.filter_mlp[i].weight, built.filter_mlp[i].bias))
    want = F.linear(x, built.filter_mlp[6].weight) * built._window(50)
    want[0] += built.skip_D
    torch.testing.assert_close(built.taps(50), want.T)


@torch.no_grad()
def test_size_of_the_filter_at_the_start():
    """Without a factor 1/sqrt(L): the L1 norm of the slowest channel was found to be about 11 in the authors' code."""
    norms = []
    for seed in range(12):
        built = layer(length=1024, seed=seed, d_model=64, filter_width=64, filter_features=5)
        built.skip_D.zero_()
        norms.append(float(built.taps(1024).abs().sum(1)[0]))
    assert 2 < numpy.mean(norms) < 60


@torch.no_grad()
def test_one_tap_and_identity_maps_by_hand():
    """Without a filter and a short convolution: y = x_0 (D x_1 v)."""
    built = layer()
    built.filter_mlp[6].weight.zero_()
    built.conv.taps_JD.zero_()
    built.conv.taps_JD[0] = 1
    x = inputs()
    gate, other, v = (built.project(x) + built.conv.bias_D).chunk(3, dim=-1)
    torch.testing.assert_close(built(x)[0], built.out(gate * built.skip_D * other * v))


@torch.no_grad()
def test_whole_layer_in_plain_loops():
    built, x = layer(), inputs(9)
    u = F.pad(built.project(x), (0, 0, 2, 0))
    taps = built.conv.taps_JD
    u = torch.stack([sum(taps[j] * u[:, t + 2 - j] for j in range(3)) for t in range(9)], dim=1) + built.conv.bias_D
    gate, other, v = u.chunk(3, dim=-1)
    z, h = other * v, built.taps(9)
    y = torch.stack([sum(h[:, k] * z[:, t - k] for k in range(t + 1)) for t in range(9)], dim=1)
    torch.testing.assert_close(built(x)[0], built.out(gate * y), rtol=1e-11, atol=1e-11)


def test_too_long_is_an_error_that_names_the_key():
    built, x = layer(length=10), inputs(11)
    with pytest.raises(ValueError, match=r"mixer.length=10: a document has 11 tokens"):
        built(x)
    state = built.init_state(2, 30, torch.device("cpu"), torch.float64)
    _, state = built(x[:, :10], state)
    with pytest.raises(ValueError, match=r"mixer.length=10: a document has 11 tokens"):
        built(x[:, 10:], state)
    segments = torch.zeros(2, 11, dtype=torch.int64)
    segments[:, 4:] = 1
    packed = built(x, None, Context(segment_ids=segments))[0]
    torch.testing.assert_close(packed[:, 4:], built(x[:, 4:])[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"length": 1}, "mixer.length=1"),
        ({"filter_features": 4}, "mixer.filter_features=4: must be odd"),
        ({"filter_width": 0}, "mixer.filter_width=0"),
        ({"short_width": 0}, "mixer.short_width=0"),
        ({"decay_fast": 0.0}, "mixer.decay_fast=0"),
        ({"filter_frequency": -1.0}, "mixer.filter_frequency=-1"),
        ({"backend": "cuda"}, "mixer.backend=cuda: must be one of"),
    ],
)
def test_values_that_cannot_work(fields, message):
    with pytest.raises(ValueError, match=message):
        layer(**fields)
