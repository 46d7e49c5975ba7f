"""Preparing at scale: many files, runs and buckets, several processes, kills."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import data.gather
import data.prepare
import data.scatter
from data.config import BpeConfig, BytesConfig, CorpusConfig, HfConfig
from data.corpus import SPLITS, digest, split_of
from data.prepare import prepare
from data.sources import documents
from data.tokenizers import load_tokenizer
from data.write import at_once, sweep

ROOT = Path(__file__).parents[2]


@pytest.fixture
def corpus(tmp_path: Path) -> CorpusConfig:
    """600 documents in 6 files, some of them equal, from 3 sources."""
    rng = np.random.default_rng(1)
    for number in range(6):
        rows = []
        for row in range(100):
            text = "".join(rng.choice(list("abc é日\n"), size=rng.integers(1, 400))) + f"#{(number * 100 + row) % 550}"
            rows.append({"text": text if row % 25 else "the same everywhere", "source": "xyz"[row % 3]})
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shares = {"val_fraction": 0.1, "test_fraction": 0.1}
    return CorpusConfig(name="mine", paths=[str(tmp_path / "*.jsonl")], domain="source", **shares)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def alive(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def small_parts(monkeypatch: pytest.MonkeyPatch, run: int, bucket: int) -> None:
    monkeypatch.setattr(data.scatter, "RUN_BYTES", run)
    monkeypatch.setattr(data.gather, "SMALL_BUCKET_BYTES", bucket)


def test_order_and_domains_are_those_of_a_sort_in_memory(
    corpus: CorpusConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_parts(monkeypatch, 5_000, 8_000)
    folder = prepare(corpus, BytesConfig(), tmp_path / "cache")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["domains"] == ["x", "y", "z"]
    everything = sorted(documents(corpus), key=lambda document: (digest(document.text)[8:], document.domain))
    for split in SPLITS:
        wanted = [document for document in everything if split_of(digest(document.text), corpus) == split]
        tokens = np.fromfile(folder / f"{split}.bin", dtype=manifest["dtype"])
        starts = np.load(folder / f"{split}_documents.npy")
        tokenizer = load_tokenizer(BytesConfig(), folder)
        texts = [tokenizer.decode(part) for part in np.split(tokens, starts[1:])]
        assert texts == [document.text for document in wanted]
        names = [manifest["domains"][number] for number in np.load(folder / f"{split}_domains.npy")]
        assert names == [document.domain for document in wanted]


@pytest.mark.parametrize(
    ("run", "bucket", "processes"), [(700, 50_000, 1), (20_000, 3_000, 1), (300, 5_000, 1), (3_000, 9_000, 2)]
)
def test_parts_and_processes_do_not_matter(
    corpus: CorpusConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: int, bucket: int, processes: int
) -> None:
    tokenizer = BpeConfig(vocab_size=300)
    whole = prepare(corpus, tokenizer, tmp_path / "whole")
    small_parts(monkeypatch, run, bucket)
    parts = prepare(corpus, tokenizer, tmp_path / "parts", processes=processes)
    assert parts.name == whole.name and contents(parts) == contents(whole)


@pytest.mark.parametrize("limits", [{"max_documents": 250}, {"max_bytes": 60_000}, {"max_documents": 1000}])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_part_is_the_first_documents_in_the_order_of_files(
    corpus: CorpusConfig, tmp_path: Path, limits: dict[str, int], processes: int
) -> None:
    first = documents(corpus)
    if "max_documents" in limits:
        first = first[: limits["max_documents"]]
    else:
        sizes = np.cumsum([len(document.text.encode()) for document in first])
        first = first[: int((sizes <= limits["max_bytes"]).sum())]
    rows = [{"text": document.text, "source": document.domain} for document in first]
    (tmp_path / "apart").mkdir()
    file = tmp_path / "apart" / "part.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = prepare(replace(corpus, paths=[str(file)]), BytesConfig(), tmp_path / "wanted")
    found = prepare(replace(corpus, **limits), BytesConfig(), tmp_path / "found", processes=processes)
    assert contents(found) == contents(wanted)


def test_a_part_reads_no_more_files_than_it_needs(
    corpus: CorpusConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "3.jsonl").write_text("broken")
    prepare(replace(corpus, max_documents=250), BytesConfig(), tmp_path / "cache")
    with pytest.raises(ValueError, match=r"3\.jsonl, line 1"):
        prepare(replace(corpus, max_documents=350), BytesConfig(), tmp_path / "cache")


KILLED = """
import os, signal, sys
from pathlib import Path
import data.prepare, data.gather, data.scatter
from data.config import *

