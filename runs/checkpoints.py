"""Checkpoints that survive a kill at any moment: written beside, renamed into place, the one before is kept."""

from __future__ import annotations

import logging
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from runs.folder import sync_folder

log = logging.getLogger(__name__)

LAST, BEFORE = "last.ckpt", "before.ckpt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's own writer goes through the system's temporary folder, from where a move may be a copy that a kill
    leaves torn."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        with open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            os.replace(path, path.with_name(BEFORE))
        os.replace(temporary, path)
        sync_folder(path.parent)


def load(path: Path) -> dict[str, Any]:
    """A checkpoint's content on the CPU. Raises what torch raises for a torn file."""
    return torch.load(path, map_location="cpu", weights_only=False, mmap=True)


def keep(folder: Path, step: int) -> None:
    """Keep the newest checkpoint for good, beside the one that the next save will replace. The two share their bytes."""
    path = folder / "checkpoints" / f"step_{step:08d}.ckpt"
    path.unlink(missing_ok=True)
    os.link(folder / "checkpoints" / LAST, path)


def kept(folder: Path) -> list[Path]:
    """The checkpoints that ``trainer.keep_every`` kept, by step."""
    return sorted((folder / "checkpoints").glob("step_*.ckpt"))


def find(folder: Path, run_id: str) -> tuple[Path | None, int]:
    """The newest whole checkpoint of a run folder and its step; (None, 0) where there is none. Torn ones are removed.

    Raises RuntimeError for a checkpoint of another run.
    """
    for name in (LAST, BEFORE):
        path = folder / "checkpoints" / name
        if not path.exists():
            continue
        try:
            content = load(path)
        except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
            log.warning("%s is torn (%s); falling back to the one before", path, type(error).__name__)
            # Out of the way, or the next save would rename it over the good one before.
            path.unlink(missing_ok=True)
            continue
        if content["run_id"] != run_id:
            raise RuntimeError(f"{path} belongs to run {content['run_id']}, not to {run_id}")
        return path, int(content["global_step"])
    return None, 0
