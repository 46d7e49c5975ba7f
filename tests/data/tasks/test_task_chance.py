"""What chance is: whoever guesses as a task says that chance guesses, and no better, scores what it gives as chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from data.tasks import configs
from data.tasks.base import Examples
from tests.data.tasks.conftest import KINDS, drawn, graded, measure

Guess = Callable[[Any, Examples, np.random.Generator], np.ndarray]


def any_of(low: Callable[[Any], int], high: Callable[[Any], int]) -> Guess:
    """Any token of a range, all alike."""
    return lambda cfg, examples, rng: rng.integers(low(cfg), high(cfg), size=examples.targets.shape)


def from_rows(choices: Callable[[Any, np.ndarray], np.ndarray]) -> Guess:
    """At each position any entry of what ``choices`` takes from the row, all alike."""

    def guess(cfg: Any, examples: Examples, rng: np.random.Generator) -> np.ndarray:
        return np.stack([rng.choice(choices(cfg, row), size=cfg.seq_len) for row in examples.inputs])

    return guess


def left_to_copy(cfg: Any, examples: Examples, rng: np.random.Generator) -> np.ndarray:
    """Any of the source's tokens that the copy has not shown yet."""
    out = np.zeros_like(examples.targets)
    for row, tokens in enumerate(examples.inputs):
        (where,) = np.nonzero(tokens < cfg.n_tokens)
        source, copy = tokens[where[: cfg.span]], where[cfg.span :]
        for shown, t in enumerate(copy[:-1], start=1):
            out[row, t] = rng.choice(np.setdiff1d(source, tokens[copy[:shown]]))
    return out


def keys_and_values(cfg: Any, row: np.ndarray) -> np.ndarray:
    """The values that a row shows, for tasks whose tokens are keys, values and filler."""
    return row[(row >= cfg.n_keys) & (row < cfg.n_keys + cfg.n_values)]


any_token = any_of(lambda cfg: 0, lambda cfg: cfg.n_tokens)
any_state = any_of(lambda cfg: 0, lambda cfg: cfg.vocab_size)
second_half = any_of(lambda cfg: cfg.n_tokens // 2, lambda cfg: cfg.n_tokens)
GUESSES: dict[str, Guess] = {
    "copy_fixed": any_token,
    "copy_offset": left_to_copy,
    "copy_separator": any_token,
    "delayed_recall": from_rows(keys_and_values),
    "induction": from_rows(lambda cfg, row: row[: cfg.seq_len - 2 * cfg.n_graded]),
    "mad_compression": any_token,
    # The last token pads; keys are the smaller half of the others.
    "mad_fuzzy_recall": any_of(lambda cfg: (cfg.n_tokens - 1) // 2, lambda cfg: cfg.n_tokens - 1),
    "mad_memorization": lambda cfg, examples, rng: rng.choice(
        np.unique(examples.targets[examples.targets != -100]), size=examples.targets.shape
    ),
    "mad_noisy_recall": second_half,
    "mad_recall": second_half,
    "mad_selective_copy": any_token,
    "mqar": from_rows(keys_and_values),
    "parity": any_state,
    "regression": lambda cfg, examples, rng: np.zeros(examples.targets.shape),
    "s3": any_state,
    "s5": any_state,
    "selective_copy": any_token,
}


def assert_guess_scores(cfg: Any, guess: Guess, chance: float) -> None:
    examples = drawn(cfg, 3000)
    found = measure(cfg, guess(cfg, examples, np.random.default_rng(1)), examples)
    if cfg.continuous:
        assert found == pytest.approx(chance, rel=0.05)
    else:  # four standard deviations of so many independent guesses
        n = int(graded(cfg, examples.targets).sum())
        assert found == pytest.approx(chance, abs=4 * (chance * (1 - chance) / n) ** 0.5)


@pytest.mark.parametrize("kind", GUESSES)
def test_a_guess_scores_chance(kind: str) -> None:
    cfg = configs()[kind]()
    cfg.check("data")
    assert_guess_scores(cfg, GUESSES[kind], cfg.chance())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("copy_offset", {"span": 5}),
        ("delayed_recall", {"facts": 5, "min_gap": 100}),
        ("induction", {"pairs": 8, "repeats": 2, "seq_len": 64, "n_tokens": 40}),
        ("mad_fuzzy_recall", {"n_tokens": 32, "key_len": 1}),
        ("mad_memorization", {"n_tokens": 33}),
        ("mad_recall", {"n_tokens": 9}),
        ("mqar", {"pairs": [1, 3, 5], "asks": 2}),
        ("regression", {"noise": 0.8}),
    ],
)
def test_a_guess_scores_chance_at_other_sizes(kind: str, changes: dict[str, Any]) -> None:
    cfg = configs()[kind](**changes)
    cfg.check("data")
    assert_guess_scores(cfg, GUESSES[kind], cfg.chance())


@pytest.mark.parametrize("letters", [4, 18])
def test_any_letter_of_the_alphabet_scores_chance_in_regbench(letters: int) -> None:
    """Which letters are an automaton's is not in its rows, so here they are all."""
    cfg = configs()["regbench"](min_symbols=letters, n_symbols=letters)
    cfg.check("data")
    examples = drawn(cfg, 3000)
    found = measure(cfg, np.random.default_rng(1).integers(letters, size=examples.targets.shape), examples)
    assert found == pytest.approx(cfg.chance(), rel=0.02)
    if letters == 18:
        of_size = [configs()["regbench"](min_symbols=k, n_symbols=k).chance() for k in range(4, 19)]
        assert configs()["regbench"]().chance() == pytest.approx(np.mean(of_size))


@pytest.mark.parametrize(("kind", "changes"), [("mqar", {}), ("delayed_recall", {}), ("delayed_recall", {"facts": 1})])
def test_who_has_not_seen_the_values_scores_one_in_all_of_them(kind: str, changes: dict[str, Any]) -> None:
    """A window that reaches none of them. With a single fact that is chance: the one value shown is the answer."""
    cfg = configs()[kind](**changes)
    values = any_of(lambda cfg: cfg.n_keys, lambda cfg: cfg.n_keys + cfg.n_values)
    assert_guess_scores(cfg, values, 1 / cfg.n_values)
    if changes:
        assert cfg.chance() == 1 / cfg.n_values
    else:
        assert cfg.chance() > 2 / cfg.n_values


def test_every_task_has_its_chance_tested() -> None:
    assert {*GUESSES, "regbench"} == set(KINDS)
