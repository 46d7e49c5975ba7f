"""What runs will cost, before any is started: counts, budgets, memory by a dry run, time from measurements."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from models.budget import COUNTS, Shape, counts
from runs.schema import Config
from runs.validate import validate
from sweeps.plan import main
from sweeps.planning import memory
from sweeps.planning.speed import NOMINAL, Speed, find, hours
from tests.runs.commands import ROOT, environment

TINY = ("model.d_model=16", "model.n_heads=2", "model.mlp_width=24", "global_batch=4", "data.seq_len=64")


@pytest.fixture
def plan(capsys, tmp_path):
    """The JSON of a command."""

    def run(*words: str, code: int = 0):
        assert main([*words, f"paths.results={tmp_path}", "--json"]) == code
        said = capsys.readouterr()
        return json.loads(said.out) if code == 0 else said.err

    return run


def config(*overrides: str) -> Config:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return validate(compose("config", overrides=list(overrides)))


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_a_study_is_planned_mixer_by_mixer(plan):
    content = plan("study=quickstart", "--no-memory")
    rows = {row["mixer"]: row for row in content["rows"]}
    names = "transformer swa mamba2 deltanet gated_deltanet xlstm hyena mesa toeplitz maglev"
    assert list(rows) == names.split() and content["reference"] == "transformer" and content["runs"] == 10
    shared = ["tokenizer=bpe", "tokenizer.vocab_size=2048", "global_batch=4", "steps=400"]
    for name, row in rows.items():
        expected = counts(config(f"mixer={name}", *shared), Shape(2048))
        assert {key: row[key] for key in expected if key in row} == {k: v for k, v in expected.items() if k in row}
        assert row["tokens"] == 400 * 4 * 256
        for by, key in COUNTS.items():
            base = rows["transformer"][key]
            assert row["off"][by] == pytest.approx((row[key] - base) / base)
    assert content["hours"] == pytest.approx(sum(row["hours_all_runs"] for row in rows.values()))
    assert {row["hours_from"] for row in rows.values()} == {"assumed"}
    assert rows["mesa"]["hours"] > rows["transformer"]["hours"], "at equal FLOPs per second"


@pytest.mark.parametrize(
    ("recipe", "transformer", "mesa", "tokens"),
    [
        ("mesanet_140m", 145_967_616, 146_195_368, 15e9),
        ("mesanet_440m", 433_203_200, 433_924_032, 15e9),
        ("mesanet_1b", 936_066_048, 937_489_568, 50e9),
    ],
)
def test_the_mesanet_recipes_are_planned_offline(plan, recipe, transformer, mesa, tokens, tmp_path):
    content = plan(f"experiment={recipe}", "mixer=transformer,mesa", "--no-memory", f"paths.cache={tmp_path}")
    assert [row["params"] for row in content["rows"]] == [transformer, mesa]
    assert content["plan"] == recipe
    for row in content["rows"]:
        assert 0 <= row["tokens"] - tokens < 524_288


def test_budgets_are_shown_met_or_not_available(plan):
    content = plan("mixer=transformer,gla,hawk", "match=params,state", "--no-memory")
    rows = {row["label"]: row for row in content["rows"]}
    assert len(rows) == 6
    met = rows["gla match=params"]
    assert met["match"]["met"] and abs(met["match"]["residual"]) <= 0.005
    assert met["params_non_embedding"] == met["match"]["reached"]
    none = rows["hawk match=state"]
    assert none["params"] is none["hours"] is none["match"] is None
    assert "its state is as wide as the layer itself" in none["not_available"]
    assert rows["transformer match=state"]["match"]["residual"] == 0


def test_the_table_says_what_the_json_says(plan, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    words = ["mixer=transformer,hawk,gla", "match=state", f"paths.results={tmp_path}", "--no-memory"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "! hawk: match=state: mixer hawk cannot have" in said and "! gla" in said
    assert "assumed: transformer" in said and "3 runs" in said


def test_a_studys_points_are_apart_where_they_cost_different_amounts(plan, tmp_path):
    (tmp_path / "made_up.yaml").write_text(
        "shared: {steps: 50, schedule.warmup_steps: 5}\n"
        "mixers:\n"
        "  swa: {optimizer.lr: [1e-3, 2e-3], mixer.window: [16, 64]}\n"
        "  gla: {optimizer.lr: [1e-3, 2e-3, 3e-3, 4e-3]}\n"
        "tune: {seeds: [100, 101]}\nseeds: [0, 1, 2, 3, 4]\n"
    )
    words = (f"hydra.searchpath=[sweeps://{tmp_path}]", "study=made_up", "--no-memory")
    content = plan(*words)
    rows = {row["label"]: row for row in content["rows"]}
    assert list(rows) == ["swa mixer.window=16", "swa mixer.window=64", "gla"]
    assert rows["swa mixer.window=16"]["state_bytes"] * 4 == rows["swa mixer.window=64"]["state_bytes"]
    assert rows["gla"]["runs"] == 4 * 2 + 5
    assert rows["swa mixer.window=16"]["runs"] == 2 * 2 + 5 / 2
    assert content["runs"] == 2 * (4 * 2 + 5)
    narrowed = plan(*words, "mixer=gla", "seed=0,1")
    assert [row["runs"] for row in narrowed["rows"]] == [4 * 2 + 2]


def test_tasks_and_unknown_vocabularies(plan, tmp_path):
    content = plan("data=mqar", "mixer=transformer,mesa", "--no-memory")
    assert (
        content["rows"][0]["params"]
        == counts(config("data=mqar"), Shape(config("data=mqar").data.vocab_size))["params"]
    )
    words = ["data=slimpajama", "tokenizer=hf", "tokenizer.path=some/where", f"paths.cache={tmp_path}", "--no-memory"]
    assert "tokenizer.path=some/where: how many tokens it has" in plan(*words, code=2)
    known = plan(*words, "vocab_size=1000")["rows"][0]
    assert known["params"] - known["params_non_embedding"] == 1000 * 128


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["study=nosuch"], "study=nosuch: no such choice"),
        (["mixer=nosuch"], "mixer=nosuch: no such choice"),
        (["optimizer.lr=-1"], "optimizer.lr=-1.0: must be above 0"),
        (["--fast"], "--fast: unknown flag. Flags: --json, --no-memory"),
        (["calibrate=soon"], "calibrate=soon: must be a number above 0"),
        (
            ["experiment=mesanet_140m", "calibrate=1", "paths.cache=/nowhere"],
            "data.hub=cerebras/SlimPajama-627B: not yet",
        ),
        (["study=quickstart", "optimizer.lr=1"], "sets optimizer.lr from its grids"),
        (["match=params", "match_reference=nosuch"], "match_reference=nosuch: no such choice"),
    ],
    ids=str,
)
def test_a_wrong_question_ends_with_a_sentence(plan, words, message):
    assert message in plan(*words, code=2)


# ---- memory ----------------------------------------------------------------------------------------------------------

SHAPE = Shape(97)
MIXERS = ["transformer", "swa", "gated_deltanet", "xlstm", "mesa", "hyena", "toeplitz", "maglev", "lrt", "hawk_mesa"]


@pytest.mark.parametrize("name", MIXERS)
def test_a_dry_run_counts_what_a_real_one_does(name, monkeypatch):
    tiny = config(f"mixer={name}", *TINY)
    dry = memory._step(tiny, SHAPE).peak, memory._score(tiny, SHAPE, _mode(tiny), 4, 64)
    monkeypatch.setattr(memory, "FakeTensorMode", contextlib.nullcontext)
    assert (memory._step(tiny, SHAPE).peak, memory._score(tiny, SHAPE, _mode(tiny), 4, 64)) == dry


def _mode(tiny: Config) -> str:
    return memory.modes(tiny, SHAPE)[-1]


@pytest.mark.parametrize("name", ["transformer", "mesa", "hawk_mesa", "maglev"])
def test_deep_models_are_continued_in_a_straight_line(name, monkeypatch):
    deep = config(f"mixer={name}", *TINY, "model.n_layers=12")
    continued = memory.estimate(deep, SHAPE)
    monkeypatch.setattr(memory, "SHALLOW", 12)
    whole = memory.estimate(deep, SHAPE)
    assert continued.training == pytest.approx(whole.training, rel=0.02)
    assert continued.total == pytest.approx(whole.total, rel=0.02)


def test_mixers_that_walk_token_by_token_are_continued_over_the_length(monkeypatch):
    walking = config("mixer=slstm", *TINY)
    whole = memory.estimate(walking, SHAPE).training
    monkeypatch.setattr(memory, "PROBES", (8, 16))
    monkeypatch.setattr(memory, "OPERATIONS", 10)
    assert memory.estimate(walking, SHAPE).training == pytest.approx(whole, rel=0.05)


def test_memory_has_the_parts_that_it_should():
    def parts(*more: str) -> memory.Memory:
        return memory.estimate(config("mixer=gated_deltanet", *TINY, "model.n_layers=4", *more), SHAPE)

    base = parts()
    n = counts(config("mixer=gated_deltanet", *TINY, "model.n_layers=4"), SHAPE)["params"]
    assert (base.weights, base.gradients, base.moments) == (4 * n, 4 * n, 8 * n)
    assert base.training > base.gradients
    half = parts("trainer.micro_batch=2")
    assert 0.4 < (half.training - half.gradients) / (base.training - base.gradients) < 0.75
    assert parts("trainer.activation_checkpointing=true").training < 0.8 * base.training
    assert parts("trainer.eval_batch=64").evaluation == pytest.approx(2 * base.evaluation, rel=0.05)
    sharded = parts("trainer=fsdp", "trainer.devices=4", "trainer.micro_batch=1")
    assert sharded.weights == base.weights / 4 and sharded.moments == base.moments / 4


# ---- time ------------------------------------------------------------------------------------------------------------


def record(folder: Path, mixer: str, run_id: str, **changes) -> None:
    """A finished run's record."""
    tiny = config(f"mixer={mixer}", *TINY)
    content = {
        "run_id": run_id,
        "mixer": mixer,
        "host": dataclasses.asdict(tiny.trainer),
        "science": {"precision": "fp32"},
        "counts": counts(tiny, Shape(257)),
        "timing": {"tokens_per_s": 1000.0, "scoring_parallel_tokens_per_s": 3000.0},
        **changes,
    }
    path = folder / "runs" / "default" / f"{mixer}-{run_id}"
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps(content))


