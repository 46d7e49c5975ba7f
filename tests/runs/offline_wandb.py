"""Reads W&B's offline transaction log without the network: LevelDB framing around protobuf records.

A 7-byte file header, then blocks of 32 KiB with records: crc32 (4 bytes), length (2), type (1: whole, 2: first, 3: middle,
4: last), data. A record's header never crosses the end of a block.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2 as pb

BLOCK, HEADER = 32768, 7
WHOLE, FIRST, LAST = 1, 2, 4


def _records(path: Path) -> Iterator[Any]:
    raw = path.read_bytes()
    assert raw[:4] == b":W&B"
    position, data = 7, b""
    while position + HEADER <= len(raw):
        left = BLOCK - position % BLOCK
        _crc, length, kind = struct.unpack("<IHB", raw[position : position + HEADER]) if left >= HEADER else (0, 0, 0)
        if kind == 0:
            position += left  # padding up to the next block
            continue
        piece = raw[position + HEADER : position + HEADER + length]
        if len(piece) < length:
            return  # the torn tail of a killed run
        position += HEADER + length
        data = piece if kind in (WHOLE, FIRST) else data + piece
        if kind in (WHOLE, LAST):
            record = pb.Record()
            record.ParseFromString(data)
            yield record


def _items(items: Any) -> dict[str, Any]:
    """Nested values flat, with dotted keys."""
    out: dict[str, Any] = {}
    for item in items:
        _flatten(item.key or ".".join(item.nested_key), json.loads(item.value_json), out)
    return out


def _flatten(key: str, value: Any, out: dict[str, Any]) -> None:
    if isinstance(value, dict) and value:
        for name, child in value.items():
            _flatten(f"{key}.{name}", child, out)
    else:
        out[key] = value


def read_offline(path: Path) -> dict[str, Any]:
    """``run`` (id, name, group, job_type, tags), ``config``, ``history`` rows, ``summary`` and ``exit`` code; ``metrics``:
    by name or pattern, its axis and which extremes its summary keeps."""
    out: dict[str, Any] = {"run": {}, "config": {}, "history": [], "summary": {}, "metrics": {}, "exit": None}
    for record in _records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            out["run"] = {
                "id": run.run_id,
                "name": run.display_name,
                "group": run.run_group,
                "job_type": run.job_type,
                "tags": list(run.tags),
            }
            out["config"].update(_items(run.config.update))
        elif kind == "config":
            out["config"].update(_items(record.config.update))
        elif kind == "history":
            out["history"].append(_items(record.history.item))
        elif kind == "summary":
            out["summary"].update(_items(record.summary.update))
        elif kind == "metric":
            metric = record.metric
            kept = [name for name in ("min", "max", "last") if getattr(metric.summary, name)]
            out["metrics"][metric.name or metric.glob_name] = (metric.step_metric, kept)
        elif kind == "exit":
            out["exit"] = record.exit.exit_code
    return out
