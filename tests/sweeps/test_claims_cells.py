"""Where the claims ledger finds a figure: modes, slices, positions, distances and suites, paired by seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from sweeps.ledger.evidence import Cell, combine
from sweeps.ledger.statements import ClaimError
from sweeps.ledger.verdicts import FAILS, HOLDS, UNTESTED
from tests.sweeps.test_claims import ACCURACY, CLEAR, LIKE_CLEAR, WORSE, row, text_study, verdict


def test_modes_of_one_run_are_compared_by_the_reports_own_difference(tmp_path: Path) -> None:
    forced = row("a", [1.4] * 5, rank=None, mode="teacher-forced")
    for key in ("values", "seeds"):
        del forced[key]
    forced["minus_deployed"] = {"mean": -0.1, "ci95": [-0.12, -0.08]}
    text_study(tmp_path, [row("a", CLEAR, mode="recurrent"), forced])
    test = {"study": "text", "mixer": "a", "mode": "teacher-forced", "than": {"mode": "recurrent"}}
    found = verdict(tmp_path, {"better": test})
    assert found["verdict"] == HOLDS and found["figures"][1]["text"] == "\N{MINUS SIGN}0.100 ± 0.020 (n = 5)"
    assert verdict(tmp_path, {"equal_within": {**test, "margin": 0.01}})["verdict"] == FAILS
    swapped = {"study": "text", "mixer": "a", "mode": "recurrent", "than": {"mode": "teacher-forced"}}
    assert verdict(tmp_path, {"better": swapped})["verdict"] == FAILS


def test_slices_are_paired_by_seed(tmp_path: Path) -> None:
    a, b = [0.9, 0.92, 0.91, 0.94], [0.8, 0.9, 0.7, 0.75]
    rows = [row("a", a, metric=ACCURACY), row("b", b, metric=ACCURACY)]
    mixers = {r["mixer"]: {"mean": [1.0, r["mean"]], "values": [[1.0] * 4, r["values"]]} for r in rows}
    text_study(tmp_path, rows, slices=[{"slice": "pairs", "metric": ACCURACY, "labels": [4, 16], "mixers": mixers}])
    found = verdict(tmp_path, {"better": {"study": "text", "mixer": "a", "than": "b", "slice": "pairs=max"}})
    assert found["p_for"] == pytest.approx(stats.ttest_rel(a, b).pvalue)
    same = verdict(tmp_path, {"better": {"study": "text", "mixer": "a", "than": "b", "slice": "pairs=16"}})
    assert same["figures"][0]["text"] == found["figures"][0]["text"]


def test_positions_are_means_over_ranges_by_their_length(tmp_path: Path) -> None:
    edges = [0, 1, 2, 4, 8]
    runs = {
        m: [{"edges": edges, "mean": [5, 4, 3 + s / 10 + d, 2 + d]} for s in range(3)]
        for m, d in (("a", 0), ("b", 0.5))
    }
    text_study(tmp_path, [row("a", CLEAR[:3]), row("b", WORSE[:3])], positions=runs)
    found = verdict(tmp_path, {"better": {"study": "text", "mixer": "a", "than": "b", "positions": [0.25, 1.0]}})
    assert found["figures"][0]["text"].startswith(f"{np.mean([(2 * (3 + s / 10) + 4 * 2) / 6 for s in range(3)]):.3f}")
    assert found["figures"][0]["terms"][0]["span"] == [2, 8]
    tokens = verdict(tmp_path, {"better": {"study": "text", "mixer": "a", "than": "b", "positions": [2, 8]}})
    assert tokens["figures"][1]["text"] == found["figures"][1]["text"] == "\N{MINUS SIGN}0.500 ± 0.000 (n = 3)"


def evaluation(
    mixer: str, metric: str, values: Sequence[float], better: str | None = "lower", mode: str = "parallel"
) -> dict[str, Any]:
    """A row under ``evaluations``; its runs come in another order than the table's."""
    own = row(mixer, values, metric=metric, mode=mode)
    del own["seeds"]
    return {**own, "values": own["values"][::-1], "runs": own["runs"][::-1], "better": better}


def test_suites_are_paired_by_the_seeds_of_their_runs(tmp_path: Path) -> None:
    rows = [
        evaluation("a", "loss/length=512", CLEAR),
        evaluation("a", "loss/length=4096", LIKE_CLEAR),
        evaluation("a", "loss/length=4096", [9.0] * 5, mode="teacher_forced"),
        evaluation("b", "loss/length=4096", WORSE[:4]),
        evaluation("b", "index", WORSE, None),
        {"mixer": "h", "mode": "parallel", "metric": "loss/length=4096", "n": 0, "mean": None, "reason": "too long"},
    ]
    other = {"suite": "mesa", "rows": []}
    text_study(
        tmp_path, [row("a", CLEAR), row("b", WORSE)], evaluations=[other, {"suite": "extrapolation", "rows": rows}]
    )
    test = {"study": "text", "suite": "extrapolation", "metric": "loss/length=max", "mixer": "a", "than": "b"}
    found = verdict(tmp_path, {"better": test})
    assert found["verdict"] == HOLDS
    assert found["p_for"] == pytest.approx(stats.ttest_rel(LIKE_CLEAR[:4], WORSE[:4]).pvalue)
    assert found["figures"][0]["terms"][0]["pointer"] == "/evaluations/1/rows/1"
    within = verdict(tmp_path, {"better": {**test, "than": {"metric": "loss/length=min"}}})
    assert min(within["p_for"], within["p_against"]) == pytest.approx(stats.ttest_rel(LIKE_CLEAR, CLEAR).pvalue)
    forced = verdict(tmp_path, {"better": {**test, "than": {"mode": "teacher_forced"}}})
    assert forced["verdict"] == HOLDS
    none = verdict(tmp_path, {"better": {**test, "than": "h"}})
    assert none["verdict"] == UNTESTED and none["reason"] == "h, loss/length=4096: too long"
    with pytest.raises(ClaimError, match=r"^c0: mixer b, metric index: neither more nor less of it is better"):
        verdict(tmp_path, {"better": {**test, "mixer": "b", "metric": "index", "than": "b"}})
    with pytest.raises(ClaimError, match=r"^c0: mixer z, metric loss/length=max of suite extrapolation: not in"):
        verdict(tmp_path, {"better": {**test, "mixer": "z"}})