def found(results: Path, mixer: str = "swa", *more: str) -> Speed:
    asked = config(f"mixer={mixer}", *TINY, *more)
    return find(asked, mixer, counts(asked, Shape(257)), memory.modes(asked, Shape(257)), results)


def test_speed_is_that_of_the_nearest_finished_run_at_equal_flops_per_second(tmp_path):
    flops = counts(config("mixer=swa", *TINY), Shape(257))["train_flops_per_token"]
    assert found(tmp_path).source == "assumed"
    assert found(tmp_path, "swa", "trainer.threads=3").train == pytest.approx(3 * NOMINAL["cpu", "fp32"] / flops)
    record(tmp_path, "gla", "0")
    record(tmp_path, "swa", "1", science={"precision": "bf16"})
    record(tmp_path, "swa", "2", host={"accelerator": "gpu"})
    record(tmp_path, "swa", "3", timing={})
    assert found(tmp_path).source == "assumed", "of another mixer, precision or host, or unfinished"
    large = {"train_flops_per_token": 100 * flops}
    record(tmp_path, "swa", "4", counts=large)
    assert found(tmp_path).source == "from the speed of run swa-4"
    assert found(tmp_path).train == pytest.approx(100_000)
    record(tmp_path, "swa", "5")
    assert found(tmp_path) == Speed(1000.0, {"parallel": 3000.0}, "measured by run swa-5")


