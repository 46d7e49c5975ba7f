"""How fast a run goes, and how long it takes: measured where there is a measurement, and said to be assumed where not.

In this order: a short calibration on this machine (`calibrate`), finished runs of the same mixer under
``<paths.results>/runs``, ``<paths.results>/speed/models.json`` of `python -m evals.speed`, a nominal speed. A measurement
of another size is carried over at equal FLOPs per second.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.budget import Shape
from models.budget import counts as count
from runs.folder import read_json

if TYPE_CHECKING:
    from data.dataset import Dataset
    from models.lm import LanguageModel
    from runs.schema import Config

STARTUP = 12.0
"""Seconds before the first step and after the last: imports, opening the data, checkpoints, the record."""

NOMINAL = {("cpu", "fp32"): 6e10, ("cpu", "bf16"): 6e10, ("gpu", "fp32"): 4e13, ("gpu", "bf16"): 3e14}
"""FLOPs per second of a CPU core (what the published quickstart reached, nearly alike for all mixers) and of an H100 at
three tenths of its peak: stands in where nothing was measured."""

QUIET = 0.85  # share of its cores that a program gets on a machine with nothing else to do

SCORING = 0.5
"""FLOPs per second of scoring over those of training, where only training was measured: logits of whole batches cost."""

TOKEN_BY_TOKEN = {"cpu": 1.0, "gpu": 0.1}
"""The same of scoring token by token over scoring in parallel, many sequences side by side. On a CPU a step of 256 rows is
as good as a parallel pass (measured with maglev); a GPU waits for its kernels to be launched (assumed)."""


@dataclass(frozen=True)
class Speed:
    """Tokens per second: of training, and of scoring in each of the model's modes; and where that is from."""

    train: float
    score: dict[str, float]
    source: str
    startup: float = STARTUP
    share: float = 1.0  # of a core that a thread got during a calibration; below 1 other programs took the rest

    @property
    def measured(self) -> bool:
        return not self.source.startswith("assumed")


def hours(config: Config, speed: Speed, test_tokens: int | None) -> float:
    """Wall time of a run with its validations and its test. A test split of unknown size counts as a validation."""
    assert config.steps is not None
    every, val = config.evaluation.every, config.evaluation.val_tokens
    validations = math.ceil(config.steps / every) if every else 1
    test = test_tokens if test_tokens is not None else config.evaluation.test_tokens or val or 0
    scored = validations * (val if val is not None else test) + test
    seconds = config.steps * config.tokens_per_step / speed.train
    return (speed.startup + seconds + sum(scored / rate for rate in speed.score.values())) / 3600


def find(config: Config, mixer: str, counts: Mapping[str, Any], modes: tuple[str, ...], results: Path) -> Speed:
    """The best that is known of this mixer without measuring anything."""
    runs = list(_runs(config, mixer, results / "runs"))
    if runs:

        def distance(record: dict[str, Any]) -> float:
            return abs(math.log(record["counts"]["train_flops_per_token"] / counts["train_flops_per_token"]))

        best = min(runs, key=distance)
        scale = best["counts"]["train_flops_per_token"] / counts["train_flops_per_token"]
        timing = best["timing"]
        scored = {mode: timing.get(f"scoring_{mode}_tokens_per_s") for mode in modes}
        word = "measured by" if abs(math.log(scale)) < 0.05 else "from the speed of"
        train = scale * timing["tokens_per_s"]
        known = {mode: scale * rate for mode, rate in scored.items() if rate}
        return Speed(
            train, _filled(config, known, train, counts, modes), f"{word} run {best['mixer']}-{best['run_id']}"
        )
    if (
        rate := _suite(config, mixer, results / "speed" / "models.json")
    ) is not None and config.trainer.accelerator == "cpu":
        train = rate / counts["train_flops_per_token"]
        return Speed(train, _filled(config, {}, train, counts, modes), "from the FLOPs per second of speed/models.json")
    train = _nominal(config) / counts["train_flops_per_token"]
    return Speed(train, _filled(config, {}, train, counts, modes), "assumed")


def _nominal(config: Config) -> float:
    trainer = config.trainer
    devices = trainer.devices * trainer.nodes
    cores = (trainer.threads or _cores()) if trainer.accelerator == "cpu" else 1
    return NOMINAL[trainer.accelerator, config.precision] * devices * cores


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _filled(
    config: Config, known: Mapping[str, float], train: float, counts: Mapping[str, Any], modes: tuple[str, ...]
) -> dict[str, float]:
    """Of modes without a measurement: at the FLOPs per second of training."""
    parallel = SCORING * train * counts["train_flops_per_token"] / counts["flops_per_token"]
    slower = TOKEN_BY_TOKEN[config.trainer.accelerator]
    return {mode: known.get(mode, parallel * (slower if mode == "recurrent" else 1.0)) for mode in modes}


