"""The difference to a reference run by position: Student's t over the same sequences, refused where they are not the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from evals import positions as module
from evals.positions import PositionsConfig, evaluate, paired
from evals.suite import Parts, Subject, settings_of
from runs.load import open_data
from tests.evals.test_suites import subject_of, texts

__all__ = ["texts"]


def test_pairs_have_the_interval_of_a_paired_t_test() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(2.0, 0.5, 12)
    b = a + rng.normal(0.1, 0.02, 12)
    found = paired(a.tolist(), b.tolist())
    wanted = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (found["low"], found["high"]) == pytest.approx((wanted.low, wanted.high))
    assert found["mean"] == pytest.approx((a - b).mean()) and found["n"] == 12
    holes: list[float | None] = [None, *a[1:]]
    assert paired(holes, b.tolist()) == paired(a[1:].tolist(), b[1:].tolist())
    assert paired([1.0], [0.5]) == {"mean": 0.5, "low": None, "high": None, "n": 1}


def test_a_reference_is_known_by_its_name_wherever_it_lies() -> None:
    plain = settings_of(PositionsConfig())
    assert "reference" not in plain
    for place in ("/here/swa-1", "/there/swa-1", "swa-1"):
        assert settings_of(PositionsConfig(reference=place)) == {**plain, "reference": "swa-1"}


def with_reference(own: Subject, other: Subject, monkeypatch: pytest.MonkeyPatch) -> dict:
    monkeypatch.setattr(module, "at_step", lambda key, folder, like: other)
    return evaluate(own, PositionsConfig(sequences=6, reference="there/other"), Parts(None)).tables


def test_the_difference_is_that_of_the_same_sequences(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = subject_of("transformer", texts), subject_of("transformer", texts)
    other.name = "other"
    with torch.no_grad():
        other.model.output_matrix.mul_(0.5)
    tables = with_reference(own, other, monkeypatch)
    theirs = evaluate(other, PositionsConfig(sequences=6), Parts(None)).tables["parallel"]
    gaps = np.array(tables["parallel"]["sequences"], dtype=float) - np.array(theirs["sequences"], dtype=float)
    found = tables["difference"]
    assert found["mean"] == pytest.approx(np.nanmean(gaps, axis=0).tolist()) and found["reference"] == "other"
    assert any(abs(x) > 1e-3 for x in found["mean"]) and found["n"] == (~np.isnan(gaps)).sum(axis=0).tolist()
    whole = np.array(tables["parallel"]["each"]) - np.array(theirs["each"])
    assert found["overall"]["mean"] == pytest.approx(whole.mean()) and found["overall"]["n"] == 6


def test_a_run_differs_from_itself_by_nothing(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = with_reference(subject_of("maglev", texts), subject_of("maglev", texts), monkeypatch)["difference"]
    assert set(found["mean"]) == set(found["low"]) == {0.0} and found["overall"]["high"] == 0.0


def test_another_text_is_refused_and_both_runs_are_named(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = subject_of("transformer", texts), subject_of("transformer", texts)
    config = dataclasses.replace(other.config, data=dataclasses.replace(other.config.data, seq_len=16))
    other = dataclasses.replace(other, name="shorter", config=config, dataset=open_data(config))
    with pytest.raises(
        ValueError, match=r"suite.positions.reference=there/other: transformer reads data .* shorter reads"
    ):
        with_reference(own, other, monkeypatch)
