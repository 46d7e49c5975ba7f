"""In-context linear regression, the problem that a Mesa layer solves in closed form.

Garg et al., "What can transformers learn in-context?", 2022, section 2; von Oswald et al., "Uncovering mesa-optimization
algorithms in transformers", 2023, section 2. Prior and noise are known, so the best answer is: the posterior mean, which
is ridge regression.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from data.tasks import register
from data.tasks.base import Examples, TaskConfig, require
from data.tasks.draw import binned, bins

if TYPE_CHECKING:
    from data.tasks.score import TaskScore


@register
@dataclass
class RegressionConfig(TaskConfig):
    """x1 y1 x2 y2 ...: at each x, predict its y. y = w.x + noise with w ~ N(0, I / dim) of the example, x ~ N(0, I).

    Continuous. A position holds dim + 1 numbers: x is (x, 0) and y is (0, ..., 0, y). Metrics are mean squared errors:
    ``loss``, that of the posterior mean, ``bayes``, and ``excess``, the difference; by ``seen``, pairs read before. Chance, for the constant 0: 1 + noise^2. Solved by ridge regression with the
    weight noise^2 x dim: one Mesa layer, or many steps of gradient descent in as many layers of linear attention. No w is
    in two splits.
    """

    kind: str = "regression"
    dim: int = 8
    noise: float = 0.1

    continuous: ClassVar[bool] = True

    def check(self, path: str) -> None:
        super().check(path)
        require(self.seq_len % 2 == 0, f"{path}.seq_len={self.seq_len}: must be even, for whole pairs")
        require(0 < self.noise < float("inf"), f"{path}.noise={self.noise}: must be above 0 and finite")

    @property
    def input_width(self) -> int:
        return self.dim + 1

    @property
    def vocab_size(self) -> int:
        """No tokens; 1, for what must have a size."""
        return 1

    @property
    def n_graded(self) -> int | None:
        return self.seq_len // 2

    @property
    def slice_values(self) -> dict[str, list[int]]:
        return {"seen": bins(self.seq_len // 2 - 1)}

    def chance(self) -> float:
        return 1 + self.noise**2

    def sample(self, rng: np.random.Generator, n: int) -> Examples:
        pairs = self.seq_len // 2
        w = rng.standard_normal((n, self.dim)) / np.sqrt(self.dim)
        x = rng.standard_normal((n, pairs, self.dim), dtype=np.float32)
        y = np.einsum("npd,nd->np", x, w) + self.noise * rng.standard_normal((n, pairs))
        inputs = np.zeros((n, pairs, 2, self.dim + 1), dtype=np.float32)
        inputs[:, :, 0, :-1], inputs[:, :, 1, -1] = x, y
        targets = np.full((n, self.seq_len), np.nan, dtype=np.float32)
        targets[:, ::2] = y
        seen = np.full((n, self.seq_len), -1)
        seen[:, ::2] = binned(np.arange(pairs))
        return Examples(inputs.reshape(n, self.seq_len, -1), targets, w.view(np.int64), {"seen": seen})

    def oracle(self, inputs: np.ndarray) -> np.ndarray:
        """The posterior mean of each y given the pairs before it: w = (X'X + noise^2 dim I)^-1 X'y. Float64."""
        x, y = inputs[:, ::2, :-1].astype(np.float64), inputs[:, 1::2, -1].astype(np.float64)
        moments = np.cumsum(x[:, :, :, None] * x[:, :, None, :], axis=1)
        products = np.cumsum(x * y[:, :, None], axis=1)
        ridge = self.noise**2 * self.dim * np.eye(self.dim)
        w = np.linalg.solve(moments[:, :-1] + ridge, products[:, :-1, :, None])[..., 0]
        out = np.zeros(inputs.shape[:2])
        out[:, 2::2] = np.einsum("npd,npd->np", x[:, 1:], w)
        return out

    def new_score(self, n_examples: int) -> TaskScore:
        from data.tasks.score import RegressionScore

        return RegressionScore(n_examples, self.slice_values, self.oracle)
