"""The yardstick: proper probabilities, the formula of Kneser and Ney by hand, the graded bytes, the cache."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from data.config import BpeConfig, BytesConfig, CorpusConfig
from data.prepare import prepare
from data.tokenizers import load_tokenizer
from evals.ngram import BASE, BOUNDARY, NGram, Yardstick, _part, ngram_keys, yardstick


def stream(*texts: str) -> np.ndarray:
    """Documents as bytes, each led by BOUNDARY."""
    return np.concatenate([[BOUNDARY, *text.encode()] for text in texts]).astype(np.uint16)


def key(context: list[int], byte: int = 0) -> int:
    """The key of a context of 4 symbols, oldest first, and a byte."""
    return sum(symbol * BASE**lag for lag, symbol in enumerate([byte, *reversed(context)]))


TEXTS = (
    "in the beginning god created the heaven and the earth",
    "and the earth was without form, and void",
    "and god said, let there be light: and there was light",
    "the the the the",
    "b",
)


def test_keys_hold_the_bytes_before_and_stop_at_the_document() -> None:
    keys, positions = ngram_keys(stream("ab", "c"), 3)
    a, b, c = map(ord, "abc")
    assert positions.tolist() == [1, 2, 4]
    assert keys.tolist() == [
        a + BOUNDARY * BASE + BOUNDARY * BASE**2,
        b + a * BASE + BOUNDARY * BASE**2,
        c + BOUNDARY * BASE + BOUNDARY * BASE**2,
    ]


@pytest.mark.parametrize(
    "context", [b"the ", b"and ", b"zzzz", b"\xff\x00\xfe\x01", b"zthe", None], ids=lambda c: repr(c) if c else "start"
)
def test_probabilities_sum_to_one_over_the_bytes(context: bytes | None) -> None:
    model = NGram(stream(*TEXTS))
    before = [BOUNDARY] * 4 if context is None else list(context)
    p = model.probabilities(np.array([key(before, byte) for byte in range(256)]))
    assert (p > 0).all()
    assert p.sum() == pytest.approx(1, abs=1e-12)


def test_a_stream_is_scored_byte_by_byte_in_its_contexts() -> None:
    model = NGram(stream(*TEXTS))
    text = stream("the earth", "light")
    nats = model.nats(text)
    assert (nats[text == BOUNDARY] == 0).all()
    at = 5  # the second "e" of "the e": 4 bytes before it are "the "
    expected = model.probabilities(np.array([key(list(b"the "), ord("e"))]))[0]
    assert nats[at] == pytest.approx(-math.log(expected))


def reference(texts: tuple[str, ...], order: int, history: list[int], byte: int) -> float:
    """Modified Kneser-Ney with dictionaries, straight from the paper's equations; one probability."""
    raw: list[Counter] = [Counter() for _ in range(order + 1)]
    for text in texts:
        symbols = [BOUNDARY] * (order - 1) + list(text.encode())
        for end in range(order - 1, len(symbols)):
            for n in range(1, order + 1):
                raw[n][tuple(symbols[end - n + 1 : end + 1])] += 1

    def counts(n: int) -> dict[tuple, int]:
        if n == order:
            return raw[n]
        before: dict[tuple, set] = defaultdict(set)
        for gram in raw[n + 1]:
            before[gram[1:]].add(gram[0])
        return {gram: raw[n][gram] if gram[0] == BOUNDARY else len(left) for gram, left in before.items()}

    p = 1 / 256
    for n in range(1, order + 1):
        table = counts(n)
        of = Counter(min(count, 5) for count in table.values())
        discount = [0.0, 0.5, 0.5, 0.5]
        if of[1] and of[2] and of[3]:
            y = of[1] / (of[1] + 2 * of[2])
            for k, value in (
                (1, 1 - 2 * y * of[2] / of[1]),
                (2, 2 - 3 * y * of[3] / of[2]),
                (3, 3 - 4 * y * of[4] / of[3]),
            ):
                discount[k] = value if 0 < value <= k else 0.5
        context = tuple(history[len(history) - n + 1 :])
        follow = {gram[-1]: count for gram, count in table.items() if gram[:-1] == context}
        if not follow:
            continue
        total = sum(follow.values())
        gamma = sum(discount[min(count, 3)] for count in follow.values()) / total
        own = follow.get(byte, 0)
        p = (own - discount[min(own, 3)]) / total + gamma * p
    return p


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_equal_to_the_formula_by_hand(order: int) -> None:
    texts = TEXTS * 2 + ("there was a man in the land of uz",)
    model = NGram(stream(*texts), order)
    scored = stream("the man and the light", "zx")
    keys, positions = ngram_keys(scored, order)
    found = model.probabilities(keys)
    for position, p in zip(positions, found, strict=True):
        start = max(np.flatnonzero(scored[: position + 1] == BOUNDARY))
        history = ([BOUNDARY] * order + scored[start + 1 : position].tolist())[-(order - 1) :] if order > 1 else []
        assert p == pytest.approx(reference(texts, order, history, int(scored[position])), rel=1e-12)


def test_longer_context_helps_on_repetitive_text() -> None:
    train, test = stream(*TEXTS * 20), stream(TEXTS[0])
    assert NGram(train, 5).nats(test).sum() < NGram(train, 2).nats(test).sum() < NGram(train, 1).nats(test).sum()


