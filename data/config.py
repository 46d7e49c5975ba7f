"""Typed configs of the ``data`` and ``tokenizer`` groups. No torch, no numpy: a config is checked before anything
starts.

``check(path)`` raises ValueError with one sentence that names the full key, its value and what would be right.
"""

from __future__ import annotations

import glob
import re
from dataclasses import dataclass, field
from pathlib import Path

from data.tasks import WithTasks

EMBEDDED = ("kjv",)
PACKINGS = ("bos", "bos_reset", "best_fit", "rows")
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst", ".parquet")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


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
            if not match.name.endswith(SUFFIXES):
                raise ValueError(f"{where}: {match} is of no known kind; must be one of {', '.join(SUFFIXES)}")
            # Its own name is kept: a link named rows.jsonl may lead to a blob named by a hash.
            found.add(str(match.parent.resolve() / match.name))
    return sorted(found)


@dataclass
class CorpusConfig:
    """Natural text, joined into one stream of tokens and read in windows of equal length."""

    kind: str = "corpus"

    name: str = "kjv"
    """The embedded corpus, or, with ``paths`` or ``hub``, any other word that should stand in tables. For a committed
    corpus it is the name of its YAML file, which the command that prepares it needs."""

    hub: str | None = None
    """A data set of the Hugging Face hub, ``owner/name``, or a folder laid out like one. It is fetched only by ``python
    -m data.prepare``, never by a run."""

    hub_config: str | None = None
    """The hub's name for a part or variant of the data set."""

    hub_split: str | None = "train"
    """The hub's split to train on; the splits that have no name below are taken from it, by document. None: nothing to
    train on, as for a test set of its own."""

    hub_val: str | None = None
    """The hub's own validation split. None: a share of ``hub_split``."""

    hub_test: str | None = None
    """The hub's own test split. None: a share of ``hub_split``."""

    revision: str | None = None
    """A commit, tag or branch of the hub's data set. None: the newest when the corpus is first prepared."""

    paths: list[str] = field(default_factory=list)
    """Local files or globs: a .txt file is a document, and so is each row of a .jsonl (also .gz, .zst) or .parquet file.
    Empty for the embedded corpus and for a hub data set."""

    text: str = "text"
    """Column of the text; ``a.b`` is field b inside a. A column of texts, or of lists of texts, is joined."""

    join: str = "\n\n"
    """Between the texts of one document, where its column holds several."""

    domain: str | None = None
    """Column that names where a document is from, dotted as ``text``: losses are then also reported by it."""

    max_documents: int | None = None
    """A part of the corpus: its first documents in the order of its files. The hub's own validation and test splits are
    always whole."""

    max_bytes: int | None = None
    """The same by bytes of text: documents are taken while they fit."""

    cut_chars: int = 8192
    """A corpus that is one .txt file alone is cut into documents of at most this many characters, at line ends where
    there are any: a document belongs to one split, so a single one could not give three."""

    seq_len: int = 256
    """T, tokens that a model reads in one training or evaluation window."""

    packing: str = "bos"
    """``bos``: documents follow each other, each led by BOS. ``bos_reset``: the same tokens, and segment ids that let
    no information cross from one document into the next. ``best_fit``: rows that all begin with BOS, filled with the
    documents that fit best, the last one cropped. ``rows``: a document a row, cropped or padded."""

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
        for name in ("max_documents", "max_bytes"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{path}.{name}={getattr(self, name)}: must be at least 1, or null for all")
        for name in ("text", "domain"):
            if (value := getattr(self, name)) is not None and not all(value.split(".")):
                raise ValueError(f"{path}.{name}={value}: must name a column, as in text or meta.source")
        self._check_source(path)

    def _check_source(self, path: str) -> None:
        if self.name in EMBEDDED and (self.paths or self.hub):
            raise ValueError(f"{path}.name={self.name}: is the embedded corpus, which reads no files; use data=files")
        if self.hub is not None:
            return self._check_hub(path)
        for name in ("hub_config", "hub_val", "hub_test", "revision"):
            if getattr(self, name) is not None:
                raise ValueError(f"{path}.{name}={getattr(self, name)}: needs {path}.hub, the data set that it is of")
        if self.hub_split != "train":
            raise ValueError(f"{path}.hub_split={self.hub_split}: needs {path}.hub, the data set that it is of")
        if self.name not in EMBEDDED and not self.paths:
            raise ValueError(f"{path}.paths=[]: name the files, as in '{path}.paths=[corpus/*.txt]'")
        source_files(list(self.paths), path)

    def _check_hub(self, path: str) -> None:
        assert self.hub is not None
        if self.paths:
            raise ValueError(f"{path}.paths={list(self.paths)}: must be empty where {path}.hub={self.hub} is given")
        if not HUB_NAME.fullmatch(self.hub) and not Path(self.hub).expanduser().is_dir():
            raise ValueError(f"{path}.hub={self.hub}: is neither owner/name nor a folder")
        named = [split for split in (self.hub_split, self.hub_val, self.hub_test) if split is not None]
        if not named:
            raise ValueError(f"{path}.hub_split=null: name at least one of hub_split, hub_val and hub_test")
        for number, split in enumerate(named):
            if split in named[:number]:
                raise ValueError(f"{path}.hub_split, hub_val, hub_test={','.join(named)}: {split} is named twice")


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


@dataclass
class HfConfig:
    """A byte-pair tokenizer made elsewhere, as a tokenizer.json file of the Hugging Face ``tokenizers`` library."""

    kind: str = "hf"

    name: str = "hf"
    """The name of its YAML file, which the command that prepares a corpus needs."""

    path: str = ""
    """A model or tokenizer of the Hugging Face hub, ``owner/name``, a folder with a tokenizer.json, or such a file."""

    revision: str | None = None
    """A commit, tag or branch of the hub's repository. None: the newest when a corpus is first prepared."""

    bos: str | None = None
    """The token that starts a document, as ``<s>``. None: a new one after all others."""

    def check(self, path: str) -> None:
        """Raises ValueError."""
        if self.kind != "hf":
            raise ValueError(f"{path}.kind={self.kind}: a tokenizer of Hugging Face has kind hf")
        if not self.path:
            raise ValueError(f"{path}.path=: name a tokenizer.json, a folder with one, or a hub repository")
        if self.file() is None and not HUB_NAME.fullmatch(self.path):
            raise ValueError(f"{path}.path={self.path}: is neither a tokenizer.json, nor a folder, nor owner/name")
        if (file := self.file()) is not None and not file.is_file():
            raise ValueError(f"{path}.path={self.path}: the folder holds no tokenizer.json")

    def file(self) -> Path | None:
        """The tokenizer.json that ``path`` stands for if it is on this machine."""
        local = Path(self.path).expanduser()
        return local / "tokenizer.json" if local.is_dir() else local if local.is_file() else None


TokenizerConfig = BytesConfig | BpeConfig | HfConfig

DATA: dict[str, type] = WithTasks({"corpus": CorpusConfig})
"""kind of a ``data`` config -> its dataclass."""

TOKENIZERS: dict[str, type] = {"bytes": BytesConfig, "bpe": BpeConfig, "hf": HfConfig}
"""kind of a ``tokenizer`` config -> its dataclass."""
