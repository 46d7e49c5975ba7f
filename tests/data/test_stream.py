from __future__ import annotations

import numpy as np
import pytest

from data.stream import Permutation, Stream


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 100, 127, 128, 997, 1000, 14_421])
@pytest.mark.parametrize("seed", [0, 1, 2, 12345678901234567])
def test_permutation_is_a_bijection(n: int, seed: int) -> None:
    images = Permutation(n, seed)(np.arange(n))
    assert images.dtype == np.int64
    np.testing.assert_array_equal(np.sort(images), np.arange(n))


@pytest.mark.parametrize("n", [50_000_000_000, 2**40 + 1, 2**61 + 12345])
def test_permutation_of_more_than_fits_in_memory(n: int) -> None:
    permutation = Permutation(n, 3)
    indices = np.unique(np.concatenate([np.arange(100_000), np.random.default_rng(0).integers(0, n, 100_000)]))
    images = permutation(indices)
    assert len(np.unique(images)) == len(indices)
    assert images.min() >= 0 and images.max() < n
    assert images.mean() / n == pytest.approx(0.5, abs=0.01)
    # One at a time or all together, an index has the same image.
    assert [int(permutation(np.array([index]))[0]) for index in indices[:5]] == list(images[:5])


def test_permutation_looks_random() -> None:
    n, seeds = 1000, 2000
    images = np.stack([Permutation(n, seed)(np.arange(n)) for seed in range(seeds)])
    # Each position's mean image, over seeds, has a standard error of n / sqrt(12 seeds).
    z = (images.mean(0) - (n - 1) / 2) / (n / np.sqrt(12 * seeds))
    assert np.abs(z).max() < 5 and z.std() == pytest.approx(1, abs=0.15)
    # Neighbours do not stay together: the step from one to the next is that of two independent draws, n / 3 on average.
    steps = np.abs(np.diff(images, axis=1)).mean(0)
    assert np.abs(steps - n / 3).max() < 5 * n / np.sqrt(18 * seeds)
    fixed = (images == np.arange(n)).sum(1)
    assert fixed.mean() == pytest.approx(1, abs=0.12)
    orders = {tuple(Permutation(3, seed)(np.arange(3))) for seed in range(200)}
    assert len(orders) == 6


def test_permutation_refuses_what_it_cannot_do() -> None:
    for n in (0, -1, 2**62):
        with pytest.raises(ValueError, match=f"n={n}"):
            Permutation(n, 0)
    for index in (-1, 10):
        with pytest.raises(ValueError, match=r"range\(10\)"):
            Permutation(10, 0)(np.array([0, index]))


@pytest.mark.parametrize(("n", "batch"), [(100, 10), (97, 10), (7, 16), (1, 3), (50, 1)])
def test_every_window_once_per_epoch(n: int, batch: int) -> None:
    stream = Stream(n, global_batch=batch, seed=5)
    order = np.concatenate([stream.windows(step) for step in range(3 * n // batch + 2)])
    epochs = [order[epoch * n : (epoch + 1) * n] for epoch in range(3)]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(n))
    if n > 10:
        assert (epochs[0] != epochs[1]).any() and (epochs[1] != epochs[2]).any()


def test_windows_depend_on_seed_and_step_only() -> None:
    stream = Stream(97, global_batch=10, seed=5)
    steps = [3, 50, 9, 10, 3, 1_000_000, 0, 9]
    jumping = [stream.windows(step) for step in steps]
    for step, windows in zip(steps, jumping, strict=True):
        np.testing.assert_array_equal(windows, Stream(97, global_batch=10, seed=5).windows(step))
    assert (Stream(97, global_batch=10, seed=6).windows(0) != stream.windows(0)).any()


def test_order_of_samples_does_not_depend_on_the_batch() -> None:
    small, large = Stream(97, global_batch=4, seed=1), Stream(97, global_batch=12, seed=1)
    for step in range(30):
        parts = [small.windows(3 * step + part) for part in range(3)]
        np.testing.assert_array_equal(np.concatenate(parts), large.windows(step))


def test_stream_order_is_pinned() -> None:
    # Golden: another order would silently change what a seed means. Raise data.prepare.FORMAT if it must change.
    assert Stream(14_420, global_batch=4, seed=0).windows(0).tolist() == [6063, 6272, 10119, 2902]


def test_stream_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="step=-1"):
        Stream(4, global_batch=2, seed=0).windows(-1)
    with pytest.raises(ValueError, match="global_batch=0"):
        Stream(4, global_batch=0, seed=0)
