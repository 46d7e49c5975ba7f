from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from data.dataset import Batch, total_variation
from data.tasks import configs
from data.tasks.dataset import TaskDataset
from data.tasks.score import TaskScore

SLICES = {"pairs": [4, 8], "gap": [1, 2, 3]}


def batch_of(rng: np.random.Generator, first: int, rows: int) -> Batch:
    targets = rng.integers(0, 5, (rows, 6))
    targets[rng.random((rows, 6)) < 0.4] = -100
    gap = np.where(targets == -100, -1, rng.integers(1, 4, (rows, 6)))
    gap[rng.random((rows, 6)) < 0.1] = -1
    return Batch(
        inputs_BT=torch.zeros(rows, 6, dtype=torch.int64),
        targets_BT=torch.from_numpy(targets),
        segment_ids_BT=None,
        n_targets=int((targets != -100).sum()),
        document_BT=torch.from_numpy(np.where(targets == -100, -1, first + np.arange(rows)[:, None])),
        slices={"pairs": torch.from_numpy(rng.choice([4, 8], rows)), "gap": torch.from_numpy(gap)},
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_metrics_are_plain_means(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    score = TaskScore(30, SLICES)
    found: list[tuple[int, float, bool, int, int]] = []
    for first in (0, 10, 20):
        batch = batch_of(rng, first, 9)
        assert batch.document_BT is not None and batch.slices is not None
        nats = torch.from_numpy(rng.random((9, 6))).to(dtype).requires_grad_()
        correct = torch.from_numpy(rng.random((9, 6)) < 0.7)
        graded = batch.targets_BT != -100
        score.add(batch, torch.where(graded, nats, math.nan), correct)
        for i, t in graded.nonzero().tolist():
            labels = int(batch.slices["pairs"][i]), int(batch.slices["gap"][i, t])
            found.append((first + i, float(nats.detach()[i, t]), bool(correct[i, t]), *labels))
    metrics = score.metrics()
    assert metrics["loss"] == pytest.approx(np.mean([row[1] for row in found]), rel=1e-12)
    assert metrics["accuracy"] == pytest.approx(np.mean([row[2] for row in found]), rel=1e-12)
    by_example = {row[0]: [other[2] for other in found if other[0] == row[0]] for row in found}
    assert metrics["accuracy_all"] == pytest.approx(np.mean([all(right) for right in by_example.values()]))
    expected = {f"accuracy/pairs={v}": [row[2] for row in found if row[3] == v] for v in (4, 8)}
    expected |= {f"accuracy/gap={v}": [row[2] for row in found if row[4] == v] for v in (1, 2, 3)}
    assert metrics.keys() == {"loss", "accuracy", "accuracy_all", *expected}
    for name, right in expected.items():
        assert metrics[name] == pytest.approx(np.mean(right)), name
    assert score.graded == len(found)
    documents = score.documents()
    for example in range(30):
        mine = [row for row in found if row[0] == example]
        assert documents["graded"][example] == len(mine)
        assert documents["correct"][example] == sum(row[2] for row in mine)
        assert documents["nats"][example] == pytest.approx(sum(row[1] for row in mine), abs=1e-12)


def scores(kind: str) -> tuple[Any, list[Batch]]:
    cfg = configs()[kind](eval_examples=60, train_examples=None)
    dataset = TaskDataset(cfg, global_batch=4, seed=0)
    return dataset, list(dataset.eval_batches("test", 7))


@pytest.mark.parametrize("kind", ["mqar", "regbench", "regression"])
def test_processes_add_up(kind: str) -> None:
    dataset, batches = scores(kind)
    rng = np.random.default_rng(0)
    whole, parts = dataset.new_score("test"), [dataset.new_score("test") for _ in range(3)]
    for number, batch in enumerate(batches):
        nats, correct = rng.random(batch.targets_BT.shape), rng.random(batch.targets_BT.shape) < 0.5
        whole.add(batch, nats, correct, nats / 2)
        parts[number % 3].add(batch, nats, correct, nats / 2)
    parts[0].set_totals(sum(part.totals() for part in parts))
    for name, value in whole.metrics().items():
        assert parts[0].metrics()[name] == pytest.approx(value, rel=1e-12), name
    for name, values in whole.documents().items():
        np.testing.assert_allclose(parts[0].documents()[name], values, rtol=1e-12)
    assert whole.totals().dtype == np.float64
    with pytest.raises(ValueError, match=r"^3 totals for a score of \d+$"):
        parts[0].set_totals(np.zeros(3))


def test_excess_of_the_true_distribution_is_nothing() -> None:
    dataset, batches = scores("regbench")
    score = dataset.new_score("test")
    for batch in batches:
        assert batch.answers_BT is not None
        choices = np.array(
            [[max(1, f"{answers:b}".count("1")) for answers in row] for row in batch.answers_BT.tolist()]
        )
        true = [[[(answers >> v) & 1 for v in range(19)] for answers in row] for row in batch.answers_BT.tolist()]
        likely = torch.tensor(true) / torch.from_numpy(choices)[:, :, None]
        variation = total_variation(likely.flatten(0, 1), batch.answers_BT.flatten()).view(choices.shape)
        score.add(batch, np.log(choices), np.ones(choices.shape, dtype=bool), variation)
    metrics = score.metrics()
    assert metrics["excess"] == pytest.approx(0, abs=1e-12) and metrics["accuracy"] == 1
    assert metrics["tvd"] == pytest.approx(0, abs=1e-7)
    assert 0 < metrics["loss"] < math.log(3)


def test_regression_is_measured_against_the_best_predictor() -> None:
    dataset, batches = scores("regression")
    best, zero = dataset.new_score("test"), dataset.new_score("test")
    for batch in batches:
        targets, inputs = batch.targets_BT.numpy(), batch.inputs_BT.numpy()
        best.add(batch, (dataset.cfg.oracle(inputs) - targets) ** 2, None)
        zero.add(batch, batch.targets_BT**2, None)
    assert best.metrics()["excess"] == pytest.approx(0, abs=1e-9)
    found = zero.metrics()
    assert found["loss"] == pytest.approx(dataset.cfg.chance(), rel=0.2)
    assert found["bayes"] == best.metrics()["loss"] < 0.3 < found["loss"]
    assert found["excess"] == pytest.approx(found["loss"] - found["bayes"])
    assert found["excess/seen=0"] == pytest.approx(0, abs=1e-6)  # nothing was read: 0 is the best answer
    assert found["excess/seen=16"] > 0.8 * found["loss/seen=16"]
    assert set(zero.documents()) == {"nats", "bayes", "graded"}


def test_edges() -> None:
    score = TaskScore(3, SLICES)
    with pytest.raises(ValueError, match="nothing was scored"):
        score.metrics()
    batch = batch_of(np.random.default_rng(0), 0, 3)
    assert batch.slices is not None
    strange = batch._replace(slices={"gap": torch.full((3, 6), 9)})
    with pytest.raises(ValueError, match=r"^slice gap: has no label 9, only \[1, 2, 3\]$"):
        score.add(strange, np.zeros((3, 6)), np.zeros((3, 6)))
    with pytest.raises(ValueError, match="nothing was scored"):
        configs()["regression"]().new_score(4).metrics()


def test_total_variation_is_half_the_sum_of_differences() -> None:
    likely = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5]])
    answers = torch.tensor([0b011, 0b100, 0b111])  # tokens 0 and 1; token 2; any
    distance = 0.5 * (abs(0.2 - 1 / 3) + abs(0.3 - 1 / 3) + abs(0.5 - 1 / 3))
    torch.testing.assert_close(total_variation(likely, answers), torch.tensor([0.0, 1.0, distance]))
