"""Run folders as `runs.run` leaves them, with figures that a test chooses. Nothing is trained."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runs.identity import SENTINEL, digest, flatten

DOCUMENT_BYTES = np.array([3000, 1200, 4100, 0, 2500, 900, 3700, 2200])
STATE_BYTES = {"transformer": 1048576, "swa": 262144, "mamba2": 73728, "mesa": 131072, "hyena": 786432}
RATES = {"transformer": 41000.0, "swa": 38000.0, "mesa": 9500.0, "hyena": 15000.0}


def science(mixer: str, seed: int, lr: float, **changes: Any) -> dict[str, Any]:
    """The nested science of a small run. ``changes`` are dotted keys with ``__`` for the dot."""
    out: dict[str, Any] = {
        "mixer": {"kind": mixer, "d_model": 64, "n_heads": 2, "head_dim": 32},
        "model": {"d_model": 64, "n_layers": 2, "n_heads": 2, "mlp_ratio": 3.0, "dropout": 0.0},
        "data": {
            "kind": "corpus",
            "name": "kjv",
            "paths": [],
            "cut_chars": 8192,
            "seq_len": 256,
            "packing": "bos",
            "val_fraction": 0.05,
            "test_fraction": 0.05,
        },
        "tokenizer": {"kind": "bytes"},
        "optimizer": {"kind": "adamw", "lr": lr, "weight_decay": 0.1, "betas": [0.9, 0.98], "clip": 1.0},
        "schedule": {"kind": "cosine", "warmup_steps": 20, "final": 0.1},
        "evaluation": {"every": 20, "val_tokens": 65536, "test_tokens": None},
        "steps": 200,
        "tokens": None,
        "global_batch": 16,
        "precision": "fp32",
        "seed": seed,
        "init_seed": seed,
        "data_seed": seed,
    }
    if mixer == "swa":
        out["mixer"]["window"] = 64
    for key, value in changes.items():
        *path, last = key.split("__")
        node = out
        for part in path:
            node = node[part]
        node[last] = value
    return out


def write_run(
    root: Path,
    mixer: str = "swa",
    *,
    study: str = "default",
    seed: int = 0,
    lr: float = 3e-3,
    bits: float = 2.0,
    document_bits: np.ndarray | None = None,
    tuned: Sequence[str] = (),
    state: str = "done",
    spikes: int = 0,
    diverged: bool = False,
    code: dict[str, str] | None = None,
    fingerprint: str = "f00d",
    phase: str | None = None,
    document_bytes: np.ndarray = DOCUMENT_BYTES,
    record: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A run folder under ``root``/runs. ``bits`` is its test score; ``document_bits`` (per byte, by document) shape it.

    Returns the folder.
    """
    facts = science(mixer, seed, lr, **changes)
    free = {"seed", "init_seed", "data_seed", *tuned}
    flat = {key: value for key, value in flatten(facts).items() if not key.startswith("mixer.")}
    comparison = {key: SENTINEL if key in free else value for key, value in flat.items()}
    run_id = digest(facts)
    folder = root / "runs" / study / f"{mixer}-{run_id}"
    folder.mkdir(parents=True)
    steps, batch = facts["steps"], facts["global_batch"] * facts["data"]["seq_len"]
    rate = RATES.get(mixer, 22000.0)
    _write_rows(folder, steps, batch, bits, rate, facts["evaluation"]["every"], spikes)

    nats, n_bytes = _documents(bits, document_bits, document_bytes)
    total_bits = float(nats.sum() / math.log(2) / n_bytes.sum())
    done = state == "done"
    content: dict[str, Any] = {
        "run_id": run_id,
        "mixer": mixer,
        "study": study,
        "science": facts,
        "host": {"accelerator": "cpu", "devices": 1, "micro_batch": 16},
        "comparison": comparison,
        "comparison_key": digest(comparison),
        "code": code or {"shared": "5a4ed0000001", "mixer": f"own-{mixer}"},
        "code_changed": False,
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "command": f"python train.py study={study}" if study != "default" else f"python train.py mixer={mixer}",
        "overrides": [
            f"mixer={mixer}",
            f"optimizer.lr={lr}",
            f"seed={seed}",
            *([f"study.phase={phase}"] if phase else []),
        ],
        "accessories": {
            "positions": "rotary, base 10000" if mixer in ("transformer", "swa") else "none",
            "q/k norm": "l2",
        },
        "hardware": {"cpu": "A CPU", "cores": 2, "threads": 2, "gpu": None, "devices": 1},
        "versions": {"python": "3.11.2", "torch": "2.13.0", "numpy": "2.4.6"},
        "hostname": "secret-host",
        "data": {"fingerprint": fingerprint, "train_tokens": 3_690_000, "vocab_size": 257, "epochs": 0.222},
        "counts": {
            "params": 148_000,
            "params_non_embedding": 131_000,
            "params_mixer": 33_000,
            "flops_per_token": 360_000.0,
            "train_flops_per_token": 1_080_000.0 * (1.7 if mixer == "mesa" else 1),
            "state_bytes": STATE_BYTES.get(mixer, 65_536),
            "tokens": steps * batch,
            "train_flops": 1_080_000.0 * steps * batch * (1.7 if mixer == "mesa" else 1),
        },
    }
    if done:
        content["metrics"] = {
            "test/loss": total_bits * math.log(2),
            "test/perplexity": math.exp(total_bits * math.log(2)),
            "test/bits_per_byte": total_bits,
            "val/loss": (bits + 0.01) * math.log(2),
            "val/bits_per_byte": bits + 0.01,
            "train/loss": bits * math.log(2),
            "train/spikes": spikes,
            "train/diverged": float(diverged),
        }
        content["timing"] = {"seconds": steps * batch / rate, "tokens_per_s": rate}
        content["finished"] = "2026-01-01T00:00:00+0000"
        np.savez(folder / "test_documents.npz", nats=nats, bytes=n_bytes)
    content.update(record or {})
    status = {"state": state, "step": steps if done else 40, "steps": steps, "attempts": 1, "heartbeat": time.time()}
    status["error"] = "RuntimeError: it broke" if state == "failed" else None
    (folder / "run.json").write_text(json.dumps(content, indent=1))
    (folder / "status.json").write_text(json.dumps(status))
    return folder


