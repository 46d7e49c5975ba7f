from __future__ import annotations

import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import data.plan
import data.prepare
from data.config import BpeConfig, BytesConfig, CorpusConfig
from data.corpus import SPLITS, digest, split_of
from data.prepare import prepare
from data.sources import documents
from data.tokenizers import load_tokenizer


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a prepared folder, without the marks of who asked for it."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@pytest.mark.parametrize("tokenizer_cfg", [BytesConfig(), BpeConfig(vocab_size=300)])
def test_files_hold_the_corpus(
    small_corpus: CorpusConfig, tokenizer_cfg: BytesConfig | BpeConfig, tmp_path: Path
) -> None:
    folder = prepare(small_corpus, tokenizer_cfg, tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    tokenizer = load_tokenizer(tokenizer_cfg, folder)
    assert manifest["tokenizer_fingerprint"] == tokenizer.fingerprint
    assert manifest["fingerprint"] == folder.name
    texts = [document.text for document in documents(small_corpus)]
    for split in SPLITS:
        tokens = np.fromfile(folder / f"{split}.bin", dtype=manifest["dtype"])
        starts = np.load(folder / f"{split}_documents.npy")
        np.testing.assert_array_equal(starts, np.flatnonzero(tokens == tokenizer.bos_id))
        assert starts[0] == 0
        read = [tokenizer.decode(part[1:]) for part in np.split(tokens, starts[1:])]
        assert Counter(read) == Counter(text for text in texts if split_of(digest(text), small_corpus) == split)
        counts = {"documents": len(read), "tokens": len(tokens), "bytes": sum(len(text.encode()) for text in read)}
        assert manifest["splits"][split] == counts
        assert read != [text for text in texts if text in set(read)], "documents were not shuffled"


def test_embedded_corpus_sizes(cache: Path) -> None:
    manifest = json.loads((prepare(CorpusConfig(), BytesConfig(), cache) / "manifest.json").read_text())
    assert manifest["splits"] == {
        "train": {"documents": 1063, "tokens": 3_691_739, "bytes": 3_690_676},
        "val": {"documents": 66, "tokens": 222_195, "bytes": 222_129},
        "test": {"documents": 60, "tokens": 223_518, "bytes": 223_458},
    }
    assert manifest["dtype"] == "<u2"


def test_folder_depends_on_content_and_settings_only(
    small_corpus: CorpusConfig, write_jsonl: Callable[..., str], tmp_path: Path
) -> None:
    texts = [document.text for document in documents(small_corpus)]
    elsewhere = [write_jsonl(texts[200:], "a.jsonl"), write_jsonl(texts[:200][::-1], "z.jsonl")]
    folder = prepare(small_corpus, BytesConfig(), tmp_path)
    same = replace(small_corpus, name="other", paths=elsewhere, seq_len=99, packing="bos_reset")
    assert prepare(same, BytesConfig(), tmp_path) == folder
    # Not only the name: made from the other order, the files are the same.
    again = prepare(same, BytesConfig(), tmp_path / "fresh")
    assert contents(folder) == contents(again)
    others = [
        prepare(replace(small_corpus, val_fraction=0.21), BytesConfig(), tmp_path),
        prepare(replace(small_corpus, test_fraction=0.21), BytesConfig(), tmp_path),
        prepare(small_corpus, BpeConfig(vocab_size=300), tmp_path),
        prepare(small_corpus, BpeConfig(vocab_size=301), tmp_path),
        prepare(replace(small_corpus, paths=elsewhere[1:]), BytesConfig(), tmp_path),
    ]
    assert len({folder, *others}) == 6


def test_bpe_is_trained_on_the_train_split_only(write_jsonl: Callable[..., str], tmp_path: Path) -> None:
    cfg = CorpusConfig(name="mine", val_fraction=0.2, test_fraction=0.2)
    texts = [f"{number} zebra zebra zebra" for number in range(200)]
    # Only held-out documents have these words, and so many of them that their merges would come first.
    held_out = [f"{number} quokka quokka quokka" for number in range(1000)]
    texts += [text for text in held_out if split_of(digest(text), cfg) != "train"]
    folder = prepare(replace(cfg, paths=[write_jsonl(texts)]), BpeConfig(vocab_size=300), tmp_path)
    tokenizer = load_tokenizer(BpeConfig(), folder)
    tokens = {tokenizer.decode([token]) for token in range(tokenizer.vocab_size)}
    assert " zebra" in tokens
    assert not any("qu" in token or "kk" in token for token in tokens)


def test_large_vocabularies_get_wider_files(small_corpus: CorpusConfig, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    class Wide:
        fingerprint, bos_id = "wide", 2**16

        def __init__(self, vocab_size: int) -> None:
            self.vocab_size = vocab_size
            self.token_bytes = np.zeros(vocab_size, dtype=np.int64)
            self.token_bytes[-2] = 1

        def encode(self, text: str) -> np.ndarray:
            return np.full(len(text.encode()), self.vocab_size - 2)

        def save(self, folder: Path) -> None: ...

    for size, dtype in ((2**16, "<u2"), (2**16 + 1, "<u4")):
        tokenizer = Wide(size)
        tokenizer.bos_id = size - 1
        monkeypatch.setattr(data.prepare, "build_tokenizer", lambda cfg, texts, made=tokenizer: made)
        folder = prepare(small_corpus, BytesConfig(), tmp_path / str(size))
        assert json.loads((folder / "manifest.json").read_text())["dtype"] == dtype
        assert set(np.fromfile(folder / "val.bin", dtype=dtype)) == {size - 1, size - 2}


def test_an_empty_split_is_refused(write_jsonl: Callable[..., str], tmp_path: Path) -> None:
    cfg = CorpusConfig(name="mine", paths=[write_jsonl(["alone"])])
    with pytest.raises(ValueError, match=r"data\.val_fraction=0\.05.*none of 1 documents fell into the \w+ split"):
        prepare(cfg, BytesConfig(), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_empty_documents_are_skipped_and_counted(
    write_jsonl: Callable[..., str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [f"text {number}" for number in range(40)]
    shares = {"val_fraction": 0.3, "test_fraction": 0.3}
    full = CorpusConfig(name="mine", paths=[write_jsonl(texts)], **shares)
    holes = CorpusConfig(name="mine", paths=[write_jsonl([*texts, "", " \n"], "holes.jsonl")], **shares)
    folder = prepare(full, BytesConfig(), tmp_path)
    assert "skipped" not in caplog.text
    assert prepare(holes, BytesConfig(), tmp_path) == folder
    assert "data.name=mine: skipped 2 empty documents beside 40 with text" in caplog.text
    with pytest.raises(ValueError, match=r"data\.paths=.*blank.*no document has any text"):
        prepare(replace(full, paths=[write_jsonl(["", " "], "blank.jsonl")]), BytesConfig(), tmp_path)


def test_equal_documents_are_kept(write_jsonl: Callable[..., str], tmp_path: Path) -> None:
    texts = [f"text {number % 20}" for number in range(60)]
    cfg = CorpusConfig(name="mine", paths=[write_jsonl(texts)], val_fraction=0.3, test_fraction=0.3)
    manifest = json.loads((prepare(cfg, BytesConfig(), tmp_path) / "manifest.json").read_text())
    assert sum(counts["documents"] for counts in manifest["splits"].values()) == 60
    once = replace(cfg, paths=[write_jsonl(texts[:20], "once.jsonl")])
    assert (
        json.loads((prepare(once, BytesConfig(), tmp_path) / "manifest.json").read_text())["source"]
        != manifest["source"]
    )


def test_two_processes_at_once(small_corpus: CorpusConfig, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    cache = tmp_path / "cache"

    def work() -> None:
        barrier.wait(timeout=20)
        calls: list[int] = []
        whole = data.prepare.assemble
        data.prepare.assemble = lambda *args, **more: (calls.append(1), whole(*args, **more))  # type: ignore[assignment]
        folder = prepare(small_corpus, BytesConfig(), cache)
        results.put((str(folder), len(calls)))

    processes = [context.Process(target=work) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len({folder for folder, _ in found}) == 1
    assert sorted(calls for _, calls in found) == [0, 0, 3], "one works, the others wait"
    assert [entry.name for entry in cache.iterdir()] == [Path(found[0][0]).name]


def test_a_prepared_folder_is_not_made_again_nor_are_texts_read(
    small_corpus: CorpusConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare(small_corpus, BpeConfig(vocab_size=300), tmp_path)
    monkeypatch.setattr(data.plan, "scatter", lambda *_: pytest.fail("read again"))
    assert prepare(small_corpus, BpeConfig(vocab_size=300), tmp_path) == folder
    assert prepare(replace(small_corpus, seq_len=9, name="else"), BpeConfig(vocab_size=300), tmp_path) == folder


def test_a_changed_file_is_read_again(small_corpus: CorpusConfig, tmp_path: Path) -> None:
    folder = prepare(small_corpus, BytesConfig(), tmp_path)
    file = Path(small_corpus.paths[0])
    stat = file.stat()
    file.write_text(file.read_text().replace('#7"', '#8"'))  # of the same size
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert prepare(small_corpus, BytesConfig(), tmp_path) != folder
