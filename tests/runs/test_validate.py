"""What cannot run ends before anything starts, with one sentence: the key, its value, what would be right."""

import subprocess
import sys
import time

import pytest

from tests.runs.commands import ROOT, environment

REFUSED = {
    "mixer=nosuch": "mixer=nosuch: no such choice. Choices: .*swa, swa_gated_deltanet, toeplitz, transformer",
    "mixer=swaa": "Did you mean 'swa'",
    "mixer.typo=1": "mixer.typo: unknown key.* Valid keys: kind, d_model",
    "+mixer.typo=1": "mixer.typo: unknown key of mixer swa.* Valid keys: .*window",
    "mixer.window=abc": r"mixer.window=abc \(str\): mixer swa wants int",
    "mixer.window=0": "mixer.window=0: must be at least 1",
    "mixer.rope_base=0.5": "mixer.rope_base=0.5: must be above 1",
    "mixer.d_model=64": "mixer.d_model=64: the residual stream has model.d_model=128",
    "mixer.kind=nosuch": "mixer.kind='nosuch' is not a mixer.* Mixers: .*transformer",
    "model.d_model=100 model.n_heads=3": "model.d_model=100: model.n_heads=3 does not divide it; heads that do: 1, 2, 4, 5",
    "model.norm=batch": "model.norm=batch: must be one of rms, rms_plain, layer",
    "model.dropout=1": "model.dropout=1.0: must be in",
    "optimizer.lr=-1": "optimizer.lr=-1.0: must be above 0",
    "optimizer.lr=fast": r"optimizer.lr=fast \(str\): optimizer wants float",
    "optimizer.betas=[0.9]": "optimizer.betas=.*two numbers",
    "schedule.warmup_steps=1000 steps=10": "schedule.warmup_steps=1000: must be below steps=10",
    "global_batch=10 trainer.micro_batch=4": "global_batch=10: .*does not divide it; the next that fits is 12",
    "trainer=ddp global_batch=7": "global_batch=7: .*2 x 1 x 3 does not divide it",
    "trainer.devices=2": "trainer.strategy=auto: 2 processes need ddp or fsdp",
    "trainer.strategy=fsdp": "trainer.strategy=fsdp: needs trainer.accelerator=gpu",
    "steps=null": "steps=null: set steps or tokens",
    "steps=1.5": r"steps=1.5 \(float\): wants int",
    "trainer.kernels=fast": "trainer.kernels=fast: must be one of torch, strict, fallback",
    "mixer=toeplitz mixer.length=100": "data.seq_len=256: mixer toeplitz takes at most 100 tokens; set mixer.length=256",
    "nosuch=1": "nosuch: unknown key. Valid keys: .*mixer, model",
    "evaluation.every=-1": "evaluation.every=-1: must be at least 0",
    "data=files data.paths=[/nope.txt]": r"data.paths\[0\]=/nope.txt: no such file",
    "data.seq_len=1": "data.seq_len=1: must be at least 2",
    "tokenizer.kind=nosuch": "tokenizer.kind=nosuch: must be one of",
    "logger.wandb=sometimes": "logger.wandb=sometimes: must be one of offline, online, disabled",
}

PROGRAM = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from hydra import compose, initialize_config_dir
from runs.cli import explain
from runs.validate import validate
for line in sys.stdin:
    with initialize_config_dir({str(ROOT / "conf")!r}, version_base="1.3"):
        try:
            validate(compose("config", overrides=line.split()))
            print("accepted")
        except Exception as error:
            print(" ".join(explain(error).split()))
"""


@pytest.fixture(scope="module")
def answers():
    """All cases in one process: what the user would read."""
    lines = [case if "mixer=" in case else f"mixer=swa {case}" for case in REFUSED]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input="\n".join(lines), capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(REFUSED, done.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_sentence(answers, case):
    import re

    assert re.search(REFUSED[case], answers[case]), answers[case]


@pytest.mark.slow
@pytest.mark.parametrize("override", ["mixer.typo=1", "mixer=nosuch", "optimizer.lr=-1"])
def test_command_line_ends_with_that_sentence_and_no_traceback(override, tmp_path):
    done = subprocess.run(
        [sys.executable, "train.py", override, f"paths.results={tmp_path}"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert override.split("=")[0] in done.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir()), "nothing is written for a config that cannot run"


def test_config_is_shown_quickly_and_without_torch():
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "train.py", "--cfg", "job"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "kind: transformer" in done.stdout
    assert " torch\n" not in done.stderr
    assert time.perf_counter() - begin < 10, "about 0.4 s alone; the limit allows for a machine that is busy"
