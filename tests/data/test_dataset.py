from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.config import BpeConfig, BytesConfig, CorpusConfig
from data.dataset import Batch, Dataset, open_dataset
from data.sources import documents

TOKENIZERS = [BytesConfig(), BpeConfig(vocab_size=300)]


@pytest.fixture
def open_small(small_corpus: CorpusConfig, tmp_path: Path) -> Callable[..., Any]:
    """Opens the small corpus with changes to its config."""

    def open_it(tokenizer: Any = TOKENIZERS[0], *, global_batch: int = 6, seed: int = 0, **changes: Any) -> Dataset:
        return open_dataset(
            replace(small_corpus, **changes), tokenizer, global_batch=global_batch, seed=seed, cache=tmp_path / "cache"
        )

    return open_it


def tokens_of(dataset: Any, split: str) -> list[int]:
    return [int(token) for token in np.fromfile(dataset.folder / f"{split}.bin", dtype=np.uint16)]


def assert_equal(one: Batch, other: Batch) -> None:
    for field, a, b in zip(Batch._fields, one, other, strict=True):
        same = torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
        assert same, field


def reference(
    tokens: list[int], first: int, seq_len: int, bos: int
) -> tuple[list[int], list[int], list[int], list[int]]:
    """One window, token by token: inputs, targets, segments, documents of the targets."""
    inputs, targets, segments, document = [], [], [], []
    segment = 0
    for position in range(first, first + seq_len):
        inside = position < len(tokens)
        if inside and tokens[position] == bos and position > first:
            segment += 1
        inputs.append(tokens[position] if inside else bos)
        graded = position + 1 < len(tokens)
        targets.append(tokens[position + 1] if graded and tokens[position + 1] != bos else -100)
        segments.append(segment)
        document.append(tokens[: position + 2].count(bos) - 1 if graded else -1)
    return inputs, targets, segments, document


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("packing", ["bos", "bos_reset"])
def test_training_rows_are_the_windows_of_the_stream(
    open_small: Callable[..., Any], tokenizer: Any, packing: str
) -> None:
    dataset = open_small(tokenizer, packing=packing)
    tokens = tokens_of(dataset, "train")
    assert min(dataset.train_batch(step).n_targets for step in range(12)) < 6 * 16  # there is some BOS to leave out
    for step in range(12):
        batch = dataset.train_batch(step)
        assert batch.inputs_BT.shape == (6, 16) and batch.document_BT is None
        assert batch.inputs_BT.dtype == batch.targets_BT.dtype == torch.int64
        for row, window in enumerate(dataset.stream.windows(step)):
            inputs, targets, segments, _ = reference(tokens, int(window) * 16, 16, dataset.bos_id)
            assert batch.inputs_BT[row].tolist() == inputs
            assert batch.targets_BT[row].tolist() == targets
            if packing == "bos_reset":
                assert batch.segment_ids_BT[row].tolist() == segments
        assert (batch.segment_ids_BT is None) == (packing == "bos")
        assert batch.n_targets == int((batch.targets_BT != -100).sum())


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("packing", ["bos", "bos_reset"])
@pytest.mark.parametrize(("seq_len", "batch_size"), [(16, 5), (16, 1), (17, 4), (2, 64), (100_000, 2)])
def test_evaluation_reads_every_token_once(
    open_small: Callable[..., Any], tokenizer: Any, packing: str, seq_len: int, batch_size: int
) -> None:
    dataset = open_small(tokenizer, packing=packing)
    dataset.seq_len = seq_len  # set here, as no training window could be as long as the longest
    tokens = tokens_of(dataset, "val")
    rows = [row for batch in dataset.eval_batches("val", batch_size) for row in rows_of(batch)]
    for number, row in enumerate(rows[:: max(1, len(rows) // 20)]):
        number *= max(1, len(rows) // 20)
        expected = reference(tokens, number * seq_len, min(seq_len, len(tokens) + 20), dataset.bos_id)
        for found, want in zip(row, expected, strict=True):
            if found is not None:
                assert found[: len(want)] == want
    graded = [target for row in rows for target in row[1] if target != -100]
    assert graded == [token for token in tokens if token != dataset.bos_id]
    sizes = [len(batch.inputs_BT) for batch in dataset.eval_batches("val", batch_size)]
    assert all(size == batch_size for size in sizes[:-1]) and 1 <= sizes[-1] <= batch_size


def rows_of(batch: Batch) -> list[tuple[Any, ...]]:
    assert batch.n_targets == int((batch.targets_BT != -100).sum())
    segments = [None] * len(batch.inputs_BT) if batch.segment_ids_BT is None else batch.segment_ids_BT.tolist()
    assert batch.document_BT is not None
    return list(
        zip(batch.inputs_BT.tolist(), batch.targets_BT.tolist(), segments, batch.document_BT.tolist(), strict=True)
    )


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("split", ["val", "test"])
def test_document_sums_add_up(open_small: Callable[..., Any], tokenizer: Any, split: str) -> None:
    dataset = open_small(tokenizer)
    tokens, bos = tokens_of(dataset, split), dataset.bos_id
    score = dataset.new_score(split)
    for batch in dataset.eval_batches(split, 3):
        score.add(batch, (batch.targets_BT + 1).float(), batch.targets_BT == 0)
    texts: list[list[int]] = []
    for token in tokens:
        if token == bos:
            texts.append([])
        else:
            texts[-1].append(token)
    sizes = [len(dataset.tokenizer.decode(text).encode()) for text in texts]
    assert score.document_bytes.tolist() == dataset.document_bytes(split).tolist() == sizes
    assert score.document_nats.tolist() == [sum(token + 1 for token in text) for text in texts]
    assert score.tokens == len(tokens) - len(texts)
    assert (score.bytes, score.nats) == (sum(sizes), score.document_nats.sum())


def test_limited_evaluation_is_the_start_of_the_whole(open_small: Callable[..., Any]) -> None:
    dataset = open_small()
    whole = [row for batch in dataset.eval_batches("test", 4) for row in rows_of(batch)]
    for limit, n_rows in ((160, 10), (170, 10), (175, 10), (176, 11), (1, 1), (10**9, len(whole))):
        assert [row for batch in dataset.eval_batches("test", 4, max_tokens=limit) for row in rows_of(batch)] == whole[
            :n_rows
        ]


@pytest.mark.parametrize("packing", ["bos", "bos_reset"])
def test_ranks_together_read_the_global_batch(open_small: Callable[..., Any], packing: str) -> None:
    dataset = open_small(packing=packing)
    whole = dataset.train_batch(7)
    for world in (1, 2, 3, 6):
        blocks = [dataset.train_batch(7, slice(rank * 6 // world, (rank + 1) * 6 // world)) for rank in range(world)]
        strided = [dataset.train_batch(7, slice(rank, None, world)) for rank in range(world)]
        assert all(part.n_targets == whole.n_targets for part in blocks + strided)
        assert torch.equal(torch.cat([part.inputs_BT for part in blocks]), whole.inputs_BT)
        assert torch.equal(torch.cat([part.targets_BT for part in blocks]), whole.targets_BT)
        for rank, part in enumerate(strided):
            assert torch.equal(part.targets_BT, whole.targets_BT[rank::world])
            if packing == "bos_reset":
                assert torch.equal(part.segment_ids_BT, whole.segment_ids_BT[rank::world])
    with pytest.raises(ValueError, match="selects nothing"):
        dataset.train_batch(0, slice(6, 9))


def test_a_batch_is_a_function_of_seed_and_step(open_small: Callable[..., Any]) -> None:
    dataset, other = open_small(), open_small(seed=1)
    steps = [0, 40, 3, 3, 1, 1000]
    for step in steps:
        assert_equal(dataset.train_batch(step), open_small().train_batch(step))
    n_windows = dataset.stream.n_windows
    order = [row for step in range(n_windows) for row in dataset.train_batch(step).inputs_BT.tolist()][:n_windows]
    changed = [row for step in range(n_windows) for row in other.train_batch(step).inputs_BT.tolist()][:n_windows]
    assert order != changed and sorted(order) == sorted(changed)
    # A caller may write into what it was given.
    dataset.train_batch(0).inputs_BT.fill_(0)
    assert_equal(dataset.train_batch(0), open_small().train_batch(0))
    assert other.fingerprint == dataset.fingerprint


def test_epoch_covers_the_train_split(open_small: Callable[..., Any]) -> None:
    dataset = open_small(global_batch=1)
    tokens = tokens_of(dataset, "train")
    n_windows = dataset.stream.n_windows
    assert n_windows == (len(tokens) - 1) // 16 and dataset.n_train_tokens == len(tokens)
    graded = [target for step in range(n_windows) for target in dataset.train_batch(step).targets_BT.flatten().tolist()]
    expected = [token if token != dataset.bos_id else -100 for token in tokens[1 : n_windows * 16 + 1]]
    assert sorted(graded) == sorted(expected)


def test_fingerprint_names_what_is_read(open_small: Callable[..., Any]) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"tokenizer": TOKENIZERS[1]},
        {"packing": "bos_reset"},
        {"seq_len": 17},
        {"val_fraction": 0.25},
        {"test_fraction": 0.25},
    ]
    prints = [open_small(**change).fingerprint for change in changes]
    assert len(set(prints)) == len(prints)
    assert open_small(name="renamed", global_batch=3).fingerprint == prints[0]


def _send(dataset: Dataset, queue: Any) -> None:
    queue.put([field.tolist() for field in dataset.train_batch(5)[:2]])  # type: ignore[union-attr]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_read_the_same(open_small: Callable[..., Any], method: str) -> None:
    dataset = open_small(TOKENIZERS[1])
    expected = [field.tolist() for field in dataset.train_batch(5)[:2]]  # the files are open before the other starts
    context: Any = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=_send, args=(dataset, queue))
    process.start()
    assert queue.get(timeout=60) == expected
    process.join(20)
    assert process.exitcode == 0


def test_pickle_holds_no_tokens(cache: Path) -> None:
    dataset = open_dataset(CorpusConfig(), BytesConfig(), global_batch=2, seed=0, cache=cache)
    before = dataset.train_batch(3)
    dataset.document_bytes("val")
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 50_000
    assert_equal(pickle.loads(pickled).train_batch(3), before)


def test_text_reads_like_the_corpus(cache: Path) -> None:
    dataset = open_dataset(CorpusConfig(), BytesConfig(), global_batch=4, seed=0, cache=cache)
    batch = next(dataset.eval_batches("val", 2))
    text = dataset.tokenizer.decode(batch.inputs_BT[0].tolist())
    assert batch.inputs_BT[0, 0] == dataset.bos_id and len(text) == 255 and " the " in text


def test_a_single_text_file_is_enough(tmp_path: Path) -> None:
    text = "\n".join(document.text for document in documents(CorpusConfig())[:100])
    (tmp_path / "a.txt").write_text(text)
    cfg = CorpusConfig(name="files", paths=[str(tmp_path / "a.txt")])
    dataset = open_dataset(cfg, BytesConfig(), global_batch=4, seed=0, cache=tmp_path / "cache")
    assert dataset.train_batch(0).inputs_BT.shape == (4, 256)
    splits = [dataset.document_bytes(split) for split in ("train", "val", "test")]
    assert sum(int(sizes.sum()) for sizes in splits) == len(text.encode())
    assert min(map(len, splits)) >= 1


def test_errors_name_the_key(open_small: Callable[..., Any], small_corpus: CorpusConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data\.seq_len=100000: the train split has only \d+ tokens"):
        open_small(seq_len=100_000)
    with pytest.raises(ValueError, match=r"^data\.packing=loose"):
        open_small(packing="loose")
    with pytest.raises(ValueError, match=r"^tokenizer\.vocab_size=3"):
        open_small(BpeConfig(vocab_size=3))
    with pytest.raises(ValueError, match=r"^data\.kind=task: must be one of corpus"):
        open_small(kind="task")
    with pytest.raises(ValueError, match=r"^global_batch=0"):
        open_small(global_batch=0)
    dataset = open_small()
    with pytest.raises(ValueError, match="step=-1"):
        dataset.train_batch(-1)
    with pytest.raises(ValueError, match="split=valid: must be one of train, val, test"):
        dataset.eval_batches("valid", 4)
    with pytest.raises(ValueError, match="batch_size=0"):
        dataset.eval_batches("val", 0)
    with pytest.raises(ValueError, match="max_tokens=0"):
        dataset.eval_batches("val", 1, max_tokens=0)


def test_a_damaged_file_is_noticed(open_small: Callable[..., Any]) -> None:
    folder = open_small().folder
    with (folder / "train.bin").open("ab") as file:
        file.write(b"\0\0")
    with pytest.raises(ValueError, match="not of the size that its manifest states"):
        open_small()
