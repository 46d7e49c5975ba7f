from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data.config import CorpusConfig
from data.sources import MAX_UNITS, documents, units

ROWS: list[dict[str, Any]] = [
    {"text": f"document {number} é日\u2028\n", "meta": {"redpajama_set_name": f"RedPajama{'CG'[number % 2]}"}}
    for number in range(7)
] + [{"text": "", "meta": {"redpajama_set_name": "RedPajamaC"}}]
"""As SlimPajama's: the name of the source lies inside a column."""


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=3)
    elif file.suffix == ".gz":
        # Two members, as tools that append write them.
        file.write_bytes(gzip.compress(lines[:100]) + gzip.compress(lines[100:]))
    elif file.suffix == ".zst":
        pack = zstandard.ZstdCompressor().compress
        file.write_bytes(pack(lines[:100]) + pack(lines[100:]))
    else:
        file.write_bytes(lines)
    return str(file)


KINDS = [".jsonl", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst", ".parquet"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_holds_the_same_documents(tmp_path: Path, kind: str) -> None:
    file = write(tmp_path / f"rows{kind}", ROWS)
    found = documents(CorpusConfig(name="mine", paths=[file], domain="meta.redpajama_set_name"))
    assert [(document.text, document.domain) for document in found] == [
        (row["text"], row["meta"]["redpajama_set_name"]) for row in ROWS[:-1]
    ]
    assert [document.name for document in found] == [f"{file}:{number}" for number in range(1, 8)]


@pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
def test_a_column_of_texts_is_joined(tmp_path: Path, kind: str) -> None:
    """As Qasper's: sections of paragraphs, as a structure of lists or as a list of structures."""
    lists = {"full_text": {"section_name": ["A", "B"], "paragraphs": [["one", "two"], ["three"]]}}
    structures = {"full_text": [{"paragraphs": ["one", "two"]}, {"paragraphs": ["three"]}]}
    for number, row in enumerate((lists, structures)):
        file = write(tmp_path / f"{number}{kind}", [row])
        cfg = CorpusConfig(name="mine", paths=[file], text="full_text.paragraphs", join="\n")
        assert [document.text for document in documents(cfg)] == ["one\ntwo\nthree"]


def test_a_missing_text_is_empty_and_a_missing_domain_has_a_name(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.parquet", [{"text": "a", "source": None}, {"text": None, "source": "x"}])
    found = documents(CorpusConfig(name="mine", paths=[file], domain="source"))
    assert [(document.text, document.domain) for document in found] == [("a", "none")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_without_the_column_is_named(tmp_path: Path, kind: str) -> None:
    file = write(tmp_path / f"rows{kind}", ROWS)
    for changes, message in (
        ({"text": "story"}, "no column 'story'; there is: text, meta"),
        ({"domain": "meta.source"}, "no column '(meta\\.)?source'; there is: redpajama_set_name"),
        ({"text": "meta"}, "column 'meta' holds dict, not text"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            documents(CorpusConfig(name="mine", paths=[file], **changes))
        assert str(error.value).startswith(f"{file}, ") and "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_a_torn_file_is_named(tmp_path: Path, kind: str) -> None:
    rows = [{"text": "".join(chr(97 + (number * place) % 26) for place in range(999))} for number in range(200)]
    file = Path(write(tmp_path / f"rows{kind}", rows))
    file.write_bytes(file.read_bytes()[:-300])
    with pytest.raises(ValueError, match=r"rows\.\S+, ") as error:
        documents(CorpusConfig(name="mine", paths=[str(file)]))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("frames", [1, 5])
def test_a_torn_zst_is_not_taken_for_a_short_one(tmp_path: Path, frames: int) -> None:
    """A cut at the end of a line or of a block leaves no broken line behind: the frame itself must be asked."""
    zstandard = pytest.importorskip("zstandard")
    lines = [json.dumps({"text": f"document {number} {'x' * (number % 50)}"}) + "\n" for number in range(500)]
    parts = ["".join(lines[len(lines) * i // frames : len(lines) * (i + 1) // frames]) for i in range(frames)]
    packed = [zstandard.ZstdCompressor().compress(part.encode()) for part in parts]
    skipped = b"\x50\x2a\x4d\x18\x04\x00\x00\x00\x00\x00\x00\x00"  # a frame without content, as pzstd writes it
    file = tmp_path / "a.jsonl.zst"
    cfg = CorpusConfig(name="mine", paths=[str(file)])
    file.write_bytes(b"".join(skipped + frame for frame in packed))
    assert [json.dumps({"text": document.text}) + "\n" for document in documents(cfg)] == lines
    for lost in (1, 5, len(packed[-1]) - 3):
        file.write_bytes(b"".join(packed)[:-lost])
        with pytest.raises(ValueError, match=r"a\.jsonl\.zst, after line \d+: cannot be unpacked .*middle of a frame"):
            documents(cfg)


def test_an_array_of_rows_is_not_one_document(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps([{"text": "a"}, {"text": "b"}]) + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: .*an object with columns, not list"):
        documents(CorpusConfig(name="mine", paths=[str(file)]))


def test_many_files_share_units_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(25):
        (tmp_path / f"{number:02}.txt").write_text(str(number))
    cfg = CorpusConfig(name="mine", paths=[str(tmp_path / "*.txt")])
    assert [len(unit.files) for unit in units(cfg)] == [1] * 25 and MAX_UNITS == 1024
    texts = [document.text for document in documents(cfg)]
    monkeypatch.setattr("data.sources.MAX_UNITS", 7)
    assert [len(unit.files) for unit in units(cfg)] == [3, 4, 3, 4, 3, 4, 4]
    assert [document.text for document in documents(cfg)] == texts == [str(number) for number in range(25)]


def test_a_stamp_follows_its_files(tmp_path: Path, write_jsonl: Callable[..., str]) -> None:
    cfg = CorpusConfig(name="mine", paths=[write_jsonl(["a"], "a.jsonl"), write_jsonl(["b"], "b.jsonl")])
    first, second = (unit.stamp for unit in units(cfg))
    write_jsonl(["bb"], "b.jsonl")
    assert [unit.stamp == before for unit, before in zip(units(cfg), (first, second), strict=True)] == [True, False]


@pytest.mark.parametrize(("kind", "package"), [(".jsonl.zst", "zstandard"), (".parquet", "pyarrow")])
def test_a_missing_package_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, package: str
) -> None:
    file = write(tmp_path / f"rows{kind}", ROWS)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"{file}: needs the package {package}: pip install 'isomix\[corpora\]'"):
        documents(CorpusConfig(name="mine", paths=[file]))
