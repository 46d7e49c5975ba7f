"""Published sizes and costs of the mixers, worked out by hand from their papers' formulas."""

import pytest

from mixers.deltanet import DeltaNetConfig
from mixers.gated_deltanet import GatedDeltaNetConfig
from mixers.gla import GatedLinearAttentionConfig
from mixers.hawk import HawkConfig
from mixers.linear import LinearConfig
from mixers.mamba2 import Mamba2Config
from mixers.mamba2_native import Mamba2NativeConfig
from mixers.mesa import MesaConfig
from mixers.retnet import RetNetConfig
from mixers.swa import SlidingWindowConfig
from mixers.transformer import TransformerConfig
from mixers.xlstm import XlstmConfig

WIDTHS = {"d_model": 1024, "n_heads": 8, "head_dim": 128}


@pytest.mark.parametrize(
    "config, millions",
    [
        (TransformerConfig(**WIDTHS), 4.194),
        (SlidingWindowConfig(**WIDTHS, window=1024), 3.15),
        (SlidingWindowConfig(**WIDTHS, window=64), 0.26),
        (GatedDeltaNetConfig(**WIDTHS, conv_on="none"), 1.31),
        (LinearConfig(**WIDTHS, conv_on="none"), 0.79),
    ],
    ids=["softmax", "window 1024", "window 64", "gated delta rule", "linear"],
)
def test_cell_flops_per_token_at_2048(config, millions):
    assert config.build(0, 1).cell_flops_per_token(2048) / 1e6 == pytest.approx(millions, abs=0.006)


def test_parameters_of_the_matched_layers():
    """4 d^2 projections; gates of d H weights and H biases; convolution of 4 taps on q and k; one head norm."""
    d, heads, width = 1024, 8, 128
    common, gate = 4 * d * d + 8 * d + width, d * heads + heads
    assert TransformerConfig(**WIDTHS).n_parameters() == SlidingWindowConfig(**WIDTHS).n_parameters() == 4 * d * d
    assert LinearConfig(**WIDTHS).n_parameters() == common
    assert Mamba2Config(**WIDTHS).n_parameters() == DeltaNetConfig(**WIDTHS).n_parameters() == common + gate
    for config in (GatedLinearAttentionConfig, GatedDeltaNetConfig, XlstmConfig):
        assert config(**WIDTHS).n_parameters() == common + 2 * gate
    assert MesaConfig(**WIDTHS).n_parameters() == common + 2 * gate + d


def test_parameters_of_the_reference_layers():
    d, heads = 1024, 8
    assert HawkConfig(**WIDTHS).n_parameters() / d**2 == pytest.approx(3.75 + 3.125 / heads, abs=0.02)
    assert RetNetConfig(**WIDTHS).n_parameters() / d**2 == pytest.approx(8, abs=0.01)
    native = {"conv_on": "none", "qk_norm": "none"}
    gla = GatedLinearAttentionConfig(**WIDTHS, **native, expand_k=0.5, output_gate="silu", decay="vector")
    assert gla.n_parameters() / d**2 == pytest.approx(4, abs=0.03)
    # about 6 d^2 + 2 d N: 2048 values of width 64 make 32 heads
    mamba = Mamba2NativeConfig(**WIDTHS).n_parameters()
    assert mamba / (6 * d**2 + 2 * d * 128) == pytest.approx(1, abs=0.01)
    block = XlstmConfig(**WIDTHS, **native, expand_k=0.5, head_norm="layer", output_gate="sigmoid", gate_cap=15.0)
    assert block.n_parameters() == 4 * d * d + 2 * (d * heads + heads) + d


@pytest.mark.parametrize("layers, heads, total", [(14, 6, 145_967_616), (28, 8, 433_203_200), (28, 12, 936_066_048)])
def test_published_sizes_of_the_transformers(layers, heads, total):
    """The MesaNet comparison's 140M, 440M and 940M: tied embedding of 50257, MLP of width 3 d, two norms a block."""
    d = 128 * heads
    mixer = TransformerConfig(d_model=d, n_heads=heads, head_dim=128).n_parameters()
    assert layers * (mixer + 9 * d * d + 2 * d) + 50257 * d + d == total


def test_native_gated_deltanet_has_six_squares_of_the_width():
    native = GatedDeltaNetConfig(
        **WIDTHS, expand_k=0.75, expand_v=1.5, conv_on="qkv", output_gate="silu", decay="mamba"
    )
    assert native.n_parameters() / 1024**2 == pytest.approx(6, abs=0.05)


def test_matrix_state_holds_as_many_numbers_as_a_cache_of_half_a_head_width_of_keys():
    import torch

    matched = GatedDeltaNetConfig(**WIDTHS, conv_on="none").build(0, 1)
    window = SlidingWindowConfig(**WIDTHS, window=64).build(0, 1)
    assert matched.state_bytes(2048, torch.float32) == window.state_bytes(2048, torch.float32)
