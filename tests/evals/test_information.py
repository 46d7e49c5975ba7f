"""Known answers: a vector that holds nothing retains nothing, and a short input fits into it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evals.information import InformationConfig
from evals.information import evaluate as information
from evals.suite import Parts
from models.two_pass import TwoPassModel
from tests.evals.test_suites import subject_of, texts  # noqa: F401 - a fixture


def test_an_encoder_that_says_nothing_retains_nothing(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    subject = subject_of("swa", texts)
    monkeypatch.setattr(subject.model, "deployed_features", lambda x: torch.zeros(*x.shape, 16))
    config = InformationConfig(length=8, ways=["frozen"], steps=60, width=64, layers=1, batch=16, lr=3e-3)
    found = information(subject, config, Parts(None)).metrics
    # What is left is what the places of the texts alone tell: next to nothing.
    assert abs(found["retained/frozen/compute=1"]) < 0.15


@pytest.mark.parametrize("name", ["gated_deltanet", "maglev"])
def test_a_short_input_survives_end_to_end_and_the_runs_own_weights_are_left_alone(name: str, texts: Path) -> None:  # noqa: F811
    subject = subject_of(name, texts)
    before = {key: value.clone() for key, value in subject.model.state_dict().items()}
    config = InformationConfig(length=3, steps=150, width=64, layers=1, batch=32, lr=5e-3, fractions=[0.1, 1.0])
    found = information(subject, config, Parts(None)).metrics
    assert found["retained/end_to_end/compute=1"] > found["retained/end_to_end/compute=0.1"]
    assert found["retained/end_to_end/compute=1"] > 0.4
    assert all(torch.equal(value, before[key]) for key, value in subject.model.state_dict().items())
    again = information(subject_of(name, texts), config, Parts(None)).metrics
    assert again == found, "a function of the seed"


def test_two_pass_models_are_scored_as_deployed_and_teacher_forced_beside_it(
    texts: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here the recurrence says nothing: only what is not deployed retains."""
    monkeypatch.setattr(TwoPassModel, "deployed_features", lambda _self, x, _segments=None: torch.zeros(*x.shape, 16))
    config = InformationConfig(length=3, steps=150, width=64, layers=1, batch=32, lr=5e-3, fractions=[1.0])
    found = information(subject_of("maglev", texts), config, Parts(None)).metrics
    for way in ("frozen", "end_to_end"):
        assert found[f"retained/{way}/compute=1"] < 0.2
        assert found[f"teacher_forced/retained/{way}/compute=1"] > 0.3
        assert found[f"teacher_forced/nats/{way}/compute=1"] < found[f"nats/{way}/compute=1"]
    assert not any(
        "teacher_forced" in name for name in information(subject_of("swa", texts), config, Parts(None)).metrics
    )


def test_what_cannot_be_is_refused(texts: Path) -> None:  # noqa: F811
    with pytest.raises(ValueError, match="suite.information.length=33: must be at most the training length, 32"):
        information(subject_of("swa", texts), InformationConfig(length=33), Parts(None))
    with pytest.raises(ValueError, match="multiple of 64"):
        InformationConfig(width=100).check("suite.information")
