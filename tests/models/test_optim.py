"""Decay groups, schedules, and the count of loss spikes."""

import math

import pytest
import torch

from models.config import Optimizer, Schedule
from models.guard import Spikes
from models.optim import decay_groups, learning_rate, make_optimizer
from tests.contract.cases import language_model


def rates(steps=100, **settings):
    schedule = Schedule(**settings)
    return [learning_rate(schedule, step, steps) for step in range(steps)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "trapezoid"])
def test_schedule_warms_up_reaches_its_peak_once_and_ends_at_its_final_share(kind):
    r = rates(kind=kind, warmup_steps=10, final=0.1, decay_fraction=0.4)
    assert r[0] > 0 and all(a < b for a, b in zip(r[:10], r[1:11], strict=True))
    assert r[10] == pytest.approx(1) and max(r) <= 1 and r[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in zip(r[10:], r[11:], strict=False))


def test_shapes_of_the_decay():
    assert rates(kind="linear", warmup_steps=0, final=0.0)[33] == pytest.approx(1 - 33 / 99)
    half = rates(steps=101, kind="cosine", warmup_steps=0, final=0.2)[50]
    assert half == pytest.approx(0.2 + 0.8 * 0.5)
    quarter = rates(steps=101, kind="cosine", warmup_steps=0, final=0.0)[25]
    assert quarter == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    r = rates(steps=111, kind="trapezoid", warmup_steps=10, final=0.0, decay_fraction=0.4)
    assert r[10:71] == [1.0] * 61 and r[90] == pytest.approx(0.5)


def test_one_step_schedule():
    assert rates(steps=1, kind="cosine", warmup_steps=0, final=0.1) == [1.0]


def test_optimizer_decays_matrices_and_nothing_else():
    model = language_model("gated_deltanet_native")
    optimizer = make_optimizer(model, Optimizer(lr=1e-2, weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        vector = parameter.ndim < 2 or "embed" in name
        wanted = before[name] if vector else before[name] * (1 - 1e-2 * 0.5)
        torch.testing.assert_close(parameter.detach(), wanted)


def test_marks_of_a_mixer_are_respected_and_must_name_parameters():
    model = language_model("swa")
    mixer = model.backbone.layers[1].mixer
    mixer.no_decay = lambda: {"out.weight"}
    decayed, free = decay_groups(model)
    assert "backbone.blocks.1.mixer.out.weight" in free and "backbone.blocks.0.mixer.out.weight" in decayed
    mixer.no_decay = lambda: {"nothing"}
    with pytest.raises(KeyError, match="nothing"):
        decay_groups(model)


def test_spikes_are_counted_and_survive_a_checkpoint():
    generator = torch.Generator().manual_seed(0)
    losses = 3 + 0.1 * torch.randn(400, generator=generator)
    whole, first = Spikes(), Spikes()
    losses[[200, 201, 300]] += 5
    for loss in losses:
        whole.add(loss)
    assert int(whole.count) == 3
    for loss in losses[:201]:
        first.add(loss)
    second = Spikes()
    second.load_state_dict(first.state_dict())
    for loss in losses[201:]:
        second.add(loss)
    assert torch.equal(second.mean, whole.mean) and torch.equal(second.count, whole.count)


def test_a_falling_loss_is_no_spike():
    spikes = Spikes()
    for step in range(500):
        spikes.add(torch.tensor(6 * math.exp(-step / 50) + 2))
    assert int(spikes.count) == 0
