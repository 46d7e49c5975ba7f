"""Models of tasks: real numbers in and out, all positions read from the last one, several right answers."""

import pytest
import torch
import torch.nn.functional as F

from data.dataset import Batch
from models.lm import build_model
from models.optim import decay_groups
from tests.contract.cases import NAMES, config

FIELDS = dict.fromkeys(Batch._fields)


def model_of(name, **ends):
    return build_model(config(name), 11, **ends).double()


def numbers(batch=2, steps=12, width=3):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, steps, width, generator=generator, dtype=torch.float64)
    y = torch.randn(batch, steps, generator=generator, dtype=torch.float64)
    y[:, ::2] = float("nan")
    return Batch(**FIELDS | {"inputs_BT": x, "targets_BT": y, "n_targets": batch * steps // 2})


def tokens(batch=2, steps=12):
    x = torch.randint(0, 11, (batch, steps), generator=torch.Generator().manual_seed(0))
    y = torch.randint(0, 11, (batch, steps), generator=torch.Generator().manual_seed(1))
    return Batch(**FIELDS | {"inputs_BT": x, "targets_BT": y, "n_targets": batch * steps})


@pytest.mark.parametrize("name", NAMES)
def test_real_numbers_are_fitted_by_their_squared_error(name):
    model, batch = model_of(name, input_width=3), numbers()
    features = model.features(batch.inputs_BT)
    wanted = (features @ model.head.weight[0] - batch.targets_BT)[:, 1::2].square().mean()
    loss, terms = model.loss(batch)
    torch.testing.assert_close(terms["cross_entropy"], wanted.detach())
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        graded = model.grade(batch)
        deployed = model.deployed_features(batch.inputs_BT) @ model.head.weight[0] - batch.targets_BT
    torch.testing.assert_close(graded.nats_BT[:, 1::2], deployed[:, 1::2].square())
    assert (graded.nats_BT[:, ::2] == 0).all() and not graded.correct_BT.any()


def test_stream_of_real_numbers_starts_with_unit_variance_for_every_mixer_alike():
    models = [build_model(config(name), 1, input_width=9) for name in ("transformer", "mesa", "maglev")]
    x = torch.randn(64, 64, 9, generator=torch.Generator().manual_seed(0))
    assert float(models[0].backbone.embedded(x).var().detach()) == pytest.approx(1, rel=0.4)  # 144 weights: 12 % noise
    for other in models[1:]:
        assert torch.equal(other.backbone.embed.weight, models[0].backbone.embed.weight)
        assert torch.equal(other.head.weight, models[0].head.weight)
    counts = models[0].counts(64)
    assert counts["params"] - counts["params_non_embedding"] == 9 * 16 + 16


@pytest.mark.parametrize("name", ["transformer", "gated_deltanet", "maglev", "lrt"])
def test_readout_from_the_last_position_sees_no_other(name):
    model, batch = model_of(name, readout_len=12).eval(), tokens()
    features = torch.randn(2, 12, 16, dtype=torch.float64)
    other = torch.randn(2, 12, 16, dtype=torch.float64)
    other[:, -1] = features[:, -1]
    torch.testing.assert_close(model.readout(features), model.readout(other))
    decoded = model.readout(features)
    assert not torch.allclose(decoded[:, 0], decoded[:, 1]), "which position is wanted must matter"
    # Every position depends on the last token, and on the first one.
    nats = model.grade(batch).nats_BT
    changed = batch.inputs_BT.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 11
    assert (model.grade(batch._replace(inputs_BT=changed)).nats_BT != nats).all()
    loss, terms = model.loss(batch)
    wanted = F.cross_entropy(
        model.logits(model.readout(model.features(batch.inputs_BT))).flatten(0, 1), batch.targets_BT.flatten()
    )
    torch.testing.assert_close(terms["cross_entropy"], wanted.detach())
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    decayed, free = decay_groups(model)
    assert decayed.keys() | free.keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("name", ["transformer", "maglev"])
def test_any_of_several_right_answers_counts(name, monkeypatch):
    monkeypatch.setattr("models.two_pass.BLOCK", 5)
    model, batch = model_of(name).eval(), tokens()
    with torch.no_grad():
        likeliest = model.logits(model.deployed_features(batch.inputs_BT)).argmax(-1)
        right = torch.rand(2, 12, generator=torch.Generator().manual_seed(3)) < 0.5
        answers = torch.where(right, (1 << likeliest) | 1 << 9, 1 << ((likeliest + 1) % 11))
        graded = model.grade(batch._replace(answers_BT=answers))
    assert torch.equal(graded.correct_BT, right | (likeliest == 9) & right)


def test_maglevs_distance_can_be_taken_where_nothing_is_graded():
    """With one graded position of twelve, the paper's mean would leave the memories of eleven alone."""
    from tests.models.test_two_pass import model_of as two_pass

    batch = tokens()
    batch.targets_BT[:, :-1] = -100
    batch = batch._replace(n_targets=2)
    at_targets, everywhere = (two_pass("mixer=maglev", f"mixer.consistency_at={where}") for where in ("targets", "all"))
    first, second = everywhere.both_passes(batch.inputs_BT)
    apart = (second.memory_BTD - first.memory_BTD).square().mean(-1).sqrt()
    torch.testing.assert_close(everywhere.loss(batch)[1]["distance"], apart.mean().detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(at_targets.loss(batch)[1]["distance"], apart[:, -1].mean().detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["gated_deltanet", "maglev"])
def test_the_distance_from_the_true_distribution_is_that_of_the_deployed_logits(name):
    model, batch = model_of(name), tokens()
    answers = torch.randint(1, 2**11, batch.targets_BT.shape, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = model.grade(batch._replace(answers_BT=answers)).variation_BT
        likely = model.logits(model.deployed_features(batch.inputs_BT)).softmax(-1)
        assert model.grade(batch).variation_BT is None
    for row in range(found.shape[0]):
        for t in range(found.shape[1]):
            true = torch.tensor([(int(answers[row, t]) >> v) & 1 for v in range(11)]).double()
            wanted = (likely[row, t] - true / true.sum()).abs().sum() / 2
            assert float(found[row, t]) == pytest.approx(float(wanted), abs=1e-12)
