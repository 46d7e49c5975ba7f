"""Published sizes and costs of the mixers, worked out by hand from their papers' formulas."""

import pytest

from mixers.gated_deltanet import GatedDeltaNetConfig
from mixers.swa import SlidingWindowConfig
from mixers.transformer import TransformerConfig

WIDTHS = {"d_model": 1024, "n_heads": 8, "head_dim": 128}


@pytest.mark.parametrize(
    "config, millions",
    [
        (TransformerConfig(**WIDTHS), 4.194),
        (SlidingWindowConfig(**WIDTHS, window=1024), 3.15),
        (SlidingWindowConfig(**WIDTHS, window=64), 0.26),
        (GatedDeltaNetConfig(**WIDTHS, conv_on="none"), 1.31),
    ],
    ids=["softmax", "window 1024", "window 64", "gated delta rule"],
)
def test_cell_flops_per_token_at_2048(config, millions):
    assert config.build(0, 1).cell_flops_per_token(2048) / 1e6 == pytest.approx(millions, abs=0.006)


def test_parameters_of_the_matched_layer():
    """4 d^2 projections, two gates of d H + H, convolution of 4 taps on q and k, one head norm."""
    d, heads, width = 1024, 8, 128
    assert TransformerConfig(**WIDTHS).n_parameters() == 4 * d * d
    assert GatedDeltaNetConfig(**WIDTHS).n_parameters() == 4 * d * d + 2 * (d * heads + heads) + 8 * d + width


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
