"""Data sets of the Hugging Face hub, read through ``datasets``: only ``python -m data.prepare`` comes here."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.config import CorpusConfig
from data.corpus import Document
from data.sources import MAX_UNITS, Unit, file_stamp, library, make_document, one_line


def hub_units(cfg: CorpusConfig, *, streaming: bool) -> list[Unit]:
    """The parts of the hub's splits, at the commit that ``data.revision`` now stands for.

    Raises ValueError, naming the keys, for a data set, a config or a split that cannot be had.
    """
    commit = _commit(cfg)
    found: list[Unit] = []
    for split, hub_split in ((None, cfg.hub_split), ("val", cfg.hub_val), ("test", cfg.hub_test)):
        if hub_split is None:
            continue
        n = min(MAX_UNITS, _open(cfg.hub, cfg.hub_config, hub_split, commit, streaming).num_shards)
        for i in range(n):
            stamp = f"{commit}/{hub_split}/{i}/{n}"
            found.append(Unit(len(found), stamp, split=split, hub_split=hub_split, shard=(i, n), revision=commit))
    return found


def read_hub(cfg: CorpusConfig, unit: Unit, *, streaming: bool) -> Iterator[Document]:
    """The documents of a unit. Raises ValueError for a row that has no such columns."""
    assert unit.hub_split is not None
    rows = _open(cfg.hub, cfg.hub_config, unit.hub_split, unit.revision, streaming)
    roots = sorted({name.split(".")[0] for name in (cfg.text, cfg.domain) if name is not None})
    if rows.features is not None and set(roots) <= set(rows.features):
        rows = rows.select_columns(roots)  # the others need not be read, let alone fetched
    i, n = unit.shard
    number = 0
    try:
        for row in rows.shard(num_shards=n, index=i, contiguous=True):
            number += 1
            yield make_document(cfg, f"{cfg.hub}/{unit.hub_split}/{i}:{number}", row)
    except Exception as error:  # noqa: BLE001 - the network, the library and the files have errors of their own
        raise ValueError(
            f"data.hub={cfg.hub}: split {unit.hub_split}, part {i + 1} of {n}, row {number}: {one_line(error)}; the "
            "same command goes on from what is done"
        ) from None


@functools.lru_cache(maxsize=4)  # a process reads many units; finding out what the hub has takes seconds
def _open(hub: str, config: str | None, split: str, revision: str | None, streaming: bool) -> Any:
    datasets = library("datasets", f"data.hub={hub}")
    # A folder has no revisions: its stamp only keeps what was opened before a change from being used after it.
    known = None if Path(hub).expanduser().is_dir() else revision
    try:
        found = datasets.load_dataset(hub, config, split=split, revision=known, streaming=streaming)
        if streaming:
            return found
        return found.to_iterable_dataset(num_shards=min(MAX_UNITS, 1 + len(found) // 10_000))
    except Exception as error:  # noqa: BLE001 - network, names, scripts: each has an error of its own
        raise ValueError(
            f"data.hub={hub}: data.hub_config={config}, split {split} at revision {revision} cannot be opened "
            f"({one_line(error)})"
        ) from None


def _commit(cfg: CorpusConfig) -> str:
    """So that all units are of one state of the data set, also after a restart; of a folder, its files' stamps."""
    assert cfg.hub is not None
    folder = Path(cfg.hub).expanduser()
    if folder.is_dir():
        return file_stamp(sorted(str(file) for file in folder.rglob("*") if file.is_file()))
    import huggingface_hub

    try:
        return str(huggingface_hub.HfApi().dataset_info(cfg.hub, revision=cfg.revision).sha)
    except Exception as error:  # noqa: BLE001 - see above
        raise ValueError(f"data.hub={cfg.hub}: not found on the hub ({one_line(error)})") from None
