from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.config import BytesConfig, CorpusConfig
from data.dataset import IGNORED, open_dataset
from data.packing import best_fit


@pytest.fixture
def open_small(small_corpus: CorpusConfig, tmp_path: Path) -> Callable[..., Any]:
    def open_it(*, global_batch: int = 5, seed: int = 0, **changes: Any) -> Any:
        cfg = replace(small_corpus, **changes)
        return open_dataset(cfg, BytesConfig(), global_batch=global_batch, seed=seed, cache=tmp_path / "cache")

    return open_it


def documents_of(dataset: Any, split: str) -> list[list[int]]:
    """Tokens of each document, BOS first."""
    tokens, starts = dataset.splits[split].files
    return [part.tolist() for part in np.split(tokens, starts[1:])]


def nanochat(documents: list[list[int]], size: int, buffer_size: int) -> list[list[int]]:
    """Its loader's inner loop, document by document; what is left when documents run out is the last row."""
    rest, held, rows = list(documents), [], []  # type: ignore[var-annotated]
    while rest or held:
        row: list[int] = []
        while len(row) < size:
            while len(held) < buffer_size and rest:
                held.append(rest.pop(0))
            if not held:
                break
            remaining, best, best_length = size - len(row), -1, 0
            for number, document in enumerate(held):
                if len(document) <= remaining and len(document) > best_length:
                    best, best_length = number, len(document)
            if best < 0:
                best = min(range(len(held)), key=lambda number: len(held[number]))
            row.extend(held.pop(best)[:remaining])
        rows.append(row)
    return rows


@pytest.mark.parametrize("size", [2, 17, 40, 1000])
@pytest.mark.parametrize("buffer", [1, 7, 1000])
def test_best_fit_fills_rows_as_nanochat_does(size: int, buffer: int) -> None:
    rng = np.random.default_rng(size)
    documents = [[256, *rng.integers(0, 256, rng.integers(1, 60))] for _ in range(200)]
    taken_from, taken, first = best_fit(np.array([len(document) for document in documents]), size, buffer)
    pieces = [documents[number][:n] for number, n in zip(taken_from, taken, strict=True)]
    rows = [list(chain(*pieces[a:b])) for a, b in zip(first[:-1], first[1:], strict=True)]
    assert rows == nanochat(documents, size, buffer)
    assert all(len(row) == size for row in rows[:-1])
    assert sorted(taken_from) == list(range(200)), "each document once"


def test_best_fit_of_nothing() -> None:
    assert [part.tolist() for part in best_fit(np.empty(0, dtype=np.int64), 9)] == [[], [], [0]]