if __name__ == "__main__":
    data.scatter.RUN_BYTES, data.gather.SMALL_BUCKET_BYTES = 5_000, 20_000
    calls, dies, at = [], sys.argv[1], int(sys.argv[2])
    for module, name in ((data.scatter, "digest"), (data.gather, "gather"), (data.prepare, "assemble"), (data.prepare, "publish")):
        def wrapped(*args, _whole=getattr(module, name), _name=name, **more):
            calls.append(_name)
            if _name == dies and calls.count(_name) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return _whole(*args, **more)
        setattr(module, name, wrapped)
    folder = data.prepare.prepare({cfg!r}, BpeConfig(vocab_size=300), Path({cache!r}))
    print(folder.name, *(calls.count(name) for name in ("digest", "gather", "assemble")))
"""


def attempt(corpus: CorpusConfig, cache: Path, dies: str = "never", at: int = 1) -> subprocess.CompletedProcess[str]:
    code = KILLED.replace("{cfg!r}", repr(corpus)).replace("{cache!r}", repr(str(cache)))
    return subprocess.run([sys.executable, "-c", code, dies, str(at)], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_a_killed_preparation_goes_on_from_what_is_done(corpus: CorpusConfig, tmp_path: Path) -> None:
    calm = attempt(corpus, tmp_path / "calm")
    name, *counts = calm.stdout.split()
    hashed, gathered, assembled = map(int, counts)
    assert (hashed, assembled) == (600, 3) and gathered > 10, calm.stderr
    cache = tmp_path / "cache"
    deaths = [("digest", 50), ("digest", 330), ("gather", 1), ("gather", 4), ("assemble", 2), ("publish", 1)]
    for dies, at in deaths:
        killed = attempt(corpus, cache, dies, at)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert [entry.name[:6] for entry in cache.iterdir()] == [".work-"], "a half-made folder has no final name"
    last = attempt(corpus, cache)
    assert last.returncode == 0, last.stderr
    # Files and buckets that were done are not done again; only joining is.
    assert last.stdout.split() == [name, "0", "0", "3"]
    assert [entry.name for entry in cache.iterdir()] == [name]
    assert contents(cache / name) == contents(tmp_path / "calm" / name)


@pytest.mark.slow
@pytest.mark.parametrize("all_of_them", [True, False])
def test_killed_processes_lose_only_what_they_were_at(corpus: CorpusConfig, tmp_path: Path, all_of_them: bool) -> None:
    """The command itself, with two processes, all of them or the first alone killed while they read."""
    os.mkfifo(tmp_path / "2a.jsonl")  # a file that never comes to an end: the fourth of seven
    command = [
        sys.executable,
        "-m",
        "data.prepare",
        "data=files",
        "tokenizer=bytes",
        "processes=2",
        "data.domain=source",
    ]
    paths = sorted(str(file) for file in tmp_path.glob("*.jsonl"))
    command += [f"data.paths={json.dumps(paths)}", f"paths.cache={tmp_path}/cache", "data.val_fraction=0.1"]
    command += ["data.test_fraction=0.1", "progress=false"]
    started = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    records = lambda: sorted(tmp_path.glob("cache/.work-*/units/*/unit.json"))  # noqa: E731
    for _ in range(600):
        if len(records()) >= 5 or started.poll() is not None:
            break
        signal.sigtimedwait([], 0.1)
    assert started.poll() is None, started.communicate()
    workers = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    assert len(workers) >= 2
    (os.killpg if all_of_them else os.kill)(started.pid, signal.SIGKILL)
    started.wait()
    for _ in range(100):  # a worker that lived on would write beside the next attempt
        if not any(alive(worker) for worker in workers):
            break
        signal.sigtimedwait([], 0.1)
    assert not any(alive(worker) for worker in workers)
    done = {file.parent.name: file.stat().st_mtime_ns for file in records()}
    assert len(done) >= 5 and "3" not in done
    (tmp_path / "2a.jsonl").unlink()
    (tmp_path / "2a.jsonl").write_text(json.dumps({"text": "at last", "source": "x"}) + "\n")
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    wanted = prepare(replace(corpus, paths=paths[::-1]), BytesConfig(), tmp_path / "wanted")
    folder = tmp_path / "cache" / wanted.name
    assert contents(folder) == contents(wanted)
    assert finished.stdout.startswith(f"{folder}: train ")


def test_mending_a_broken_line_keeps_what_was_done(
    corpus: CorpusConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "4.jsonl"
    good = file.read_text()
    file.write_text(good + '{"text": "cut')
    with pytest.raises(ValueError, match=r"4\.jsonl, line 101: want"):
        prepare(corpus, BytesConfig(), tmp_path / "cache")
    file.write_text(good)
    read: list[Any] = []
    whole = data.scatter.read
    monkeypatch.setattr(
        data.scatter, "read", lambda cfg, unit, **more: (read.append(unit.number), whole(cfg, unit, **more))[1]
    )
    folder = prepare(corpus, BytesConfig(), tmp_path / "cache")
    assert read == [4, 5]
    assert contents(folder) == contents(prepare(corpus, BytesConfig(), tmp_path / "wanted"))


def test_a_file_that_changed_since_it_was_read_is_read_again(
    corpus: CorpusConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(data.prepare, "assemble", lambda *_, **__: pytest.fail("stopped here"))
        with pytest.raises(BaseException, match="stopped here"):
            prepare(corpus, BpeConfig(vocab_size=300), tmp_path / "cache")
    with (tmp_path / "2.jsonl").open("a") as file:
        for number in range(8):  # enough for the train split, and so for the tokenizer, to have some
            file.write(json.dumps({"text": f"{number} {'quokka ' * 50}", "source": "w"}) + "\n")
    folder = prepare(corpus, BpeConfig(vocab_size=300), tmp_path / "cache")
    assert contents(folder) == contents(prepare(corpus, BpeConfig(vocab_size=300), tmp_path / "wanted"))


def test_a_full_disk_is_said_and_nothing_is_lost(
    corpus: CorpusConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(data.prepare, "assemble", full)
        with pytest.raises(OSError, match=r"paths\.cache=.*: the disk is full; make room .*goes on from what is done"):
            prepare(corpus, BytesConfig(), tmp_path / "cache")
    monkeypatch.setattr(data.scatter, "read", lambda *_, **__: pytest.fail("read again"))
    prepare(corpus, BytesConfig(), tmp_path / "cache")


def test_a_tokenizer_that_loses_bytes_is_refused(
    corpus: CorpusConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from data.tokenizers import BytesTokenizer

    monkeypatch.setattr(BytesTokenizer, "encode", lambda self, text: np.frombuffer(text.encode()[:-1], dtype=np.uint8))
    with pytest.raises(ValueError, match=r"a document of \d+ bytes became tokens of \d+ bytes"):
        prepare(corpus, BytesConfig(), tmp_path / "cache")


def test_too_many_domains_are_refused(tmp_path: Path) -> None:
    """Their numbers are 16 bits wide."""
    file = tmp_path / "many.jsonl"
    file.write_text("".join(json.dumps({"text": f"text {n}", "url": str(n)}) + "\n" for n in range(32_768)))
    cfg = CorpusConfig(name="mine", paths=[str(file)], domain="url")
    with pytest.raises(ValueError, match=r"data\.domain=url: this column has 32,768 different values; want .* 32,767"):
        prepare(cfg, BytesConfig(), tmp_path / "cache")


def test_a_tokenizer_that_cannot_be_had_is_said_before_texts_are_read(
    corpus: CorpusConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(data.scatter, "read", lambda *_, **__: pytest.fail("texts were read"))
    with pytest.raises(ValueError, match=r"tokenizer\.path=.*: is no tokenizer\.json"):
        prepare(corpus, HfConfig(path=str(tmp_path / "tokenizer.json")), tmp_path / "cache")


def test_two_makers_of_a_folder_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one that should be dead goes on writing does not reach the other's."""
    folder = tmp_path / "part"
    with at_once(folder) as late:
        (late / "a").write_text("half")
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 1)
            with at_once(folder) as other:
                (other / "a").write_text("whole")
        assert contents(folder) == {"a": b"whole"}
        (late / "a").write_text("whole, late")
    assert contents(folder) == {"a": b"whole, late"} and [path.name for path in tmp_path.glob(".part*")] == []
    with pytest.raises(RuntimeError), at_once(folder) as failed:
        (failed / "a").write_text("half")
        raise RuntimeError
    assert contents(folder) == {"a": b"whole, late"}
    sweep(tmp_path)
    assert not list(tmp_path.glob(".part*"))


def test_small_corpora_have_work_for_all_and_large_ones_few_buckets() -> None:
    sizes = {1: 1, 60_000_000: 15, 10**9: 64, 128 * 10**9: 954}
    assert {size: data.gather.n_buckets_of(size) for size in sizes} == sizes