def test_no_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        NGram(np.array([BOUNDARY, BOUNDARY]))
    with pytest.raises(ValueError, match="boundary"):
        NGram(np.array([97, 98]))


# ---- the graded bytes ------------------------------------------------------------------------------------------------


def test_only_the_graded_front_of_each_document_counts() -> None:
    bar = Yardstick(np.array([1, 2, 4, 8, 16], dtype=np.float32), np.array([3, 0, 2]), 10)
    assert bar.document_nats(np.array([3, 0, 2])).tolist() == [7, 0, 24]
    assert bar.document_nats(np.array([2, 0, 0])).tolist() == [3, 0, 0]
    assert bar.bits_per_byte(np.array([2, 0, 0])) == pytest.approx(3 / 2 / math.log(2))
    for other in ([3, 0, 3], [3, 0]):
        with pytest.raises(ValueError, match="not those of this test split"):
            bar.document_nats(np.array(other))


def test_graded_bytes_of_any_tokenizer_fit(tmp_path: Path) -> None:
    """Documents of the test split stand in the same order whatever the tokenizer, so bytes can be counted off."""
    file = tmp_path / "text.jsonl"
    file.write_text("".join(f'{{"text": "{text} number {i}"}}\n' for i in range(30) for text in TEXTS))
    cfg = CorpusConfig(name="tiny", paths=[str(file)], seq_len=16, val_fraction=0.2, test_fraction=0.2)
    bar = yardstick(cfg, tmp_path / "cache")
    for tokenizer in (BytesConfig(), BpeConfig(vocab_size=300)):
        folder = prepare(cfg, tokenizer, tmp_path / "cache")
        tokens = np.fromfile(folder / "test.bin", dtype=np.uint16)
        starts = np.load(folder / "test_documents.npy")
        n_bytes = np.add.reduceat(load_tokenizer(tokenizer, folder).token_bytes[tokens], starts)
        assert n_bytes.tolist() == bar.document_bytes.tolist()


def test_cached_by_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text("".join(f'{{"text": "{text} number {i}"}}\n' for i in range(30) for text in TEXTS))
    cfg = CorpusConfig(name="tiny", paths=[str(file)], val_fraction=0.2, test_fraction=0.2)
    first = yardstick(cfg, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(NGram, "__init__", lambda *_: pytest.fail("counted again"))
        again = yardstick(CorpusConfig(**{**cfg.__dict__, "seq_len": 8}), tmp_path / "cache")
    assert again.byte_nats.tolist() == first.byte_nats.tolist()
    file.write_text(file.read_text().replace("god", "cat"))
    assert yardstick(cfg, tmp_path / "cache").byte_nats.tolist() != first.byte_nats.tolist()


def test_counts_as_much_as_was_read_and_no_more(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text("".join(f'{{"text": "{text} number {i}"}}\n' for i in range(30) for text in TEXTS))
    cfg = CorpusConfig(name="tiny", paths=[str(file)], val_fraction=0.2, test_fraction=0.2)
    whole = yardstick(cfg, tmp_path / "cache")
    half, twice = (yardstick(cfg, tmp_path / "cache", share=share) for share in (0.5, 2.0))
    assert half.train_bytes == pytest.approx(whole.train_bytes / 2, rel=0.05)
    assert half.bits_per_byte() > whole.bits_per_byte() + 0.01
    assert twice.byte_nats.tolist() == whole.byte_nats.tolist()
    assert yardstick(cfg, tmp_path / "cache", max_train_bytes=500).train_bytes < 500
    with pytest.raises(ValueError, match="share=0: must be above 0"):
        yardstick(cfg, tmp_path / "cache", share=0)


def test_a_part_is_whole_documents_from_all_over_the_text() -> None:
    tokens = stream(*(chr(97 + i) * 9 for i in range(20)))
    part = _part(tokens, 85)
    assert len(part) == 85 and part[0] == BOUNDARY
    letters = [set(piece.tolist()) for piece in np.split(part, np.flatnonzero(part == BOUNDARY)[1:])]
    assert all(len(letter) == 2 for letter in letters) and len(letters) == 9  # eight whole ones, and half of a ninth
    assert len(set().union(*letters)) == 10 and max(set().union(*letters) - {BOUNDARY}) > 97 + 9
    assert _part(tokens, 200) is tokens


@pytest.fixture(scope="session")
def kjv(tmp_path_factory: pytest.TempPathFactory) -> tuple[Yardstick, float]:
    """The yardstick of the embedded corpus and the seconds that it took, preparing aside."""
    cache = tmp_path_factory.mktemp("cache")
    prepare(CorpusConfig(), BytesConfig(), cache)
    begin = time.process_time()
    return yardstick(CorpusConfig(), cache), time.process_time() - begin


def test_king_james_bible(kjv: tuple[Yardstick, float]) -> None:
    """1.690 bits per byte, pinned: a change of the corpus, the split or the model must not pass unseen."""
    bar, seconds = kjv
    assert bar.bits_per_byte() == pytest.approx(1.6895, abs=5e-4)
    assert len(bar.document_bytes) == 60
    assert seconds < 15


def test_needs_no_torch() -> None:
    code = "import sys, evals.ngram, sweeps.report, sweeps.diff; sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=root).returncode == 0
