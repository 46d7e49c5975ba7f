"""Groups of downstream tasks by the names that lm-eval gives them, or `evals/tasks/`.

``global`` and ``local`` are MesaNet's (arXiv 2506.05233, section 5.2): a task is global where a longer window helps and no
short one beats full attention. ``recall`` is the cloze suite of Arora et al. 2024: the answer stands in the prompt.
"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """One task of a group."""

    task: str
    metric: str | None = None  # that lm-eval reports and that counts in the group's mean; None: the first of each task
    part: str | None = None  # means are taken over entries of one part: their units differ
    shots: tuple[int, ...] = ()  # examples before the question; (): as the task says
    prefixes: int = 1  # draws of those examples
    optional: bool = False  # its data may not be had; it is then left out of the mean, and that is said


SCRAMBLING = (0, 1, 10, 100)
TRANSLATION = (0, 1, 5, 10, 50)
PREFIXES = 10

GROUPS: dict[str, tuple[Entry, ...]] = {
    "global": (Entry("lambada_openai", "acc"), Entry("hellaswag", "acc_norm"), Entry("race", "acc")),
    "local": (
        Entry("piqa", "acc"),
        Entry("winogrande", "acc"),
        Entry("arc_easy", "acc"),
        Entry("arc_challenge", "acc_norm"),
        Entry("social_iqa", "acc"),
        Entry("boolq", "acc"),
        Entry("openbookqa", "acc_norm"),
        Entry("storycloze_2018", "acc", optional=True),  # given out by hand only
    ),
    "recall": (
        Entry("swde", "contains"),
        Entry("squad_completion", "contains"),
        Entry("fda", "contains"),
        Entry("based_triviaqa", "contains"),
        Entry("based_nq", "contains"),
        Entry("based_drop", "contains"),
    ),
    "fewshot": (
        Entry("cycle_letters", "exact_match", "scrambling", SCRAMBLING, PREFIXES),
        Entry("anagrams2", "exact_match", "scrambling", SCRAMBLING, PREFIXES),
        Entry("wmt14-fr-en", "bleu", "translation", TRANSLATION, PREFIXES),
        Entry("wmt16-de-en", "bleu", "translation", TRANSLATION, PREFIXES),
        Entry("wmt16-ro-en", "bleu", "translation", TRANSLATION, PREFIXES),
    ),
    "tmm": (
        Entry("squad_completion", "contains"),
        Entry("squadv2", "f1", "squadv2"),
        Entry("longbench", None, "longbench"),
        Entry("ifeval", "prompt_level_strict_acc"),
        Entry("arc_easy", "acc"),
        Entry("glue", None),
        Entry("hellaswag", "acc_norm"),
    ),
    "maglev": (
        Entry("lambada_openai", "acc"),
        Entry("piqa", "acc"),
        Entry("hellaswag", "acc_norm"),
        Entry("winogrande", "acc"),
        Entry("arc_easy", "acc"),
        Entry("arc_challenge", "acc_norm"),
        Entry("social_iqa", "acc"),
        Entry("boolq", "acc"),
    ),
}
"""Group -> its tasks. RACE is lm-eval's, which is RACE-H; MesaNet's table has RACE-M beside it."""
