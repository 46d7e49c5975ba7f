"""Where a number stopped being finite is named: the layer, the gradient or the weights."""

from types import SimpleNamespace

import torch
from lightning.pytorch.plugins.precision import Precision

from data.dataset import Batch
from models.guard import locate
from tests.contract.cases import language_model


def located(spoil):
    model = language_model("swa")
    x = torch.randint(0, 11, (2, 12))
    batch = Batch(x, x, None, 24, None)
    spoil(model)
    model.loss(batch)[0].backward()
    module = SimpleNamespace(
        model=model,
        global_step=0,
        reseed=lambda micro: None,
        trainer=SimpleNamespace(precision_plugin=Precision()),
    )
    return locate(module, batch)


def nan(*_):
    return torch.full((2, 12, 16), float("nan"))


def test_first_layer_in_order_of_execution():
    assert located(lambda m: m.backbone.blocks[1].mlp.down.register_forward_hook(nan)).endswith(
        "first layer whose output is not finite is backbone.blocks.1.mlp.down"
    )
    both = located(
        lambda m: [
            m.backbone.blocks[i].mixer_norm.register_forward_hook(nan) for i in (1, 0)
        ]  # what comes first counts
    )
    assert both.endswith("backbone.blocks.0.mixer_norm")


def test_gradient_in_order_of_the_backward_pass():
    def spoil(model):
        model.backbone.blocks[0].mlp.down.weight.register_hook(lambda g: g * float("inf"))
        model.backbone.blocks[1].mlp.down.weight.register_hook(lambda g: g * float("inf"))

    assert located(spoil).endswith("the gradient is not, first at backbone.blocks.1.mlp.down.weight")


def test_weights():
    def spoil(model):
        model.backbone.blocks[1].mixer.out.weight.data[0, 0] = float("nan")

    assert located(spoil) == "the weights of backbone.blocks.1.mixer.out.weight are not finite"
