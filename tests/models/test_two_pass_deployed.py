"""The deployed recurrence: in bf16, without copies of its caches, over packed documents, and exact where quality is measured."""

import pytest
import torch

from tests.contract.cases import close
from tests.models.test_two_pass import VARIANTS, batch_of, model_of, tokens, variant


@pytest.mark.parametrize("name", VARIANTS)
def test_activations_in_bf16(name):
    model, batch = variant(name, torch.float32), batch_of(tokens())
    with torch.no_grad():
        wanted = {mode: model.grade(batch, mode).nats_BT for mode in model.modes}
    with torch.autocast("cpu", torch.bfloat16):
        model.train().loss(batch)[0].backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        model.eval()
        with torch.no_grad():
            for mode in model.modes:
                close(model.grade(batch, mode).nats_BT, wanted[mode], 0.1)
            _, state = model.prefill(batch.inputs_BT[:, :20], model.init_state(2, 23))
            _, state = model.step(batch.inputs_BT[:, 20], state)
    kept = [t for layer in state.layers for t in layer.values() if t.is_floating_point()] + [state.memory_BD]
    assert {t.dtype for t in kept} == {torch.bfloat16}
    if "L" not in model.mixer.p_pattern:
        assert sum(t.nbytes for t in kept) == 2 * model.counts(21, torch.bfloat16)["state_bytes"], "of two sequences"


def test_caches_are_not_copied_where_no_gradient_needs_them(monkeypatch):
    model, x, donated = variant("maglev"), tokens(), []
    decode = model.decode

    def watched(*arguments, context, **named):
        donated.append(context.donate_state)
        return decode(*arguments, context=context, **named)

    monkeypatch.setattr(model, "decode", watched)
    kept = model.deployed_features(x)
    assert not any(donated)
    kept.sum().backward()
    donated.clear()
    with torch.no_grad():
        assert torch.equal(model.deployed_features(x), kept)
    assert all(donated) and len(donated) == 23


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_reading_in_pieces_keeps_documents_apart(name):
    """The state that comes in is of the first column's document, the one that goes out of the last column's."""
    model, x = variant(name), tokens()
    segments = torch.zeros(2, 23, dtype=torch.int64)
    segments[0, 8:], segments[1, 3:], segments[1, 15:] = 1, 1, 2
    wanted, state, parts = model.deployed_features(x, segments), model.init_state(2, 23), []
    for a, b in ((0, 7), (7, 10), (10, 11), (11, 23)):
        features, state = model.read(x[:, a:b], state, segments[:, a:b])
        parts.append(features)
    close(torch.cat(parts, dim=1), wanted, 1e-12)


@torch.no_grad()
@pytest.mark.parametrize("more", [[], ["mixer.sharing=separate"]])
def test_what_is_measured_is_read_exactly_whatever_prompts_are(more):
    exact = model_of("mixer=maglev", *more).eval()
    assisted = model_of("mixer=maglev", *more, "mixer.prefill=q_assisted").eval()
    x, start = tokens(), exact.init_state(2, 23)
    close(assisted.read(x, start)[0], exact.deployed_features(x), 1e-12)
    close(assisted.grade(batch_of(x)).nats_BT, exact.grade(batch_of(x)).nats_BT, 1e-12)
    at_once = assisted.read(x, start, assisted=True)[0]
    close(at_once, exact.features(x), 1e-12)
    assert torch.equal(assisted.prefill(x, start)[0], assisted.logits(at_once)), "as generation reads its prompt"
    assert not torch.allclose(at_once, exact.deployed_features(x))
    segments = (torch.arange(23) >= 9).long().expand(2, -1)
    close(assisted.read(x, start, segments, assisted=True)[0], exact.features(x, segments), 1e-12)
