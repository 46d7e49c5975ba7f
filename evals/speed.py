"""How fast our forms are beside their peers: ratios measured in one run, peer and ours in turn.

    python -m evals.speed                      # a table, and results/speed.json
    python -m evals.speed only=delta repeats=9 threads=2

A ratio is the peer's time over ours (above 1: ours is faster), the median over repeats, each of which times both. Where a
third program takes a core for a moment, one repeat suffers and the median does not.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from runs.cli import patient_threads
from runs.validate import ConfigError, command_line

patient_threads()  # as train.py has them; it must be set before torch is imported

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

Pass = Callable[[], Any]


@dataclass
class Command:
    """The command line: key=value."""

    only: str = ""  # part of a measurement's name
    repeats: int = 7
    threads: int | None = None
    out: str = "results/speed.json"


@dataclass
class Row:
    """One comparison."""

    name: str
    peer: str
    setting: str
    ratio: float  # peer's time / ours
    low: float
    high: float
    ours_ms: float
    peer_ms: float
    goal: float  # the ratio that is asked for


def seconds(act: Pass) -> float:
    """Wall time of one call."""
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def compare(name: str, peer: str, setting: str, goal: float, ours: Pass, theirs: Pass, repeats: int) -> Row:
    """Time both in turn; every repeat gives a ratio."""
    ours(), theirs()
    pairs = [(seconds(theirs), seconds(ours)) for _ in range(repeats)]
    ratios = [a / b for a, b in pairs]
    return Row(
        name,
        peer,
        setting,
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        1e3 * statistics.median(b for _, b in pairs),
        1e3 * statistics.median(a for a, _ in pairs),
        goal,
    )


def forward_backward(act: Callable[..., Tensor], inputs: list[Tensor]) -> Pass:
    """One pass and its gradients with respect to all inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    upstream: list[Tensor] = []

    def run() -> None:
        out = act(*leaves)
        if not upstream:
            upstream.append(torch.randn_like(out))
        torch.autograd.grad(out, leaves, upstream[0])

    return run


def random(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- operations ------------------------------------------------------------------------------------------------------


def attention_rows(repeats: int) -> Iterator[Row]:
    """Softmax attention and its sliding window against torch's scaled_dot_product_attention."""
    from mixers.ops.attention import attention

    def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    qkv = [random(1, 2048, 4, 64, seed=i) for i in range(3)]
    setting = "B=1 T=2048 H=4 K=64, float32, forward + backward"
    yield compare(
        "attention",
        "torch SDPA, causal",
        setting,
        0.9,
        forward_backward(lambda q, k, v: attention(q, k, v)[0], qkv),
        forward_backward(lambda q, k, v: sdpa(q, k, v, is_causal=True), qkv),
        repeats,
    )
    window = 256
    gap = torch.arange(2048)[:, None] - torch.arange(2048)
    mask = (gap >= 0) & (gap < window)
    yield compare(
        "sliding-window attention",
        "torch SDPA with a mask",
        f"{setting}, W={window}",
        2.0,
        forward_backward(lambda q, k, v: attention(q, k, v, window=window)[0], qkv),
        forward_backward(lambda q, k, v: sdpa(q, k, v, attn_mask=mask), qkv),
        repeats,
    )


def fla_naive(module: str) -> Any:
    """A reference file of fla-core, loaded by its path: importing the package would need triton. None if not installed."""
    try:
        files = metadata.files("fla-core") or []
    except metadata.PackageNotFoundError:
        return None
    path = next(Path(str(f.locate())) for f in files if str(f).endswith(f"fla/ops/{module}/naive.py"))
    spec = importlib.util.spec_from_file_location(f"fla_naive_{module}", path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def delta_rows(repeats: int) -> Iterator[Row]:
    """The gated delta rule against fla's plain-torch chunk code."""
    from mixers.ops.delta import chunk_delta_rule

    naive = fla_naive("gated_delta_rule")
    if naive is None:
        return
    for steps in (2048, 8192):
        q, k, v = (random(1, steps, 4, 64, seed=i) for i in range(3))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        beta, g = random(1, steps, 4, seed=3).sigmoid(), F.logsigmoid(random(1, steps, 4, seed=4) + 3)
        yield compare(
            "gated delta rule",
            f"fla {metadata.version('fla-core')} naive chunk",
            f"B=1 T={steps} H=4 K=V=64, float32, forward + backward",
            2.5,
            forward_backward(lambda *x: chunk_delta_rule(*x, scale=64**-0.5)[0], [q, k, v, beta, g]),
            forward_backward(
                lambda q, k, v, beta, g: naive.naive_chunk_gated_delta_rule(q, k, v, g, beta)[0], [q, k, v, beta, g]
            ),
            max(3, repeats // 2),
        )


# ---- the training loop and the stream --------------------------------------------------------------------------------


def quickstart_config(*overrides: str) -> Any:
    """The checked config of the quickstart's transformer."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from runs.validate import validate

    root = Path(__file__).resolve().parents[1]
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


def loop_rows(repeats: int) -> Iterator[Row]:
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
    ratios = [a / b for a, b in pairs]
    bare_ms, ours_ms = (1e3 * statistics.median(x) / steps for x in zip(*pairs, strict=True))
    yield Row(
        "training loop",
        "bare PyTorch loop",
        setting,
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        ours_ms,
        bare_ms,
        1 / 1.1,
    )
    count = 2000
    begin = time.perf_counter()
    for step in range(count):
        dataset.train_batch(step)
    stream_ms = 1e3 * (time.perf_counter() - begin) / count
    ratio = ours_ms / stream_ms
    yield Row("stream", "what training consumes", setting, ratio, ratio, ratio, stream_ms, ours_ms, 20.0)


MEASUREMENTS = {"attention": attention_rows, "delta": delta_rows, "loop": loop_rows}


def show(rows: list[Row], console: Console) -> None:
    """The table."""
    table = Table(title="peer's time / our time: above 1, ours is faster", show_lines=True)
    table.add_column("ours, against its peer")
    for column in ("ratio", "asked", "ms: ours, peer"):
        table.add_column(column, justify="right")
    for row in rows:
        met = "green" if row.ratio >= row.goal else "red"
        table.add_row(
            f"{row.name}, against {row.peer}\n[dim]{row.setting}[/]",
            f"[{met}]{row.ratio:.2f}[/]\n[dim]{row.low:.2f} to {row.high:.2f}[/]",
            f"{row.goal:.2f}",
            f"{row.ours_ms:.3g}\n{row.peer_ms:.3g}",
        )
    console.print(table)


def main(arguments: list[str]) -> int:
    """Measure, show, write the JSON."""
    from runs.host import git_commit, processor

    logging.basicConfig(level=logging.WARNING)
    console = Console()
    try:
        command = command_line(Command, arguments)
    except ConfigError as error:
        console.print(str(error), style="red")
        return 1
    threads = command.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    rows: list[Row] = []
    for name, measure in MEASUREMENTS.items():
        if command.only in name:
            with console.status(f"measuring {name}"):
                rows += measure(command.repeats)
    show(rows, console)
    root = Path(__file__).resolve().parents[1]
    out = Path(command.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    host = {"cpu": processor(), "threads": threads, "torch": str(torch.__version__), "commit": git_commit(root)}
    out.write_text(json.dumps({"host": host, "repeats": command.repeats, "rows": [asdict(r) for r in rows]}, indent=1))
    console.print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
