"""What must hold for every task."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from data.config import DATA
from data.tasks import configs
from data.tasks.base import SPLITS, in_split
from tests.data.tasks.conftest import KINDS, TINY, drawn, graded, measure, same

CONF = Path(__file__).parents[3] / "conf" / "data"

# Labels at every position, or none that depends on the context: the whole row is the context then.
WHOLE_ROW = ("parity", "s3", "s5", "regbench", "mad_compression", "mad_memorization")


@pytest.mark.parametrize("kind", KINDS)
def test_yaml_lists_every_field_with_its_default_and_a_reason(kind: str) -> None:
    file = CONF / f"{kind}.yaml"
    loaded = OmegaConf.load(file)
    expected = configs()[kind]()
    assert OmegaConf.to_container(loaded) == asdict(expected)
    assert DATA[kind] is type(expected) and kind in DATA
    assert OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(type(expected)), loaded)) == expected
    assert all("#" in line for line in file.read_text().splitlines())
    expected.check("data")


def test_every_task_is_in_the_table_of_the_documentation() -> None:
    table = (CONF.parents[1] / "docs" / "tasks.md").read_text()
    assert [kind for kind in KINDS if f"| `{kind}` |" not in table] == []


def test_examples_have_the_shapes_and_ranges_that_they_promise(cfg: Any) -> None:
    n, length = 300, cfg.seq_len
    examples = drawn(cfg, n)
    where = graded(cfg, examples.targets)
    assert examples.targets.shape == (n, length)
    assert where.any(axis=1).all()
    assert cfg.n_graded is None or (where.sum(axis=1) == cfg.n_graded).all()
    assert examples.content.shape[0] == n and examples.content.dtype == np.int64
    if cfg.continuous:
        assert examples.inputs.shape == (n, length, cfg.input_width)
        assert examples.inputs.dtype == examples.targets.dtype == np.float32
    else:
        assert examples.inputs.shape == (n, length)
        assert examples.inputs.dtype == examples.targets.dtype == np.int64
        for tokens in (examples.inputs, examples.targets[where]):
            assert tokens.min() >= 0 and tokens.max() < cfg.vocab_size
        used = set(np.unique(examples.inputs)) | set(np.unique(examples.targets[where]))
        assert len(used) >= cfg.vocab_size - (cfg.kind == "mad_memorization")  # of an odd number one is no one's value


def test_slices_have_the_labels_that_are_declared(cfg: Any) -> None:
    examples = drawn(cfg, 300)
    where = graded(cfg, examples.targets)
    assert examples.slices.keys() == cfg.slice_values.keys()
    for name, labels in examples.slices.items():
        values = cfg.slice_values[name]
        assert values == sorted(set(values)) and labels.shape in ((300,), (300, cfg.seq_len))
        broad = np.broadcast_to(labels[:, None] if labels.ndim == 1 else labels, where.shape)
        assert set(np.unique(broad[where])) <= set(values), name
        assert len(np.unique(broad[where])) > 1, name


def test_sampling_is_a_function_of_the_generator(cfg: Any) -> None:
    assert same(drawn(cfg, 40, seed=1), drawn(cfg, 40, seed=1))
    assert not same(drawn(cfg, 40, seed=1), drawn(cfg, 40, seed=2))


def test_oracle_solves_it_and_a_foreign_context_destroys_that(cfg: Any) -> None:
    examples = drawn(cfg, 400)
    solved = measure(cfg, cfg.oracle(examples.inputs), examples)
    foreign = np.roll(examples.inputs, 1, axis=0)
    if cfg.kind not in WHOLE_ROW:
        keep = graded(cfg, examples.targets)
        foreign = np.where(keep[..., None] if cfg.continuous else keep, examples.inputs, foreign)
    broken = measure(cfg, cfg.oracle(foreign), examples)
    if cfg.continuous:
        assert solved < 0.25 * cfg.chance() and broken > 0.9 * cfg.chance()
        return
    assert solved > 0.9 if cfg.kind == "regbench" else solved == 1
    assert broken < cfg.chance() + 0.05
    assert cfg.chance() < 0.55


def test_oracle_sees_only_what_a_model_sees(cfg: Any) -> None:
    if cfg.readout == "last":
        return  # its oracle is the input itself
    examples = drawn(cfg, 60)
    before = cfg.oracle(examples.inputs)
    where = graded(cfg, examples.targets)
    for t in (cfg.seq_len // 2, cfg.seq_len * 3 // 4, cfg.seq_len - 2):
        changed = examples.inputs.copy()
        changed[:, t + 1 :] = np.roll(changed, 1, axis=0)[:, t + 1 :]
        after = cfg.oracle(changed)
        seen = where & (np.arange(cfg.seq_len) <= t)
        np.testing.assert_array_equal(after[seen], before[seen])


@pytest.mark.parametrize("kind", KINDS)
def test_equal_examples_are_of_one_split(kind: str) -> None:
    if kind not in TINY:
        assert kind in ("regbench", "regression")  # the automaton, the weights: see their own tests
        return
    cfg = configs()[kind](**TINY[kind])
    cfg.check("data")
    examples = drawn(cfg, 5000)
    split_of: dict[bytes, set[tuple[bool, ...]]] = {}
    splits = np.stack([in_split(examples.content, split) for split in SPLITS], axis=1)
    assert (splits.sum(axis=1) == 1).all()
    for inputs, row in zip(examples.inputs, splits.tolist(), strict=True):
        split_of.setdefault(inputs.tobytes(), set()).add(tuple(row))
    assert len(split_of) < 4000  # there were many equal ones
    assert all(len(found) == 1 for found in split_of.values())
    assert len(set.union(*split_of.values())) == 3


def test_splits_have_their_shares(cfg: Any) -> None:
    content = drawn(cfg, 4000).content
    shares = [in_split(content, split).mean() for split in SPLITS]
    assert sum(shares) == pytest.approx(1)
    # Memorised facts aside, contents differ, so the shares are those of independent draws.
    assert shares == pytest.approx([0.9, 0.05, 0.05], abs=0.02)


def test_chance_is_a_probability_or_a_squared_error(cfg: Any) -> None:
    assert math.isfinite(cfg.chance()) and cfg.chance() > 0


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mqar", {"kind": "mqra"}, "data.kind=mqra: this task has kind mqar"),
        ("mqar", {"seq_len": 55}, "data.seq_len=55: must be at least 56, for 4 pairs, 24 queries and data.min_gap"),
        ("mqar", {"min_gap": 40}, "data.seq_len=64: must be at least 96, for 4 pairs"),
        ("mqar", {"n_keys": 3}, "data.n_keys=3: must be at least 4, the most of data.pairs"),
        ("mqar", {"pairs": []}, "data.pairs=[]: must be different numbers of at least 1, as in [4,8]"),
        ("mqar", {"pairs": [4, 4]}, "data.pairs=[4, 4]: must be different numbers of at least 1"),
        ("mqar", {"power": 0.0}, "data.power=0.0: must be above 0 and at most 1"),
        ("mqar", {"eval_examples": 0}, "data.eval_examples=0: must be at least 1"),
        ("mqar", {"train_examples": 0}, "data.train_examples=0: must be at least 1"),
        ("induction", {"n_tokens": 11}, "data.n_tokens=11: must be at least 12, so that no token comes twice"),
        ("induction", {"pairs": 5}, "data.seq_len=60: must be at least 70, for data.pairs and data.repeats of all"),
        ("delayed_recall", {"min_gap": 252}, "data.seq_len=256: must be at least 257, for data.facts, data.min_gap"),
        ("delayed_recall", {"facts": 17, "min_gap": 1}, "data.n_keys=16: must be at least data.facts=17"),
        ("copy_fixed", {"lag": 64}, "data.seq_len=64: must be at least 65, more than data.lag"),
        ("copy_offset", {"n_tokens": 15}, "data.n_tokens=15: must be at least 16, for data.span different tokens"),
        ("copy_offset", {"max_gap": 33}, "data.seq_len=64: must be at least 65, for two times data.span"),
        ("copy_separator", {"min_span": 32}, "data.max_span=31: must be at least data.min_span=32"),
        ("copy_separator", {"max_span": 32}, "data.seq_len=64: must be at least 65, for two times data.max_span"),
        ("selective_copy", {"n_data": 33}, "data.seq_len=64: must be at least 66, for two times data.n_data"),
        ("s3", {"moves": "some"}, "data.moves=some: must be one of all, swaps"),
        ("regbench", {"max_edges": 4}, "data.max_edges=4: must be at most 3, as edges lead to different other states"),
        ("regbench", {"max_states": 3}, "data.max_states=3: must be at least data.min_states=4"),
        ("regbench", {"n_symbols": 3}, "data.n_symbols=3: must be at least data.min_symbols=4"),
        ("regbench", {"n_symbols": 63}, "data.n_symbols=63: must be at most 62"),
        ("regression", {"seq_len": 63}, "data.seq_len=63: must be even, for whole pairs"),
        ("regression", {"noise": 0.0}, "data.noise=0.0: must be above 0 and finite"),
        ("mad_recall", {"seq_len": 127}, "data.seq_len=127: must be even, for whole pairs"),
        ("mad_noisy_recall", {"noise_share": 1.0}, "data.noise_share=1.0: must be at least 0 and less than 1"),
        ("mad_fuzzy_recall", {"key_len": 8}, "data.key_len=8: must be at most 7 with data.n_tokens=16"),
        ("mad_fuzzy_recall", {"seq_len": 11}, "data.seq_len=11: must be at least 12, for two pairs of data.key_len"),
        ("mad_memorization", {"map_seed": -1}, "data.map_seed=-1: must be at least 0"),
        ("mad_selective_copy", {"n_data": 128}, "data.seq_len=256: must be at least 257"),
    ],
)
def test_check_names_key_value_and_remedy(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        configs()[kind](**changes).check("data")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mqar", {"min_gap": 9}),
        ("mqar", {"pairs": [16], "n_keys": 32, "n_values": 16, "asks": 1}),
        ("mqar", {"pairs": [64], "n_keys": 4096, "n_values": 4096, "seq_len": 512, "power": 1.0, "asks": 3}),
        ("mqar", {"pairs": [1], "asks": 2, "seq_len": 6}),
        ("induction", {"pairs": 16, "repeats": 1, "seq_len": 64, "n_tokens": 32}),
        ("delayed_recall", {"min_gap": 251}),
        ("copy_fixed", {"lag": 512, "seq_len": 1024, "n_tokens": 4096}),
        ("copy_fixed", {"lag": 63}),
        ("copy_offset", {"max_gap": 0, "span": 32}),
        ("copy_separator", {"min_span": 31}),
        ("selective_copy", {"n_data": 32}),
        ("regbench", {"min_states": 4, "max_states": 4, "max_string": 1}),
        ("regression", {"dim": 20, "seq_len": 80}),
        ("mad_recall", {"n_tokens": 128, "seq_len": 1024}),
        ("mad_recall", {"n_tokens": 4, "seq_len": 4}),
        ("mad_noisy_recall", {"noise_share": 0.8}),
        ("mad_fuzzy_recall", {"seq_len": 12}),
        ("mad_fuzzy_recall", {"n_tokens": 128, "seq_len": 256}),
        ("mad_fuzzy_recall", {"key_len": 1, "value_len": 1, "seq_len": 4}),
        ("mad_selective_copy", {"n_data": 96}),
        ("mad_memorization", {"n_tokens": 8192}),
        ("s5", {"moves": "swaps", "seq_len": 100}),
    ],
)
def test_other_sizes_are_solved_too(kind: str, changes: dict[str, Any]) -> None:
    cfg = configs()[kind](**changes)
    cfg.check("data")
    examples = drawn(cfg, 50)
    assert graded(cfg, examples.targets).any(axis=1).all()
    solved = measure(cfg, cfg.oracle(examples.inputs), examples)
    if cfg.continuous:
        assert solved < 0.5 * cfg.chance()
    else:
        assert solved > 0.7 if kind == "regbench" else solved == 1
