"""The backbone's switches: each recipe can be stated, and says what it does."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from data.dataset import Batch
from models.lm import LanguageModel
from tests.contract.cases import config


def model_with(**changes):
    checked = config("transformer")
    changed = dataclasses.replace(checked.model, **changes)
    changed.check("model")
    return LanguageModel(changed, checked.mixer, vocab_size=11)


def loss_of(model, train=False):
    x = torch.randint(0, 11, (3, 20), generator=torch.Generator().manual_seed(0))
    model.train(train)
    return model.loss(Batch(x[:, :-1], x[:, 1:], None, 3 * 19, None))[0]


SWITCHES = [
    {"norm": "rms_plain"},
    {"norm": "layer"},
    {"order": "mlp_first"},
    {"final_norm": False},
    {"embed_norm": True, "embed_scale": False},
    {"embed_scale": False},
    {"tied": False},
    {"logit_cap": None},
    {"logit_cap": 0.5},
    {"residual_scalars": True, "init": "nanochat", "tied": False},
    {"mlp_bias": True, "init": "kaiming", "mlp": "silu"},
    *({"mlp": kind} for kind in ("geglu", "silu", "gelu", "relu2", "none")),
    *({"init": kind} for kind in ("normal", "kaiming")),
]


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_every_switch_changes_the_model_and_it_still_learns(switch):
    ends = []
    for model in (model_with(**switch), model_with()):
        start = loss_of(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        for _ in range(20):
            loss = loss_of(model, train=True)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ends.append(loss_of(model))
        assert ends[-1] < start - 0.05
    assert not torch.equal(*ends)


def test_block_is_pre_norm_mixer_then_mlp():
    model = model_with().double()
    block = model.backbone.blocks[0]
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    from mixers.base import NO_CONTEXT

    h = x + block.mixer(block.mixer_norm(x))[0]
    gate, value = block.mlp.up(block.mlp_norm(h)).chunk(2, -1)
    torch.testing.assert_close(block(x, None, NO_CONTEXT)[0], h + block.mlp.down(F.silu(gate) * value))


def test_logits_are_capped():
    model = model_with(logit_cap=0.5)
    assert model.logits(1e3 * torch.randn(2, 3, 16)).abs().max() <= 0.5


def test_dropout_is_a_function_of_the_generator_and_off_in_evaluation():
    model = model_with(dropout=0.5)
    torch.manual_seed(0)
    one = loss_of(model, train=True)
    torch.manual_seed(0)
    assert torch.equal(one, loss_of(model, train=True))
    assert not torch.equal(one, loss_of(model, train=True))
    assert torch.equal(loss_of(model), loss_of(model_with()))


def test_fan_in_init_has_the_variances_of_the_paper():
    checked = config("transformer")
    wide = dataclasses.replace(checked.model, d_model=256, n_layers=4, n_heads=4, head_dim=64, mlp_width=768)
    mixer = dataclasses.replace(checked.mixer, d_model=256, n_heads=4, head_dim=64)
    model = LanguageModel(wide, mixer, vocab_size=500)
    block = model.backbone.blocks[2]
    expect = {
        block.mixer.qkv.weight: 1 / 256,
        block.mixer.out.weight: 1 / 256 * 2 / 4,
        block.mlp.up.weight: 1 / 256,
        block.mlp.down.weight: 1 / 768 * 2 / 4,
        model.backbone.embed.weight: 1 / 256,
    }
    for weight, variance in expect.items():
        assert float(weight.detach().var()) == pytest.approx(variance, rel=0.05)
    x = torch.randint(0, 500, (2, 50))
    assert float((model.backbone.embed(x) * 16).detach().var()) == pytest.approx(1, rel=0.1)


def test_activation_checkpointing_gives_the_same_gradients():
    plain, saving = model_with(), model_with()
    saving.backbone.recompute = True
    wanted = torch.autograd.grad(loss_of(plain, train=True), list(plain.parameters()))
    got = torch.autograd.grad(loss_of(saving, train=True), list(saving.parameters()))
    torch.testing.assert_close(got, wanted)
