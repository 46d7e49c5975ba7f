"""What every task is: a config that can make examples, say what chance reaches on them, and solve them.

A task's file holds one or a few dataclasses derived from `TaskConfig`, each registered by its kind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from data.tasks.draw import hash_rows

if TYPE_CHECKING:
    from data.tasks.score import TaskScore

IGNORED = -100

PARTS = 20
"""An example belongs to the validation split if its content's hash is 0 modulo this, to the test split if it is 1, and
to the train split otherwise."""

SPLITS = ("train", "val", "test")


class Examples(NamedTuple):
    """N examples, one a row. T positions."""

    inputs: np.ndarray
    """(N, T) int64 tokens; of a continuous task (N, T, F) float32."""

    targets: np.ndarray
    """(N, T) int64: what must be predicted after reading ``inputs[:, : t + 1]``; -100 where nothing is graded. Each
    task says whether that is the next token or a label. Of a continuous task: (N, T) float32, NaN where not graded."""

    content: np.ndarray
    """(N, K) int64: what makes an example what it is. Its hash decides the split, so it must be the same for equal
    examples; where it is coarser (the facts, not their places), the splits are further apart."""

    slices: dict[str, np.ndarray]
    """name -> (N,) or (N, T) int64 labels by which accuracy is cut; -1: in no slice."""

    answers: np.ndarray | None = None
    """(N, T) int64 where more than one token is right: bit v is set if token v may follow, all of them equally likely.
    None: only the target is right."""

    def take(self, rows: Any) -> Examples:
        """The examples at ``rows``: indices, a mask or a slice."""
        return Examples(
            self.inputs[rows],
            self.targets[rows],
            self.content[rows],
            {name: labels[rows] for name, labels in self.slices.items()},
            None if self.answers is None else self.answers[rows],
        )


def join(parts: list[Examples]) -> Examples:
    """All examples of a list that is not empty, in order."""
    if len(parts) == 1:
        return parts[0]
    answers = [part.answers for part in parts if part.answers is not None]
    return Examples(
        np.concatenate([part.inputs for part in parts]),
        np.concatenate([part.targets for part in parts]),
        np.concatenate([part.content for part in parts]),
        {name: np.concatenate([part.slices[name] for part in parts]) for name in parts[0].slices},
        np.concatenate(answers) if answers else None,
    )


def in_split(content: np.ndarray, split: str) -> np.ndarray:
    """(N, K) content -> (N,) bool: is it of this split? A function of the content alone, hence no two splits can share
    an example, whatever the seeds."""
    part = hash_rows(content) % np.uint64(PARTS)
    if split == "train":
        return part > 1
    return part == SPLITS.index(split) - 1


def share(split: str) -> float:
    """Chance that an example is of a split."""
    return 1 - 2 / PARTS if split == "train" else 1 / PARTS


def require(condition: bool, message: str) -> None:
    """Raises ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


@dataclass
class TaskConfig:
    """The fields that all tasks share; a task adds its own. Two numbers come with every task: what ``chance`` is, and
    that ``oracle`` reaches 1 (or the Bayes score)."""

    kind: str = ""

    seq_len: int = 64
    """T, positions of each example."""

    eval_examples: int = 1000
    """Examples of the validation split, and of the test split; always the same ones, whatever the run's seed."""

    train_examples: int | None = None
    """null: every training example is new. A number: so many, fixed whatever the seed, are read again and again (MAD's
    measure of data efficiency)."""

    continuous: ClassVar[bool] = False
    """Inputs and targets are real numbers."""

    readout: ClassVar[str] = "each"
    """``each``: the prediction at t is read from position t. ``last``: all predictions are decoded from the features at
    the last position alone (see mad_compression)."""

    lows: ClassVar[dict[str, int]] = {}
    """Least value of each number, where it is not 1."""

    def check(self, path: str) -> None:
        """Raises ValueError with one sentence: full key, value, what would be right."""
        kind = type(self).kind
        require(self.kind == kind, f"{path}.kind={self.kind}: this task has kind {kind}")
        for name, value in vars(self).items():
            low = {"seq_len": 2, **self.lows}.get(name, 1)
            if isinstance(value, int) and not isinstance(value, bool):
                require(value >= low, f"{path}.{name}={value}: must be at least {low}")

    def require_length(self, path: str, length: int, reason: str) -> None:
        """Raises ValueError if ``seq_len`` is below what the other fields need."""
        require(self.seq_len >= length, f"{path}.seq_len={self.seq_len}: must be at least {length}, {reason}")

    @property
    def vocab_size(self) -> int:
        """Tokens that inputs and targets may hold."""
        raise TypeError(f"task {self.kind!r} must define vocab_size")

    @property
    def input_width(self) -> int | None:
        """F, numbers at each position of a continuous task; None otherwise."""
        return None

    @property
    def n_graded(self) -> int | None:
        """Graded positions of an example; None: it varies. Where all have the same number, a process need not make the
        rows of others to know how many targets a global batch has."""
        return None

    @property
    def slice_values(self) -> dict[str, list[int]]:
        """Slices and every label that they may have (-1 apart)."""
        return {}

    def chance(self) -> float:
        """Accuracy on graded positions without using the context as it should be used. Each task says how. Of a
        continuous task: the mean squared error of a constant."""
        raise TypeError(f"task {self.kind!r} must define chance()")

    def sample(self, rng: np.random.Generator, n: int) -> Examples:
        """``n`` independent examples of any split."""
        raise TypeError(f"task {self.kind!r} must define sample()")

    def oracle(self, inputs: np.ndarray) -> np.ndarray:
        """Predictions (N, T) from inputs alone, right at every graded position (or as good as can be). What it says
        elsewhere means nothing."""
        raise TypeError(f"task {self.kind!r} must define oracle()")

    def new_score(self, n_examples: int) -> TaskScore:
        """An empty score of a split with so many examples."""
        from data.tasks.score import TaskScore

        return TaskScore(n_examples, self.slice_values)


def harmonic(n: int) -> float:
    """1 + 1/2 + ... + 1/n."""
    return math.fsum(1 / k for k in range(1, n + 1))
