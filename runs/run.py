"""The life of a run: validate, find its folder, skip or continue, train, evaluate, record."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import logging
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from runs import identity as ids
from runs.folder import Busy, RunFolder
from runs.schema import Config
from runs.validate import ConfigError, reference, validate

log = logging.getLogger(__name__)

DRIFT_LENGTH, DRIFT_ROWS = 4, 16  # the memory's drift is followed to so many training lengths, in so many sequences
STOPPED = 75  # exit code of a run that a signal stopped: start it again and it goes on


class RunFailed(ConfigError):
    """A run ended with an error that is in its folder; one line is enough on the terminal."""


def run(cfg: DictConfig) -> None:
    """Run what Hydra composed. The same command again continues an unfinished run and skips a finished one."""
    from runs.host import check_devices, is_first_process

    hydra = HydraConfig.get()
    config = validate(cfg)
    check_devices(config)
    if config.study is not None and not config.study.get("phase"):
        raise ConfigError(
            f"study={config.study['name']}: a study is not one run. Start it as: python train.py study={config.study['name']}"
        )
    if config.trainer.strategy != "auto" and _is_multirun():
        _refuse_multirun(config, hydra.runtime.choices.get("hydra/launcher"))
    _refuse_unprepared(config)
    me = ids.identify(cfg, config, hydra.runtime.choices["mixer"])
    folder = RunFolder(me.folder)
    if not is_first_process():
        _follow(_matched(cfg, config)[0], me)
        return
    if folder.status().get("state") == "done":
        log.info("%s is finished: skipped (%s)", me.name, me.folder)
        _warn_of_other_code(folder, config)
        return
    try:
        folder.lock()
    except Busy as busy:
        log.warning("%s: %s: skipped", me.name, busy)
        return
    try:
        with _log_file(me.folder / "train.log"):
            _lead(cfg, config, me, folder)
    finally:
        folder.release()
        # Trainer, model and data hold each other, and hold arrays, of which Python's own collector does not know how large
        # they are: a study of many runs in one process would keep them all.
        gc.collect()


def _refuse_unprepared(config: Config) -> None:
    """A run never fetches a corpus from the hub: it says how to, before anything is written."""
    if config.data.kind == "corpus" and config.data.hub is not None:
        from data.prepare import prepare

        try:
            prepare(config.data, config.tokenizer, Path(config.paths.cache))
        except ValueError as error:
            raise ConfigError(str(error)) from None


def _matched(cfg: DictConfig, config: Config) -> tuple[Config, dict[str, Any] | None]:
    """The config with its model at the budget that ``match`` asks for, and what run.json keeps of how. Comes after the
    run's identity: that is of what was asked."""
    if config.match == "none":
        return config, None
    from models.budget import CannotMeet, meet, shape_of
    from runs.load import open_data

    try:
        config, match = meet(config, reference(cfg, config), shape_of(open_data(config)))
    except CannotMeet as cannot:
        raise ConfigError(str(cannot)) from None
    log.log(logging.INFO if match.met else logging.WARNING, "match=%s: %s", match.kind, match)
    return config, match.plain()


def _refuse_multirun(config: Config, launcher: str | None) -> None:
    if launcher in ("basic", "joblib"):
        raise ConfigError(
            f"trainer.strategy={config.trainer.strategy}: the processes of a multirun's runs cannot be started from one "
            "process. Start the runs one by one, or give each a process of its own with another hydra/launcher"
        )


