"""The native xLSTM layer equals the one of transformers, and sizes are those of the published formulas."""

import pytest
import torch

from mixers.xlstm import Xlstm, XlstmConfig
from tests.ops.oracles import assert_close

NATIVE = {
    "expand_k": 0.5,
    "conv_on": "none",
    "head_norm": "layer",
    "output_gate": "sigmoid",
    "gate_cap": 15.0,
    "input_weights": False,
    "input_bias": -10.0,
}


def native(seed: int = 0) -> Xlstm:
    """A layer whose every parameter is drawn, biases too."""
    layer = XlstmConfig(d_model=32, n_heads=2, head_dim=16, **NATIVE).build(0, 2)
    layer.init_parameters(torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.3, generator=generator)
        layer.gate.bias.copy_(torch.tensor([-0.5, 0.5, 2.0, 4.0]))
    return layer


def peer_of(layer: Xlstm, chunk_size: int):
    """The reference layer with the layer's weights."""
    modeling = pytest.importorskip("transformers.models.xlstm.modeling_xlstm")
    if not hasattr(modeling, "xLSTMLayer"):
        pytest.skip("transformers uses the installed xlstm library")
    c = layer.config
    config = modeling.xLSTMConfig(
        hidden_size=c.d_model, num_heads=c.n_heads, chunk_size=chunk_size, mode="train", autocast_kernel_dtype="float32"
    )
    peer = modeling.xLSTMLayer(config)
    keys = c.n_heads * c.key_dim
    q, k, v = layer.qkv.weight.split((keys, keys, c.d_model))
    input_gate, forget_gate = layer.gate.weight.chunk(2)
    input_bias, forget_bias = layer.gate.bias.chunk(2)
    peer.load_state_dict(
        {
            "q.weight": q,
            "k.weight": k,
            "v.weight": v,
            "ogate_preact.weight": layer.out_gate.weight,
            "igate_preact.weight": input_gate,
            "igate_preact.bias": input_bias,
            "fgate_preact.weight": forget_gate,
            "fgate_preact.bias": forget_bias,
            "multihead_norm.weight": layer.norm.weight.flatten(),
            "out_proj.weight": layer.out.weight,
        }
    )
    return peer


def test_equals_the_reference_layer():
    layer = native()
    peer = peer_of(layer, chunk_size=16)
    x = torch.randn(2, 48, 32, generator=torch.Generator().manual_seed(1))
    results = []
    for module in (peer, layer):
        leaf = x.clone().requires_grad_()
        y = module(leaf)[0]
        results.append([y, *torch.autograd.grad(y.square().sum(), leaf)])
    # float32, and the reference adds 1e-6 to each denominator
    assert_close(results[1], results[0], 1e-4, "y dx")


def test_parameters_of_both_forms():
    d, heads, width = 1024, 8, 128
    widths = {"d_model": d, "n_heads": heads, "head_dim": width}
    assert XlstmConfig(**widths, **NATIVE).n_parameters() == 4 * d * d + 2 * (d * heads + heads) + d
    assert XlstmConfig(**widths).n_parameters() == 4 * d * d + 2 * (d * heads + heads) + 8 * d + width


def test_state_and_cost_of_the_matched_form():
    d, heads, width = 1024, 8, 128
    layer = XlstmConfig(d_model=d, n_heads=heads, head_dim=width, conv_on="none").build(0, 1)
    assert layer.state_bytes(2048, torch.bfloat16) == 4 * heads * (width * width + width + 1)
    assert layer.cell_flops_per_token(2048) / 1e6 == pytest.approx(0.79, abs=0.006)


def test_gates_start_where_the_config_says():
    layer = XlstmConfig(d_model=32, n_heads=4, head_dim=8, **NATIVE).build(0, 1)
    layer.init_parameters(torch.Generator().manual_seed(0))
    assert layer.gate.bias.tolist() == pytest.approx([-10.0] * 4 + [3.0, 4.0, 5.0, 6.0])
    assert not layer.gate.weight[:4].any() and layer.gate.weight[4:].any()


def test_capped_gates_are_bounded():
    layer = native()
    layer.gate.bias.data.fill_(1e4)
    x = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(1))
    _, state = layer(x, layer.init_state(1, 8, torch.device("cpu"), torch.float32))
    assert state["stabiliser"].max() <= 15.0


def test_a_cap_that_cannot_work_is_named():
    with pytest.raises(ValueError, match="mixer.gate_cap=0"):
        XlstmConfig(d_model=32, n_heads=2, head_dim=16, gate_cap=0.0).check("mixer")
