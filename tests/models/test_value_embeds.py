"""Value embeddings: a table of tokens, gated and added to the values of attention (nanochat), in every kind of model."""

import dataclasses
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mixers.base import Context
from models.lm import build_model
from models.optim import muon_groups
from models.two_pass import TwoPassModel
from runs.validate import ConfigError
from tests.contract.cases import close, inputs, mixer
from tests.contract.test_counts import FUSED
from tests.models.test_two_pass import batch_of, checked, tokens

ON = "model.value_embeds=all"
MODELS = {
    "transformer": ["mixer=transformer"],
    "swa": ["mixer=swa", "mixer.window=5"],
    "slsl": ["mixer=slsl", "mixer.parts.S.window=5", "model.qk_norm=true"],
    "maglev": ["mixer=maglev", "mixer.window=5"],
    "q assisted": ["mixer=maglev", "mixer.window=5", "mixer.prefill=q_assisted", "mixer.prefill_passes=11"],
    "separate": ["mixer=maglev", "mixer.window=5", "mixer.sharing=separate"],
    "lrt": ["mixer=lrt", "mixer.window=5", "mixer.subsets=11"],
}


def model_of(name, *overrides, noise=0.1):
    """In float64, its weights moved away from special values: a gate of zeros is exactly 1."""
    model = build_model(checked(*MODELS[name], *overrides, small=()), 11).double().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def test_attention_by_hand():
    """One layer against a loop over queries; the gate reads the first 32 channels of the layer's normed input."""
    model = model_of("transformer", ON, "model.d_model=48")
    block, table, x = model.backbone.blocks[1], model.backbone.value_embeds["1"].weight, tokens(1, 7)
    stream = torch.randn(1, 7, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    h = block.mixer_norm(stream)[0]
    q, k, v = (part.view(7, 2, 24) for part in (h @ block.mixer.qkv.weight.T).chunk(3, -1))
    gate = 2 / (1 + torch.exp(-h[:, :32] @ block.value_gate.weight.T))
    assert block.value_gate.weight.shape == (2, 32)
    v = v + torch.stack([gate[t, :, None] * table[x[0, t]].view(2, 24) for t in range(7)])
    angle = torch.arange(7)[:, None] * 10_000.0 ** (-torch.arange(12, dtype=torch.float64) / 12)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def turned(y):
        a, b = y.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    q, k = turned(q), turned(k)
    heads = torch.zeros(7, 2, 24, dtype=torch.float64)
    for t in range(7):
        for head in range(2):
            weights = torch.softmax(k[: t + 1, head] @ q[t, head] / 24**0.5, 0)
            heads[t, head] = weights @ v[: t + 1, head]
    wanted = stream[0] + heads.flatten(1) @ block.mixer.out.weight.T
    wanted = wanted + block.mlp(block.mlp_norm(wanted))
    got = block(stream, None, Context(tokens=x), model.backbone.value_embeds["1"])[0]
    close(got[0], wanted, 1e-12)


@pytest.mark.parametrize("name", ["swa", "maglev", "lrt"])
def test_it_is_added_to_the_projected_value_before_anything_else(name):
    """Before a memory is mixed in, for one: as if the projection itself had put it out."""
    layer = mixer(name)
    x, value = inputs(2, 9), inputs(2, 9, seed=1).unflatten(-1, (2, 8))
    got = layer(x, None, Context(value_BTHV=value))[0]
    layer.qkv.register_forward_hook(lambda _, __, out: out + torch.cat((0 * x, 0 * x, value.flatten(2)), -1))
    close(got, layer(x)[0], 1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_steps_equal_the_whole(name):
    """For two-pass models as they are deployed."""
    model, x = model_of(name, ON), tokens(steps=11)
    whole = model.logits(model.deployed_features(x))
    start = model.init_state(2, 11)
    close(model.prefill(x, start)[0], whole, 1e-10)
    one, state = model.prefill(x[:, :7], start)
    two, state = model.prefill(x[:, 7:8], state)
    three = []
    for t in range(8, 11):
        logits, state = model.step(x[:, t], state)
        three.append(logits)
    close(one, whole[:, :7], 1e-10)  # read at once it takes as many passes as tokens to be exact, and has 11
    close(torch.cat((two, torch.stack(three, 1)), 1), whole[:, 7:], 1e-10)
    without = model_of(name)
    assert not torch.allclose(without.deployed_features(x), model.deployed_features(x), rtol=1e-2)


def test_every_subset_reads_the_embeddings_of_its_own_tokens():
    """Refined one position at a time, each on the newest memory and keys, LRT's second pass is the recurrence."""
    model, x = model_of("lrt", ON), tokens(steps=11)
    assert isinstance(model, TwoPassModel)
    close(model.features(x), model.deployed_features(x), 1e-10)


@pytest.mark.parametrize("name", ["maglev", "separate", "lrt", "slsl"])
def test_training_reaches_all_tables_and_gates_and_may_recompute(name):
    # Pass 1 of plain maglev is the same with and without the gradient, so both passes count.
    model, batch = model_of(name, ON, "mixer.subsets=2" if name == "lrt" else "model.dropout=0.0"), batch_of(tokens())
    gradients = []
    for recompute in (False, True):
        for stack in (model.backbone, getattr(model, "prefiller", None)):
            if stack is not None:
                stack.recompute = recompute
        model.train().zero_grad()
        model.loss(batch)[0].backward()
        gradients.append({key: p.grad.clone() for key, p in model.named_parameters()})
    for key, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][key]), key
        if "value" in key:
            assert gradient.abs().max() > 1e-9, key
    tables = [key for key in gradients[0] if "value_embeds" in key]
    assert tables == ["backbone.value_embeds.0.weight", "backbone.value_embeds.1.weight"]  # shared by both passes
    assert sum("value_gate" in key for key in gradients[0]) == (4 if name == "separate" else 2)


