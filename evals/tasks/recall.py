"""Cloze forms of TriviaQA, Natural Questions and DROP as in Arora et al. 2024 (Just read twice): the question is a sentence
that breaks off before its answer, and follows the passage that holds it."""

from __future__ import annotations

import re
from typing import Any

MARKS = re.compile(r"\[(?:PAR|DOC|TLE)\]")


def prompt(doc: dict[str, Any]) -> str:
    """The passage and the broken-off sentence. Some passages end with that sentence already; it is not said twice."""
    context, question = MARKS.sub("", doc["context"]).strip(), doc["question"].strip()
    while question and context.lower().endswith(question.lower()):
        context = context[: -len(question)].strip()
    return f"{context.strip('.')}. {question}"


def contains(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether any of the right answers is part of what was generated, whatever the case of its letters."""
    said = results[0].lower()
    return {"contains": float(any(answer.strip().lower() in said for answer in doc["answers"]))}
