"""From documents to token files, once: a folder named by what is in it.

A prepared folder holds, per split, ``{split}.bin`` (tokens, little-endian uint16 or uint32: BOS document BOS document
...) and ``{split}_documents.npy`` (int64, where each document's BOS is), and ``manifest.json`` with counts and
origins, and the tokenizer if it was trained. It never changes; a folder under its final name is whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import platform
import shutil
import socket
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from data.config import BpeConfig, BytesConfig, CorpusConfig
from data.corpus import SPLITS, digest, documents, source_hash, split_of
from data.tokenizers import Tokenizer, build_tokenizer

log = logging.getLogger(__name__)

FORMAT = 1
"""Raise it whenever the same inputs would give other files: old folders are then not found, and made anew."""

MANIFEST = "manifest.json"


def prepare(data_cfg: CorpusConfig, tokenizer_cfg: BytesConfig | BpeConfig, cache: Path) -> Path:
    """The prepared folder of a corpus and a tokenizer under ``cache``, made if it is not there.

    Its name depends on the texts, the split fractions and the tokenizer's settings; not on where the texts lie, on
    their order, on the run's seed, or on how they will be packed. Any number of processes may call it at once: each
    works in a folder of its own, the first to finish gives its one the final name, the others drop theirs. A killed
    process leaves only a folder under a temporary name, which the next call on that host removes.

    Raises ValueError if a split would be empty, and what ``data.corpus.documents`` raises.
    """
    found = [(digest(document.text), document.text) for document in documents(data_cfg)]
    source = source_hash(text_digest for text_digest, _ in found)
    settings = {
        "format": FORMAT,
        "source": source,
        "val_fraction": data_cfg.val_fraction,
        "test_fraction": data_cfg.test_fraction,
        "tokenizer": dataclasses.asdict(tokenizer_cfg),
    }
    fingerprint = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    final = cache / fingerprint
    if (final / MANIFEST).exists():
        return final

    # Sorting by the part of the digest that the split does not use is the one shuffle: it is fixed, and knows no seed.
    found.sort(key=lambda pair: pair[0][8:])
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    for text_digest, text in found:
        texts[split_of(text_digest, data_cfg)].append(text)
    for split in SPLITS:
        if not texts[split]:
            raise ValueError(
                f"data.val_fraction={data_cfg.val_fraction}, data.test_fraction={data_cfg.test_fraction}: none of "
                f"{len(found)} documents fell into the {split} split; give more documents or other fractions"
            )

    cache.mkdir(parents=True, exist_ok=True)
    _remove_orphans(cache, fingerprint)
    work = Path(tempfile.mkdtemp(prefix=f"{_prefix(fingerprint)}{os.getpid()}.", dir=cache))
    try:
        tokenizer = build_tokenizer(tokenizer_cfg, texts["train"])
        tokenizer.save(work)
        manifest: dict[str, Any] = {
            "fingerprint": fingerprint,
            **settings,
            "tokenizer_fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "dtype": "<u2" if tokenizer.vocab_size <= 2**16 else "<u4",
            "splits": {},
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("numpy", "tokenizers")},
            },
        }
        for split in SPLITS:
            manifest["splits"][split] = _write_split(work, split, texts[split], tokenizer, np.dtype(manifest["dtype"]))
        (work / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        _publish(work, final)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    log.info("prepared %s: %s", final, manifest["splits"])
    return final


def _write_split(folder: Path, split: str, texts: list[str], tokenizer: Tokenizer, dtype: np.dtype) -> dict[str, int]:
    """Writes one split's two files and returns its counts. Tokens go to disk document by document."""
    starts = np.empty(len(texts), dtype=np.int64)
    bos = np.array([tokenizer.bos_id], dtype=dtype)
    n_tokens = n_bytes = 0
    with (folder / f"{split}.bin").open("wb") as file:
        for number, text in enumerate(texts):
            starts[number] = n_tokens
            ids = tokenizer.encode(text)
            file.write(bos.tobytes() + ids.astype(dtype).tobytes())
            n_tokens += 1 + len(ids)
            n_bytes += len(text.encode())
    np.save(folder / f"{split}_documents.npy", starts)
    return {"documents": len(texts), "tokens": n_tokens, "bytes": n_bytes}


def _publish(work: Path, final: Path) -> None:
    """Gives a finished folder its final name, or does nothing if another process was first."""
    for path in work.iterdir():
        # On disk before the name is: a machine that dies must not leave a whole-looking folder of empty files.
        with path.open("rb") as file:
            os.fsync(file.fileno())
    work.chmod(0o755)  # mkdtemp makes it private; a cache may be shared
    try:
        work.rename(final)
    except OSError:
        if not (final / MANIFEST).exists():
            raise


def _prefix(fingerprint: str) -> str:
    return f".{fingerprint}.{socket.gethostname()}."


def _remove_orphans(cache: Path, fingerprint: str) -> None:
    """Removes what killed processes of this host left behind; those of other hosts cannot be judged from here."""
    prefix = _prefix(fingerprint)
    for entry in cache.iterdir():
        pid = entry.name.removeprefix(prefix).split(".")[0]
        if entry.name.startswith(prefix) and pid.isdigit() and not _alive(int(pid)):
            log.info("removing %s, left by a process that is gone", entry)
            shutil.rmtree(entry, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
