"""What replaces or aids the two passes in training: the unrolled recurrence, and the aids that are off by default."""

import pytest
import torch
import torch.nn.functional as F

from mixers.base import Context
from models.two_pass import RECURRENT, TwoPassState
from tests.contract.cases import close
from tests.models.test_two_pass import batch_of, decoded, memories, model_of, tokens, variant

# ---- unrolled ----------------------------------------------------------------------------------------------------------


def test_bptt_is_the_gradient_of_the_recurrence():
    model, x, y = variant("bptt"), tokens(), tokens(seed=1)
    parameters = list(model.parameters())
    loss, terms = model.loss(batch_of(x, y))
    got = torch.autograd.grad(loss, parameters)
    state, parts = model.init_state(2, 23), []
    for t in range(23):
        logits, state = model.step(x[:, t], state)
        parts.append(logits)
    wanted = F.cross_entropy(torch.stack(parts, dim=1).flatten(0, 1), y.flatten())
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(got, torch.autograd.grad(wanted, parameters), rtol=1e-9, atol=1e-12)
    assert set(terms) == {"cross_entropy"} and model.modes == (RECURRENT,)


def test_truncated_bptt_has_the_same_loss_and_another_gradient():
    whole, cut = (
        model_of("mixer=maglev", "mixer.training=bptt"),
        model_of("mixer=maglev", "mixer.training=bptt", "mixer.bptt_len=4"),
    )
    losses = [model.loss(batch_of(tokens()))[0] for model in (whole, cut)]
    torch.testing.assert_close(*losses)
    a, b = (
        torch.autograd.grad(loss, model.projection.value.weight)[0]
        for loss, model in zip(losses, (whole, cut), strict=True)
    )
    assert not torch.allclose(a, b)
    single = model_of("mixer=maglev", "mixer.training=bptt", "mixer.bptt_len=23")
    torch.testing.assert_close(
        a, torch.autograd.grad(single.loss(batch_of(tokens()))[0], single.projection.value.weight)[0]
    )


def test_truncated_bptt_is_the_gradient_of_pieces_that_begin_from_detached_states():
    model, x, y = model_of("mixer=maglev", "mixer.training=bptt", "mixer.bptt_len=4"), tokens(), tokens(seed=1)
    parameters = list(model.parameters())
    got = torch.autograd.grad(model.loss(batch_of(x, y))[0], parameters)
    state, losses = model.init_state(2, 23), []
    for begin in range(0, 23, 4):
        part = slice(begin, begin + 4)
        logits, state = model.prefill(x[:, part], state)
        losses.append(F.cross_entropy(logits.flatten(0, 1), y[:, part].flatten(), reduction="sum"))
        layers = [{name: value.detach() for name, value in layer.items()} for layer in state.layers]
        state = TwoPassState(layers, state.length, state.memory_BD.detach())
    wanted = torch.autograd.grad(sum(losses) / y.numel(), parameters)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


# ---- training aids -----------------------------------------------------------------------------------------------------


def test_lambda_moves_in_a_straight_line():
    model = model_of("mixer=maglev", "mixer.lam=0.5", "mixer.lam_start=0.1", "mixer.lam_steps=4")
    assert [model.strength(step) for step in (0, 1, 2, 4, 9)] == pytest.approx([0.1, 0.2, 0.3, 0.5, 0.5])
    losses = [float(model.loss(batch_of(tokens()), step)[0].detach()) for step in (0, 4)]
    apart = float(model.loss(batch_of(tokens()))[1]["distance"])
    assert losses[1] - losses[0] == pytest.approx(0.4 * apart, rel=1e-6)


def test_own_memory_is_what_the_deployed_model_would_come_nearer_to():
    x = tokens()
    model = model_of("mixer=maglev", "mixer.own_memory_prob=1").train()
    _, second = model.both_passes(x)
    with torch.no_grad():
        wanted = decoded(model, x, model.shift(second.memory_BTD))
    nats = F.cross_entropy(model.logits(wanted).flatten(0, 1), tokens(seed=1).flatten())
    torch.testing.assert_close(model.loss(batch_of(x))[1]["cross_entropy"], nats)
    model.eval()  # no aid where quality is measured
    nats = F.cross_entropy(model.logits(second.features_BTD).flatten(0, 1), tokens(seed=1).flatten())
    torch.testing.assert_close(model.loss(batch_of(x))[1]["cross_entropy"], nats)


def test_own_memory_is_drawn_position_by_position(monkeypatch):
    model, x = model_of("mixer=maglev", "mixer.own_memory_prob=0.3").train(), tokens(40)
    received, made, decode = [], [], model.decode

    def watched(embedded_BTD, before_BTD, *arguments, **named):
        received.append(before_BTD)
        made.append(decode(embedded_BTD, before_BTD, *arguments, **named))
        return made[-1]

    monkeypatch.setattr(model, "decode", watched)
    torch.manual_seed(0)
    model.loss(batch_of(x))
    theirs, given, own = received[0][:, 1:], received[1][:, 1:], made[0].memory_BTD[:, :-1]
    from_own, from_theirs = ((given == one).all(-1) for one in (own, theirs))
    assert (from_own ^ from_theirs).all(), "one of the two as a whole"
    shares = from_own.double().mean(1)
    assert from_own.double().mean() == pytest.approx(0.3, abs=0.05)
    assert ((shares > 0) & (shares < 1)).all() and (from_own != from_own[:1]).any(), "neither by row nor by column"


def test_extra_passes_converge_to_the_recurrence():
    """Position t is exact after t + 1 passes, from whatever memory the first one starts."""
    model = model_of("mixer=maglev", "mixer.extra_passes=8").eval()
    x = tokens(steps=9)
    wanted = F.cross_entropy(model.logits(model.deployed_features(x)).flatten(0, 1), tokens(steps=9, seed=1).flatten())
    torch.testing.assert_close(model.loss(batch_of(x))[1]["cross_entropy"], wanted)


def test_memory_residual_keeps_a_share_of_the_old_memory():
    model = model_of("mixer=maglev", "mixer.memory_residual=0.7").eval()
    before = memories()
    context = Context(positions=torch.arange(23))
    kept = model.decode(model.backbone.embedded(tokens()), before, context=context)
    fresh = kept.features_BTD / model.backbone.final_norm.weight
    close(kept.memory_BTD, 0.7 * before + 0.3 * fresh, 1e-6)  # sigmoid(logit(0.7)) is 0.7 in float32
