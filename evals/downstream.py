"""Downstream tasks through lm-eval, zero-shot or few-shot: reasoning, recall from the prompt, scrambled words, translation.

Options of multiple-choice tasks are scored in two ways, and both are named: ``acc_per_token`` divides an option's
log-likelihood by its tokens (MesaNet, arXiv 2506.05233, appendix), ``acc``, ``acc_norm`` and the like are lm-eval's own.
Every model is scored in its deployed mode; beside it a two-pass model is scored teacher-forced in the tasks that ask for
likelihoods, not in those that it answers by generating. Tasks come from the hub when they are first run; those of
``include_path`` come from wherever their YAML says.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from data.randomness import key
from evals.groups import GROUPS, Entry
from evals.suite import Parts, Result, Subject, suite
from models.config import at_least, one_of

if TYPE_CHECKING:
    from evals.adapter import Adapter

OWN_TASKS = Path(__file__).parent / "tasks"


@dataclass
class DownstreamConfig:
    """See `conf/suite/downstream.yaml`."""

    groups: list[str] = field(default_factory=lambda: ["global", "local"])
    tasks: list[str] = field(default_factory=list)
    include_path: str | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    max_length: int | None = None
    max_gen_toks: int = 48
    bos: bool = True

    def check(self, path: str) -> None:
        for group in self.groups:
            one_of(f"{path}.groups", group, tuple(GROUPS))
        if not self.groups and not self.tasks:
            raise ValueError(f"{path}.groups=[]: name at least one group, or tasks in {path}.tasks")
        at_least(f"{path}.limit", self.limit, 1, "null takes all documents")
        at_least(f"{path}.num_fewshot", self.num_fewshot, 0, "null leaves it to the tasks")
        at_least(f"{path}.max_length", self.max_length, 2, "null takes the training length")
        at_least(f"{path}.max_gen_toks", self.max_gen_toks, 1)
        if self.include_path is not None and not Path(self.include_path).expanduser().is_dir():
            raise ValueError(f"{path}.include_path={self.include_path}: must be a folder with task YAMLs")

    def entries(self) -> list[tuple[str, Entry]]:
        """(group, entry), single tasks in a group without a name."""
        named = [(group, entry) for group in self.groups for entry in GROUPS[group]]
        return named + [("", Entry(task)) for task in self.tasks]


@suite("downstream", DownstreamConfig)
def evaluate(subject: Subject, config: DownstreamConfig, parts: Parts) -> Result:
    """Metrics: ``<task>/<metric>`` (with several numbers of examples ``<task>/shots=<n>/<metric>`` and, over their draws,
    ``..._std``); means over a group's tasks ``<group>/per_token`` and ``<group>/lm_eval``; ``<mode>/...`` in other modes
    than the deployed one. Tables: each document's score.

    Raises ValueError where lm-eval is missing or does not know a task, RuntimeError where tasks failed: those that did
    not are kept, and the same command goes on from there.
    """
    length, longest = config.max_length or subject.dataset.seq_len, subject.config.mixer.max_len()
    result = Result()
    if longest is not None and longest < length:
        result.metrics["downstream"] = None
        result.reasons["downstream"] = f"mixer {subject.config.mixer.kind} takes at most {longest} tokens, not {length}"
        return result
    try:
        from evals.adapter import Adapter
    except ModuleNotFoundError as error:
        raise ValueError(f"suite=[downstream]: needs lm-eval ({error}); pip install 'isomix[eval]'") from None
    manager = known_tasks([entry.task for _, entry in config.entries()], config.include_path)
    for mode in subject.model.modes:
        adapter = Adapter(subject, max_length=length, max_gen_toks=config.max_gen_toks, bos=config.bos, mode=mode)
        _in_mode(adapter, manager, config, parts, result, "" if adapter.deployed else f"{mode}/")
    return result


def _in_mode(
    adapter: Adapter, manager: Any, config: DownstreamConfig, parts: Parts, result: Result, prefix: str
) -> None:
    """Puts all tasks into the result, ``prefix`` before each name."""
    entries = config.entries()
    failed: list[str] = []
    means: dict[str, dict[str, list[float]]] = {}
    lacking: set[str] = set()  # groups without one of their tasks
    for group, entry in entries:
        task = f"{prefix}{entry.task}"
        shots: Sequence[int | None] = (
            entry.shots if config.num_fewshot is None and entry.shots else [config.num_fewshot]
        )
        for n in shots:
            try:
                runs = [
                    parts(f"{task}/{n}/{draw}", partial(run, adapter, manager, entry, n, draw, config))
                    for draw in range(entry.prefixes if n else 1)
                ]
            except Exception as error:  # noqa: BLE001 - the hub, data sets and tasks have errors of their own
                reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
                if entry.optional:
                    result.metrics[task] = None
                    result.reasons[task] = f"left out of the mean, its data cannot be had ({reason})"
                else:
                    failed.append(f"{task} ({reason})")
                break
            slice_name = f"/shots={n}" if entry.shots else ""
            where_name = "/".join(filter(None, (group, entry.part))) + slice_name
            if not all(runs):
                result.metrics[task] = None
                result.reasons[task] = "its answers are generated, which is the deployed model's alone"
                lacking.add(where_name)
                continue
            scores = _collect(result, runs, slice_name, entry.metric, prefix)
            if group:
                where = means.setdefault(where_name, {})
                for name, value in scores.items():
                    where.setdefault(name, []).append(value)
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(entries)} tasks failed, the others are kept: {'; '.join(failed)}")
    for where_name, found in means.items():
        if where_name not in lacking:  # a mean over other tasks than the deployed model's says nothing beside it
            result.metrics |= {f"{prefix}{where_name}/{name}": fmean(values) for name, values in found.items()}


def known_tasks(names: list[str], include_path: str | None) -> Any:
    """lm-eval's task manager. Its own thousands of tasks are indexed (5 s) only where one of them is asked for. Raises
    ValueError for a name that no folder has."""
    from lm_eval.tasks import TaskManager

    folders = [str(OWN_TASKS), *([str(Path(include_path).expanduser())] if include_path else [])]
    manager = TaskManager(include_path=folders, include_defaults=False)
    if not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=folders)
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, 3)
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise ValueError(f"suite.downstream.tasks={name}: must be a task of lm-eval or of include_path{hint}")
    return manager


def run(
    adapter: Adapter, manager: Any, entry: Entry, shots: int | None, draw: int, config: DownstreamConfig
) -> dict[str, Any]:
    """One task, or all those of a group of lm-eval: name -> ``metrics``, ``documents`` (each one's score,
    where a metric is a mean of such), ``n``; ``truncated`` stands with the first. {} for tasks of which one generates, in
    another mode than the deployed one."""
    from lm_eval import simple_evaluate

    tasks = manager.load([entry.task])["tasks"]
    if not adapter.deployed and any(task.OUTPUT_TYPE == "generate_until" for task in tasks.values()):
        return {}
    cut = adapter.truncated
    found = simple_evaluate(
        model=adapter,
        tasks=list(tasks.values()),
        num_fewshot=shots,
        limit=config.limit,
        bootstrap_iters=0,
        log_samples=True,
        task_manager=manager,
        fewshot_random_seed=key("fewshot", draw) % 2**31,
    )
    out: dict[str, Any] = {}
    for name, task in tasks.items():
        metrics = _metrics(found["results"][name])
        samples = found["samples"][name]
        documents = {metric: [sample.get(metric) for sample in samples] for metric in metrics}
        if task.OUTPUT_TYPE == "multiple_choice":
            metric = "acc" if "acc" in metrics else next(iter(metrics))
            values = [_per_token(adapter, task, sample)[metric] for sample in samples]
            metrics[f"{metric}_per_token"] = float(task.aggregation()[metric](values))
            documents[f"{metric}_per_token"] = values
        numbers = {key: [float(v) for v in vs] for key, vs in documents.items() if all(map(_is_number, vs))}
        out[name] = {"metrics": metrics, "documents": numbers, "n": len(samples)}
    out[next(iter(tasks))]["truncated"] = adapter.truncated - cut
    return out


def _metrics(row: dict[str, Any]) -> dict[str, float]:
    """lm-eval's ``acc,none`` as ``acc``; another filter than the only one keeps its name: ``exact_match,strict``."""
    found = {name: float(value) for name, value in row.items() if "," in name and _is_number(value)}
    found = {name: value for name, value in found.items() if not name.partition(",")[0].endswith("_stderr")}
    bare = [name.partition(",")[0] for name in found]
    return {
        name.partition(",")[0] if bare.count(name.partition(",")[0]) == 1 else name: value
        for name, value in found.items()
    }


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, str | bytes | list | tuple | dict) and float(value) == float(value)
    except (TypeError, ValueError):
        return False


