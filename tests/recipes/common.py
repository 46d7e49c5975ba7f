"""A recipe of `conf/experiment/`: at full size on the meta device, and three real steps of it at reduced width."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from models.lm import build_model, model_for
from models.optim import make_optimizer
from runs import identity
from runs.fit import fit
from runs.folder import RunFolder
from runs.host import set_threads
from runs.load import open_data
from runs.schema import Config
from runs.validate import validate
from runs.wandb_sink import NoSink
from sweeps.plan import main as plan_main

ROOT = Path(__file__).resolve().parents[2]

SPREAD = 2e-5
"""Nats by which golden losses may differ. Three steps in float32 with the instruction sets SSE4, AVX2 and AVX-512 differ by 2e-6;
another weight decay, beta, clip or norm by 4e-5 to 1e-1."""

REDUCED = (
    "data=kjv",
    "tokenizer=bytes",
    "model.d_model=32",
    "model.n_heads=2",
    "model.n_layers=2",
    "data.seq_len=64",
    "global_batch=8",
    "tokens=null",
    "steps=3",
    "schedule.warmup_steps=1",  # half the peak, the peak, and what the schedule ends with
    "precision=fp32",  # bf16 rounds differently from CPU to CPU
    "evaluation.every=0",
    "evaluation.val_tokens=2048",
    "trainer.threads=1",
    "trainer.log_every=1",
    "trainer.progress=false",
    f"paths.cache={ROOT / '.cache'}",
)


def composed(*overrides: str) -> DictConfig:
    """As `train.py` would compose it."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def checked(*overrides: str) -> Config:
    """Composed and validated."""
    return validate(composed(*overrides))


def group_sizes(config: Config, vocab_size: int) -> list[tuple[float, int]]:
    """(weight decay, parameters) of each optimizer group, of a model that holds no numbers."""
    with torch.device("meta"):
        model = build_model(config, vocab_size)
    groups = make_optimizer(model, config.optimizer).param_groups
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    return [(group["weight_decay"], sum(p.numel() for p in group["params"])) for group in groups]


def planned(capsys, *words: str) -> dict[str, dict]:
    """Rows of `python -m sweeps.plan`, by label."""
    assert plan_main([*words, "--json", "--no-memory"]) == 0
    return {row["label"]: row for row in json.loads(capsys.readouterr().out)["rows"]}


def first_losses(results: Path, recipe: str, mixer: str, *overrides: str) -> list[float]:
    """Nats per token of three training steps of a recipe at reduced width, and of validation after them."""
    cfg = composed(f"experiment={recipe}", f"mixer={mixer}", *REDUCED, f"paths.results={results}", *overrides)
    config = validate(cfg)
    set_threads(config)
    me = identity.identify(cfg, config, mixer)
    folder = RunFolder(me.folder)
    me.folder.mkdir(parents=True)
    data = open_data(config)
    fit(config, model_for(config, data), data, me=me, checkpoint=None, folder=folder, sink=NoSink())
    rows = folder.rows()
    return [row[key] for key in ("train/loss", "val/loss") for row in rows if key in row]