def test_speed_may_come_from_the_speed_suite(tmp_path):
    (tmp_path / "speed").mkdir()
    rows = [{"name": "transformer", "ours_ms": 100.0}, {"name": "swa, W=128", "ours_ms": 50.0}]
    (tmp_path / "speed" / "models.json").write_text(json.dumps({"rows": rows}))
    suite = ["model.d_model=256", "model.n_layers=4", "model.n_heads=4", "model.mlp_width=768", "data.seq_len=512"]
    for mixer, more, ms in (("transformer", [], 100.0), ("swa", ["mixer.window=128"], 50.0)):
        own = counts(config(f"mixer={mixer}", *suite, *more), Shape(4096))["train_flops_per_token"]
        tiny = counts(config(f"mixer={mixer}", *TINY), Shape(257))["train_flops_per_token"]
        speed = found(tmp_path, mixer)
        assert speed.train == pytest.approx(own / tiny * 4 * 512 / (ms / 1e3)) and speed.measured
    assert not found(tmp_path, "gla").measured


def test_hours_hold_training_validations_and_the_test():
    asked = config("steps=100", "evaluation.every=30", "evaluation.val_tokens=5000")
    at = Speed(2000.0, {"recurrent": 10.0, "teacher_forced": 1000.0}, "", startup=7.0)
    seconds = 7 + 100 * 16 * 256 / 2000 + (4 * 5000 + 900) * (1 / 10 + 1 / 1000)
    assert hours(asked, at, 900) * 3600 == pytest.approx(seconds)


