"""A mixer survives what frameworks do to modules, and its config file is its dataclass."""

import copy
import dataclasses
import io

import pytest
import torch
from omegaconf import MISSING, OmegaConf

import mixers
from models.optim import decay_groups
from tests.contract.cases import NAMES, ROOT, close, config, inputs, language_model, mixer

pytestmark = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def nan_filled():
    """Every torch.empty is NaN, so that memory which nobody initialises cannot hide."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_own_init_survives_building(name, nan_filled):
    model = language_model(name)
    for parameter_name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), f"{parameter_name} was not initialised"
    layer = model.backbone.blocks[0].mixer
    own = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.fill_(float("nan"))
    own.init_parameters(torch.Generator().manual_seed(0))
    constant = copy.deepcopy(own)
    constant.init_parameters(torch.Generator().manual_seed(1))
    for key, parameter in own.named_parameters():
        drawn, again = parameter[~parameter.isnan()], constant.get_parameter(key)
        again = again[~again.isnan()]
        if drawn.numel() and torch.equal(drawn, again):  # not random: must be exactly this in the built model
            assert torch.equal(layer.get_parameter(key)[~parameter.isnan()], drawn), key
        elif drawn.numel() > 8:  # random: must look like the mixer's own draw, not the backbone's
            close(layer.get_parameter(key).std(), parameter.std(), 0.8)


def test_init_is_a_function_of_the_seed_and_shared_parts_are_equal_for_all_mixers(name):
    model, same, other = language_model(name), language_model(name), language_model(name, seed=1)
    reference = dict(language_model("transformer").named_parameters())
    differs = False
    for key, value in model.named_parameters():
        assert torch.equal(value, same.get_parameter(key)), key
        differs |= not torch.equal(value, other.get_parameter(key))
        if ".mixer." not in key and (key in reference or model.modes == ("parallel",)):
            assert torch.equal(value, reference[key]), key
    assert differs


def test_decay_groups_hold_every_parameter_once_and_respect_the_marks(name):
    model = language_model(name)
    decayed, free = decay_groups(model)
    assert decayed.keys() | free.keys() == dict(model.named_parameters()).keys() and not decayed.keys() & free.keys()
    for i, block in enumerate(model.backbone.blocks):
        for marked in block.mixer.no_decay():
            assert f"backbone.blocks.{i}.mixer.{marked}" in free
    for key in decayed:
        assert not any(word in key for word in ("bias", "norm", "embed")), key
    assert any(".mixer." in key for key in decayed)


def test_save_load_and_deepcopy(name):
    layer, x = mixer(name, torch.float32), inputs(2, 20, torch.float32)
    expected = layer(x)[0]
    assert torch.equal(copy.deepcopy(layer)(x)[0], expected)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh = mixer(name, torch.float32, seed=1)
    assert not torch.equal(fresh(x)[0], expected)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(fresh(x)[0], expected)


def test_compiles(name):
    layer, x = mixer(name, torch.float32), inputs(2, 70, torch.float32)
    want = layer(x)[0]
    wanted = torch.autograd.grad(want.square().sum(), list(layer.parameters()))
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager")
    got = compiled(x)[0]
    close(got, want, 1e-5)
    for g, w in zip(torch.autograd.grad(got.square().sum(), list(compiled.parameters())), wanted, strict=True):
        close(g, w, 1e-4)
    torch._dynamo.reset()


def test_recomputed_in_the_backward_pass(name):
    """Activation checkpointing: saved tensors are made a second time, and may be looked at once."""
    model, x = language_model(name), torch.randint(0, 11, (2, 70), generator=torch.Generator().manual_seed(0))
    gradients = []
    for recompute in (False, True):
        model.backbone.recompute = recompute
        loss = model.features(x).square().sum()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def test_yaml_lists_every_field_with_its_reason(name):
    path = ROOT / "conf" / "mixer" / f"{name}.yaml"
    plain = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    cls = mixers.config_class(plain["kind"])
    fields = {field.name: field for field in dataclasses.fields(cls)}
    assert set(plain) == set(fields)
    for key, value in plain.items():
        fixed = not (isinstance(value, str) and value.startswith("${"))
        if name == plain["kind"] and fixed and fields[key].default is not MISSING:
            factory = fields[key].default_factory
            default = fields[key].default if factory is dataclasses.MISSING else factory()
            assert value == default, f"{key}: the file of the plain name holds the dataclass's defaults"
    text = path.read_text().splitlines()
    assert text[0].startswith("# ")
    own = [line for line in text if line and not line.startswith(("#", "kind:", "d_model:", "n_heads:", "head_dim:"))]
    assert all("#" in line for line in own), "each field says why"


def test_backbone_builds_on_the_meta_device(name):
    with torch.device("meta"):
        model = language_model(name)
    assert model.counts(128)["params"] == language_model(name).counts(128)["params"]


def test_initialise_touches_every_parameter(name):
    model = language_model(name)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    with torch.no_grad():
        for value in model.parameters():
            value.fill_(123.0)
    model.initialise(0)
    for key, value in model.named_parameters():
        assert torch.equal(value, before[key]), key
    assert config(name).mixer.kind
