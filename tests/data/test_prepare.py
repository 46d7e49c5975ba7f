from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import data.prepare
from data.config import BpeConfig, BytesConfig, CorpusConfig
from data.corpus import SPLITS, digest, documents, split_of
from data.prepare import prepare
from data.tokenizers import load_tokenizer

ROOT = Path(__file__).parents[2]


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
    for file in folder.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes()
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

        def encode(self, text: str) -> np.ndarray:
            return np.full(3, self.vocab_size - 1)

        def save(self, folder: Path) -> None: ...

    for size, dtype in ((2**16, "<u2"), (2**16 + 1, "<u4")):
        tokenizer = Wide(size)
        tokenizer.bos_id = size - 1
        monkeypatch.setattr(data.prepare, "build_tokenizer", lambda cfg, texts, made=tokenizer: made)
        folder = prepare(small_corpus, BytesConfig(), tmp_path / str(size))
        assert json.loads((folder / "manifest.json").read_text())["dtype"] == dtype
        assert (np.fromfile(folder / "val.bin", dtype=dtype) == size - 1).all()


def test_an_empty_split_is_refused(write_jsonl: Callable[..., str], tmp_path: Path) -> None:
    cfg = CorpusConfig(name="mine", paths=[write_jsonl(["alone"])])
    with pytest.raises(ValueError, match=r"data\.val_fraction=0\.05.*none of 1 documents fell into the \w+ split"):
        prepare(cfg, BytesConfig(), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_two_processes_at_once(small_corpus: CorpusConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    rename = os.rename

    def both_then_rename(source: Path, target: Path) -> None:
        barrier.wait(timeout=20)  # each has made its whole folder before either gives the name
        rename(source, target)

    monkeypatch.setattr(data.prepare.os, "rename", both_then_rename)
    cache = tmp_path / "cache"

    def work() -> None:
        folder = prepare(small_corpus, BytesConfig(), cache)
        results.put((str(folder), (folder / "train.bin").stat().st_size))

    processes = [context.Process(target=work) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
    first, second = results.get(), results.get()
    assert first == second
    assert [entry.name for entry in cache.iterdir()] == [Path(first[0]).name]


def test_a_killed_process_leaves_nothing_that_counts(small_corpus: CorpusConfig, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    code = f"""
import os, signal, data.prepare
from data.config import *
from data.tokenizers import BytesTokenizer
from pathlib import Path
encode, calls = BytesTokenizer.encode, []
def die(self, text):
    calls.append(text)
    if len(calls) == 250:  # in the second or third of the three files
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(self, text)
BytesTokenizer.encode = die
data.prepare.prepare({small_corpus!r}, BytesConfig(), Path({str(cache)!r}))
"""
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = list(cache.iterdir())
    assert len(left) == 1 and left[0].name.startswith(".") and (left[0] / "train.bin").exists()
    # One of a process that lives is left alone.
    living = cache / left[0].name.replace(left[0].name.split(".")[-2], str(os.getppid()))
    living.mkdir()
    folder = prepare(small_corpus, BytesConfig(), cache)
    assert sorted(cache.iterdir()) == sorted([folder, living])
    assert (folder / "manifest.json").exists()


def test_an_error_leaves_nothing(small_corpus: CorpusConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(data.prepare, "_publish", fail)
    with pytest.raises(KeyboardInterrupt):
        prepare(small_corpus, BytesConfig(), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_prepared_folder_is_not_made_again(
    small_corpus: CorpusConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare(small_corpus, BpeConfig(vocab_size=300), tmp_path)
    monkeypatch.setattr(data.prepare, "build_tokenizer", lambda *_: pytest.fail("trained again"))
    assert prepare(small_corpus, BpeConfig(vocab_size=300), tmp_path) == folder
