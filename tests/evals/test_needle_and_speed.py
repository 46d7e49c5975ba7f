"""The needle is found by a model that looks things up and by no other; speed is measured for what the model can do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evals.niah import NiahConfig
from evals.niah import evaluate as niah
from evals.suite import Parts, Subject
from evals.throughput import SpeedConfig
from evals.throughput import evaluate as speed
from models.lm import Graded
from tests.evals.test_suites import subject_of, texts  # noqa: F401 - a fixture


class LooksUp(nn.Module):
    """Says what followed the longest repeated end of the text so far, nearly for sure."""

    modes = ("parallel",)

    def __init__(self, vocabulary: int):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(1))
        self.vocabulary = vocabulary

    def init_state(self, rows: int, _length: int) -> list[list[int]]:
        return [[] for _ in range(rows)]

    def read(self, tokens_BT: Tensor, state: list[list[int]], **_: bool) -> tuple[Tensor, list[list[int]]]:
        after = [list(history) for history in state]
        out = torch.zeros(*tokens_BT.shape, self.vocabulary)
        for row, tokens in enumerate(tokens_BT.tolist()):
            for t, token in enumerate(tokens):
                after[row].append(token)
                out[row, t, self.following(after[row])] = 30.0
        return out, after

    @staticmethod
    def following(history: list[int]) -> int:
        for size in range(min(24, len(history) - 1), 0, -1):
            end = history[-size:]
            for begin in range(len(history) - size - 1, -1, -1):
                if history[begin : begin + size] == end:
                    return history[begin + size]
        return 0

    def logits(self, features: Tensor) -> Tensor:
        return features

    def graded(self, features_BTD: Tensor, batch) -> Graded:
        nats = F.cross_entropy(features_BTD.transpose(1, 2), batch.targets_BT, ignore_index=-100, reduction="none")
        return Graded(nats, features_BTD.argmax(-1) == batch.targets_BT)


SMALL = NiahConfig(lengths=[96, 160], depths=[0.0, 0.5, 1.0], samples=6)


def test_a_model_that_looks_up_finds_every_needle(texts: Path) -> None:  # noqa: F811
    subject = subject_of("transformer", texts)
    subject.model = LooksUp(subject.dataset.vocab_size)  # type: ignore[assignment]
    for haystack in ("corpus", "noise"):
        config = NiahConfig(lengths=[96, 160], depths=[0.0, 0.5, 1.0], samples=6, haystack=haystack)
        found = niah(subject, config, Parts(None)).metrics
        assert set(found.values()) == {1.0}, found


@pytest.mark.parametrize("name", ["transformer", "gated_deltanet", "maglev"])
def test_an_untrained_model_is_at_chance_and_batches_change_nothing(name: str, texts: Path) -> None:  # noqa: F811
    def found(rows: int) -> dict:
        subject: Subject = subject_of(name, texts)
        subject.batch = subject.recurrent_batch = rows
        return niah(subject, SMALL, Parts(None)).metrics

    one, other = found(1), found(6)
    assert one == other and 0 <= one["accuracy/length=96"] < 0.5 and one["exact/length=160"] == 0


def test_bound_mixers_and_short_texts_say_so(texts: Path) -> None:  # noqa: F811
    subject = subject_of("toeplitz", texts)
    result = niah(subject, SMALL, Parts(None))
    assert result.metrics == {"accuracy/length=96": None, "accuracy/length=160": None}
    assert "at most 64 tokens" in result.reasons["accuracy/length=96"]
    with pytest.raises(ValueError, match="haystack=noise"):
        niah(subject_of("swa", texts), NiahConfig(lengths=[10**6], depths=[0.5], samples=1), Parts(None))


@pytest.mark.parametrize("name", ["swa", "mesa", "maglev", "toeplitz"])
def test_speed_has_a_row_for_each_setting(name: str, texts: Path) -> None:  # noqa: F811
    subject = subject_of(name, texts)
    config = SpeedConfig(contexts=[16, 48], batches=[1, 2], decode_tokens=4, repeats=1, cg_steps=[2, 5])
    result = speed(subject, config, Parts(None))
    rows = result.tables["rows"]
    assert len(rows) == (8 if name == "mesa" else 4)
    assert {row["cg_steps"] for row in rows} == ({2, 5} if name == "mesa" else {None})
    for row in rows:
        assert row["prefill_tokens_per_s"] > 0 and row["decode_tokens_per_s"] > 0 and row["peak_bytes"] is None
        assert row["state_bytes"] == row["batch"] * subject.model.counts(row["context"])["state_bytes"]
    assert [block.mixer.config for block in subject.model.backbone.layers] == [
        block.mixer.config for block in subject_of(name, texts).model.backbone.layers
    ]


def test_speed_leaves_out_what_cannot_be_and_what_there_is_no_time_for(texts: Path) -> None:  # noqa: F811
    config = SpeedConfig(contexts=[16, 63], batches=[1], decode_tokens=4, repeats=1)
    result = speed(subject_of("toeplitz", texts), config, Parts(None))
    assert result.reasons == {"context=63/batch=1": "mixer toeplitz takes at most 64 tokens"}
    config.seconds = 1e-9
    late = speed(subject_of("swa", texts), config, Parts(None))
    assert late.tables["rows"] == [] and "were over" in late.reasons["context=16/batch=1"]
