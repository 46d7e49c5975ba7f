"""Text with ``packing=bos_reset``: suites that carry a state from piece to piece see no further than the document, as the
test score does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from evals.carried import _pieces, long_dataset, nats_of, scored, sequences
from evals.extrapolation import ExtrapolationConfig
from evals.extrapolation import evaluate as extrapolation
from evals.positions import PositionsConfig
from evals.positions import evaluate as positions
from evals.suite import Parts, Subject
from models.evaluate import score
from runs.load import open_data
from tests.evals.test_suites import subject_of

MIXERS = ("swa", "hawk", "hyena", "gated_deltanet", "maglev", "lrt")


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 2 to 40 bytes."""
    folder = tmp_path_factory.mktemp("short")
    for number in range(300):
        (folder / f"{number}.txt").write_text(
            f"{number} and so on, and so on, and on "[: 2 + number % 39] + f"{number}"
        )
    return folder


def subject(name: str, texts: Path) -> Subject:
    one = subject_of(name, texts)
    one.config = dataclasses.replace(one.config, data=dataclasses.replace(one.config.data, packing="bos_reset"))
    one.dataset = open_data(one.config)
    with torch.no_grad():  # a fresh model hardly looks back
        for parameter in one.model.parameters():
            parameter.mul_(2)
    return one


@pytest.mark.parametrize("chunk", [7, 32])
@pytest.mark.parametrize("name", MIXERS)
def test_carried_state_ends_with_its_document(name: str, chunk: int, short: Path) -> None:
    one = subject(name, short)
    (batch, *_) = one.dataset.eval_batches("test", 8)
    assert (batch.segment_ids_BT != 0).any()
    with torch.no_grad():
        wanted = one.model.grade(batch).nats_BT
        across = one.model.grade(batch._replace(segment_ids_BT=None)).nats_BT
    assert not torch.allclose(wanted, across, atol=1e-2)
    torch.testing.assert_close(nats_of(one, batch, one.model.modes[0], chunk), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["swa", "maglev"])
def test_suites_agree_with_the_test_score_of_the_same_windows(name: str, short: Path) -> None:
    one = subject(name, short)
    found = positions(one, PositionsConfig(sequences=10), Parts(None)).metrics
    longer = extrapolation(one, ExtrapolationConfig(factors=[2], tokens=512), Parts(None)).metrics
    for mode in one.model.modes:
        prefix = "" if mode == one.model.modes[0] else f"{mode}/"
        for dataset, count, value in (
            (one.dataset, 10, found[f"{prefix}loss"]),
            (long_dataset(one, 64), 8, longer[f"{prefix}loss/length=64"]),
        ):
            batches = list(sequences(dataset, "test", 4, count))
            same = score(one.model, dataset, "test", batch_size=4, batches=batches, mode=mode).metrics()["loss"]
            assert value == pytest.approx(same, rel=1e-5)


def test_pieces_end_where_no_row_begins_a_document() -> None:
    borders = torch.zeros(2, 20, dtype=torch.int64)
    borders[0, 5], borders[1, 9:11] = 1, 1
    segments = borders.cumsum(1)
    assert _pieces(20, 5, None) == [(0, 5), (5, 10), (10, 15), (15, 20)]
    assert _pieces(20, 5, segments) == [(0, 4), (4, 8), (8, 13), (13, 18), (18, 20)]
    assert _pieces(20, 2, segments) == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 11), (11, 13), (13, 15), (15, 17), (17, 19), (19, 20)]  # fmt: skip
    assert _pieces(4, 2, torch.arange(4)[None]) == [(0, 4)], "all documents are of one token"


def test_rows_whose_borders_leave_no_room_are_read_apart(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory stays that of a piece."""
    one = subject("swa", short)
    (batch, *_) = one.dataset.eval_batches("test", 64)
    widths, read = [], one.model.read

    def watched(tokens_BT: torch.Tensor, *arguments, **named):
        widths.append(tokens_BT.shape[1])
        return read(tokens_BT, *arguments, **named)

    monkeypatch.setattr(one.model, "read", watched)
    with torch.no_grad():
        wanted = one.model.grade(batch).nats_BT
    torch.testing.assert_close(nats_of(one, batch, "parallel", 4), wanted, rtol=1e-4, atol=1e-4)
    assert max(widths) <= 4
    nats, graded = scored(one, one.dataset, "test", 10**6, "parallel", 4)
    assert nats.shape == graded.shape and np.isfinite(nats[graded]).all()