@contextlib.contextmanager
def _log_file(path: Path) -> Iterator[None]:
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("[%(asctime)s][%(name)s][%(levelname)s] %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def _warn_of_other_code(folder: RunFolder, config: Config) -> dict[str, str]:
    """Compare the code of an existing run with today's; warn where it changed. Returns today's hashes."""
    now, then = ids.code_hashes(*config.mixer.kinds()), folder.record().get("code", {})
    changed = [part for part in now if part in then and now[part] != then[part]]
    if changed:
        log.warning(
            "%s was begun with other code (%s changed since). To run it with today's code, move or delete %s",
            folder.path.name,
            " and ".join(changed),
            folder.path,
        )
    return now


def _lead(cfg: DictConfig, config: Config, me: ids.Identity, folder: RunFolder) -> None:
    """The process that owns the folder."""
    from runs import checkpoints
    from runs.host import describe, git_commit, set_threads
    from runs.steps import Stopped
    from runs.wandb_sink import NoSink, open_sink

    sink, exit_code = NoSink(), 1
    try:
        threads = set_threads(config)
        checkpoint, step = checkpoints.find(folder.path, me.run_id)
        rows = folder.cut_metrics(step)
        # Without a checkpoint nothing of an earlier attempt is left, its code included.
        before = folder.record() if checkpoint else {}
        code = _warn_of_other_code(folder, config) if checkpoint else ids.code_hashes(*config.mixer.kinds())
        config, match = _matched(cfg, config)
        OmegaConf.save(OmegaConf.create(dataclasses.asdict(config)), folder.path / "config.yaml")
        folder.set_record(
            run_id=me.run_id,
            mixer=me.mixer,
            study=me.study,
            science=me.science,
            host=dataclasses.asdict(config.trainer),
            comparison=me.comparison,
            comparison_key=me.comparison_key,
            match=match,
            code=before.get("code", code),
            code_changed=bool(before.get("code_changed") or before.get("code", code) != code),
            commit=git_commit(ids.ROOT),
            command=_command(),
            started=before.get("started") or time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            overrides=list(HydraConfig.get().overrides.task),
            accessories=config.mixer.accessories(),
            **describe(config, threads),
        )
        attempts = folder.status().get("attempts", 0) + 1
        folder.set_status(state="running", step=step, steps=config.steps, attempts=attempts, error=None)
        log.info("%s: %s step %d of %d (%s)", me.name, "on from" if step else "from", step, config.steps, me.folder)
        sink = open_sink(config, me, folder, rows)
        metrics = _train_and_test(config, me, folder, checkpoint, sink)
        folder.set_status(state="done", step=config.steps)
        sink.summary(metrics)
        exit_code = 0
        log.info("%s: %s", me.name, ", ".join(f"{k} {v:.4f}" for k, v in metrics.items() if k.startswith("test/")))
    except Stopped as stop:
        folder.set_status(state="preempted", signal=str(stop))
        log.warning("%s stopped by %s at a whole step; the same command continues it", me.name, stop)
        sys.exit(STOPPED)
    except KeyboardInterrupt:
        folder.set_status(state="preempted", signal="SIGINT")
        raise
    except Exception as error:  # noqa: BLE001 - whatever it was is recorded in the folder, then raised on
        message = "".join(traceback.format_exception_only(error)).strip()
        folder.set_status(state="failed", error=message)
        if _is_multirun():  # its launcher would keep quiet until the last run has ended
            log.error("%s failed: %s", me.name, message)
        with open(folder.path / "train.log", "a") as file:
            traceback.print_exc(file=file)
        raise RunFailed(f"{me.name} failed: {message}\nThe whole story: {folder.path / 'train.log'}") from None
    finally:
        sink.close(exit_code)


def _is_multirun() -> bool:
    mode = HydraConfig.get().mode
    return mode is not None and mode.name == "MULTIRUN"


def _command() -> str:
    """The command line that makes this one run, also where a multirun or a study started it."""
    hydra = HydraConfig.get()
    if _is_multirun():
        return shlex.join(["python", "train.py", "hydra.mode=RUN", *hydra.overrides.task])
    return shlex.join(["python", *sys.argv])


def _train_and_test(config: Config, me: ids.Identity, folder: RunFolder, checkpoint: Path | None, sink: Any) -> dict:
    from models.budget import activation_dtype
    from models.lm import model_for
    from runs.checkpoints import LAST
    from runs.fit import fit
    from runs.kernel_choice import choose_kernels
    from runs.load import load_model, open_data

    dataset = open_data(config)
    begun_with = folder.record().get("data", {}).get("fingerprint")
    if checkpoint and begun_with != dataset.fingerprint:
        raise ConfigError(
            f"data: this run was begun with data {begun_with}, and now finds {dataset.fingerprint}: files or library "
            f"versions changed. Restore them, or move or delete {folder.path} to begin anew"
        )
    model = model_for(config, dataset)
    folder.set_record(kernels=choose_kernels(config, model, dataset))
    counts = model.counts(dataset.seq_len, activation_dtype(config.precision))
    assert config.steps is not None
    tokens = config.steps * config.tokens_per_step
    folder.set_record(
        data={
            "fingerprint": dataset.fingerprint,
            "train_tokens": dataset.n_train_tokens,
            "vocab_size": dataset.vocab_size,
            # A task makes new examples as long as it is asked.
            "epochs": round(tokens / dataset.n_train_tokens, 3) if dataset.n_train_tokens else None,
        },
        counts={**counts, "tokens": tokens, "train_flops": counts["train_flops_per_token"] * tokens},
    )
    log.info(
        "%s: %s parameters, %s FLOPs a token in training, state of %s bytes after %d tokens",
        me.name,
        f"{counts['params']:,}",
        f"{counts['train_flops_per_token']:,.0f}",
        f"{counts['state_bytes']:,}",
        dataset.seq_len,
    )
    step_end = fit(config, model, dataset, me=me, checkpoint=checkpoint, folder=folder, sink=sink)
    # From the checkpoint, so that a run killed in here, a resumed one and eval.py all score the same weights.
    model = load_model(config, dataset, folder.path / "checkpoints" / LAST)
    weights = _hash_weights(model.state_dict())
    if config.trainer.accelerator == "gpu":
        model.cuda()
    tested, scoring = _test(config, model, dataset, me, folder)
    training = [row for row in folder.rows() if "train/loss" in row]
    validation = [row for row in folder.rows() if "val/loss" in row]
    seconds = training[-1]["seconds"]
    metrics = tested | {
        **{key: value for key, value in validation[-1].items() if key.startswith("val/")},
        "train/loss": training[-1]["train/loss"],
        "train/spikes": training[-1]["train/spikes"],
        "train/diverged": float(_diverged(training)),
    }
    folder.set_record(
        metrics=metrics,
        mode=model.modes[0],
        timing={
            "seconds": seconds,
            "tokens_per_s": round(tokens / max(step_end.seconds or seconds, 1e-9), 1),
            **scoring,
        },
        weights=weights,
        finished=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )
    return metrics


def _test(config: Config, model: Any, dataset: Any, me: ids.Identity, folder: RunFolder) -> tuple[dict, dict]:
    """The test split in each of the model's modes: metrics, and how many tokens a second were scored."""
    from models.drift import drift, long_sequences
    from models.evaluate import autocast, batch_size, by_mode, score
    from models.two_pass import TwoPassModel

    metrics: dict[str, float] = {}
    speed: dict[str, float] = {}
    limit = config.evaluation.test_tokens
    for mode in reversed(model.modes):  # the deployed one last, so that its documents stay in the file
        begin, rows = time.perf_counter(), batch_size(config.trainer, mode)
        total = score(model, dataset, "test", batch_size=rows, precision=config.precision, max_tokens=limit, mode=mode)
        seconds = time.perf_counter() - begin
        speed[f"scoring_{mode}_tokens_per_s"] = round(total.graded / seconds, 1)
        log.info("%s: scored %s test tokens in %.1f s (%s)", me.name, f"{total.graded:,}", seconds, mode)
        metrics |= by_mode("test", total.metrics(), mode, model.modes)
        _save_documents(folder.path / "test_documents.npz", total.documents())
    if isinstance(model, TwoPassModel) and len(model.modes) > 1:
        windows = dataset.eval_batches("test", config.trainer.eval_batch, None)
        tokens_BT, documents_BT = long_sequences(windows, DRIFT_LENGTH * dataset.seq_len, DRIFT_ROWS, dataset.bos_id)
        if tokens_BT is not None:
            device = next(model.parameters()).device
            with autocast(device, config.precision):
                documents_BT = None if documents_BT is None else documents_BT.to(device)
                found = drift(model, tokens_BT.to(device), documents_BT)
            folder.set_record(drift={**found.plain(), "train_length": dataset.seq_len, "rows": len(tokens_BT)})
    return metrics, speed


def _diverged(rows: list[dict[str, Any]]) -> bool:
    """Did training end clearly above its own best, by half a nat or more?"""
    losses = [row["train/loss"] for row in rows]
    return losses[-1] > min(losses) + 0.5


def _save_documents(path: Path, documents: dict[str, Any]) -> None:
    """Sums over each test document, for paired comparisons between runs."""
    import numpy as np

    temporary = path.with_suffix(".tmp.npz")
    np.savez(temporary, **documents)
    os.replace(temporary, path)


def _hash_weights(weights: dict[str, Any]) -> str:
    """SHA-256 over all weights in the order of their names: equal exactly for bitwise equal models."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()


def _follow(config: Config, me: ids.Identity) -> None:
    """Another process of a data-parallel run: it computes; the first one writes."""
    from models.lm import model_for
    from runs import checkpoints
    from runs.fit import fit
    from runs.host import set_threads
    from runs.kernel_choice import choose_kernels
    from runs.load import open_data
    from runs.steps import Stopped
    from runs.wandb_sink import NoSink

    set_threads(config)
    checkpoint, _ = checkpoints.find(me.folder, me.run_id)
    dataset = open_data(config)
    model = model_for(config, dataset)
    choose_kernels(config, model, dataset)
    try:
        fit(config, model, dataset, me=me, checkpoint=checkpoint, folder=None, sink=NoSink())
    except Stopped:
        sys.exit(STOPPED)
