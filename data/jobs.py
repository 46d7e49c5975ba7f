"""Work over processes whose results come in order, and one worker at a time for a folder."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


def in_order(
    work: Callable[..., T], shared: tuple[Any, ...], jobs: Sequence[tuple[Any, ...]], processes: int, bar: Any = None
) -> Iterator[T]:
    """Yields ``work(*shared, *job)`` for each job, in the order of jobs; with one process, in this one.

    ``shared`` is sent once to each process. Jobs that are not yet begun when the caller stops, or when one fails, are dropped. Raises what ``work`` raises, and
    RuntimeError if a worker was killed. ``bar`` (tqdm) counts and is closed.
    """
    try:
        for result in (
            (work(*shared, *job) for job in jobs) if processes == 1 else _parallel(work, shared, jobs, processes)
        ):
            if bar is not None:
                bar.update()
            yield result
    finally:
        if bar is not None:
            bar.close()


_task: tuple[Callable[..., Any], tuple[Any, ...]]  # of a worker process


def _begin(work: Callable[..., Any], shared: tuple[Any, ...]) -> None:
    global _task
    _task = work, shared
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A pool's workers outlive a parent that was killed, and would go on writing beside the next attempt."""
    if (parent := multiprocessing.parent_process()) is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _call(job: tuple[Any, ...]) -> Any:
    work, shared = _task
    return work(*shared, *job)


def _parallel(
    work: Callable[..., T], shared: tuple[Any, ...], jobs: Sequence[tuple[Any, ...]], processes: int
) -> Iterator[T]:
    # Spawned, not forked: libraries with threads (torch, tokenizers, datasets) may be loaded here.
    context = multiprocessing.get_context("spawn")
    workers = min(processes, max(1, len(jobs)))
    executor = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(work, shared))
    waiting: deque[Future[T]] = deque()
    rest = iter(jobs)
    try:
        while True:
            while len(waiting) < 2 * processes and (job := next(rest, None)) is not None:
                waiting.append(executor.submit(_call, job))
            if not waiting:
                return
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise RuntimeError(
            f"processes={processes}: a worker process was killed, often for want of memory; the same command with fewer "
            "processes goes on from what is done"
        ) from None
    finally:
        executor.shutdown(cancel_futures=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes ``folder`` and holds its lock, waiting for it if need be. The lock goes when its process does, however that
    ends; the folder may be removed while it is held."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "lock"
        try:
            handle = file.open("a")
        except FileNotFoundError:
            continue  # removed since it was made, by the one who had finished
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("another process works in %s; waiting for it", folder)
                fcntl.flock(handle, fcntl.LOCK_EX)
            if file.exists() and file.stat().st_ino == os.fstat(handle.fileno()).st_ino:
                yield
                return


def bar(what: str, total: int, progress: bool) -> Any:
    """A tqdm bar that counts parts, or None."""
    if not progress:
        return None
    from tqdm import tqdm

    return tqdm(total=total, desc=what, unit="part", dynamic_ncols=True)
