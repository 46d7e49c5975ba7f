"""What a corpus is made of: documents, and which split each belongs to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from data.config import CorpusConfig

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Document:
    """One text that belongs together: no split, and with ``packing=bos_reset`` no segment, crosses its ends."""

    name: str
    """Where it was found: a file, a line, a row."""

    text: str

    domain: str | None = None
    """What ``data.domain`` says of it."""


def digest(text: str) -> bytes:
    """32 bytes that decide a document's split (the first 8) and its place in the shuffled corpus (the rest).

    Both depend on the text alone, so neither the order of files nor their names matter, and two equal documents always
    land in the same split, next to each other.
    """
    return hashlib.blake2b(text.encode(), digest_size=32, person=b"isomix-document").digest()


def shares(cfg: CorpusConfig) -> tuple[float, float]:
    """The parts of the documents that go to ``test`` and ``val``: none where the hub has a split of its own."""
    if cfg.hub is None:
        return cfg.test_fraction, cfg.val_fraction
    return (0.0 if cfg.hub_test else cfg.test_fraction), (0.0 if cfg.hub_val else cfg.val_fraction)


def split_of(text_digest: bytes, cfg: CorpusConfig) -> str:
    """``train``, ``val`` or ``test``. Documents that are added later never move the ones already there."""
    position = int.from_bytes(text_digest[:8], "big") / 2**64
    test, val = shares(cfg)
    if position < test:
        return "test"
    return "val" if position < test + val else "train"
