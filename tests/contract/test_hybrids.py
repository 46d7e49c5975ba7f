"""A hybrid is its parts: each layer is a layer of a part, and the model around them stays one model."""

import pytest
import torch
import yaml

from mixers.base import Context
from models.lm import LanguageModel
from tests.contract.cases import HYBRIDS, ROOT, TINY, close, config, language_model

pytestmark = pytest.mark.parametrize("name", HYBRIDS)


def tokens(batch=2, steps=70):
    return torch.randint(0, 11, (batch, steps), generator=torch.Generator().manual_seed(0))


def model(name):
    return language_model(name).double().eval()


def test_layers_are_those_of_models_of_the_parts_alone(name):
    """Equal weights too: what a layer starts from depends on its place and its mixer, not on its neighbours."""
    checked = config(name)
    hybrid = model(name)
    x_BTD = hybrid.backbone.embed(tokens()) * checked.model.d_model**0.5
    seen = set()
    for i, block in enumerate(hybrid.backbone.layers):
        part = checked.mixer.for_layer(i)
        seen.add(part.kind)
        alone = LanguageModel(checked.model, part, vocab_size=11).double().eval().backbone.layers[i]
        assert type(block.mixer) is type(alone.mixer)
        for key, value in alone.state_dict().items():
            assert torch.equal(value, block.state_dict()[key]), key
        x_BTD = alone(x_BTD, None, Context())[0]
    assert len(seen) == len(set(checked.mixer.pattern)), "this test must see every part"
    close(hybrid.features(tokens()), hybrid.backbone.final_norm(x_BTD), 1e-12)


def test_whole_equals_split_equals_steps(name):
    hybrid, x = model(name), tokens()
    whole = hybrid.logits(hybrid.features(x))
    state, parts = hybrid.init_state(2, 70), []
    for a, b in ((0, 37), (37, 66), *((t, t + 1) for t in range(66, 70))):
        logits, state = hybrid.prefill(x[:, a:b], state)
        parts.append(logits)
    close(torch.cat(parts, dim=1), whole, 1e-10)


def test_packed_documents_equal_the_documents_apart(name):
    hybrid, x = model(name), tokens()
    segments = (torch.arange(70) >= 30).long().expand(2, -1)
    together = hybrid.features(x, segments)
    close(together, torch.cat((hybrid.features(x[:, :30]), hybrid.features(x[:, 30:])), dim=1), 1e-10)


def test_parameters_are_those_of_the_parts(name):
    counts, mixer = model(name).counts(64), config(name).mixer
    assert counts["params_mixer"] == sum(mixer.for_layer(i).n_parameters() for i in range(2))


def test_yaml_is_data(name):
    plain = yaml.safe_load((ROOT / "conf" / "mixer" / f"{name}.yaml").read_text())
    assert plain["kind"] == "hybrid"
    assert any(
        entry.startswith("/mixer@parts.") for group in plain["defaults"] if isinstance(group, dict) for entry in group
    )
    assert "model.n_layers=2" in TINY  # both parts of each pattern are seen above
