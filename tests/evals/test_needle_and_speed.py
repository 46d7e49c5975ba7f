"""The needle is found by a model that looks things up and by no other; speed is measured for what the model can do."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import evals.niah as module
from data.config import BpeConfig
from data.randomness import key
from evals.niah import NiahConfig, found_share
from evals.niah import evaluate as niah
from evals.suite import Parts, Subject
from evals.throughput import SpeedConfig
from evals.throughput import evaluate as speed
from runs.load import open_data
from tests.evals.known import LooksUp, Sleeper, Unigram, uniform
from tests.evals.test_suites import subject_of, texts  # noqa: F401 - a fixture

SMALL = NiahConfig(lengths=[96, 160], depths=[0.0, 0.5, 1.0], samples=6)


def test_a_model_that_looks_up_finds_every_needle(texts: Path) -> None:  # noqa: F811
    subject = subject_of("transformer", texts)
    subject.model = LooksUp(subject.dataset.vocab_size)  # type: ignore[assignment]
    for haystack in ("corpus", "noise"):
        config = NiahConfig(lengths=[96, 160], depths=[0.0, 0.5, 1.0], samples=6, haystack=haystack)
        found = niah(subject, config, Parts(None)).metrics
        assert set(found.values()) == {1.0}, found


def test_the_needle_and_the_question_are_of_the_same_tokens(texts: Path) -> None:  # noqa: F811
    """With a tokenizer that joins digits, and a space to what follows it."""
    subject = subject_of("transformer", texts)
    paths = dataclasses.replace(subject.config.paths, cache=str(texts / "bpe_cache"))
    subject.config = dataclasses.replace(subject.config, tokenizer=BpeConfig(vocab_size=320), paths=paths)
    subject.dataset = open_data(subject.config)
    tokenizer = subject.dataset.tokenizer
    assert tokenizer is not None and len(tokenizer.encode(" 1234")) < 4, "joins digits"
    subject.model = LooksUp(subject.dataset.vocab_size)  # type: ignore[assignment]
    assert set(niah(subject, SMALL, Parts(None)).metrics.values()) == {1.0}


def test_a_model_that_cannot_tell_numbers_apart_is_at_chance(texts: Path) -> None:  # noqa: F811
    """Uniform, and a unigram to which all digits are alike: each candidate shares the first place with all others."""
    subject = subject_of("transformer", texts)
    letters = torch.full((257,), 0.001)
    letters[list(b"0123456789")] = 0.01
    letters[ord(" ")] = 0.5
    for model in (uniform(257), Unigram(letters)):
        subject.model = model  # type: ignore[assignment]
        found = niah(subject, SMALL, Parts(None)).metrics
        for name, value in found.items():
            assert value == pytest.approx(0.1 if name.startswith("accuracy") else 0.0), name
    assert found_share(np.array([[1.0, 2.0], [1.0, 1.0], [2.0, 1.0]])).tolist() == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("name", ["transformer", "gated_deltanet", "maglev"])
def test_an_untrained_model_is_at_chance_and_batches_change_nothing(name: str, texts: Path) -> None:  # noqa: F811
    def found(rows: int) -> dict:
        subject: Subject = subject_of(name, texts)
        subject.batch = subject.recurrent_batch = rows
        return niah(subject, NiahConfig(lengths=[96, 160], depths=[0.0, 1.0], samples=4), Parts(None)).metrics

    one, other = found(1), found(4)
    assert one == other and 0 <= one["accuracy/length=96"] < 0.5 and one["exact/length=160"] == 0


def test_teacher_forced_accuracy_stands_beside_the_deployed_one(
    texts: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The nats of each candidate are those of a whole pass over prompt and candidate; nothing is generated."""
    subject, graded = subject_of("maglev", texts), []
    config = NiahConfig(lengths=[96], depths=[0.5], samples=3, candidates=4)
    share = module.found_share
    monkeypatch.setattr(module, "found_share", lambda nats: graded.append(nats) or share(nats))
    found = niah(subject, config, Parts(None))
    assert set(found.metrics) == {
        *(f"{prefix}accuracy/length=96{depth}" for prefix in ("", "teacher_forced/") for depth in ("", "/depth=0.5")),
        "exact/length=96",
    }
    deployed, forced = graded
    rng = np.random.default_rng(key("niah", 0, 96, 500))
    tokenizer = subject.dataset.tokenizer
    prompts, answers = module._samples(subject, tokenizer, config, 96, 0.5, 3, rng)  # type: ignore[arg-type]
    for features, nats in ((subject.model.features, forced), (subject.model.deployed_features, deployed)):
        for row, candidates in enumerate(answers):
            for c, after in enumerate(candidates):
                ids = torch.tensor([[*prompts[row].tolist(), *after]])
                with torch.no_grad():
                    logp = subject.model.logits(features(ids[:, :-1]))[0, -len(after) :].log_softmax(-1)
                assert nats[row, c] == pytest.approx(-float(logp[range(len(after)), after].sum()), rel=1e-4)
    assert not np.allclose(forced, deployed)


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
    assert late.tables["rows"] == [] and "would not be enough" in late.reasons["context=16/batch=1"]


def test_speed_is_that_of_a_model_that_sleeps(texts: Path) -> None:  # noqa: F811
    """A millisecond for each token, whatever the batch: no faster than it sleeps, whatever else the machine does."""
    subject = subject_of("transformer", texts)
    subject.model = Sleeper(257, 0.001)  # type: ignore[assignment]
    config = SpeedConfig(contexts=[20, 40], batches=[1, 4], decode_tokens=5, repeats=2)
    for row in speed(subject, config, Parts(None)).tables["rows"]:
        context, batch = row["context"], row["batch"]
        assert row["first_token_s"] >= 0.001 * context and row["decode_tokens_per_s"] <= batch / 0.001
        assert row["prefill_tokens_per_s"] == pytest.approx(batch * context / row["first_token_s"])
        assert row["state_bytes"] == batch * 8 * context and row["prefills"] == 2


def test_speed_ends_in_its_time(texts: Path) -> None:  # noqa: F811
    """Two prefills of 10 and 200 tokens would take 0.1 and 2 s: the second is left out, and so are repeats of the first."""
    subject = subject_of("transformer", texts)
    subject.model = Sleeper(257, 0.005)  # type: ignore[assignment]
    config = SpeedConfig(contexts=[200, 10], batches=[1], decode_tokens=1, repeats=1000, seconds=0.4)
    begin = time.perf_counter()
    result = speed(subject, config, Parts(None))
    (row,) = result.tables["rows"]
    assert row["context"] == 10 and 1 <= row["prefills"] < 9 and time.perf_counter() - begin < 2
    assert result.reasons == {"context=200/batch=1": "suite.speed.seconds=0.4 would not be enough"}
