"""The speed suite counts rightly and runs as typed; how fast anything is, is measured and never asserted."""

import json

import pytest

from evals.speed.__main__ import main
from evals.speed.measure import Curve, row_of


def test_exponent_of_a_power_law():
    lengths = [512, 1024, 2048]
    assert Curve("x", lengths, [3 * t**1.5 for t in lengths], 1.1).exponent == pytest.approx(1.5)


def test_ratio_is_the_median_of_pairs():
    row = row_of("x", "peer", "here", 1.0, [(2.0, 1.0), (9.0, 3.0), (40.0, 4.0)])
    assert (row.ratio, row.low, row.high) == (3.0, 2.0, 10.0)
    assert (row.peer_ms, row.ours_ms) == (9000.0, 3000.0)


def test_one_operation_as_typed(tmp_path, capsys):
    assert main(["ops", "only=hawk", "repeats=1", "threads=1", f"out={tmp_path}"]) == 0
    found = json.loads((tmp_path / "ops.json").read_text())
    (row,), (curve,) = found["rows"], found["curves"]
    assert row["name"] == "hawk: scan" and row["ratio"] > 0 and row["low"] == row["high"]
    assert curve["name"] == "hawk" and len(curve["ms"]) == len(curve["lengths"]) == 5
    assert found["host"]["threads"] == 1 and found["repeats"] == 1
    assert (tmp_path / "length.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "hawk: scan" in printed and "exponent" in printed


def test_unknown_words_are_named(capsys):
    assert main(["ops", "repeat=3"]) == 1
    printed = capsys.readouterr().out
    assert "repeat" in printed and "decode" in printed
