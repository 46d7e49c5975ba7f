"""From documents to token files, once: a folder named by what is in it.

A prepared folder holds, per split, ``{split}.bin`` (tokens, little-endian uint16 or uint32: BOS document BOS document
...), ``{split}_documents.npy`` (int64, where each document's BOS is) and, if the corpus has domains,
``{split}_domains.npy`` (int16, each document's number in the manifest's ``domains``); ``manifest.json`` with counts and
origins; the tokenizer if it was trained or read from a file. It never changes; a folder under its final name is whole.
``requests/`` in it has a file for each config that led to it, so that a run need not read texts to find it.

    python -m data.prepare data=NAME tokenizer=NAME    (data/command.py)
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import logging
import platform
import shutil
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from data.config import BpeConfig, CorpusConfig, HfConfig, TokenizerConfig
from data.corpus import SPLITS
from data.gather import n_buckets_of, tokenize, train_texts
from data.jobs import bar, in_order, locked
from data.plan import Plan, make_plan
from data.sources import units
from data.tokenizers import Tokenizer, build_tokenizer, load_tokenizer
from data.write import assemble, at_once, publish, sweep, write_json

log = logging.getLogger(__name__)

FORMAT = 2
"""Raise it whenever the same inputs would give other files: old folders are then not found, and made anew."""

MANIFEST = "manifest.json"

TRAINING_BYTES = 1 << 30
"""A tokenizer is trained on so much of the train split, from its start (documents are shuffled)."""


def prepare(
    data_cfg: CorpusConfig,
    tokenizer_cfg: TokenizerConfig,
    cache: Path,
    *,
    fetch: bool = False,
    streaming: bool = True,
    processes: int = 1,
    progress: bool = False,
) -> Path:
    """The prepared folder of a corpus and a tokenizer under ``cache``, made if it is not there.

    Its name depends on the texts, the split fractions and the tokenizer; not on where the texts lie, on their order, on
    ``processes``, on the run's seed, or on how they will be packed. Equal texts are kept as often as they come. Any
    number of processes may call it at once: one works, the others wait for it. What a killed process had finished (a
    unit of texts, a bucket of tokens) is not done again.

    ``fetch`` allows to read from the hub, part by part (``streaming``) or after a download of all. Raises ValueError if
    that is needed and not allowed, if a split would be empty, and what ``data.sources.read`` raises; OSError if the disk
    is full.
    """
    request = request_of(data_cfg, tokenizer_cfg)
    if (found := find(cache, request)) is not None:
        return found
    if data_cfg.hub is not None and not fetch:
        name = tokenizer_cfg.name if isinstance(tokenizer_cfg, HfConfig) else tokenizer_cfg.kind
        raise ValueError(
            f"data.hub={data_cfg.hub}: not yet prepared under paths.cache={cache}; run 'python -m data.prepare "
            f"data={data_cfg.name} tokenizer={name}' first, with this run's other data.*, tokenizer.* and paths.cache"
        )
    # Not by the files' stamps: when one is mended, what was made of the others still counts.
    lasting = {key: value for key, value in request.items() if key != "stamps"} | {"paths": list(data_cfg.paths)}
    work = cache / f".work-{_hash(lasting)}"
    try:
        with locked(work):
            if (found := find(cache, request)) is None:
                # Before terabytes of text are read: a tokenizer that cannot be had.
                ready = _kept(tokenizer_cfg, work / "tokenizer") if isinstance(tokenizer_cfg, HfConfig) else None
                plan = make_plan(data_cfg, work, streaming=streaming, processes=processes, progress=progress)
                found = _tokenized(data_cfg, tokenizer_cfg, ready, plan, cache, work, processes, progress)
                (found / "requests").mkdir(exist_ok=True)
                write_json(found / "requests" / f"{_hash(request)}.json", request)
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(
            errno.ENOSPC,
            f"paths.cache={cache}: the disk is full; make room or set another paths.cache; the same command goes on from "
            "what is done",
        ) from None
    return found


def request_of(data_cfg: CorpusConfig, tokenizer_cfg: TokenizerConfig) -> dict[str, Any]:
    """All of a config that decides what is prepared, known without reading texts: for local files, whether they have
    changed."""
    unread = ("kind", "name", "seq_len", "packing", "paths")
    asked = {key: value for key, value in dataclasses.asdict(data_cfg).items() if key not in unread}
    tokenizer = dataclasses.asdict(tokenizer_cfg)
    if isinstance(tokenizer_cfg, HfConfig):
        del tokenizer["name"]
        if (file := tokenizer_cfg.file()) is not None:
            tokenizer["path"] = hashlib.sha256(file.read_bytes()).hexdigest()
    request = {"format": FORMAT, **asked, "tokenizer": tokenizer}
    if data_cfg.hub is None:
        request["stamps"] = [unit.stamp for unit in units(data_cfg)]
    return request


def find(cache: Path, request: dict[str, Any]) -> Path | None:
    """The folder that such a config has led to before."""
    marks = sorted(cache.glob(f"*/requests/{_hash(request)}.json"))
    return marks[0].parents[1] if marks else None


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _tokenized(
    data_cfg: CorpusConfig,
    tokenizer_cfg: TokenizerConfig,
    tokenizer: Tokenizer | None,
    plan: Plan,
    cache: Path,
    work: Path,
    processes: int,
    progress: bool,
) -> Path:
    """The prepared folder of a plan, made in ``work`` if it is not there under its final name. ``tokenizer`` is None if it
    depends on the texts."""
    n_buckets = n_buckets_of(plan.n_bytes)
    kind = dataclasses.asdict(tokenizer_cfg)
    if tokenizer is not None:  # known by what it holds, not by where it lies
        kind = {"kind": tokenizer_cfg.kind, "fingerprint": tokenizer.fingerprint}
    settings: dict[str, Any] = {
        "format": FORMAT,
        "source": plan.source,
        "val_fraction": data_cfg.val_fraction,
        "test_fraction": data_cfg.test_fraction,
        "tokenizer": kind,
    }
    fingerprint = _hash(settings)
    final = cache / fingerprint
    if (final / MANIFEST).exists():
        return final
    if tokenizer is None:
        if isinstance(tokenizer_cfg, BpeConfig) and data_cfg.hub is not None and data_cfg.hub_split is None:
            raise ValueError("tokenizer.kind=bpe: data.hub_split=null leaves nothing to train it on; use bytes or hf")
        texts = train_texts(plan.slices, n_buckets, data_cfg, TRAINING_BYTES)
        tokenizer = _kept(tokenizer_cfg, work / f"tokenizer-{plan.source[:16]}", texts)
    dtype = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
    parts = work / f"parts-{fingerprint}-{n_buckets}"
    parts.mkdir(exist_ok=True)
    sweep(parts)
    shared = (plan.slices, n_buckets, data_cfg, tokenizer, dtype, parts)
    jobs = [(number,) for number in range(n_buckets)]
    counts = list(in_order(tokenize, shared, jobs, processes, bar("tokens", n_buckets, progress)))
    splits = {
        split: {key: sum(count[split][key] for count in counts) for key in ("documents", "tokens", "bytes")}
        for split in SPLITS
    }
    try:
        _check_splits(data_cfg, splits)
    except ValueError:
        shutil.rmtree(work)  # no other attempt could use it
        raise
    whole = work / "whole"
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir()
    for split in SPLITS:
        assemble(parts, whole, split, n_buckets, splits[split], with_domains=bool(plan.domains))
    tokenizer.save(whole)
    manifest = {
        "fingerprint": fingerprint,
        **settings,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "dtype": dtype,
        "domains": plan.domains,
        "splits": splits,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in ("numpy", "tokenizers")},
    }
    (whole / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    publish(whole, final, MANIFEST)
    log.info("prepared %s: %s", final, splits)
    return final


def _kept(cfg: TokenizerConfig, folder: Path, texts: Iterable[str] = ()) -> Tokenizer:
    """A tokenizer that is made once: a restart finds it in ``folder``."""
    if folder.exists():
        return load_tokenizer(cfg, folder)
    tokenizer = build_tokenizer(cfg, texts)
    with at_once(folder) as new:
        tokenizer.save(new)
    return tokenizer


def _check_splits(cfg: CorpusConfig, splits: dict[str, dict[str, int]]) -> None:
    n = sum(counts["documents"] for counts in splits.values())
    for split, hub_split in zip(SPLITS, (cfg.hub_split, cfg.hub_val, cfg.hub_test), strict=True):
        if not splits[split]["documents"] and (cfg.hub_split is not None or hub_split is not None):
            raise ValueError(
                f"data.val_fraction={cfg.val_fraction}, data.test_fraction={cfg.test_fraction}: none of {n} documents "
                f"fell into the {split} split; give more documents or other fractions"
            )


if __name__ == "__main__":
    from data.command import main

    sys.exit(main(sys.argv[1:]))