@pytest.mark.parametrize(
    ("layers", "which", "wanted"),
    [(4, "none", []), (4, "alternate", [1, 3]), (5, "alternate", [0, 2, 4]), (3, "all", [0, 1, 2])],
)
def test_layers_that_have_one(layers, which, wanted):
    model = model_of("swa", f"model.n_layers={layers}", f"model.value_embeds={which}")
    assert [i for i, block in enumerate(model.backbone.layers) if block.value_gate is not None] == wanted
    tables = model.backbone.value_embeds
    assert [int(key) for key in ({} if tables is None else tables)] == wanted


def test_start_is_that_of_the_plain_model_with_tables_like_values_beside_it():
    plain = dict(build_model(checked("mixer=swa", small=()), 500).named_parameters())
    model = build_model(checked("mixer=swa", ON, "model.init=nanochat", small=()), 500)
    for key, value in build_model(checked("mixer=swa", ON, small=()), 500).named_parameters():
        assert "value" in key or torch.equal(value, plain[key]), key
    for i in ("0", "1"):
        table = model.backbone.value_embeds[i].weight.detach()
        assert table.abs().max() <= math.sqrt(3) / 4 and float(table.std()) == pytest.approx(1 / 4, rel=0.03)
        assert not model.backbone.layers[int(i)].value_gate.weight.any()
    assert not torch.equal(model.backbone.value_embeds["0"].weight, model.backbone.value_embeds["1"].weight)


@pytest.mark.parametrize("name", ["swa", "maglev", "separate"])
def test_counts(name):
    wide = ("model.d_model=128", "model.mlp_width=256", ON)
    config = checked(*MODELS[name], *wide, "mixer.window=64", small=())
    model, plain = (
        build_model(config, 64),
        build_model(checked(*MODELS[name], *wide[:2], "mixer.window=64", small=()), 64),
    )
    counts, before = model.counts(128), plain.counts(128)
    gates, tables = 2 * 2 * 32, 2 * 64 * 128
    assert counts["params"] - before["params"] == gates + tables
    assert counts["params_non_embedding"] - before["params_non_embedding"] == gates
    assert counts["params_training_only"] - before["params_training_only"] == (gates if name == "separate" else 0)
    for same in ("params_scaling", "params_mixer", "state_bytes"):
        assert counts[same] == before[same]
    assert counts["flops_per_token"] - before["flops_per_token"] == 2 * gates + 2 * 2 * 128
    passes = 1 if name == "swa" else 2
    assert counts["train_flops_per_token"] - before["train_flops_per_token"] == 3 * passes * (2 * gates + 2 * 2 * 128)
    x = torch.randint(0, 64, (1, 128), generator=torch.Generator().manual_seed(0))

    def matmuls(model):
        with FlopCounterMode(display=False, custom_mapping=FUSED) as counter:
            model.features(x)
        return counter.get_total_flops() / 128

    assert matmuls(model) - matmuls(plain) == passes * 2 * gates
    assert sum(p.numel() for p in muon_groups(model)["value"].values()) == tables


def test_under_autocast_values_and_the_cache_are_bf16():
    model = model_of("maglev", ON, noise=0.0).float()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        _, state = model.prefill(tokens(), model.init_state(2, 23))
        loss = model.loss(batch_of(tokens()))[0]
        seen = []
        model.backbone.layers[0].mixer.register_forward_pre_hook(
            lambda _, given: seen.append(given[2].value_BTHV.dtype)
        )
        model.features(tokens())
    assert {state.layers[0][key].dtype for key in ("k", "v")} == {torch.bfloat16} and loss.isfinite()
    assert set(seen) == {torch.bfloat16}


def test_a_pass_without_its_tokens_is_an_error():
    model, x = model_of("maglev", ON), tokens()
    context = dataclasses.replace(model.whole(x), tokens=None)
    with pytest.raises(AssertionError):
        model.prefill_memory(model.backbone.embedded(x), context)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mixer=gla"], "model.value_embeds=all: is added to the values of attention, which mixer gla does not have"),
        (["mixer=swa_gated_deltanet"], "mixer hybrid does not have in every layer; set model.value_embeds=none"),
        (["mixer=swa", "data=regression"], "model.value_embeds=all: is looked up by tokens"),
        (["mixer=swa", "model.value_embeds=some"], "model.value_embeds=some: must be one of none, alternate, all"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(overrides, message):
    with pytest.raises(ConfigError) as error:
        checked(ON, *overrides, small=())
    assert message in str(error.value) and "\n" not in str(error.value)
