"""A copy of the code for queued jobs, which must not pick up what is edited after they were submitted."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from runs.host import MARK, git_commit
from runs.validate import ConfigError

LARGEST = 10 * 2**20
"""Bytes of the largest file that counts as code."""


def snapshot(root: Path, folder: Path, results: Path) -> Path:
    """Copy the checkout at ``root`` to ``folder/<hash of its content>``; equal code is copied once.

    What git tracks or would offer to add, except ``results`` and files over 10 MiB, which are no code. A snapshot is its
    own snapshot. Raises ConfigError outside a checkout.
    """
    if (root / MARK).exists():
        return root
    files = [path for path in _files(root) if not path.is_relative_to(results)]
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(root)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    target = folder / digest.hexdigest()[:12]
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".code-", dir=folder))
    temporary.chmod(0o755)
    for path in files:
        copy = temporary / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    (temporary / MARK).write_text(json.dumps({"commit": git_commit(root)}))
    try:
        temporary.rename(target)
    except OSError:
        if not target.exists():
            raise
        shutil.rmtree(temporary)  # another command was faster
    return target


def _files(root: Path) -> list[Path]:
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True, check=False) if shutil.which("git") else None
    if done is None or done.returncode:
        raise ConfigError(
            f"hydra.launcher.snapshot=true: {root} is not a git checkout (or git is missing), so it cannot be told what is "
            "code; with false queued jobs run the code as it is when they start"
        )
    paths = [root / name for name in sorted(filter(None, done.stdout.split("\0")))]
    return [path for path in paths if path.is_file() and path.stat().st_size <= LARGEST]