def _per_token(adapter: Adapter, task: Any, sample: dict[str, Any]) -> dict[str, Any]:
    """The task's own grading of a document, each option's log-likelihood divided by its number of tokens."""
    sizes = [len(adapter.pair(*arguments)[1]) for arguments in sample["arguments"]]
    scaled = [(nats / size, greedy) for (nats, greedy), size in zip(sample["filtered_resps"], sizes, strict=True)]
    graded: dict[str, Any] = task.process_results(sample["doc"], scaled)
    return graded


def _collect(
    result: Result, runs: list[dict[str, Any]], slice_name: str, metric: str | None, prefix: str
) -> dict[str, float]:
    """Puts the draws of one entry into the result. Returns its two scores: means over draws and over its tasks."""
    scores: dict[str, list[float]] = {"per_token": [], "lm_eval": []}
    for name in runs[0]:
        draws = [one[name] for one in runs]
        for found in draws[0]["metrics"]:
            values = [draw["metrics"][found] for draw in draws]
            result.metrics[f"{prefix}{name}{slice_name}/{found}"] = fmean(values)
            if len(values) > 1:
                result.metrics[f"{prefix}{name}{slice_name}/{found}_std"] = stdev(values)
        main = metric or next(iter(draws[0]["metrics"]))
        if main not in draws[0]["metrics"]:
            raise ValueError(f"{name}: lm-eval reports {', '.join(draws[0]['metrics'])}, and not {main}")
        per_token = next((found for found in draws[0]["metrics"] if found.endswith("_per_token")), main)
        scores["lm_eval"].append(fmean(draw["metrics"][main] for draw in draws))
        scores["per_token"].append(fmean(draw["metrics"][per_token] for draw in draws))
        result.tables[f"{prefix}{name}{slice_name}"] = draws
    return {way: fmean(values) for way, values in scores.items()}
