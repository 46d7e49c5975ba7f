"""python -m data.prepare"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from data.command import main, parse
from data.config import BpeConfig, CorpusConfig
from data.prepare import prepare

ROOT = Path(__file__).parents[2]


@pytest.fixture
def words(write_jsonl: Callable[..., str], tmp_path: Path) -> list[str]:
    file = write_jsonl([f"text {number} in words" for number in range(60)])
    return [
        "data=files",
        f"data.paths=[{file}]",
        "data.val_fraction=0.2",
        "data.test_fraction=0.2",
        f"paths.cache={tmp_path}/c",
    ]


def test_it_prepares_and_says_so_in_one_line(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "data.prepare", *words, "tokenizer=bpe", "tokenizer.vocab_size=270", "processes=2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cfg = CorpusConfig(name="files", paths=[words[1].split("[")[1][:-1]], val_fraction=0.2, test_fraction=0.2)
    folder = prepare(cfg, BpeConfig(vocab_size=270), tmp_path / "c")
    counts = json.loads((folder / "manifest.json").read_text())["splits"]
    (line,) = done.stdout.splitlines()
    assert line.startswith(
        f"{folder}: train {counts['train']['documents']} documents {counts['train']['tokens']:,} tokens "
    )
    assert "texts" in done.stderr and "tokens" in done.stderr, "bars"


def test_options_are_not_part_of_the_config(words: list[str]) -> None:
    plain = parse(words)
    other = parse([*words, "processes=7", "streaming=false", "progress=false"])
    assert plain[:3] == other[:3] and (other[3].processes, other[3].streaming, other[3].progress) == (7, False, False)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("processes=0", "processes=0: must be at least 1"),
        ("processes=many", "processes=many"),
        ("mixer=mesa", "mixer=mesa: must be one of data=, tokenizer=, processes="),
        ("fast", "fast: must be one of"),
        ("data.seq=3", "data.seq: unknown key"),
        ("data.seq_len=1", "data.seq_len=1: must be at least 2"),
        ("data=slimpyjama", "data=slimpyjama: no such choice. Did you mean 'slimpajama'"),
        ("tokenizer=hf", "tokenizer.path=: name a tokenizer.json"),
        ("data.paths=[/nowhere.txt]", "data.paths[0]=/nowhere.txt: no such file"),
        ("data=mqar", "data.kind="),
    ],
)
def test_errors_are_one_sentence(
    words: list[str], capsys: pytest.CaptureFixture[str], extra: str, message: str
) -> None:
    assert main(["data=kjv", extra] if extra.startswith("data=") else [*words, extra]) == 1
    error = capsys.readouterr().err
    assert error.startswith(message) and error.count("\n") == 1


def test_a_full_disk_is_one_sentence(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("data.prepare.assemble", full)
    assert main([*words, "progress=false"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("paths.cache=") and "the disk is full" in error and error.count("\n") == 1


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "processes=N" in capsys.readouterr().out
