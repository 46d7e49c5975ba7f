"""sLSTM: sizes of the published formula, and where its forget gates start."""

import pytest
import torch

from mixers.slstm import SlstmConfig


def test_parameters_are_the_published_ones_and_an_output_map():
    """8 d^2 / H + 10 d: 1 187 328 at d = 768 with four heads."""
    d = 768
    assert SlstmConfig(d_model=d, n_heads=4, head_dim=192).n_parameters() == 1_187_328 + d * d


@pytest.mark.parametrize("layer_index, middle", [(0, 5 - 12 * 0.5**0.3), (2, 5 - 12 * 0.5**1.6)])
def test_forget_biases_fall_by_a_power_of_the_place(layer_index, middle):
    layer = SlstmConfig(d_model=10, n_heads=2, head_dim=5).build(layer_index, 3)
    layer.init_parameters(torch.Generator().manual_seed(0))
    bias_H4V = layer.bias_D.view(2, 4, 5)
    for head_V in bias_H4V[:, 1]:
        assert head_V[[0, 2, 4]].tolist() == pytest.approx([5.0, middle, -7.0], abs=1e-5)
    assert not bias_H4V[:, [0, 2, 3]].any() and not layer.recurrent_HVGV.any()


def test_forget_biases_evenly_spaced():
    layer = SlstmConfig(d_model=10, n_heads=2, head_dim=5, forget_init="linspace").build(0, 1)
    layer.init_parameters(torch.Generator().manual_seed(0))
    assert layer.bias_D.view(2, 4, 5)[1, 1].tolist() == pytest.approx([3.0, 3.75, 4.5, 5.25, 6.0])


def test_convolution_feeds_input_and_forget_gates_alone():
    """With its taps at zero nothing of x reaches i and f, but z and o still see it."""
    layer = SlstmConfig(d_model=16, n_heads=2, head_dim=8).build(0, 1)
    layer.init_parameters(torch.Generator().manual_seed(0))
    with torch.no_grad():
        layer.conv.taps_JD.zero_()
        layer.conv.bias_D.zero_()
    x = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(1))
    raw = layer._raw(layer.conv(x)[0], x) - layer.bias_D.view(2, 4, 8)
    assert not raw[..., :2, :].any() and raw[..., 2:, :].all()


@pytest.mark.parametrize(
    "fields, name",
    [({"n_heads": 3}, "n_heads"), ({"conv_width": 0}, "conv_width"), ({"forget_init": "x"}, "forget_init")],
)
def test_values_that_cannot_work_are_named(fields, name):
    with pytest.raises(ValueError, match=f"mixer.{name}="):
        SlstmConfig(**{"d_model": 16, "n_heads": 2, "head_dim": 8, **fields}).check("mixer")
