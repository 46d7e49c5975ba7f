"""The measurement runs as typed; how fast anything is, is measured and never asserted."""

from __future__ import annotations

import re

import pytest
import torch

from tests.data.tasks import measure_speed


@pytest.mark.parametrize("kind", ["mad_compression", "regression"])  # the two with ends of their own
def test_one_task_as_typed(kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)  # what other tests run with
    monkeypatch.setattr(measure_speed, "MAKE_STEPS", 1)
    monkeypatch.setattr(measure_speed, "TRAIN_STEPS", 1)
    measure_speed.main([kind])
    first, last = capsys.readouterr().out.splitlines()
    assert re.search(rf"^{kind} +made +\d.* trained +\d.*: +\d+ times faster; test split in \d", first)
    assert last.startswith("less than 20 times faster: ")