def _runs(config: Config, mixer: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Records of finished runs of the mixer on the same kind of host."""
    host = ("accelerator", "devices", "nodes", "compile", "kernels")
    for path in sorted(folder.glob(f"*/{mixer}-*/run.json")):
        record = read_json(path)
        same = all(record.get("host", {}).get(key) == getattr(config.trainer, key) for key in host)
        threads = config.trainer.threads in (None, record.get("hardware", {}).get("threads"))
        precise = record.get("science", {}).get("precision") == config.precision
        if (
            record.get("mixer") == mixer
            and record.get("timing", {}).get("tokens_per_s")
            and same
            and threads
            and precise
        ):
            yield record


def _suite(config: Config, mixer: str, path: Path) -> float | None:
    """FLOPs per second of the mixer in the speed suite's own model (evals/speed/models.py)."""
    if not path.exists():
        return None
    from evals.speed.models import BATCH, HEADS, LAYERS, MLP, STEPS, VOCABULARY, WIDTH

    for row in json.loads(path.read_text(encoding="utf-8")).get("rows", []):
        name, *settings = row["name"].split(", ")
        if name != mixer:
            continue
        width: dict[str, Any] = {"d_model": WIDTH, "n_heads": HEADS, "head_dim": WIDTH // HEADS}
        window = {"window": int(settings[0][2:])} if settings and settings[0].startswith("W=") else {}
        mlp = "none" if "no MLP" in settings else "swiglu"
        measured = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, **width, n_layers=LAYERS, mlp_width=MLP, mlp=mlp, tied=True),
            mixer=dataclasses.replace(config.mixer, **width, **window),
            data=dataclasses.replace(config.data, seq_len=STEPS),
        )
        flops = count(measured, Shape(VOCABULARY))["train_flops_per_token"]
        return flops * BATCH * STEPS / (row["ours_ms"] / 1e3)
    return None


# ---- calibration -----------------------------------------------------------------------------------------------------


def calibrate(config: Config, seconds: float) -> Speed:
    """Trains and scores on this machine for about so many seconds; what a run does beside that is not measured.

    The model starts from its first weights and what it learns is lost: nothing is written.
    """
    from models.lm import model_for
    from runs.host import set_threads
    from runs.load import open_data

    threads = set_threads(config)
    dataset = open_data(config)
    model = model_for(config, dataset)
    if config.trainer.accelerator == "gpu":
        model.cuda()
    per_mode = {mode: seconds / 2 / len(model.modes) for mode in model.modes}
    begin, used = time.perf_counter(), time.process_time()
    train = config.trainer.devices * config.trainer.nodes * _training_rate(config, model, dataset, seconds / 2)
    score = {mode: _scoring_rate(config, model, dataset, mode, share) for mode, share in per_mode.items()}
    share = (time.process_time() - used) / (time.perf_counter() - begin) / threads
    source = f"measured here in {seconds:g} s"
    if config.trainer.accelerator == "gpu":
        return Speed(train, score, source)
    if share < QUIET:
        source += f", when others had {100 * (1 - share):.0f} % of its cores"
    return Speed(train, score, source, share=min(1.0, share))


def _training_rate(config: Config, model: LanguageModel, dataset: Dataset, seconds: float) -> float:
    """Tokens per second of one device, from the second step on."""
    import torch

    from models.evaluate import autocast, to_device
    from models.optim import make_optimizer

    device = next(model.parameters()).device
    optimizer = make_optimizer(model, config.optimizer)
    rows, step, begin = config.trainer.micro_batch, 0, time.perf_counter()
    assert rows is not None
    model.train()
    while step < 2 or time.perf_counter() - begin < seconds:
        if step == 1:
            begin = time.perf_counter()  # the first step also warms up
        for micro in range(config.accumulate):
            batch = to_device(dataset.train_batch(step, slice(micro * rows, (micro + 1) * rows)), device)
            with autocast(device, config.precision):
                loss, _ = model.loss(batch, step)
            loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        float(norm)  # as a run does: it waits for the device
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), config.optimizer.clip or 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    return (step - 1) * config.accumulate * rows * dataset.seq_len / (time.perf_counter() - begin)


def _scoring_rate(config: Config, model: LanguageModel, dataset: Dataset, mode: str, seconds: float) -> float:
    """Positions per second of one process, over whole batches."""
    import torch

    from models.evaluate import autocast, batch_size, to_device

    device = next(model.parameters()).device
    model.eval()
    positions, begin = 0, time.perf_counter()
    with torch.no_grad():
        while True:
            limit = config.evaluation.val_tokens
            for batch in dataset.eval_batches("val", batch_size(config.trainer, mode), limit):
                with autocast(device, config.precision):
                    model.grade(to_device(batch, device), mode).nats_BT.sum().item()
                positions += batch.targets_BT.numel()
                if time.perf_counter() - begin > seconds:
                    return positions / (time.perf_counter() - begin)
