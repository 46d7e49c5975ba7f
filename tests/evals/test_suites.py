"""Suites on small models: known answers, carried state == one pass, positions add up to the loss, n/a with its reason."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from data.config import CorpusConfig
from evals.carried import nats_of, scored
from evals.extrapolation import ExtrapolationConfig
from evals.extrapolation import evaluate as extrapolation
from evals.fredholm import FredholmConfig
from evals.fredholm import evaluate as fredholm
from evals.mesa import MesaSuiteConfig
from evals.mesa import evaluate as mesa
from evals.perplexity import PerplexityConfig
from evals.perplexity import evaluate as perplexity
from evals.positions import PositionsConfig, edges_of
from evals.positions import evaluate as positions
from evals.suite import Parts, Subject, find, result_file
from models.lm import model_for
from runs.load import open_data
from tests.contract.cases import config

MIXERS = ("transformer", "gated_deltanet", "toeplitz", "maglev")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of documents with some order in them."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(120):
        (folder / f"{number}.txt").write_text(
            f"{number} is a number, and {number + 1} is the next. " * (3 + number % 5)
        )
    return folder


def subject_of(name: str, texts: Path, *, uniform: bool = False) -> Subject:
    """An untrained model, training length 32."""
    checked = config(name)
    data = CorpusConfig(name="files", paths=[f"{texts}/*.txt"], seq_len=32, val_fraction=0.2, test_fraction=0.3)
    paths = dataclasses.replace(checked.paths, cache=str(texts / "cache"))
    mixer = dataclasses.replace(checked.mixer, length=64) if name == "toeplitz" else checked.mixer
    checked = dataclasses.replace(checked, data=data, paths=paths, mixer=mixer)
    dataset = open_data(checked)
    model = model_for(checked, dataset).eval()
    if uniform:
        with torch.no_grad():
            model.output_matrix.zero_()
    return Subject(name, checked, dataset, model, 0, batch=3, recurrent_batch=5)


def numbers(metrics: dict[str, float | None]) -> dict[str, float]:
    """Those that there are."""
    return {name: value for name, value in metrics.items() if value is not None}


@pytest.mark.parametrize("name", MIXERS)
def test_a_uniform_model_has_the_known_answer_everywhere(name: str, texts: Path) -> None:
    subject, nats = subject_of(name, texts, uniform=True), math.log(257)
    found = perplexity(subject, PerplexityConfig(), Parts(None)).metrics
    assert found["test/loss"] == pytest.approx(nats, rel=1e-6)
    assert found["test/bits_per_byte"] == pytest.approx(math.log2(257), rel=1e-6)
    table = positions(subject, PositionsConfig(sequences=7), Parts(None)).tables
    for mode in subject.model.modes:
        assert table[mode]["mean"] == pytest.approx([nats] * len(table[mode]["mean"]), rel=1e-5)
    longer = extrapolation(subject, ExtrapolationConfig(factors=[1, 2], tokens=256), Parts(None)).metrics
    wanted = [0.0 if "gain/" in name else nats for name in longer]
    assert list(longer.values()) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("chunk", [7, 32, 1000])
def test_carried_state_equals_one_pass(name: str, texts: Path, chunk: int) -> None:
    subject = subject_of(name, texts)
    (batch, *_) = subject.dataset.eval_batches("test", 4)
    with torch.no_grad():
        wanted = subject.model.grade(batch)
    mode = subject.model.modes[0]
    torch.testing.assert_close(nats_of(subject, batch, mode, chunk), wanted.nats_BT, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MIXERS)
def test_positions_add_up_to_the_loss(name: str, texts: Path) -> None:
    subject = subject_of(name, texts)
    result = positions(subject, PositionsConfig(sequences=10**6, per_octave=3), Parts(None))
    for mode in subject.model.modes:
        nats, graded = scored(subject, subject.dataset, "test", 10**6, mode, 32)
        table = result.tables[mode]
        assert table["so_far"][-1] == pytest.approx(nats[graded].mean(), rel=1e-6)
        for i, (a, b) in enumerate(zip(table["edges"], table["edges"][1:], strict=False)):
            assert table["mean"][i] == pytest.approx(nats[:, a:b][graded[:, a:b]].mean(), rel=1e-6)
        assert len(table["sequences"]) == len(nats)
    assert result.metrics["loss"] == pytest.approx(result.tables[subject.model.modes[0]]["so_far"][-1])


def test_batches_change_nothing(texts: Path) -> None:
    one, other = subject_of("maglev", texts), subject_of("maglev", texts)
    other.batch, other.recurrent_batch = 64, 1
    for evaluate, settings in ((perplexity, PerplexityConfig()), (positions, PositionsConfig(sequences=9))):
        a, b = evaluate(one, settings, Parts(None)).metrics, evaluate(other, settings, Parts(None)).metrics
        assert a == pytest.approx(b, rel=1e-5)


@pytest.mark.parametrize("evaluate", ["positions", "niah", "downstream"])
def test_quality_does_not_depend_on_how_prompts_are_read(evaluate: str, texts: Path) -> None:
    """``prefill=q_assisted`` is near and not exact: generation alone takes it."""
    exact, assisted = subject_of("maglev", texts), subject_of("maglev", texts)
    mixer = dataclasses.replace(assisted.config.mixer, prefill="q_assisted")
    assisted.config = dataclasses.replace(assisted.config, mixer=mixer)
    assisted.model = model_for(assisted.config, assisted.dataset).eval()
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        one, other = (
            subject.model.prefill(tokens, subject.model.init_state(1, 20))[0] for subject in (exact, assisted)
        )
    assert not torch.allclose(one, other)
    config_class, run = find(evaluate)
    more = {
        "positions": {"sequences": 7},
        "niah": {"lengths": [96], "samples": 4},
        "downstream": {
            "groups": [],
            "tasks": ["twin_choice", "twin_recall"],
            "include_path": str(Path(__file__).parent / "tasks"),
            "max_length": 64,
            "limit": 3,
        },
    }[evaluate]
    found, wanted = (run(subject, config_class(**more), Parts(None)) for subject in (assisted, exact))
    assert numbers(found.metrics) == pytest.approx(numbers(wanted.metrics), rel=1e-6)
    assert evaluate != "downstream" or found.tables == wanted.tables


def test_edges_are_log_spaced_and_none_is_empty() -> None:
    for length in (2, 3, 32, 100, 2048):
        edges = edges_of(length, 2)
        assert edges[0] == 0 and edges[-1] == length and all(np.diff(edges) > 0)
    assert edges_of(16, 1) == [0, 1, 2, 4, 8, 16]


def test_bound_mixers_say_why_they_have_no_number(texts: Path) -> None:
    subject = subject_of("toeplitz", texts)
    result = extrapolation(subject, ExtrapolationConfig(factors=[1, 2, 4], tokens=256), Parts(None))
    assert result.metrics["loss/length=64"] is not None and result.metrics["loss/length=128"] is None
    assert "at most 64 tokens" in result.reasons["loss/length=128"]
    assert positions(subject, PositionsConfig(length=128), Parts(None)).metrics == {"loss": None}


def test_a_text_that_is_too_short_says_so(texts: Path) -> None:
    result = extrapolation(subject_of("transformer", texts), ExtrapolationConfig(factors=[10**4]), Parts(None))
    assert result.metrics["loss/length=320000"] is None and "seq_len" in result.reasons["loss/length=320000"]


def test_finished_parts_are_not_done_again(texts: Path, tmp_path: Path) -> None:
    subject = subject_of("transformer", texts)
    parts = Parts(tmp_path / "parts.json")
    whole = extrapolation(subject, ExtrapolationConfig(factors=[1, 2], tokens=256), parts).metrics
    subject.model = None  # type: ignore[assignment]
    subject.model = type("Modes", (), {"modes": ("parallel",)})()  # type: ignore[assignment]
    again = extrapolation(subject, ExtrapolationConfig(factors=[1, 2], tokens=256), Parts(tmp_path / "parts.json"))
    assert again.metrics == whole


def test_files_are_named_by_settings_and_step(tmp_path: Path) -> None:
    names = {result_file(tmp_path, "positions", {"length": n}, step).name for n in (1, 2) for step in (10, 20)}
    assert len(names) == 4 and find("positions")[0] is PositionsConfig


def test_mesa_suite_has_the_runs_own_loss_and_counts_its_steps(texts: Path) -> None:
    subject = subject_of("mesa", texts)
    own = positions(subject, PositionsConfig(sequences=5), Parts(None)).metrics["loss"]
    before = [block.mixer.config for block in subject.model.backbone.layers]
    settings = MesaSuiteConfig(sequences=5, cg_steps=[0, 3, before[0].cg_steps], tol=[1e-2, 1e-5], observed=2)
    result = mesa(subject, settings, Parts(None))
    assert result.metrics[f"loss/cg_steps={before[0].cg_steps}"] == pytest.approx(own, rel=1e-6)
    assert 2.5 < result.metrics["steps/cg_steps=3"] <= 3  # the first token, with one key, is solved in one
    assert result.metrics["steps/cg_steps=0"] == 0
    assert 0 < result.metrics["steps/tol=0.01"] <= result.metrics["steps/tol=1e-05"] <= settings.max_steps
    assert [block.mixer.config for block in subject.model.backbone.layers] == before, "the model is as it was"
    # A residual of 1e-5 and thirty steps are one answer for so small a problem.
    assert result.metrics["loss/tol=1e-05"] == pytest.approx(own, rel=1e-4)
    internals = result.tables["internals"]
    assert np.array(internals["condition"]).shape == (2, 2, len(internals["positions"]))
    assert (np.array(internals["condition"]) >= 1).all() and np.array(internals["half_life"]).shape == (2, 2)


def test_mesa_without_steps_is_gated_linear_attention(texts: Path) -> None:
    """The same weights in the gla layer, which has no Lambda."""
    subject, other = subject_of("mesa", texts), subject_of("gla", texts)
    weights = {key: value for key, value in subject.model.state_dict().items() if "theta" not in key}
    other.model.load_state_dict(weights)
    for block, gla in zip(subject.model.backbone.layers, other.model.backbone.layers, strict=True):
        block.mixer.config = dataclasses.replace(block.mixer.config, gamma_bound=1.0)
        assert gla.mixer.config.kind == "gla"
    found = mesa(subject, MesaSuiteConfig(sequences=5, cg_steps=[0], tol=[], observed=1), Parts(None))
    wanted = positions(other, PositionsConfig(sequences=5), Parts(None)).metrics["loss"]
    # gla scales q by K^-1/2; the head norm takes that out, up to its epsilon beside the small outputs of a fresh model.
    assert found.metrics["loss/cg_steps=0"] == pytest.approx(wanted, rel=1e-3)
    solved = mesa(subject, MesaSuiteConfig(sequences=5, cg_steps=[5], tol=[], observed=1), Parts(None))
    assert solved.metrics["loss/cg_steps=5"] != found.metrics["loss/cg_steps=0"]


def test_fredholm_suite_shows_the_index_beside_that_of_the_start(texts: Path) -> None:
    subject = subject_of("toeplitz", texts)
    with torch.no_grad():  # layer 0: a delay by one; layer 1: nothing changed
        filters = subject.model.backbone.layers[0].mixer.filter_OHJL
        filters.zero_()
        filters[..., 1] = 1
        subject.model.backbone.layers[1].mixer.filter_OHJL[0, 0, 0] = 1.0  # all ones: zeros on the circle
    result = fredholm(subject, FredholmConfig(), Parts(None))
    assert result.metrics["index/layer=0"] == -1
    first = result.tables["filters"][-1]
    assert first["index"] == first["initial_index"] and first["margin"] == first["initial_margin"]
    ones = next(row for row in result.tables["filters"] if (row["layer"], row["operator"], row["head"]) == (1, 0, 0))
    assert ones["near_zero"]
    again = fredholm(subject, FredholmConfig(autoencoder=1), Parts(None))
    # One step of warm-up moves nothing far: the autoencoder begins where the run did, not where it ended.
    rows = again.tables["filters"]
    assert sum(row["autoencoder_index"] != row["initial_index"] for row in rows) <= 1
    assert any(row["autoencoder_index"] != row["index"] for row in rows if row["layer"] == 0)
    assert again.metrics["autoencoder_nats"] > 1 and "autoencoder_index/layer=1" in again.metrics
    assert {key: again.metrics[key] for key in result.metrics} == result.metrics
    none = fredholm(subject_of("transformer", texts), FredholmConfig(), Parts(None))
    assert none.metrics == {"index": None} and "no Toeplitz filters" in none.reasons["index"]