def epoch(dataset: Any) -> list[tuple[list[int], list[int]]]:
    """Inputs and targets of each row of the first epoch."""
    n = dataset.stream.n_windows
    batches = [dataset.train_batch(step) for step in range(-(-n // dataset.stream.global_batch))]
    rows = [row for batch in batches for row in zip(batch.inputs_BT.tolist(), batch.targets_BT.tolist(), strict=True)]
    for batch in batches:
        assert batch.n_targets == int((batch.targets_BT != IGNORED).sum())
        assert batch.segment_ids_BT is None
    return rows[:n]


def test_rows_of_a_best_fit_epoch(open_small: Callable[..., Any]) -> None:
    dataset = open_small(packing="best_fit", seq_len=40)
    rows = nanochat(documents_of(dataset, "train"), 41, 1000)
    full = [row for row in rows if len(row) == 41]
    assert len(full) >= len(rows) - 1 == len(full) - (len(full) == len(rows))
    wanted = [(row[:-1], [token if token != dataset.bos_id else IGNORED for token in row[1:]]) for row in full]
    found = epoch(dataset)
    assert sorted(found) == sorted(wanted) and found != wanted
    assert all(inputs[0] == dataset.bos_id for inputs, _ in found)


def test_rows_of_one_document(open_small: Callable[..., Any]) -> None:
    dataset = open_small(packing="rows", seq_len=40)
    wanted = []
    for document in documents_of(dataset, "train"):
        padded = document[:41] + [dataset.bos_id] * max(0, 41 - len(document))
        wanted.append((padded[:-1], [token if token != dataset.bos_id else IGNORED for token in padded[1:]]))
    assert any(IGNORED in targets for _, targets in wanted) and any(len(d) > 41 for d in documents_of(dataset, "train"))
    assert sorted(epoch(dataset)) == sorted(wanted)


@pytest.mark.parametrize("packing", ["best_fit", "rows"])
@pytest.mark.parametrize("split", ["val", "test"])
def test_evaluation_grades_what_training_would(open_small: Callable[..., Any], packing: str, split: str) -> None:
    dataset = open_small(packing=packing, seq_len=40)
    documents = documents_of(dataset, split)
    score = dataset.new_score(split)
    graded: list[list[int]] = [[] for _ in documents]
    for batch in dataset.eval_batches(split, 4):
        score.add(batch, torch.ones_like(batch.targets_BT).float(), batch.targets_BT == 0)
        assert ((batch.document_BT < 0) <= (batch.targets_BT == IGNORED)).all(), "padding is not graded"
        for targets, numbers in zip(batch.targets_BT.tolist(), batch.document_BT.tolist(), strict=True):
            for target, number in zip(targets, numbers, strict=True):
                if target != IGNORED:
                    graded[number].append(target)
    for found, document in zip(graded, documents, strict=True):
        assert found == document[1 : 1 + len(found)], "from its start, nothing twice, nothing between left out"
        if packing == "rows":
            assert len(found) == min(40, len(document) - 1)
    assert score.document_bytes.tolist() == [len(found) for found in graded]
    if packing == "best_fit":
        rows = nanochat(documents, 41, 1000)
        assert score.tokens == sum(len(row) - row.count(dataset.bos_id) for row in rows)
    first = [batch.inputs_BT for batch in dataset.eval_batches(split, 4, max_tokens=100)]
    assert len(torch.cat(first)) == 2


@pytest.mark.parametrize("packing", ["best_fit", "rows"])
def test_a_batch_is_a_function_of_seed_and_step(open_small: Callable[..., Any], packing: str) -> None:
    dataset = open_small(packing=packing, seq_len=30)
    again = pickle.loads(pickle.dumps(dataset))
    assert len(pickle.dumps(dataset)) < 50_000
    for step in (0, 7, 3, 10**6):
        whole = dataset.train_batch(step)
        assert torch.equal(again.train_batch(step).inputs_BT, whole.inputs_BT)
        parts = [open_small(packing=packing, seq_len=30).train_batch(step, slice(rank, None, 2)) for rank in range(2)]
        for rank, part in enumerate(parts):
            assert torch.equal(part.targets_BT, whole.targets_BT[rank::2]) and part.n_targets == whole.n_targets
    assert (
        open_small(packing=packing, seq_len=30).fingerprint == dataset.fingerprint != open_small(seq_len=30).fingerprint
    )


def test_the_plan_of_best_fit_is_made_once(open_small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_small(packing="best_fit").train_batch(2)
    monkeypatch.setattr("data.packing.best_fit", lambda *_: pytest.fail("made again"))
    assert torch.equal(open_small(packing="best_fit").train_batch(2).inputs_BT, before.inputs_BT)


def test_documents_and_their_tokens(open_small: Callable[..., Any]) -> None:
    dataset = open_small()
    for split in ("train", "val", "test"):
        lengths = [len(document) - 1 for document in documents_of(dataset, split)]
        assert dataset.document_tokens(split).tolist() == lengths == dataset.document_bytes(split).tolist()
        assert dataset.document_domains(split) is None
    with pytest.raises(ValueError, match="split=valid: must be one of"):
        dataset.document_tokens("valid")


def test_a_missing_or_torn_file_is_named(open_small: Callable[..., Any]) -> None:
    folder = open_small().folder
    for name in ("train.bin", "val_documents.npy"):
        raw = (folder / name).read_bytes()
        (folder / name).write_bytes(raw[:-1])
        with pytest.raises(ValueError, match=f"{name}: not of the size that its manifest states"):
            open_small()
        (folder / name).unlink()
        with pytest.raises(ValueError, match=f"{name}: is missing; remove the folder to have it made again"):
            open_small()
        (folder / name).write_bytes(raw)
    open_small()
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"manifest\.json: is missing; remove the folder to have it made again"):
        open_small()
