"""Tasks as data sets: purity, rows, splits, evaluation."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.config import BytesConfig
from data.dataset import Batch, open_dataset, right
from data.tasks import configs
from data.tasks.dataset import TaskDataset
from tests.data.tasks.conftest import KINDS

ROOT = Path(__file__).parents[3]


def opened(cfg: Any, *, global_batch: int = 50, seed: int = 0) -> TaskDataset:
    return TaskDataset(cfg, global_batch=global_batch, seed=seed)


def assert_equal(one: Any, other: Any, what: str = "") -> None:
    if isinstance(one, Batch):
        for name, a, b in zip(Batch._fields, one, other, strict=True):
            assert_equal(a, b, name)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_equal(one[name], other[name], name)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)), what
        assert not one.is_floating_point() or torch.equal(one.isnan(), other.isnan()), what
    else:
        assert one == other, what


def joined(batches: list[Batch]) -> Batch:
    """The rows of several batches; n_targets of the first."""

    def cat(parts: list[Any]) -> Any:
        if isinstance(parts[0], dict):
            return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else parts[0]

    return Batch(*(cat(list(parts)) for parts in zip(*batches, strict=True)))


def test_a_batch_is_a_function_of_seed_and_step(cfg: Any) -> None:
    one, other = opened(cfg), pickle.loads(pickle.dumps(opened(cfg)))
    steps = [0, 1, 2, 7]
    first = {step: one.train_batch(step) for step in steps}
    for step in reversed(steps):
        assert_equal(other.train_batch(step), first[step])
        assert first[step].inputs_BT.shape[:2] == (50, cfg.seq_len)
        assert first[step].document_BT is first[step].slices is first[step].answers_BT is None
    inputs = [first[step].inputs_BT for step in steps] + [opened(cfg, seed=1).train_batch(0).inputs_BT]
    rows = torch.cat(inputs).flatten(1)
    assert len(torch.unique(rows, dim=0)) > 0.9 * len(rows)


def test_rows_make_up_the_whole(cfg: Any) -> None:
    dataset = opened(cfg)
    for step in (0, 3):  # rows 150 ... 199 lie in two blocks
        whole = dataset.train_batch(step)
        cuts = [slice(0, 1), slice(1, 20), slice(20, 50)]
        assert_equal(joined([opened(cfg).train_batch(step, rows) for rows in cuts]), whole)
        assert_equal(joined([dataset.train_batch(step, rows) for rows in reversed(cuts)][::-1]), whole)
        where = ~whole.targets_BT.isnan() if cfg.continuous else whole.targets_BT != -100
        assert whole.n_targets == int(where.sum())


def test_global_batch_does_not_change_which_examples_there_are(cfg: Any) -> None:
    small, large = opened(cfg, global_batch=20), opened(cfg, global_batch=60)
    assert_equal(
        joined([small.train_batch(step) for step in (3, 4, 5)])._replace(n_targets=0),
        large.train_batch(1)._replace(n_targets=0),
    )


@pytest.mark.parametrize("split", ["val", "test"])
def test_evaluation_is_the_same_for_every_run(cfg: Any, split: str) -> None:
    dataset = opened(cfg)
    whole = joined(list(dataset.eval_batches(split, 150)))
    assert len(whole.inputs_BT) == dataset.n_documents(split) == 150
    again = list(opened(cfg, global_batch=7, seed=5).eval_batches(split, 32))
    assert [len(batch.inputs_BT) for batch in again] == [32, 32, 32, 32, 22]
    assert_equal(joined(again)._replace(n_targets=0), whole._replace(n_targets=0))
    where = ~whole.targets_BT.isnan() if cfg.continuous else whole.targets_BT != -100
    assert sum(batch.n_targets for batch in again) == whole.n_targets == int(where.sum())
    assert whole.document_BT is not None
    assert torch.equal(whole.document_BT, torch.where(where, torch.arange(150)[:, None], -1))
    assert whole.slices is not None and whole.slices.keys() == cfg.slice_values.keys()


def test_evaluation_can_be_cut_short(cfg: Any) -> None:
    dataset = opened(cfg)
    whole = joined(list(dataset.eval_batches("val", 8)))
    short = joined(list(dataset.eval_batches("val", 8, max_tokens=cfg.seq_len * 11 + 1)))
    assert len(short.inputs_BT) == 11
    assert torch.equal(torch.nan_to_num(short.inputs_BT), torch.nan_to_num(whole.inputs_BT[:11]))
    assert len(joined(list(dataset.eval_batches("val", 8, max_tokens=1))).inputs_BT) == 1


@pytest.mark.parametrize("kind", ["copy_fixed", "parity", "mqar"])
def test_no_example_is_in_two_splits(kind: str) -> None:
    """In a space so small that, were the splits but different seeds, they would share most of it."""
    tiny = {
        "copy_fixed": {"lag": 4, "n_tokens": 4, "seq_len": 6},
        "parity": {"seq_len": 9},
        "mqar": {"pairs": [1, 2], "n_keys": 5, "n_values": 5, "n_filler": 1, "asks": 1, "seq_len": 8},
    }[kind]
    cfg = configs()[kind](eval_examples=300, **tiny)
    dataset = opened(cfg, global_batch=500)
    rows = {
        "train": [row for step in range(4) for row in dataset.train_batch(step).inputs_BT.tolist()],
        **{split: next(dataset.eval_batches(split, 300)).inputs_BT.tolist() for split in ("val", "test")},
    }
    seen = {split: {tuple(row) for row in found} for split, found in rows.items()}
    assert all(len(seen[split]) < len(rows[split]) for split in rows)
    assert not seen["train"] & seen["val"] and not seen["train"] & seen["test"] and not seen["val"] & seen["test"]


def test_a_task_too_small_for_three_splits_says_so() -> None:
    dataset = opened(configs()["copy_fixed"](lag=1, n_tokens=2, seq_len=4))
    with pytest.raises(ValueError, match=r"^data\.kind=copy_fixed: with these fields there are too few different ex"):
        for split in ("val", "test"):
            next(dataset.eval_batches(split, 1))


def test_a_fixed_train_split_is_read_again_in_another_order() -> None:
    cfg = configs()["mqar"](train_examples=100, eval_examples=10)
    one, other = opened(cfg, global_batch=25), opened(cfg, global_batch=25, seed=3)
    epochs = [
        [tuple(row) for step in range(start, start + 4) for row in dataset.train_batch(step).inputs_BT.tolist()]
        for dataset, start in ((one, 0), (one, 4), (other, 0))
    ]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert len(set(epochs[0])) == 100 and one.n_train_tokens == 6400
    assert opened(configs()["mqar"]()).n_train_tokens is None
    step = one.train_batch(5)
    assert_equal(joined([one.train_batch(5, rows) for rows in (slice(0, 9), slice(9, 25))]), step)


def test_fingerprint_is_of_what_is_read(cfg: Any) -> None:
    assert opened(cfg).fingerprint == opened(cfg, seed=9, global_batch=3).fingerprint
    change = 2 if cfg.kind in ("copy_offset", "copy_separator") else -2  # what the other fields allow
    other = type(cfg)(eval_examples=150, train_examples=None, seq_len=cfg.seq_len + change)
    other.check("data")
    assert opened(other).fingerprint != opened(cfg).fingerprint
    assert opened(type(cfg)(eval_examples=151, train_examples=None)).fingerprint != opened(cfg).fingerprint


def test_two_seeds_share_no_block() -> None:
    cfg = configs()["copy_fixed"]()
    rows = torch.cat([opened(cfg, seed=seed).train_batch(step).inputs_BT for seed in (0, 1) for step in (0, 1)])
    assert len(torch.unique(rows, dim=0)) == len(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_opens_like_any_data_set(kind: str, tmp_path: Path) -> None:
    cfg = configs()[kind]()
    dataset = open_dataset(cfg, BytesConfig(), global_batch=4, seed=0, cache=tmp_path)
    assert dataset.vocab_size == cfg.vocab_size and dataset.seq_len == cfg.seq_len
    assert dataset.tokenizer is None and dataset.bos_id is None
    assert dataset.continuous == (kind == "regression") and dataset.input_width == (9 if kind == "regression" else None)
    assert dataset.readout == ("last" if kind == "mad_compression" else "each")
    assert (dataset.document_bytes("val") == 0).all() and len(dataset.document_bytes("val")) == cfg.eval_examples
    assert not list(tmp_path.iterdir())


def test_wrong_calls_are_refused(tmp_path: Path) -> None:
    cfg = configs()["parity"](eval_examples=10)
    dataset = opened(cfg)
    for call, message in (
        (lambda: dataset.train_batch(-1), "step=-1: must not be negative"),
        (lambda: dataset.train_batch(0, slice(50, 60)), "rows=slice.50, 60, None.: selects nothing"),
        (lambda: dataset.eval_batches("validation", 4), "split=validation: must be one of train, val, test"),
        (lambda: dataset.eval_batches("val", 0), "batch_size=0: must be at least 1"),
        (lambda: dataset.eval_batches("val", 4, 0), "max_tokens=0: must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    cfg.kind = "parrot"
    with pytest.raises(ValueError, match=r"^data\.kind=parrot: must be one of corpus, copy_fixed, "):
        open_dataset(cfg, BytesConfig(), global_batch=4, seed=0, cache=tmp_path)


def test_right_takes_any_token_that_may_follow() -> None:
    cfg = configs()["regbench"](eval_examples=20)
    batch = next(opened(cfg).eval_batches("val", 20))
    assert batch.answers_BT is not None
    for token in range(cfg.vocab_size):
        predicted = torch.full_like(batch.targets_BT, token)
        expected = [[bool(answers >> token & 1) for answers in row] for row in batch.answers_BT.tolist()]
        assert right(batch, predicted).tolist() == expected
    assert right(batch, batch.targets_BT.clamp(min=0))[batch.targets_BT != -100].all()
    plain = batch._replace(answers_BT=None)
    assert torch.equal(right(plain, torch.zeros_like(batch.targets_BT)), batch.targets_BT == 0)


def test_a_task_is_composed_and_checked_without_torch() -> None:
    code = (
        "import sys; from hydra import compose, initialize_config_dir; import os\n"
        "with initialize_config_dir(os.path.abspath('conf'), version_base=None):\n"
        "    cfg = compose('config', overrides=['data=mqar', 'data.pairs=[2]'])\n"
        "from data.config import DATA; DATA[cfg.data.kind](**cfg.data).check('data')\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_examples_of_a_block_do_not_depend_on_numpy_state() -> None:
    cfg = configs()["mqar"]()
    first = opened(cfg).train_batch(0)
    np.random.seed(1)
    torch.manual_seed(1)
    assert_equal(opened(cfg).train_batch(0), first)
