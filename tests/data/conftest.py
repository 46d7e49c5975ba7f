from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.config import CorpusConfig


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that the tests of a session share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes texts as rows of a .jsonl file and returns its path."""

    def write(texts: list[str], name: str = "corpus.jsonl") -> str:
        file = tmp_path / name
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        return str(file)

    return write


@pytest.fixture
def small_corpus(write_jsonl: Callable[..., str]) -> CorpusConfig:
    """300 documents of 1 to 60 characters: shorter and longer than the windows that the tests use."""
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abc é日\n"), size=rng.integers(1, 60))) + f"#{number}" for number in range(300)]
    return CorpusConfig(name="small", paths=[write_jsonl(texts)], seq_len=16, val_fraction=0.2, test_fraction=0.2)
