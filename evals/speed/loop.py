"""The training loop against bare PyTorch, and the data stream against what training consumes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from evals.speed.measure import Row, row_of


def quickstart_config(*overrides: str) -> Any:
    """The checked config of the quickstart's transformer."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from runs.validate import validate

    root = Path(__file__).resolve().parents[2]
    shared = OmegaConf.to_container(OmegaConf.load(root / "sweeps" / "quickstart.yaml").shared)
    assert isinstance(shared, dict)
    settings = [f"{key}={value}" for key, value in shared.items() if isinstance(key, str)]
    with initialize_config_dir(str(root / "conf"), version_base="1.3"):
        return validate(compose("config", overrides=["mixer=transformer", "logger=none", *settings, *overrides]))


def bare_loop(config: Any, dataset: Any, steps: int) -> float:
    """Seconds of the shortest PyTorch loop that does the same work: loss, gradient, clipping, AdamW, schedule."""
    from models.lm import build_model
    from models.optim import learning_rate, make_optimizer

    model = build_model(config, dataset.vocab_size)
    optimizer = make_optimizer(model, config.optimizer)
    begin = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.lr * learning_rate(config.schedule, step, config.steps)
        loss, _ = model.loss(dataset.train_batch(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - begin


def our_loop(config: Any, dataset: Any) -> float:
    """Seconds that our loop counts for its steps, with its log rows; the record of the run goes to a temporary folder."""
    from models.lm import build_model
    from runs.fit import fit
    from runs.folder import RunFolder
    from runs.identity import Identity
    from runs.wandb_sink import NoSink

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        step_end = fit(
            config,
            build_model(config, dataset.vocab_size),
            dataset,
            me=Identity("speed", "transformer", "speed", {}, {}, path),
            checkpoint=None,
            folder=RunFolder(path),
            sink=NoSink(),
        )
    return step_end.seconds


def rows(repeats: int, only: str) -> Iterator[Row]:
    """The loop against bare PyTorch, and the stream against what training consumes."""
    from runs.load import open_data

    steps = 40
    config = quickstart_config(
        f"steps={steps}", "evaluation.every=0", "evaluation.val_tokens=1", "schedule.warmup_steps=5"
    )
    dataset = open_data(config)
    setting = f"quickstart model, {config.global_batch} x {config.data.seq_len} tokens a step"
    bare_loop(config, dataset, 5)
    pairs = [(bare_loop(config, dataset, steps), our_loop(config, dataset)) for _ in range(max(3, repeats // 2))]
    row = row_of("training loop", "bare PyTorch loop", setting, 1 / 1.1, [(a / steps, b / steps) for a, b in pairs])
    yield row
    count = 2000
    begin = time.perf_counter()
    for step in range(count):
        dataset.train_batch(step)
    stream_ms = 1e3 * (time.perf_counter() - begin) / count
    ratio = row.ours_ms / stream_ms
    yield Row("stream", "what training consumes", setting, ratio, ratio, ratio, stream_ms, row.ours_ms, 20.0)
