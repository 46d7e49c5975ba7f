"""What a mixer says of its size and cost is what it has and does."""

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from tests.contract.cases import NAMES, config, mixer, start

pytestmark = pytest.mark.parametrize("name", NAMES)


def test_parameter_count_equals_the_formula(name):
    layer = mixer(name)
    assert sum(p.numel() for p in layer.parameters()) == config(name).mixer.n_parameters()


def fused_attention(q_shape, k_shape, v_shape, *_args, out_shape=None, **_options):
    """The counter of this torch version does not know the CPU's fused attention."""
    return sdpa_flop_count(q_shape, k_shape, v_shape)


def uncounted(*_arguments, **_options):
    """The counter takes the gradient of a depthwise convolution for that of a dense one."""
    return 0


def transform(rows, length):
    """A split-radix FFT of real numbers."""
    return math.prod(rows) * (2 * length * math.log2(length) - 4 * length + 6)


def forward_transform(x_shape, *_arguments, **_options):
    return transform(x_shape[:-1], x_shape[-1])


def inverse_transform(spectrum_shape, _dim, _norm, length, *_arguments, **_options):
    return transform(spectrum_shape[:-1], length)


FUSED = {
    torch.ops.aten._fft_r2c: forward_transform,
    torch.ops.aten._fft_c2r: inverse_transform,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: fused_attention,
    torch.ops.aten.convolution_backward: uncounted,
}


def counted(layer, steps):
    with FlopCounterMode(display=False, custom_mapping=FUSED) as counter:
        layer(torch.randn(1, steps, layer.config.d_model, generator=torch.Generator().manual_seed(0)))
    return counter.get_total_flops()


def test_linear_maps_agree_with_a_flop_counter(name):
    layer, steps = mixer(name, torch.float32), 96
    maps = [m for m in layer.modules() if isinstance(m, nn.Linear)]
    with FlopCounterMode(display=False) as counter:
        for m in maps:
            m(torch.zeros(steps, m.in_features))
    assert layer.flops_per_token(steps) - layer.cell_flops_per_token(steps) == counter.get_total_flops() / steps


@pytest.mark.parametrize("steps", [256, 1024])
def test_cell_agrees_with_a_flop_counter_up_to_masked_halves(name, steps):
    """The formula takes causal halves and leaves out how a form organises its work; the counter sees whole blocks. Below
    1 where it misses elementwise work (outer products of step loops) or a form has shorter chunks than the formula's 64
    (Mesa's 32)."""
    layer = mixer(name, torch.float32, overrides=False)
    linear = layer.flops_per_token(steps) - layer.cell_flops_per_token(steps)
    measured = counted(layer, steps) / steps - linear
    said = layer.cell_flops_per_token(steps)
    if measured == 0:  # the counter sees matrix products only: this cell is elementwise
        assert said <= 0.2 * linear
    else:
        assert 0.5 <= measured / said <= 2.5


def test_flops_grow_with_the_length_as_the_work_does(name):
    layer = mixer(name, torch.float32, overrides=False)
    grown = counted(layer, 2048) / counted(layer, 1024)
    said = 2 * layer.flops_per_token(2048) / layer.flops_per_token(1024)
    assert said == pytest.approx(grown, rel=0.25)


def test_training_flops_agree_with_a_flop_counter(name):
    """Three forward passes; fewer where the backward pass repeats a solver instead of differentiating through it."""
    layer, steps = mixer(name, torch.float32, overrides=False), 512
    x = torch.randn(1, steps, layer.config.d_model, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with FlopCounterMode(display=False, custom_mapping=FUSED) as counter:
        layer(x)[0].sum().backward()
    said = layer.train_flops_per_token(steps)
    assert said >= 2 * layer.flops_per_token(steps)
    assert 0.6 <= counter.get_total_flops() / steps / said <= 1.6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("steps", [1, 4, 100])
def test_state_bytes_agree_with_the_tensors(name, steps, dtype):
    layer = mixer(name, torch.float32)
    state = start(layer, 1, steps, dtype)
    floating = sum(t.numel() * t.itemsize for t in state.values() if t.is_floating_point())
    assert layer.state_bytes(steps, dtype) == floating
    assert all(not t.is_floating_point() or t.shape[0] == 1 for t in state.values())


def saved_bytes(layer, steps):
    """What the forward pass keeps for the backward pass, each tensor's memory once."""
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor

    alive: list = []
    x = torch.randn(1, steps, layer.config.d_model, generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)[0].sum()
    return sum(storages.values()) - sum(p.untyped_storage().nbytes() for p in layer.parameters())


def test_training_memory_is_linear_in_the_length(name):
    layer = mixer(name, torch.float32, overrides=False)
    once, twice = saved_bytes(layer, 1024), saved_bytes(layer, 2048)
    assert twice <= 2.25 * max(once, 1)  # a doubling scan keeps T log T
