"""Documents and prompts of the twin tasks: small tasks of each output type that lm-eval's own have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets


def documents(**_: Any) -> dict[str, datasets.Dataset]:
    """All rows of twins.jsonl as the test split; the first four also serve as examples."""
    lines = (Path(__file__).parent / "twins.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {"test": datasets.Dataset.from_list(rows), "train": datasets.Dataset.from_list(rows[:4])}


def blanks(doc: dict[str, Any]) -> list[str]:
    """Two beginnings of one sentence, as in WinoGrande."""
    return [f"{doc['passage']} It was {name} who" for name in (doc["name"], doc["other"])]


def contains(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The answer is part of what was generated."""
    return {"contains": float(doc["answer"].lower() in results[0].lower())}