def measured(process: subprocess.Popen) -> tuple[float, float]:
    """CPU seconds and the most memory, in GB, of a process that ends well. ``ru_maxrss`` will not do: Linux hands on to
    a new program what the process that it was forked from held."""
    peak, ended = 0, 0
    while not ended:
        time.sleep(0.1)
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
        peak = max(peak, int(found[1]) if found else 0)  # none once it has ended
        ended, status, used = os.wait4(process.pid, os.WNOHANG)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return used.ru_utime + used.ru_stime, peak * 1024 / 1e9


@pytest.mark.slow
def test_a_calibration_of_seconds_predicts_a_run_of_a_minute(plan, tmp_path):
    """Memory and time within 25 %. Of the time that the run gets: what other programs take of the machine meanwhile, no
    calibration can know. And the mean of one before and one after, for they also slow the core that a program has."""
    words = ["tokenizer=bpe", "tokenizer.vocab_size=2048", "trainer.threads=1", "evaluation.test_tokens=65536"]
    words += ["evaluation.every=0", "schedule.warmup_steps=5", "evaluation.val_tokens=65536"]
    steps = round(40 * plan(*words, "calibrate=5", "--no-memory")["rows"][0]["tokens_per_s"] / (16 * 256))
    words.append(f"steps={steps}")

    first = plan(*words, "calibrate=15")["rows"][0]
    run = [sys.executable, "train.py", *words, "logger=none", "trainer.progress=false", f"paths.results={tmp_path}"]
    took, peak = measured(subprocess.Popen(run, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL))
    second = plan(*words, f"paths.results={tmp_path / 'none'}", "calibrate=15")["rows"][0]
    predicted = [3600 * row["hours"] * row["core_share"] for row in (first, second)]
    assert sum(predicted) / 2 == pytest.approx(took, rel=0.25)
    assert first["memory_gb"] == pytest.approx(peak, rel=0.25)
    after = plan(*words, "--no-memory")["rows"][0]
    assert after["hours_from"].startswith("measured by run transformer-")
    assert after["tokens_per_s"] == pytest.approx((first["tokens_per_s"] + second["tokens_per_s"]) / 2, rel=0.5)
