"""How fast each task is made, and how many times faster than a model of two layers and width 128 trains on it:
python -m tests.data.tasks.measure_speed [kind ...] (CPU time of one thread, whatever else the machine does)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from hydra import compose, initialize_config_dir

from data.dataset import Dataset
from data.tasks import configs
from data.tasks.dataset import TaskDataset
from models.lm import model_for
from models.optim import make_optimizer
from runs.schema import Config
from runs.validate import validate
from tests.runs.commands import ROOT

ROWS, MAKE_STEPS, TRAIN_STEPS = 32, 100, 10
ASKED = 20  # times faster


def seconds(act: Callable[[int], Any], steps: int) -> float:
    """CPU seconds of a step, after one that is not counted."""
    act(0)
    begin = time.process_time()
    for step in range(2, steps + 2):
        act(step)
    return (time.process_time() - begin) / steps


def trainer(config: Config, dataset: Dataset) -> Callable[[int], None]:
    """A step of training on a batch that is there already."""
    model, batch = model_for(config, dataset), dataset.train_batch(0)
    optimizer = make_optimizer(model, config.optimizer)

    def train(step: int) -> None:
        model.loss(batch)[0].backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def main(kinds: list[str]) -> None:
    torch.set_num_threads(1)
    slow = []
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        for kind in kinds or configs():
            settings = [f"data={kind}", "data.train_examples=null", "mixer=transformer", "model=tiny"]
            config = validate(compose("config", overrides=[*settings, f"global_batch={ROWS}"]))
            dataset = TaskDataset(config.data, global_batch=ROWS, seed=0)
            make, train = seconds(dataset.train_batch, MAKE_STEPS), seconds(trainer(config, dataset), TRAIN_STEPS)
            begin = time.process_time()
            next(dataset.eval_batches("test", 1))
            split = time.process_time() - begin
            tokens, ratio = ROWS * config.data.seq_len, train / make
            slow += [kind] * (ratio < ASKED)
            print(
                f"{kind:20s} made {tokens / make / 1e6:6.2f} M tokens/s, trained {tokens / train / 1e3:6.1f} k tokens/s: "
                f"{ratio:6.0f} times faster; test split in {split:.2f} s",
                flush=True,
            )
    print(f"less than {ASKED} times faster: {', '.join(slow) or 'none'}")


if __name__ == "__main__":
    main(sys.argv[1:])
