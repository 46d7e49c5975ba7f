"""How fast each task is made: python -m tests.data.tasks.measure_speed [kind ...] (tokens a second of one core)."""

from __future__ import annotations

import sys
import time

from data.tasks import configs
from data.tasks.dataset import TaskDataset

STEPS, ROWS = 100, 32


def main(kinds: list[str]) -> None:
    for kind in kinds or configs():
        cfg = configs()[kind](train_examples=None)
        dataset = TaskDataset(cfg, global_batch=ROWS, seed=0)
        dataset.train_batch(0)
        begin = time.process_time()
        for step in range(2, STEPS + 2):
            dataset.train_batch(step)
        rate = STEPS * ROWS * cfg.seq_len / (time.process_time() - begin)
        begin = time.process_time()
        next(dataset.eval_batches("test", 1))
        print(f"{kind:20s} {rate / 1e6:6.1f} M tokens/s; test split in {time.process_time() - begin:.2f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
