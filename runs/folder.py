"""The folder of a run: lock, status, metrics and records, each written so that a kill at any moment leaves it whole."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import IO, Any

HEARTBEAT_SECONDS = 10.0


class Busy(RuntimeError):
    """Another process is running this run."""


def write_atomic(path: Path, text: str) -> None:
    """Write a whole file or nothing: temporary file in the same folder, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sync_folder(path: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file's content; {} where there is none."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a torn last line of a killed process is left out."""
    rows = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return rows


class RunFolder:
    """``config.yaml``, ``run.json``, ``metrics.jsonl``, ``checkpoints/``, ``status.json`` and ``train.log`` of one run."""

    def __init__(self, path: Path):
        self.path = path
        self._lock_file: IO[str] | None = None
        self._metrics: IO[str] | None = None
        self._stop = threading.Event()
        self._writing = threading.Lock()
        self._beat: threading.Thread | None = None

    # ---- lock ----

    def lock(self) -> None:
        """Become the only process of this run and start the heartbeat. Raises Busy."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock_file = open(self.path / ".lock", "a+")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                self._lock_by_heartbeat()  # a network file system without flock
            else:
                owner = self.status()
                self._lock_file.close()
                self._lock_file = None
                raise Busy(f"process {owner.get('pid')} on {owner.get('host')} is running it") from None
        self._stop.clear()
        self._beat = threading.Thread(target=self._heartbeat, daemon=True)
        self._beat.start()

    def _lock_by_heartbeat(self) -> None:
        status = self.status()
        age = time.time() - status.get("heartbeat", 0)
        if status.get("state") == "running" and age < 6 * HEARTBEAT_SECONDS:
            raise Busy(f"process {status.get('pid')} on {status.get('host')} showed life {age:.0f} s ago")

    def is_locked(self) -> bool:
        """Is a process running this run? Only looks."""
        try:
            file = open(self.path / ".lock")
        except FileNotFoundError:
            return False
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:  # a network file system without flock
                try:
                    self._lock_by_heartbeat()
                except Busy:
                    return True
        return False

    def _heartbeat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            self.set_status()

    def release(self) -> None:
        """Stop the heartbeat, close the files, free the lock."""
        self._stop.set()
        if self._beat is not None:
            self._beat.join()
            self._beat = None
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None

    # ---- status ----

    def status(self) -> dict[str, Any]:
        """``state`` (queued, running, done, failed, preempted), error, heartbeat; {} before the first start."""
        return read_json(self.path / "status.json")

    def set_status(self, **changes: Any) -> None:
        """Change fields of the status; always renews the heartbeat."""
        with self._writing:
            status = {**self.status(), **changes, "heartbeat": time.time(), "pid": os.getpid()}
            status["host"] = socket.gethostname()
            write_atomic(self.path / "status.json", json.dumps(status, indent=1))

    # ---- records ----

    def record(self) -> dict[str, Any]:
        """The content of run.json."""
        return read_json(self.path / "run.json")

    def set_record(self, **changes: Any) -> None:
        """Change fields of run.json."""
        write_atomic(self.path / "run.json", json.dumps({**self.record(), **changes}, indent=1, default=str))

    # ---- metrics ----

    def rows(self) -> list[dict[str, Any]]:
        """All rows of metrics.jsonl."""
        return read_rows(self.path / "metrics.jsonl")

    def cut_metrics(self, step: int) -> list[dict[str, Any]]:
        """Keep only the rows that the checkpoint at ``step`` covers, so that no step is there twice; returns them."""
        rows = [row for row in self.rows() if row["step"] <= step]
        write_atomic(self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        return rows

    def log(self, row: dict[str, Any]) -> None:
        """Append a row; it must have ``step`` and ``tokens``."""
        if self._metrics is None:
            self._metrics = open(self.path / "metrics.jsonl", "a")
        self._metrics.write(json.dumps(row) + "\n")
        self._metrics.flush()

    def sync_metrics(self) -> None:
        """Make the rows durable; called before a checkpoint, which must never be ahead of them."""
        if self._metrics is not None:
            os.fsync(self._metrics.fileno())