def test_pairs_are_the_common_seeds(tmp_path: Path) -> None:
    a = Cell(1.0, 0.1, 3, {(0, 0): 1.0, (1, 1): 1.2, (2, 2): 0.8})
    b = Cell(2.0, 0.1, 3, {(1, 1): 2.0, (2, 2): 1.7, (3, 3): 2.3})
    found = combine([(1.0, a), (-1.0, b)])
    assert found.n == 2 and found.mean == pytest.approx(((1.2 - 2.0) + (0.8 - 1.7)) / 2) and found.paired


def test_distances_of_the_passes_are_read_by_mode(tmp_path: Path) -> None:
    def drift(value: float) -> list[dict[str, Any]]:
        """Beyond the training length of 16 the memories are far apart, which a share of the context leaves out."""
        return [{"edges": [0, 8, 16, 64], "mean": [value + s / 10, value, 9.0], "train_length": 16} for s in range(3)]

    found = {"recurrent": {"a": drift(1.0), "b": drift(0.5)}, "teacher-forced": {"a": drift(0.2), "b": drift(0.5)}}
    text_study(tmp_path, [row("a", CLEAR[:3]), row("b", WORSE[:3])], drift=found)
    test = {"study": "text", "mixer": "a", "than": "b", "distance": [0, 1.0]}
    forced = verdict(tmp_path, {"better": {**test, "mode": "teacher-forced"}})
    assert forced["verdict"] == HOLDS
    first, second = (one["text"] for one in forced["figures"])
    assert first == "0.250 ± 0.124 (n = 3)" and second.startswith("\N{MINUS SIGN}0.300")
    assert forced["figures"][0]["what"] == "a (teacher-forced) distance at 0 to 1.0"
    assert forced["metrics"] == ["distance of the passes' memories"]
    assert verdict(tmp_path, {"better": test})["verdict"] == FAILS, "recurrent, where no mode is named"
    with pytest.raises(ClaimError, match="c0: mixer c, distance in mode recurrent: .* which has a, b"):
        verdict(tmp_path, {"at_least": {**{k: v for k, v in test.items() if k != "than"}, "mixer": "c", "value": 1}})


def test_a_verdict_says_whose_tuning_ended_at_the_edge(tmp_path: Path) -> None:
    edge = {"at_edge": {"optimizer.lr": "largest"}}
    text_study(tmp_path, [row("a", CLEAR), row("b", WORSE, **edge), row("c", WORSE, **edge), row("d", WORSE)])
    said = "the largest or smallest rate tried was chosen for b"
    assert verdict(tmp_path, {"better": {"study": "text", "mixer": "a", "than": ["b", "d"]}})["note"] == said
    assert verdict(tmp_path, {"contrast": {"study": "text", "plus": ["b"], "minus": ["a"], "above": 0}})["note"] == said
    assert verdict(tmp_path, {"better": {"study": "text", "mixer": "a", "than": "d"}})["note"] == ""


# ---- at a ceiling ----------------------------------------------------------------------------------------------------


def test_where_both_solve_a_task_nobody_is_refuted(tmp_path: Path) -> None:
    solved, nearly = [0.999, 1.0, 1.0, 0.998], [0.97, 0.98, 0.975, 0.99]
    text_study(
        tmp_path, [row(name, x, metric=ACCURACY) for name, x in zip("abc", (solved, [1.0] * 4, nearly), strict=True)]
    )
    found = verdict(tmp_path, {"better": {"study": "text", "mixer": "a", "than": ["c", "b"]}})
    assert (found["verdict"], found["reason"]) == (UNTESTED, "a and b both solve it: accuracies of 0.99 and more")
    ahead = {"study": "text", "plus": ["a"], "minus": ["b"], "above": 0.1}
    assert verdict(tmp_path, {"contrast": ahead})["verdict"] == UNTESTED
    assert verdict(tmp_path, {"better": {"study": "text", "mixer": "a", "than": "c"}})["verdict"] == HOLDS
    equal = {"study": "text", "mixer": "a", "than": "b", "margin": 0.02}
    assert verdict(tmp_path, {"equal_within": equal})["verdict"] == HOLDS  # that both can do it was asked


def test_a_loss_has_no_ceiling(tmp_path: Path) -> None:
    text_study(tmp_path, [row("a", CLEAR), row("b", WORSE)])
    assert verdict(tmp_path, {"better": {"study": "text", "mixer": "b", "than": "a"}})["verdict"] == FAILS
