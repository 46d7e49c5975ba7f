from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from data.dataset import Batch
from data.metrics import TextScore, bits_per_byte


def batch(targets, document) -> Batch:
    fields = dict.fromkeys(Batch._fields)
    return Batch(**(fields | {"targets_BT": targets, "document_BT": document}))


def test_bits_per_byte() -> None:
    assert bits_per_byte(8 * math.log(2), 1) == pytest.approx(8)  # a uniform guess among 256 bytes
    assert bits_per_byte(math.log(1024), 2) == pytest.approx(5)
    with pytest.raises(ValueError, match="0 bytes"):
        bits_per_byte(1.0, 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_score_leaves_out_what_is_not_graded(dtype: torch.dtype) -> None:
    nats = torch.tensor([[1.0, 2.0, math.nan], [4.0, 0.5, math.inf]], dtype=dtype, requires_grad=True)
    targets = torch.tensor([[0, 2, -100], [2, 1, -100]])
    document = torch.tensor([[0, 0, -1], [2, 2, -1]])
    correct = torch.tensor([[True, False, True], [True, True, True]])
    score = TextScore(4, np.array([1, 2, 4]))
    score.add(batch(targets, document), nats, correct)
    assert score.document_nats.tolist() == [3.0, 0.0, 4.5, 0.0]
    assert score.document_bytes.tolist() == [5, 0, 6, 0]
    assert (score.nats, score.tokens, score.bytes) == (7.5, 4, 11)
    assert score.nats_per_token == 7.5 / 4
    assert score.perplexity == pytest.approx(math.exp(7.5 / 4))
    assert score.bits_per_byte == pytest.approx(7.5 / math.log(2) / 11)
    assert score.metrics() == {
        "loss": 7.5 / 4,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte,
        "accuracy": 3 / 4,
    }


def test_parts_add_up_to_the_whole() -> None:
    rng = np.random.default_rng(0)
    nats, targets, document = rng.random((8, 5)), rng.integers(0, 3, (8, 5)), rng.integers(0, 4, (8, 5))
    correct = rng.random((8, 5)) < 0.5
    whole, parts = TextScore(4, np.array([1, 2, 4])), [TextScore(4, np.array([1, 2, 4])) for _ in range(2)]
    whole.add(batch(targets, document), nats, correct)
    for row in range(8):
        parts[row % 2].add(batch(targets[row], document[row]), nats[row], correct[row])
    together = TextScore(4, np.array([1, 2, 4]))
    together.set_totals(parts[0].totals() + parts[1].totals())
    np.testing.assert_allclose(together.document_nats, whole.document_nats, rtol=1e-14)
    np.testing.assert_array_equal(together.document_bytes, whole.document_bytes)
    assert together.tokens == whole.tokens == 40
    assert together.correct == whole.correct == correct.sum()
    assert together.metrics() == pytest.approx(whole.metrics(), rel=1e-14)


def test_domains_are_scored_apart() -> None:
    score = TextScore(3, np.array([1, 2, 4]), (["books", "code", "mail"], np.array([1, 0, 1])))
    nats, targets, document = np.array([1.0, 2.0, 4.0, 9.0]), np.array([0, 1, 2, 0]), np.array([0, 1, 2, 2])
    score.add(batch(targets, document), nats, targets == 0)
    found = score.metrics()
    assert found["bits_per_byte/domain=code"] == pytest.approx(14 / math.log(2) / 6)
    assert found["bits_per_byte/domain=books"] == pytest.approx(2 / math.log(2) / 2)
    assert "bits_per_byte/domain=mail" not in found, "nothing of it was read"


def test_edges() -> None:
    empty = TextScore(2, np.array([1]))
    with pytest.raises(ValueError, match="nothing was scored"):
        _ = empty.nats_per_token
    with pytest.raises(ValueError, match="0 bytes"):
        _ = empty.bits_per_byte
    empty.add(batch(np.array([0]), np.array([1])), np.array([1e6]), np.array([False]))
    assert empty.perplexity == math.inf
