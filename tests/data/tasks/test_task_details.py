"""Independent checks of single tasks, by brute force."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from data.tasks import configs
from tests.data.tasks.conftest import drawn


def task(kind: str, **changes: Any) -> Any:
    made = configs()[kind](**changes)
    made.check("data")
    return made


@pytest.mark.parametrize(("min_gap", "asks"), [(1, 1), (2, 2), (7, 2), (20, 1), (1, 3)])
def test_mqar_binds_each_key_once_and_asks_as_often_as_it_should(min_gap: int, asks: int) -> None:
    cfg = task("mqar", pairs=[4, 8], min_gap=min_gap, asks=asks, n_keys=10, n_values=32)
    examples = drawn(cfg, 300)
    for row, targets, pairs, gaps in zip(
        examples.inputs.tolist(),
        examples.targets.tolist(),
        examples.slices["pairs"].tolist(),
        examples.slices["gap"].tolist(),
        strict=True,
    ):
        keys, values = row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs in (4, 8)
        assert all(10 <= value < 42 for value in values)
        where = [t for t in range(2 * pairs, 64) if row[t] < 10]
        assert sorted(row[t] for t in where) == sorted(keys * asks)  # no key in the filler
        assert all(token >= 42 for t, token in enumerate(row) if t >= 2 * pairs and t not in where)
        assert [t for t in range(64) if targets[t] != -100] == where
        for t in where:
            fact = keys.index(row[t])
            assert targets[t] == values[fact]
            gap = t - (2 * fact + 1)
            assert gap >= min_gap and gaps[t] <= gap < 2 * gaps[t]
    assert set(examples.slices["pairs"].tolist()) == {4, 8}


def test_mqar_asks_soon_by_a_power_law() -> None:
    places = {
        power: np.nonzero(drawn(task("mqar", pairs=[4], asks=1, power=power), 4000).targets != -100)[1]
        for power in (0.01, 1.0)
    }
    share = {power: np.bincount((where - 8) // 2, minlength=28) / 4000 for power, where in places.items()}
    assert share[1.0] == pytest.approx(np.full(28, 4 / 28), abs=0.03)
    # The first draw falls on slot s with chance s^(power - 1) / sum; with four draws the shares are flatter than that.
    assert (np.diff(share[0.01][:6]) < 0).all() and share[0.01][0] > 4 * share[0.01][10]


def test_mqar_asks_every_pair_as_soon_as_any_other() -> None:
    examples = drawn(task("mqar", pairs=[4], asks=1), 4000)
    first = np.argmax(examples.targets != -100, axis=1)
    asked = examples.inputs[np.arange(4000), first]
    place = np.argmax(examples.inputs[:, :8:2] == asked[:, None], axis=1)
    assert np.bincount(place) / 4000 == pytest.approx(np.full(4, 0.25), abs=0.03)


def test_induction_repeats_pairs_that_came_once() -> None:
    examples = drawn(task("induction", pairs=8, repeats=2, seq_len=64, n_tokens=40), 300)
    gaps = examples.slices["gap"].tolist()
    for row, targets, gap in zip(examples.inputs.tolist(), examples.targets.tolist(), gaps, strict=True):
        context, rest = row[:32], row[32:]
        assert len(set(context)) == 32 and len(set(rest)) == 16
        assert all(rest.count(token) == 2 for token in rest)
        for asked, answer in zip(rest[::2], rest[1::2], strict=True):
            assert context[context.index(asked) + 1] == answer
        for t in range(32, 64, 2):
            latest = max(u for u in range(t) if row[u] == row[t + 1])
            assert gap[t] <= t - latest < 2 * gap[t]
        assert targets[32::2] == rest[1::2] and set(targets[:32] + targets[33::2]) == {-100}


@pytest.mark.parametrize("changes", [{}, {"facts": 1, "min_gap": 200}, {"facts": 5, "min_gap": 1, "seq_len": 16}])
def test_delayed_recall_keeps_its_distance(changes: dict[str, int]) -> None:
    cfg = task("delayed_recall", **changes)
    examples = drawn(cfg, 300)
    gaps = []
    for row, targets in zip(examples.inputs.tolist(), examples.targets.tolist(), strict=True):
        where = [t for t, token in enumerate(row) if token < 16]
        assert len(where) == 2 * cfg.facts and where[cfg.facts :] == list(range(cfg.seq_len - cfg.facts, cfg.seq_len))
        facts = {row[t]: (row[t + 1], t + 1) for t in where[: cfg.facts]}
        for t in where[cfg.facts :]:
            assert targets[t] == facts[row[t]][0]
            gaps.append(t - facts[row[t]][1])
    assert min(gaps) == cfg.min_gap
    if not changes:
        assert min(gaps) > 2 * (64 - 1)  # two layers of windows of 64


def test_copies_copy() -> None:
    fixed = drawn(task("copy_fixed", seq_len=70), 50)
    for row, targets in zip(fixed.inputs.tolist(), fixed.targets.tolist(), strict=True):
        assert all(row[t] == row[t - 32] for t in range(32, 70))
        assert targets[31:69] == row[32:] and set(targets[:31] + targets[69:]) == {-100}
    offset = drawn(task("copy_offset"), 200)
    found = set()
    for row, targets in zip(offset.inputs.tolist(), offset.targets.tolist(), strict=True):
        where = [t for t, token in enumerate(row) if token < 32]
        first, second = where[:16], where[16:]
        assert [row[t] for t in first] == [row[t] for t in second] and len({row[t] for t in where}) == 16
        assert first == list(range(first[0], first[0] + 16)) and second == list(range(second[0], second[0] + 16))
        assert [t for t in range(64) if targets[t] != -100] == second[:-1]
        assert [targets[t] for t in second[:-1]] == [row[t + 1] for t in second[:-1]]
        found.add(second[0] - first[0])
    assert found == set(range(16, 49))
    separator = drawn(task("copy_separator"), 200)
    spans = set()
    for row, targets in zip(separator.inputs.tolist(), separator.targets.tolist(), strict=True):
        span = row.index(32)
        assert row == [*row[:span], 32, *row[:span], *[33] * (63 - 2 * span)]
        assert targets == [-100] * span + row[:span] + [-100] * (64 - 2 * span)
        spans.add(span)
    assert spans == set(range(8, 32))


@pytest.mark.parametrize("kind", ["selective_copy", "mad_selective_copy"])
def test_selective_copy_names_the_data_in_order(kind: str) -> None:
    cfg = task(kind)
    examples = drawn(cfg, 2000)
    n, tail = cfg.n_data, cfg.n_data + (kind == "mad_selective_copy")
    for row, targets in zip(examples.inputs.tolist(), examples.targets.tolist(), strict=True):
        assert [token for token in row if token < cfg.n_tokens] == targets[-n:]
        assert all(token < cfg.n_tokens + 1 for token in row[:-tail])
        marks = [cfg.n_tokens + 1] * n if tail == n else [cfg.n_tokens + 1] + [cfg.n_tokens] * n
        assert row[-tail:] == marks and set(targets[:-n]) == {-100}
    there = (examples.inputs[:, :-tail] < cfg.n_tokens).mean(axis=0)
    assert there == pytest.approx(np.full(len(there), n / len(there)), abs=0.05)  # all places alike, the last one too


def test_states_are_products_of_permutations() -> None:
    for kind, points in (("parity", 2), ("s3", 3), ("s5", 5)):
        elements = list(itertools.permutations(range(points)))
        for changes in [{}] + [{"moves": "swaps"}] * (kind != "parity"):
            examples = drawn(task(kind, **changes), 40)
            for row, targets in zip(examples.inputs.tolist(), examples.targets.tolist(), strict=True):
                state = tuple(range(points))
                for move, label in zip(row, targets, strict=True):
                    state = tuple(elements[move][i] for i in state)
                    assert elements[label] == state
                    assert not changes or sum(i != x for i, x in enumerate(elements[move])) == 2
    bits = drawn(task("parity"), 100)
    assert (bits.targets == np.cumsum(bits.inputs, axis=1) % 2).all()


def test_chance_of_state_tracking_is_that_of_the_likeliest_state() -> None:
    assert [task(kind).chance() for kind in ("parity", "s3", "s5")] == pytest.approx([1 / 2, 1 / 6, 1 / 120])
    # Swaps change the sign at each step, so half of the states are out.
    for kind, long_run in (("s3", 1 / 3), ("s5", 1 / 60)):
        cfg = task(kind, moves="swaps", seq_len=30)
        targets = drawn(cfg, 20_000).targets
        best = np.mean([np.bincount(targets[:, t]).max() / len(targets) for t in range(30)])
        assert cfg.chance() == pytest.approx(best, abs=0.01)
        assert task(kind, moves="swaps", seq_len=2000).chance() == pytest.approx(long_run, rel=0.01)


def test_regbench_rows_are_strings_of_their_automaton() -> None:
    cfg = task("regbench", seq_len=300)
    letters, targets, n_edges = cfg.automata(np.random.default_rng(5), 60)
    examples = drawn(cfg, 60, seed=5)
    lengths, used = [], set()
    for i, row in enumerate(examples.inputs.tolist()):
        assert examples.answers is not None
        assert row[0] == 18
        edges = [
            dict(zip(letters[i, s, :k].tolist(), targets[i, s, :k].tolist(), strict=True))
            for s, k in enumerate(n_edges[i])
        ]
        state = 0
        for t, token in enumerate(row):
            state = 0 if token == 18 else edges[state][token]  # KeyError: a token that the automaton forbids
            assert all(len(set(edge.values())) == len(edge) and s not in edge.values() for s, edge in enumerate(edges))
            target = int(examples.targets[i, t])
            if t + 1 < len(row):
                assert target == (row[t + 1] if row[t + 1] != 18 else -100)
            if target != -100:
                assert examples.answers[i, t] == sum(1 << letter for letter in edges[state])
                assert target in edges[state]
                used.add(len(edges[state]))
        ends = [t for t, token in enumerate(row) if token == 18]
        lengths += [b - a - 1 for a, b in itertools.pairwise(ends)]
    assert min(lengths) == 1 and 40 < max(lengths) <= 49 and used == {1, 2, 3}


def test_regbench_edges_are_uniform() -> None:
    cfg = task("regbench", min_states=5, max_states=5)
    letters, targets, n_edges = cfg.automata(np.random.default_rng(0), 6000)
    assert np.bincount(n_edges[:, 0])[1:] / 6000 == pytest.approx(np.full(3, 1 / 3), abs=0.03)
    for edge in range(3):
        assert np.bincount(targets[:, 1, edge], minlength=5)[:5] / 6000 == pytest.approx(
            [0.25, 0, 0.25, 0.25, 0.25], abs=0.03
        )
        assert np.bincount(letters[:, 1, edge], minlength=18) / 6000 == pytest.approx(np.full(18, 1 / 18), abs=0.02)
    # Which letter leads where is not settled by their numbers.
    assert np.corrcoef(letters[:, 1, 0], targets[:, 1, 0])[0, 1] == pytest.approx(0, abs=0.05)


def test_regbench_splits_by_language() -> None:
    cfg = task("regbench", max_states=12)
    rng = np.random.default_rng(0)
    letters, targets, n_edges = cfg.automata(rng, 200)
    language = cfg._language(letters, targets, n_edges)
    assert len(np.unique(language)) > 190
    # Other names for the states, the start aside.
    order = np.concatenate(
        [np.zeros((200, 1), dtype=int), 1 + rng.permuted(np.tile(np.arange(11), (200, 1)), axis=1)], 1
    )
    name = np.argsort(order, axis=1)
    row = np.arange(200)[:, None]
    renamed = name[row[:, :, None], targets[row, order]]
    assert (cfg._language(letters[row, order], renamed, n_edges[row, order]) == language).all()
    # Edges in another order: the unused ones must stay behind.
    flip = np.argsort(np.where(np.arange(3) < n_edges[..., None], -np.arange(3), 9), axis=2)
    assert (
        cfg._language(np.take_along_axis(letters, flip, 2), np.take_along_axis(targets, flip, 2), n_edges) == language
    ).all()
    # Two states that do the same are one: a copy of state 1 takes the place of the last, unreachable one.
    small = task("regbench", min_states=4, max_states=6)
    letters, targets, n_edges = small.automata(rng, 300)
    targets %= 5  # nothing leads to state 5, and some states lead to themselves
    language = small._language(letters, targets, n_edges)
    for part in (letters, targets, n_edges):
        part[:, 5] = part[:, 1]
    targets = np.where((targets == 1) & (rng.random(targets.shape) < 0.5), 5, targets)
    assert (small._language(letters, targets, n_edges) == language).all()
    # One edge more is another language, if its state can be reached: the start can.
    more = np.minimum(n_edges + (np.arange(6) == 0), 3)
    changed = more[:, 0] != n_edges[:, 0]
    assert (small._language(letters, targets, more) != language)[changed, 0].all() and changed.sum() > 100


def test_regression_oracle_is_the_posterior_mean() -> None:
    cfg = task("regression", dim=3, noise=0.3, seq_len=24)
    examples = drawn(cfg, 20_000)
    predictions = cfg.oracle(examples.inputs)
    x, y = examples.inputs[:, ::2, :3].astype(float), examples.inputs[:, 1::2, 3].astype(float)
    assert (examples.inputs[:, ::2, 3] == 0).all() and (examples.inputs[:, 1::2, :3] == 0).all()
    np.testing.assert_array_equal(examples.targets[:, ::2], examples.inputs[:, 1::2, 3])
    assert np.isnan(examples.targets[:, 1::2]).all()
    for i in range(20):
        for k in range(12):
            # Conditioning of the joint normal distribution of all y, with no weights in sight.
            covariance = x[i, : k + 1] @ x[i, : k + 1].T / 3 + 0.09 * np.eye(k + 1)
            expected = covariance[k, :k] @ np.linalg.solve(covariance[:k, :k], y[i, :k]) if k else 0.0
            assert predictions[i, 2 * k] == pytest.approx(expected, abs=1e-5)
    # The error at each place is that of the posterior.
    errors = (predictions[:, ::2] - y) ** 2
    for k in (0, 1, 4, 11):
        precision = 3 * np.eye(3) + np.einsum("npi,npj->nij", x[:, :k], x[:, :k]) / 0.09
        expected = 0.09 + np.einsum("ni,nij,nj->n", x[:, k], np.linalg.inv(precision), x[:, k])
        assert errors[:, k].mean() == pytest.approx(expected.mean(), rel=0.05)


def test_regression_splits_by_weights() -> None:
    cfg = task("regression")
    content = drawn(cfg, 500).content
    w = content.view(np.float64)
    assert w.shape == (500, 8) and w.var() == pytest.approx(1 / 8, rel=0.1)


@pytest.mark.parametrize("kind", ["mad_recall", "mad_noisy_recall"])
def test_mad_recall_grades_what_came_before(kind: str) -> None:
    cfg = task(kind)
    examples = drawn(cfg, 300)
    noise = 0
    for row, targets, gaps in zip(
        examples.inputs.tolist(), examples.targets.tolist(), examples.slices["gap"].tolist(), strict=True
    ):
        facts: dict[int, tuple[int, int]] = {}
        for t in range(0, 128, 2):
            key, value = row[t : t + 2]
            if key >= 16:
                assert value >= 16 and targets[t] == -100
                noise += 1
                continue
            assert 0 <= key < 8 <= value < 16 and targets[t + 1] == -100
            assert targets[t] == (facts[key][0] if key in facts else -100)
            assert key not in facts or (facts[key][0] == value and gaps[t] <= t - facts[key][1] < 2 * gaps[t])
            facts[key] = value, t + 1
        assert targets[126] != -100
    assert noise / (300 * 64) == pytest.approx(0.2 if kind == "mad_noisy_recall" else 0, abs=0.02)


def test_mad_fuzzy_recall_spells_whole_pairs() -> None:
    cfg = task("mad_fuzzy_recall")
    examples = drawn(cfg, 200)
    lengths = []
    for row, targets, sizes, order in zip(
        examples.inputs.tolist(),
        examples.targets.tolist(),
        examples.slices["key"].tolist(),
        examples.slices["token"].tolist(),
        strict=True,
    ):
        kinds = "".join("p" if token == 15 else "k" if token < 7 else "v" for token in row)
        assert kinds.lstrip("p").strip("kv") == "" and kinds.endswith("v")
        runs = [[t for t, _ in group] for _, group in itertools.groupby(enumerate(kinds), lambda pair: pair[1])]
        runs = runs[kinds.startswith("p") :]
        known: dict[tuple[int, ...], tuple[int, ...]] = {}
        expected = {}
        for key_at, value_at in zip(runs[::2], runs[1::2], strict=True):
            key, value = tuple(row[t] for t in key_at), tuple(row[t] for t in value_at)
            assert len(set(key)) == len(key) <= 3 and len(set(value)) == len(value) <= 3
            if key in known:
                assert known[key] == value
                expected |= {t - 1: (row[t], len(key), number) for number, t in enumerate(value_at, start=1)}
            known[key] = value
        found = {t: (targets[t], sizes[t], order[t]) for t in range(128) if targets[t] != -100}
        assert found == expected
        lengths.append(kinds.count("p"))
    assert max(lengths) <= 10 and len(set(lengths)) > 5


def test_mad_memorization_has_one_map_for_all() -> None:
    cfg = task("mad_memorization")
    examples = drawn(cfg, 400)
    facts: dict[int, int] = {}
    for row, targets in zip(examples.inputs.tolist(), examples.targets.tolist(), strict=True):
        assert set(row[1::2]) == {255} and set(targets[::2]) == {-100}
        for key, value in zip(row[::2], targets[1::2], strict=True):
            assert facts.setdefault(key, value) == value
    assert set(facts) == set(range(127)) and len(set(facts.values())) == 127
    assert (drawn(task("mad_memorization", map_seed=1), 1).targets != examples.targets[:1]).any()


def test_mad_compression_wants_every_token_back() -> None:
    examples = drawn(task("mad_compression"), 50)
    assert (examples.targets[:, :-1] == examples.inputs[:, :-1]).all()
    assert (examples.inputs[:, -1] == 15).all() and (examples.targets[:, -1] == -100).all()
    assert configs()["mad_compression"].readout == "last"
