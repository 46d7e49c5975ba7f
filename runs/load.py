"""A trained run from its folder: config, data and model, for generation and evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from data.dataset import Dataset, open_dataset
from models.lm import LanguageModel, model_for
from runs import checkpoints
from runs.folder import read_json
from runs.schema import Config
from runs.validate import ConfigError, validate


@dataclass
class TrainedRun:
    """What a run folder gives back."""

    config: Config
    dataset: Dataset
    model: LanguageModel
    step: int


def open_data(config: Config) -> Dataset:
    """The data set of a checked config, prepared if that has not been done."""
    return open_dataset(
        config.data,
        config.tokenizer,
        global_batch=config.global_batch,
        seed=config.data_seed,
        cache=Path(config.paths.cache),
    )


def load_model(config: Config, dataset: Dataset, checkpoint: Path) -> LanguageModel:
    """The model at a checkpoint's weights, on the CPU, in eval mode."""
    model = model_for(config, dataset)
    weights = checkpoints.load(checkpoint)["state_dict"]
    model.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
    return model.eval()


def load_run(folder: Path) -> TrainedRun:
    """Open a run folder. Raises ConfigError where it is none, or holds no checkpoint yet."""
    if not (folder / "config.yaml").exists():
        raise ConfigError(f"run={folder}: no run folder (it has no config.yaml)")
    config = validate(OmegaConf.load(folder / "config.yaml"))  # type: ignore[arg-type]
    checkpoint, step = checkpoints.find(folder, read_json(folder / "run.json")["run_id"])
    if checkpoint is None:
        raise ConfigError(f"run={folder}: holds no checkpoint yet")
    dataset = open_data(config)
    return TrainedRun(config, dataset, load_model(config, dataset, checkpoint), step)