def _documents(bits: float, shape: np.ndarray | None, n_bytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nats and bytes of each document, scaled so that all together have ``bits`` per byte."""
    per_byte = np.linspace(0.9, 1.1, len(n_bytes)) if shape is None else np.asarray(shape, dtype=float)
    raw = per_byte * n_bytes
    return raw * (bits * n_bytes.sum() / raw.sum()) * math.log(2), n_bytes


def _write_rows(folder: Path, steps: int, batch: int, bits: float, rate: float, every: int, spikes: int) -> None:
    rows: list[dict[str, Any]] = []
    for step in range(10, steps + 1, 10):
        loss = (bits + 4.0 * math.exp(-5 * step / steps)) * math.log(2)
        rows.append(
            {
                "step": step,
                "tokens": step * batch,
                "train/loss": loss,
                "train/grad_norm": 0.5,
                "train/learning_rate": 1e-3,
                "train/spikes": spikes,
                "seconds": step * batch / rate,
                "tokens_per_s": rate,
            }
        )
        if step % every == 0 or step == steps:
            rows.append(
                {"step": step, "tokens": step * batch, "val/loss": loss, "val/bits_per_byte": loss / math.log(2)}
            )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_study(
    root: Path,
    name: str,
    runs: dict[str, list[Path]],
    *,
    trials: dict[str, list[tuple[float, float]]] | None = None,
    **spec: Any,
) -> None:
    """``study.json`` over run folders: mixer -> its runs. ``trials``: mixer -> (lr, validation metric)."""
    trials = trials or {}
    mixers: dict[str, Any] = {}
    for mixer, folders in runs.items():
        rows = [json.loads((folder / "run.json").read_text()) for folder in folders]
        lr = rows[0]["science"]["optimizer"]["lr"] if rows else None
        tried = [rate for rate, _ in trials.get(mixer, [])]
        edge = {"optimizer.lr": "smallest" if lr == min(tried) else "largest"} if lr in (tried[:1] + tried[-1:]) else {}
        mixers[mixer] = {
            "point": None if lr is None else {"optimizer.lr": lr},
            "at_edge": edge,
            "trials": [
                {
                    "point": {"optimizer.lr": rate},
                    "seed": 100,
                    "run": f"{mixer}-tune{i}",
                    "state": "done",
                    "value": value,
                }
                for i, (rate, value) in enumerate(trials.get(mixer, []))
            ],
            "runs": [
                {"seed": row["science"]["seed"], "run": folder.name, "state": "done"}
                for row, folder in zip(rows, folders, strict=True)
            ],
        }
    seeds = sorted({row["seed"] for mixer in mixers.values() for row in mixer["runs"]})
    content = {
        "study": name,
        "spec": {
            "name": name,
            "mixers": {m: {"optimizer.lr": [rate for rate, _ in trials.get(m, [])] or [3e-3]} for m in runs},
            "seeds": seeds,
            "reference": next(iter(runs)),
            "tune": {"seeds": [100], "metric": "val/bits_per_byte", "mode": "min"},
            "equal_trials": True,
            "description": "A synthetic study",
            "report": {},
            **spec,
        },
        "overrides": [],
        "phases": {},
        "mixers": mixers,
        "updated": "2026-01-01T00:00:00+0000",
    }
    path = root / "runs" / name / "study.json"
    path.write_text(json.dumps(content, indent=1))
