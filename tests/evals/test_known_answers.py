"""Models whose answers are known (uniform, unigram, oracle) give the known figures in every suite; of the needle and of speed
in test_needle_and_speed.py."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from data.dataset import Batch
from evals.adapter import Adapter
from evals.downstream import DownstreamConfig
from evals.downstream import evaluate as downstream
from evals.extrapolation import ExtrapolationConfig
from evals.extrapolation import evaluate as extrapolation
from evals.fredholm import FredholmConfig
from evals.fredholm import evaluate as fredholm
from evals.information import InformationConfig
from evals.information import evaluate as information
from evals.mesa import MesaSuiteConfig
from evals.mesa import evaluate as mesa
from evals.perplexity import PerplexityConfig
from evals.perplexity import evaluate as perplexity
from evals.positions import PositionsConfig
from evals.positions import evaluate as positions
from evals.suite import Parts, Subject
from runs.load import open_data
from tests.evals.known import Oracle, Successor, Unigram, uniform
from tests.evals.test_suites import subject_of, texts  # noqa: F401 - a fixture

TWINS = Path(__file__).parent / "tasks"
V, T = 257, 32


def targets_of(subject: Subject, length: int = T) -> np.ndarray:
    """(N, T) targets of the whole windows of the test split, straight from the tokens: BOS (256) is not graded."""
    batches = list(subject.dataset.eval_batches("test", 64))
    whole = torch.cat([batch.targets_BT[(batch.document_BT >= 0).all(dim=1)] for batch in batches]).numpy()  # type: ignore[operator]
    n = len(whole) * T // length
    return whole.reshape(-1)[: n * length].reshape(n, length)


def skewed() -> torch.Tensor:
    """Probabilities of a unigram."""
    return torch.from_numpy(np.random.default_rng(0).dirichlet(np.ones(V)))


def nats_of(model: torch.nn.Module, targets: np.ndarray) -> np.ndarray:
    """What a unigram must pay for each graded target."""
    return -model.logits_V.numpy()[targets[targets >= 0]]  # type: ignore[operator]


@pytest.mark.parametrize("kind", ["uniform", "unigram"])
def test_loss_of_known_probabilities(kind: str, texts: Path) -> None:  # noqa: F811
    subject = subject_of("transformer", texts)
    model = uniform(V) if kind == "uniform" else Unigram(skewed())
    subject.model = model  # type: ignore[assignment]
    targets = np.concatenate([b.targets_BT.flatten().numpy() for b in subject.dataset.eval_batches("test", 64)])
    wanted = nats_of(model, targets)
    found = perplexity(subject, PerplexityConfig(), Parts(None)).metrics
    assert found["test/loss"] == pytest.approx(wanted.mean())
    assert found["test/perplexity"] == pytest.approx(math.exp(wanted.mean()))
    assert found["test/bits_per_byte"] == pytest.approx(wanted.mean() / math.log(2)), "each token is a byte"
    assert found["test/accuracy"] == pytest.approx(np.mean(targets[targets >= 0] == int(model.logits_V.argmax())))

    windows = targets_of(subject)
    table = positions(subject, PositionsConfig(sequences=10**6), Parts(None)).tables["parallel"]
    for mean, a, b in zip(table["mean"], table["edges"], table["edges"][1:], strict=False):
        assert mean == pytest.approx(nats_of(model, windows[:, a:b]).mean())
    assert table["so_far"][-1] == table["loss"] == pytest.approx(nats_of(model, windows).mean())

    result = extrapolation(subject, ExtrapolationConfig(factors=[1, 2, 4], tokens=10**6), Parts(None))
    for length in (32, 64, 128):
        windows = targets_of(subject, length)
        assert result.metrics[f"loss/length={length}"] == pytest.approx(nats_of(model, windows).mean())
        assert result.metrics[f"last/length={length}"] == pytest.approx(nats_of(model, windows[:, -T:]).mean())
        assert result.metrics[f"gain/length={length}"] == 0


@pytest.fixture(scope="module")
def alphabets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts in which each letter has one that follows it."""
    folder = tmp_path_factory.mktemp("alphabets")
    for number in range(60):
        (folder / f"{number}.txt").write_text("abcdefghijklmnopqrstuvwxyz" * (2 + number // 26) + "abcdefghijklmnopqrstuvwxyz"[: number % 26])  # fmt: skip
    return folder


LETTERS = dict(zip(b"abcdefghijklmnopqrstuvwxyz", b"bcdefghijklmnopqrstuvwxyza", strict=True)) | {256: ord("a")}


def test_an_oracle_pays_nothing(alphabets: Path) -> None:
    subject = subject_of("transformer", alphabets)
    subject.model = Successor(V, LETTERS)  # type: ignore[assignment]
    found = perplexity(subject, PerplexityConfig(), Parts(None)).metrics
    assert found["test/accuracy"] == 1 and found["test/perplexity"] == 1
    assert found["test/bits_per_byte"] == pytest.approx(0, abs=1e-12)
    table = positions(subject, PositionsConfig(sequences=10**6), Parts(None)).tables["parallel"]
    assert table["mean"] == pytest.approx([0.0] * len(table["mean"]), abs=1e-12)
    metrics = extrapolation(subject, ExtrapolationConfig(factors=[1, 2], tokens=10**6), Parts(None)).metrics
    assert list(metrics.values()) == pytest.approx([0.0] * len(metrics), abs=1e-12)


def test_an_oracle_that_needs_a_long_text_shows_where(alphabets: Path) -> None:
    """Nothing is known before the 33rd token, which only sequences of two training lengths have."""
    subject = subject_of("transformer", alphabets)
    subject.model = Successor(V, LETTERS, after=T)  # type: ignore[assignment]
    result = extrapolation(subject, ExtrapolationConfig(factors=[1, 2], tokens=10**6), Parts(None))
    assert result.metrics["loss/length=32"] == pytest.approx(math.log(V))
    assert result.metrics["last/length=64"] == pytest.approx(0, abs=1e-12)
    assert result.metrics["gain/length=64"] == pytest.approx(-math.log(V))
    interval = result.tables["gain"]["parallel/length=64"]
    assert interval["low"] == pytest.approx(interval["high"]) and interval["n"] == len(targets_of(subject, 64))
    subject.model = Successor(V, LETTERS, after=T // 2)  # type: ignore[assignment]
    table = positions(subject, PositionsConfig(), Parts(None)).tables["parallel"]
    wanted = [math.log(V) if edge <= T // 2 else 0.0 for edge in table["edges"][1:]]
    assert table["mean"] == pytest.approx(wanted, rel=1e-6, abs=1e-12)


def test_windows_that_hold_other_tokens_are_not_subtracted(alphabets: Path) -> None:
    subject = subject_of("transformer", alphabets)
    subject.config.data.packing = "rows"  # type: ignore[union-attr]
    subject.model = uniform(V)  # type: ignore[assignment]
    subject.dataset = open_data(subject.config)
    result = extrapolation(subject, ExtrapolationConfig(factors=[2], tokens=10**6), Parts(None))
    assert result.metrics["gain/length=64"] is None
    assert result.reasons["gain/length=64"] == "packing=rows: windows of two lengths do not hold the same tokens"


def test_mesas_settings_are_alike_for_a_uniform_model(texts: Path) -> None:  # noqa: F811
    subject = subject_of("mesa", texts, uniform=True)
    found = mesa(subject, MesaSuiteConfig(sequences=3, cg_steps=[0, 2], tol=[1e-3], observed=1), Parts(None)).metrics
    losses = [value for name, value in found.items() if name.startswith("loss/")]
    assert losses == pytest.approx([math.log(V)] * 9, rel=1e-6)


def test_mesas_quarters_are_the_first_and_the_last_of_the_positions(texts: Path) -> None:  # noqa: F811
    """Where every target costs its position in nats, the first quarter costs its mean and the last one its own."""
    subject = subject_of("mesa", texts)
    T = subject.dataset.seq_len

    def by_position(subject: Subject, batch: Batch, mode: str, chunk: int) -> torch.Tensor:
        return torch.arange(T, dtype=torch.float32).expand(batch.targets_BT.shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evals.carried.nats_of", by_position)
        found = mesa(subject, MesaSuiteConfig(sequences=3, cg_steps=[2], tol=[], observed=1), Parts(None)).metrics
    assert found["loss/cg_steps=2"] == (T - 1) / 2
    assert found["loss/first_quarter/cg_steps=2"] == (T / 4 - 1) / 2
    assert found["loss/last_quarter/cg_steps=2"] == T - 1 - (T / 4 - 1) / 2


def test_the_identity_has_index_zero(texts: Path) -> None:  # noqa: F811
    """A delay has -1 (test_suites.py); what changes nothing has 0, and is as far from the circle's zeros as can be."""
    subject = subject_of("toeplitz", texts)
    with torch.no_grad():
        for block in subject.model.backbone.layers:
            block.mixer.filter_OHJL.zero_()  # type: ignore[union-attr, operator]
            block.mixer.filter_OHJL[..., 0] = 2  # type: ignore[union-attr, index]
    result = fredholm(subject, FredholmConfig(), Parts(None))
    assert {result.metrics[f"index/layer={layer}"] for layer in (0, 1)} == {0} and result.metrics["near_zero"] == 0
    assert all(row["margin"] == pytest.approx(1) for row in result.tables["filters"])


# ---- information -----------------------------------------------------------------------------------------------------


def test_a_vector_that_holds_the_input_retains_it(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The oracle: two tokens, each as eight signs of its byte. (What says nothing retains nothing: test_information.py.)"""
    subject = subject_of("transformer", texts)

    def written(tokens_BT: torch.Tensor) -> torch.Tensor:
        bits = (tokens_BT[..., None] >> torch.arange(8)) & 1
        return (2.0 * bits - 1).flatten(1)[:, None]

    monkeypatch.setattr(subject.model, "deployed_features", written)
    config = InformationConfig(length=2, ways=["frozen"], steps=400, width=64, layers=1, lr=1e-2, fractions=[1.0])
    found = information(subject, config, Parts(None)).metrics
    assert 0.85 < found["retained/frozen/compute=1"] < 1  # the decoder has only seen a part of all bytes


def test_the_unigrams_nats_are_those_of_the_counts(texts: Path) -> None:  # noqa: F811
    subject = subject_of("transformer", texts)
    config = InformationConfig(
        length=32, ways=["frozen"], steps=1, width=64, layers=1, test_sequences=4, fractions=[1.0]
    )
    found = information(subject, config, Parts(None)).metrics["nats/unigram"]
    read = np.concatenate([subject.dataset.train_batch(step).inputs_BT.numpy() for step in range(64)])[: config.batch]
    counts = np.bincount(read.reshape(-1), minlength=V) + 1
    (batch, *_) = subject.dataset.eval_batches("test", 4)
    assert found == pytest.approx(-np.log(counts / counts.sum())[batch.inputs_BT.numpy()].mean())


# ---- downstream ------------------------------------------------------------------------------------------------------


def rows() -> list[dict]:
    return [json.loads(line) for line in (TWINS / "twins.jsonl").read_text().splitlines()]


def test_tasks_of_a_unigram_are_sums_of_its_logarithms(texts: Path) -> None:  # noqa: F811
    subject = subject_of("transformer", texts)
    model = Unigram(skewed())
    subject.model = model  # type: ignore[assignment]
    adapter = Adapter(subject, max_length=300)
    likeliest = int(model.logits_V.argmax())
    pairs = [([1, 2], [3, 4, 5]), ([1, 2], [likeliest]), ([7], [likeliest, 3])]
    wanted = [(float(model.logits_V[after].sum()), set(after) == {likeliest}) for _, after in pairs]
    for (nats, greedy), (total, right) in zip(adapter.score(pairs), wanted, strict=True):
        assert nats == pytest.approx(total) and greedy == right
    config = DownstreamConfig(groups=[], tasks=["twin_choice", "twin_rolling"], include_path=str(TWINS), max_length=300)
    found = downstream(subject, config, Parts(None)).metrics
    passages = [np.frombuffer(row["passage"].encode(), np.uint8) for row in rows()]
    bits = -sum(model.logits_V.numpy()[passage].sum() for passage in passages) / math.log(2) / sum(map(len, passages))
    assert found["twin_rolling/bits_per_byte"] == pytest.approx(bits)
    per_token = [[float(model.logits_V[list(f" {o}".encode())].mean()) for o in row["options"]] for row in rows()]
    right = [int(np.argmax(options)) == row["gold"] for options, row in zip(per_token, rows(), strict=True)]
    assert found["twin_choice/acc_per_token"] == pytest.approx(np.mean(right))


def test_an_oracle_solves_every_kind_of_task(texts: Path) -> None:  # noqa: F811
    subject = subject_of("transformer", texts)
    oracle = Oracle(V)
    for row in rows()[:4]:
        passage, name, answer = row["passage"], row["name"], row["answer"]
        for text in (
            f"{passage}\nQ: {row['question']}?\nA: {row['options'][row['gold']]}",
            f"{passage} It was {name} who went up to {answer}",
            f"{passage} {name} went up to {answer}",
            f"{passage} And {name} went up to {answer}.",
        ):
            oracle.learn([256, *text.encode()])
    subject.model = oracle  # type: ignore[assignment]
    tasks = ["twin_choice", "twin_inputs", "twin_cloze", "twin_rolling", "twin_recall"]
    config = DownstreamConfig(groups=[], tasks=tasks, include_path=str(TWINS), max_length=300, limit=4)
    found = downstream(subject, config, Parts(None)).metrics
    told = sum(len(row["passage"]) for row in rows()[:4])
    assert found["twin_rolling/bits_per_byte"] == pytest.approx(4 * math.log2(4) / told), (
        "which of four names it will be"
    )
    assert found["twin_cloze/perplexity"] == pytest.approx(1)
    scores = {name: value for name, value in found.items() if "acc" in name or "contains" in name}
    assert len(scores) == 7 and set(scores.values()) == {1.0}, scores
