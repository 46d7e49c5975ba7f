"""Typed configs of the ``data`` and ``tokenizer`` groups. No torch, no numpy: a config is checked before anything
starts.

``check(path)`` raises ValueError with one sentence that names the full key, its value and what would be right.
"""

from __future__ import annotations

import glob
from dataclasses import dataclass, field
from pathlib import Path

EMBEDDED = ("kjv",)
PACKINGS = ("bos", "bos_reset")
SUFFIXES = (".txt", ".jsonl")


def source_files(paths: list[str], path: str = "data") -> list[str]:
    """The files that ``paths`` names, globs expanded, sorted, each once. Raises ValueError that names the entry at
    fault."""
    found: set[str] = set()
    for number, entry in enumerate(paths):
        file = Path(entry).expanduser()
        where = f"{path}.paths[{number}]={entry}"
        if file.is_dir():
            raise ValueError(f"{where}: is a folder; name its files, as in {entry.rstrip('/')}/*.txt")
        if file.exists():
            matches = [file]
        elif glob.has_magic(str(file)):
            matches = [match for match in map(Path, glob.glob(str(file), recursive=True)) if match.is_file()]
            if not matches:
                raise ValueError(f"{where}: the pattern matches no file")
        else:
            raise ValueError(f"{where}: no such file")
        for match in matches:
            if match.suffix not in SUFFIXES:
                raise ValueError(f"{where}: {match} is neither a .txt nor a .jsonl file")
            # Its own name is kept: a link named rows.jsonl may lead to a blob named by a hash.
            found.add(str(match.parent.resolve() / match.name))
    return sorted(found)


@dataclass
class CorpusConfig:
    """Natural text, joined into one stream of tokens and read in windows of equal length."""

    kind: str = "corpus"

    name: str = "kjv"
    """The embedded corpus, or, with ``paths``, any other word that should stand in tables."""

    paths: list[str] = field(default_factory=list)
    """Empty for the embedded corpus; else files or globs. A .txt file is a document, and so is each row of a .jsonl
    file (``{"text": ...}``)."""

    cut_chars: int = 8192
    """A corpus that is one .txt file alone is cut into documents of at most this many characters, at line ends where
    there are any: a document belongs to one split, so a single one could not give three."""

    seq_len: int = 256
    """T, tokens that a model reads in one training or evaluation window."""

    packing: str = "bos"
    """``bos``: documents follow each other, each led by BOS. ``bos_reset``: the same tokens, and segment ids that let
    no information cross from one document into the next."""

    val_fraction: float = 0.05
    """Chance that a document is put into the validation split, by a hash of its text."""

    test_fraction: float = 0.05

    def check(self, path: str) -> None:
        """Raises ValueError; reads no file, but looks whether the named ones exist."""
        if self.kind != "corpus":
            raise ValueError(f"{path}.kind={self.kind}: a corpus has kind corpus")
        if self.seq_len < 2:
            raise ValueError(f"{path}.seq_len={self.seq_len}: must be at least 2")
        if self.cut_chars < 1:
            raise ValueError(f"{path}.cut_chars={self.cut_chars}: must be at least 1")
        if self.packing not in PACKINGS:
            raise ValueError(f"{path}.packing={self.packing}: must be one of {', '.join(PACKINGS)}")
        for name in ("val_fraction", "test_fraction"):
            if not 0 < getattr(self, name) < 0.5:
                raise ValueError(f"{path}.{name}={getattr(self, name)}: must be greater than 0 and less than 0.5")
        if self.name in EMBEDDED and self.paths:
            raise ValueError(f"{path}.name={self.name}: is the embedded corpus, which reads no files; use data=files")
        if self.name not in EMBEDDED and not self.paths:
            raise ValueError(f"{path}.paths=[]: name the .txt or .jsonl files, as in '{path}.paths=[corpus/*.txt]'")
        source_files(list(self.paths), path)


@dataclass
class BytesConfig:
    """One token per byte of UTF-8, and BOS: 257 tokens. Nothing to train, nothing to store."""

    kind: str = "bytes"

    def check(self, path: str) -> None:
        """Raises ValueError."""
        if self.kind != "bytes":
            raise ValueError(f"{path}.kind={self.kind}: the byte tokenizer has kind bytes")


@dataclass
class BpeConfig:
    """Byte-level byte-pair encoding, trained once on the train split."""

    kind: str = "bpe"

    vocab_size: int = 1024
    """All tokens: 256 bytes, the merges, and BOS."""

    def check(self, path: str) -> None:
        """Raises ValueError."""
        if self.kind != "bpe":
            raise ValueError(f"{path}.kind={self.kind}: the byte-pair tokenizer has kind bpe")
        if self.vocab_size < 257:
            raise ValueError(f"{path}.vocab_size={self.vocab_size}: must be at least 257, the 256 bytes and BOS")


DATA: dict[str, type] = {"corpus": CorpusConfig}
"""kind of a ``data`` config -> its dataclass."""

TOKENIZERS: dict[str, type] = {"bytes": BytesConfig, "bpe": BpeConfig}
"""kind of a ``tokenizer`` config -> its dataclass."""
