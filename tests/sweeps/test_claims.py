"""The claims ledger on reports that the tests make up: verdicts against scipy, controls, checks that can fail."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from runs.identity import ROOT
from sweeps.claims import check, main, make
from sweeps.ledger.check import stale
from sweeps.ledger.evidence import Reports
from sweeps.ledger.index import INDEX, accuracies, index
from sweeps.ledger.places import Place
from sweeps.ledger.statements import ClaimError, read_papers
from sweeps.ledger.verdicts import FAILS, HOLDS, OPEN, UNTESTED
from sweeps.reports.compare import holm
from sweeps.reports.style import FIXED

LOSS, ACCURACY = "test/bits_per_byte", "test/accuracy"
CLEAR = [1.50, 1.51, 1.49, 1.52, 1.48]  # far below WORSE, seed by seed
WORSE = [1.80, 1.82, 1.79, 1.81, 1.78]
LIKE_CLEAR = [1.51, 1.50, 1.495, 1.51, 1.49]  # now above CLEAR, now below


# ---- made-up reports -------------------------------------------------------------------------------------------------


def row(
    mixer: str, values: Sequence[float], *, metric: str = LOSS, rank: int | None = 1, **more: Any
) -> dict[str, Any]:
    x = np.asarray(values, dtype=float)
    seeds = more.pop("seeds", range(len(x)))
    ci95 = list(stats.t.interval(0.95, len(x) - 1, x.mean(), stats.sem(x))) if len(x) > 1 and x.std() > 0 else None
    if len(x) > 1 and x.std() == 0:
        ci95 = [x.mean(), x.mean()]
    return {
        "rank": rank,
        "mixer": mixer,
        "mode": more.pop("mode", "parallel"),
        "metric": metric,
        "n": len(x),
        "mean": float(x.mean()),
        "ci95": ci95,
        "interval_over": "seeds",
        "values": [float(v) for v in x],
        "seeds": [[s, s] for s in seeds],
        "runs": [f"{mixer}-{s}" for s in seeds],
        "difference": None,
        "state_bytes": 1000,
        **more,
    }


def report(root: Path, study: str, rows: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    content = {"study": study, "metric": rows[0]["metric"], "rows": list(rows), "slices": [], "positions": {}, **more}
    content = {
        "description": f"About {study}.",
        "finding": ["It was found."],
        "seconds": 120.0,
        "commits": ["abcdef0123", "abcdef0123+changes"],
        **content,
    }
    content = {"hardware": [{"cpu": "A CPU", "threads": 1, "gpu": None}], **content}
    (root / "results" / study).mkdir(parents=True, exist_ok=True)
    (root / "results" / study / "report.json").write_text(json.dumps(content))
    return content


def study(root: Path, name: str, control: Mapping[str, Any] | None) -> None:
    (root / "sweeps").mkdir(exist_ok=True)
    settings = {} if control is None else {"control": control}
    (root / "sweeps" / f"{name}.yaml").write_text(yaml.safe_dump({"mixers": {"a": {}}, "report": settings}))


def claims(root: Path, *found: dict[str, Any], file: str = "paper") -> None:
    (root / "claims").mkdir(exist_ok=True)
    full = [
        {"id": f"c{i}", "claim": "A claim.", "where": "Table 1", "command": "python train.py", **one}
        for i, one in enumerate(found)
    ]
    (root / "claims" / f"{file}.yaml").write_text(yaml.safe_dump({"paper": file, "source": "arXiv", "claims": full}))


def ledger(root: Path) -> tuple[str, dict[str, Any]]:
    text, record = make(root / "results", root / "claims", root / "sweeps")
    return text, json.loads(record)


def words(root: Path, *more: str) -> list[str]:
    return [f"paths.results={root / 'results'}", f"claims={root / 'claims'}", f"studies={root / 'sweeps'}", *more]


def text_study(root: Path, rows: Sequence[dict[str, Any]], **more: Any) -> None:
    """A study ``text`` whose control is met."""
    report(root, "text", rows, **more)
    study(root, "text", {"mixer": rows[0]["mixer"], "at_most": 1e9})


def verdict(root: Path, test: dict[str, Any], **claim: Any) -> dict[str, Any]:
    claims(root, {"test": test, **claim})
    return ledger(root)[1]["claims"][0]


# ---- verdicts --------------------------------------------------------------------------------------------------------


def test_better_is_decided_by_the_paired_interval(tmp_path: Path) -> None:
    text_study(tmp_path, [row("a", CLEAR), row("b", WORSE), row("c", LIKE_CLEAR)])
    found = verdict(tmp_path, {"better": {"study": "text", "mixer": "a", "than": "b"}})
    assert found["verdict"] == HOLDS
    assert found["p_for"] == pytest.approx(stats.ttest_rel(CLEAR, WORSE).pvalue)
    assert verdict(tmp_path, {"better": {"study": "text", "mixer": "b", "than": "a"}})["verdict"] == FAILS
    found = verdict(tmp_path, {"better": {"study": "text", "mixer": "a", "than": "c"}})
    assert found["verdict"] == OPEN and min(found["p_for"], found["p_against"]) == pytest.approx(
        stats.ttest_rel(CLEAR, LIKE_CLEAR).pvalue
    )
    gap = np.subtract(CLEAR, LIKE_CLEAR)
    half = stats.t.ppf(0.975, 4) * stats.sem(gap)
    assert found["figures"][1]["text"] == f"{gap.mean():+.3f} ± {half:.3f} (n = 5)".replace("-", "\N{MINUS SIGN}")


def test_accuracy_is_better_when_higher(tmp_path: Path) -> None:
    text_study(tmp_path, [row("a", [0.9, 0.92, 0.91], metric=ACCURACY), row("b", [0.5, 0.55, 0.52], metric=ACCURACY)])
    assert verdict(tmp_path, {"better": {"study": "text", "mixer": "a", "than": "b"}})["verdict"] == HOLDS
    assert verdict(tmp_path, {"better": {"study": "text", "mixer": "b", "than": "a"}})["verdict"] == FAILS


def test_of_several_rivals_all_must_be_beaten_and_one_decides_against(tmp_path: Path) -> None:
    text_study(
        tmp_path, [row("a", CLEAR), row("b", WORSE), row("c", LIKE_CLEAR), row("d", [v - 0.3 for v in LIKE_CLEAR])]
    )
    two = verdict(tmp_path, {"better": {"study": "text", "mixer": "a", "than": ["b", "c"]}})
    assert two["verdict"] == OPEN  # c is not beaten
    lost = verdict(tmp_path, {"better": {"study": "text", "mixer": "a", "than": ["b", "d"]}})
    assert lost["verdict"] == FAILS
    assert lost["p_against"] == pytest.approx(2 * stats.ttest_rel(CLEAR, [v - 0.3 for v in LIKE_CLEAR]).pvalue)


def test_a_difference_that_test_documents_leave_open_is_open(tmp_path: Path) -> None:
    difference = {"reference": "b", "over_documents": {"p": 0.4}}
    text_study(tmp_path, [row("a", CLEAR, difference=difference), row("b", WORSE)])
    assert verdict(tmp_path, {"better": {"study": "text", "mixer": "a", "than": "b"}})["verdict"] == OPEN
    found = verdict(tmp_path, {"better": {"study": "text", "mixer": "b", "than": "a"}})
    assert found["verdict"] == OPEN and found["note"] == "clear over seeds, but not over test documents"


@pytest.mark.parametrize(("value", "expected"), [(0.8, HOLDS), (0.905, OPEN), (0.99, FAILS)])
def test_at_least_and_at_most(tmp_path: Path, value: float, expected: str) -> None:
    values = [0.9, 0.92, 0.91, 0.89, 0.9]
    text_study(tmp_path, [row("a", values, metric=ACCURACY)])
    found = verdict(tmp_path, {"at_least": {"study": "text", "mixer": "a", "value": value}})
    assert found["verdict"] == expected
    assert min(found["p_for"], found["p_against"]) == pytest.approx(stats.ttest_1samp(values, value).pvalue)
    other = {HOLDS: FAILS, FAILS: HOLDS, OPEN: OPEN}[expected]
    assert verdict(tmp_path, {"at_most": {"study": "text", "mixer": "a", "value": value}})["verdict"] == other


@pytest.mark.parametrize(("margin", "expected"), [(0.05, HOLDS), (0.01, OPEN), (0.001, OPEN)])
def test_equal_within(tmp_path: Path, margin: float, expected: str) -> None:
    text_study(tmp_path, [row("a", CLEAR), row("c", LIKE_CLEAR), row("b", WORSE)])
    test = {"study": "text", "mixer": "a", "than": "c", "margin": margin}
    found = verdict(tmp_path, {"equal_within": test})
    assert found["verdict"] == expected
    low, high = stats.ttest_rel(CLEAR, LIKE_CLEAR).confidence_interval(0.95)
    assert (expected == HOLDS) == (-margin < low and high < margin)
    assert verdict(tmp_path, {"equal_within": {**test, "than": "b"}})["verdict"] == FAILS


def test_no_worse_allows_better_and_a_margin(tmp_path: Path) -> None:
    accuracy = {"c": [0.9, 0.92, 0.91, 0.89], "d": [0.89, 0.915, 0.9, 0.88], "e": [0.5, 0.52, 0.51, 0.5]}
    text_study(tmp_path, [row(name, values, metric=ACCURACY) for name, values in accuracy.items()])
    for mixer, than, margin, expected in (
        ("c", "e", 0.01, HOLDS),
        ("d", "c", 0.02, HOLDS),
        ("d", "c", 0.005, OPEN),
        ("e", "c", 0.02, FAILS),
    ):
        test = {"study": "text", "mixer": mixer, "than": than, "margin": margin}
        assert verdict(tmp_path, {"no_worse": test})["verdict"] == expected, test
    text_study(tmp_path, [row("a", CLEAR), row("c", LIKE_CLEAR), row("b", WORSE)])
    for mixer, than, expected in (("a", "b", HOLDS), ("c", "a", HOLDS), ("b", "a", FAILS)):
        found = verdict(tmp_path, {"no_worse": {"study": "text", "mixer": mixer, "than": than, "margin": 0.05}})
        assert found["verdict"] == expected
    assert found["p_against"] == pytest.approx(stats.ttest_1samp(np.subtract(WORSE, CLEAR), 0.05).pvalue)


def test_slope_over_variants_is_that_of_least_squares_seed_by_seed(tmp_path: Path) -> None:
    values = {"k1": [1.9, 1.91, 1.88], "k4": [1.7, 1.73, 1.69], "k16": [1.6, 1.61, 1.57]}
    text_study(tmp_path, [row(name, v) for name, v in values.items()])
    test = {"study": "text", "x": {"k1": 1, "k4": 4, "k16": 16}, "log": True, "sign": "falling"}
    found = verdict(tmp_path, {"slope": test})
    slopes = [stats.linregress([0, 2, 4], [values[name][s] for name in values]).slope for s in range(3)]
    assert found["verdict"] == HOLDS and found["p_for"] == pytest.approx(stats.ttest_1samp(slopes, 0).pvalue)
    assert found["figures"][-1]["text"].startswith(f"\N{MINUS SIGN}{-np.mean(slopes):.4f}")
    assert verdict(tmp_path, {"slope": {**test, "sign": "rising"}})["verdict"] == FAILS


def test_contrast_is_a_difference_of_differences(tmp_path: Path) -> None:
    rows = {"a": [1.5, 1.6, 1.4], "b": [1.7, 1.81, 1.6], "c": [1.5, 1.61, 1.4], "d": [1.52, 1.6, 1.43]}
    text_study(tmp_path, [row(name, values) for name, values in rows.items()])
    found = verdict(tmp_path, {"contrast": {"study": "text", "plus": ["b", "c"], "minus": ["a", "d"], "above": 0.1}})
    sums = np.add(rows["b"], rows["c"]) - np.add(rows["a"], rows["d"])
    assert found["p_for"] == pytest.approx(stats.ttest_1samp(sums, 0.1).pvalue) and found["verdict"] == HOLDS


def test_counts_are_exact_and_need_no_control(tmp_path: Path) -> None:
    report(tmp_path, "text", [row("a", CLEAR, state_bytes=1900), row("b", WORSE)])
    test = {"study": "text", "mixer": "a", "than": "b", "field": "state_bytes"}
    found = verdict(tmp_path, {"ratio": {**test, "between": [1.8, 2.0]}})
    assert found["verdict"] == HOLDS and found["figures"][0]["text"] == "1.9 times"
    assert verdict(tmp_path, {"ratio": {**test, "between": [1.0, 1.1]}})["verdict"] == FAILS


def test_one_seed_decides_nothing(tmp_path: Path) -> None:
    text_study(tmp_path, [row("a", [1.5]), row("b", [1.8])])
    found = verdict(tmp_path, {"better": {"study": "text", "mixer": "a", "than": "b"}})
    assert found["verdict"] == OPEN and "no interval" in found["figures"][0]["text"]


def test_the_mean_over_studies_is_paired_too(tmp_path: Path) -> None:
    other = {"a": [1.2, 1.3, 1.1, 1.25, 1.15], "b": [1.3, 1.42, 1.2, 1.35, 1.26]}
    text_study(tmp_path, [row("a", CLEAR), row("b", LIKE_CLEAR)])
    report(tmp_path, "more", [row(name, values) for name, values in other.items()])
    study(tmp_path, "more", {"mixer": "a", "at_most": 2})
    found = verdict(tmp_path, {"better": {"study": ["text", "more"], "mixer": "a", "than": "b"}})
    gaps = (np.subtract(CLEAR, LIKE_CLEAR) + np.subtract(other["a"], other["b"])) / 2
    assert found["p_for"] == pytest.approx(stats.ttest_1samp(gaps, 0).pvalue)


# ---- what makes a claim untested -------------------------------------------------------------------------------------


def test_a_study_without_a_report_leaves_the_claim_untested_with_its_command(tmp_path: Path) -> None:
    found = verdict(tmp_path, {"better": {"study": "text", "mixer": "a", "than": "b"}})
    assert found["verdict"] == UNTESTED and found["command"] == "python train.py study=text"
    assert "`python train.py study=text`" in ledger(tmp_path)[0]


def test_a_failed_control_leaves_the_claim_untested(tmp_path: Path) -> None:
    test = {"better": {"study": "text", "mixer": "a", "than": "b"}}
    text_study(tmp_path, [row("a", CLEAR), row("b", WORSE)])
    assert verdict(tmp_path, test)["verdict"] == HOLDS
    study(tmp_path, "text", {"mixer": "b", "metric": LOSS, "at_most": 1.7})
    found = verdict(tmp_path, test)
    assert found["verdict"] == UNTESTED and found["reason"].startswith("control failed: b test/bits_per_byte 1.800")
    study(tmp_path, "text", {"mixer": "b", "at_most": 1.9})
    assert verdict(tmp_path, test)["verdict"] == HOLDS
    study(tmp_path, "text", {"mixer": "b", "at_least": 1.9})
    assert verdict(tmp_path, test)["verdict"] == UNTESTED
    study(tmp_path, "text", None)
    assert "names no positive control" in verdict(tmp_path, test)["reason"]


def test_what_a_reader_must_know_of_a_control_stands_beside_it(tmp_path: Path) -> None:
    report(tmp_path, "text", [row("a", CLEAR), row("b", WORSE)])
    study(tmp_path, "text", {"mixer": "a", "at_most": 1.6, "note": "chosen late"})
    claims(tmp_path, {"test": {"better": {"study": "text", "mixer": "a", "than": "b"}}})
    text, record = ledger(tmp_path)
    assert "| `at most 1.6` | met | chosen late |" in text and record["controls"][0]["note"] == "chosen late"


def test_a_control_may_be_the_yardstick(tmp_path: Path) -> None:
    test = {"better": {"study": "text", "mixer": "a", "than": "b"}}
    report(tmp_path, "text", [row("a", CLEAR), row("b", WORSE)], yardstick={LOSS: 1.6})
    study(tmp_path, "text", {"mixer": "a", "at_most": "yardstick"})
    assert verdict(tmp_path, test)["verdict"] == HOLDS
    study(tmp_path, "text", {"mixer": "b", "at_most": "yardstick"})
    assert verdict(tmp_path, test)["verdict"] == UNTESTED


def test_a_suite_that_was_not_run_leaves_the_claim_untested(tmp_path: Path) -> None:
    text_study(tmp_path, [row("a", CLEAR), row("b", WORSE)])
    found = verdict(tmp_path, {"better": {"study": "text", "mixer": "a", "than": "b", "positions": [0, 0.5]}})
    assert found["verdict"] == UNTESTED and "suite=[positions]" in found["reason"]
    found = verdict(
        tmp_path, {"at_most": {"study": "text", "mixer": "a", "suite": "mesa", "metric": "loss", "value": 2}}
    )
    assert found["verdict"] == UNTESTED and "suite=[mesa]" in found["reason"]


def test_what_is_found_without_the_confound_stands_beside_the_claim(tmp_path: Path) -> None:
    text_study(tmp_path, [row("a", CLEAR), row("b", WORSE)])
    test = {"better": {"study": "text", "mixer": "a", "than": "b"}}
    without = {"label": "turned round", "test": {"better": {"study": "text", "mixer": "b", "than": "a"}}}
    found = verdict(tmp_path, test, confound={"text": "Twice the FLOPs.", "without": [without]})
    assert (found["verdict"], found["without"][0]["verdict"]) == (HOLDS, FAILS)
    [line] = [line for line in ledger(tmp_path)[0].splitlines() if line.startswith("| `c0`")]
    assert "Twice the FLOPs.<br>*turned round:* **does not hold**" in line and "(text/report.html)" in line


# ---- the correction --------------------------------------------------------------------------------------------------


def test_verdicts_are_corrected_for_the_tests_of_one_paper(tmp_path: Path) -> None:
    rivals = {"b": [v + d for v, d in zip(CLEAR, [0.01, 0.03, 0.02, 0.05, 0.02], strict=True)]}
    p = stats.ttest_rel(CLEAR, rivals["b"]).pvalue
    assert 0.01 < p < 0.05
    text_study(tmp_path, [row("a", CLEAR), row("b", rivals["b"]), row("c", LIKE_CLEAR)])
    close = {"test": {"better": {"study": "text", "mixer": "a", "than": "b"}}}
    other = {"test": {"better": {"study": "text", "mixer": "a", "than": "c"}}}
    claims(tmp_path, close)
    assert ledger(tmp_path)[1]["claims"][0]["verdict"] == HOLDS
    claims(tmp_path, close, other, other, other, other)
    found = ledger(tmp_path)[1]["claims"][0]
    assert found["verdict"] == OPEN and "the interval alone says: holds; 5 tests" in found["note"]
    assert holm([p, 0.5, 0.5, 0.5, 0.5])[0] > 0.05
    claims(tmp_path, close)
    claims(tmp_path, *[{**other, "id": f"o{i}"} for i in range(4)], file="second")
    assert ledger(tmp_path)[1]["claims"][0]["verdict"] == HOLDS  # another paper is another family


# ---- files -----------------------------------------------------------------------------------------------------------


def whole(root: Path) -> None:
    """Three claims, one of them untested, and a control."""
    text_study(root, [row("a", CLEAR), row("b", WORSE)])
    test = {"better": {"study": "text", "mixer": "a", "than": "b"}}
    claims(
        root, {"test": test}, {"test": {"at_most": {"study": "text", "mixer": "a", "value": 1.6}}}, {"figure": "12.3"}
    )


def test_the_files_are_the_same_each_time_and_pass_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole(tmp_path)
    assert main(words(tmp_path, "--check")) == 1 and "is not there" in capsys.readouterr().err
    assert main(words(tmp_path)) == 0
    files = [tmp_path / "results" / name for name in ("CLAIMS.md", "claims.json", "README.md")]
    first = [file.read_bytes() for file in files]
    assert main(words(tmp_path)) == 0 and [file.read_bytes() for file in files] == first
    assert main(words(tmp_path, "--check")) == 0
    text = first[0].decode()
    assert "| paper, arXiv | 3 | 2 | 0 | 0 | 1 |" in text
    assert "`a` 1.500 ± 0.020 (n = 5)" in text and "12.3<br>*Table 1*" in text


def test_the_index_lists_studies_with_a_control(tmp_path: Path) -> None:
    report(tmp_path, "met", [row("a", CLEAR), row("b", WORSE)])
    report(tmp_path, "failed", [row("a", [0.2] * 5, metric=ACCURACY)])
    report(tmp_path, "without", [row("a", CLEAR)])
    study(tmp_path, "met", {"mixer": "a", "at_most": 2.0})
    study(tmp_path, "failed", {"mixer": "a", "at_least": 0.9})
    study(tmp_path, "without", None)
    text = index(tmp_path / "results", tmp_path / "sweeps")
    assert (
        "[met](met/report.html)**<br>About met. | It was found. | `python train.py study=met trainer.threads=1`" in text
    )
    assert (
        "10 runs in the table, 2 min of training, tuning included<br>commit abcdef0, abcdef0+changes<br>A CPU, 1 thread"
        in text
    )
    assert "Counts for nothing: control failed: a 0.200" in text and "without" not in text
    assert text.index("## Text") < text.index("[met]") < text.index("## Tasks") < text.index("[failed]")


def test_tasks_stand_in_one_table_if_their_control_succeeded(tmp_path: Path) -> None:
    for name, best in (("good", 0.99), ("bad", 0.4)):
        rows = [row(mixer, [best - i / 10] * 5, metric=ACCURACY) for i, mixer in enumerate(FIXED[:3])]
        rows += [row("mesa", [0.1, 0.2, 0.3, 0.4, 0.5], metric=ACCURACY), row("other", [0.3] * 5, metric=ACCURACY)]
        report(tmp_path, name, rows, slices=[{"slice": "gap", "metric": ACCURACY, "chance": 0.125}])
        study(tmp_path, name, {"mixer": "transformer", "at_least": 0.9})
    text_study(tmp_path, [row("a", CLEAR)])
    head, _, *rows = accuracies(tmp_path / "results", tmp_path / "sweeps", "results/").splitlines()
    assert head.count("`") == 20 and len(rows) == 1
    begin = "| [About good.](results/good/report.html) | 0.12 | 0.99 | 0.89 | 0.79 |  |  |  |  |"
    assert rows[0] == f"{begin} 0.30 (0.10 to 0.50) |  |  |"  # Student's interval would reach below chance
    assert accuracies(tmp_path / "results", tmp_path / "sweeps") in index(tmp_path / "results", tmp_path / "sweeps")


def test_the_readme_shows_the_table_of_tasks_as_it_is() -> None:
    """After a new study: copy the last table of results/README.md, with its links under results/."""
    assert accuracies(ROOT / "results", ROOT / "sweeps", "results/") in (ROOT / "README.md").read_text()


def test_a_study_that_is_like_another_has_its_control(tmp_path: Path) -> None:
    report(tmp_path, "text", [row("a", CLEAR), row("b", WORSE)])
    study(tmp_path, "base", {"mixer": "a", "at_most": 1.0})
    (tmp_path / "sweeps" / "text.yaml").write_text("like: base\n")
    found = verdict(tmp_path, {"better": {"study": "text", "mixer": "a", "than": "b"}})
    assert found["verdict"] == UNTESTED and found["reason"].startswith("control failed: a 1.500")


def test_the_check_fails_when_a_report_has_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole(tmp_path)
    assert main(words(tmp_path)) == 0
    report(tmp_path, "text", [row("a", [v + 0.1 for v in CLEAR]), row("b", WORSE)])
    assert main(words(tmp_path, "--check")) == 1
    assert "differs from what the reports give, first in line" in capsys.readouterr().err


def test_the_check_fails_on_a_figure_that_no_report_has(tmp_path: Path) -> None:
    whole(tmp_path)
    text, record = make(tmp_path / "results", tmp_path / "claims", tmp_path / "sweeps")
    assert [p for p in check(tmp_path / "results", text, record) if "is not there" not in p] == []
    invented = text.replace("`a` 1.500 ± 0.020 (n = 5)", "`a` 1.400 ± 0.020 (n = 5)")
    assert any("not in the line of CLAIMS.md" in p for p in check(tmp_path / "results", invented, record))
    added = text.replace("`a` 1.500 ± 0.020 (n = 5)", "`a` 1.500 ± 0.020 (n = 5) and 0.7 more")
    assert any("a number among our figures" in p for p in check(tmp_path / "results", added, record))
    moved = record.replace('"pointer": "/rows/0"', '"pointer": "/rows/7"')
    assert any("has nothing at /rows/7" in p for p in check(tmp_path / "results", text, moved))
    swapped = record.replace('"pointer": "/rows/0"', '"pointer": "/rows/1"')
    assert any("the report gives" in p for p in check(tmp_path / "results", text, swapped))


def test_every_recorded_place_can_be_read_again(tmp_path: Path) -> None:
    whole(tmp_path)
    reports = Reports(tmp_path / "results")
    figure = ledger(tmp_path)[1]["claims"][0]["figures"][0]
    assert reports.at(Place.parse(figure["terms"][0])).mean == pytest.approx(np.mean(CLEAR))


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("test", "named"),
    [
        ({"better": {"study": "text", "mixer": "z", "than": "b"}}, ["mixer z", LOSS, "a (parallel"]),
        ({"better": {"study": "text", "mixer": "a", "than": "z"}}, ["mixer z", LOSS]),
        ({"at_most": {"study": "text", "mixer": "a", "metric": "test/oops", "value": 1}}, ["mixer a", "metric test/oops"]),
        ({"better": {"study": "text", "mixer": "a", "than": "b", "slice": "gap=3"}}, ["slice gap=3", "mixer a"]),
        ({"better": {"study": "text", "mixer": "a", "mode": "odd", "than": "b"}}, ["mixer a in mode odd"]),
        ({"ratio": {"study": "text", "mixer": "a", "than": "b", "field": "oops", "between": [1, 2]}}, ["field oops", "mixer a"]),
        ({"beter": {"study": "text"}}, ["test.beter", "Did you mean 'better'?"]),
        ({"better": {"study": "text", "mixer": "a", "then": "b"}}, ["then", "Did you mean 'than'?"]),
        ({"better": {"study": "text", "mixer": "a"}}, ["than is missing"]),
        ({"at_least": {"study": "text", "mixer": "a", "value": "1e-3"}}, ["test.at_least.value=1e-3", "must be a number"]),
        ({"equal_within": {"study": "text", "mixer": "a", "than": "b", "margin": 0}}, ["margin=0", "above 0"]),
        ({"contrast": {"study": "text", "plus": ["a"], "minus": ["b"]}}, ["one of above, below and within"]),
        ({"slope": {"study": "text", "x": {"a": 1, "b": 1}, "sign": "rising"}}, ["different numbers"]),
    ],
)  # fmt: skip
def test_a_wrong_name_is_one_sentence(
    tmp_path: Path, test: dict[str, Any], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text_study(tmp_path, [row("a", CLEAR), row("b", WORSE)])
    claims(tmp_path, {"id": "the-claim", "test": test})
    assert main(words(tmp_path)) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and message.startswith("the-claim")
    assert all(word in message for word in named), message
    assert not (tmp_path / "results" / "CLAIMS.md").exists()


def test_an_id_may_be_there_once(tmp_path: Path) -> None:
    claims(tmp_path, {"id": "same"}, file="first")
    claims(tmp_path, {"id": "same"}, file="second")
    with pytest.raises(ClaimError, match=r"^same: the id is there twice, in first.yaml and in second.yaml"):
        read_papers(tmp_path / "claims")


def test_a_claim_without_a_test_says_what_would_be_one(tmp_path: Path) -> None:
    claims(tmp_path, {"id": "bare", "command": ""})
    with pytest.raises(ClaimError, match="^bare: without a test it needs the command"):
        read_papers(tmp_path / "claims")


# ---- a report of real runs --------------------------------------------------------------------------------------------


def test_the_published_quickstart_gives_its_own_differences(tmp_path: Path) -> None:
    better = {"study": "quickstart", "mixer": ["hyena", "xlstm"], "than": "transformer"}
    forced = {
        "study": "quickstart",
        "mixer": "maglev",
        "mode": "teacher-forced",
        "than": {"mode": "recurrent"},
        "margin": 0.005,
    }
    claims(tmp_path, {"test": {"better": better}}, {"test": {"equal_within": forced}})
    study(tmp_path, "quickstart", {"mixer": "transformer", "at_most": "yardstick"})
    text, record = make(ROOT / "docs", tmp_path / "claims", tmp_path / "sweeps")
    [first, second] = json.loads(record)["claims"]
    rows = {
        row["mixer"]: row
        for row in json.loads((ROOT / "docs/quickstart/report.json").read_text())["rows"]
        if row["rank"]
    }
    for figure, mixer in ((first["figures"][1], "hyena"), (first["figures"][3], "xlstm")):
        own = rows[mixer]["difference"]["over_seeds"]
        shown = float(figure["text"].split()[0].replace("\N{MINUS SIGN}", "-"))
        assert abs(shown - own["mean"]) <= 5e-4  # three digits
    assert first["verdict"] == FAILS and first["p_against"] == pytest.approx(2 * rows["xlstm"]["difference"]["p"])
    assert second["verdict"] == HOLDS  # far inside the margin
    assert [p for p in check(ROOT / "docs", text, record) if "is not there" not in p] == []


# ---- the project's own -----------------------------------------------------------------------------------------------


def test_the_papers_claims_are_well_formed() -> None:
    papers = read_papers()
    assert [paper.name for paper in papers] == ["Maglev", "MesaNet", "Toeplitz MLP Mixer"]
    found = [claim for paper in papers for claim in paper.claims]
    assert len({claim.id for claim in found}) == len(found) > 80
    assert all(claim.command or claim.why for claim in found)


def test_commands_name_mixers_suites_data_and_recipes_that_exist() -> None:
    groups = {"mixer": "conf/mixer", "data": "conf/data", "suite": "conf/suite", "experiment": "conf/experiment"}
    for claim in (claim for paper in read_papers() for claim in paper.claims):
        for key, values in re.findall(r"(?<![\w.])(mixer|data|suite|experiment)=\[?([\w,]+)", claim.command):
            for value in values.split(","):
                assert (ROOT / groups[key] / f"{value}.yaml").exists(), f"{claim.id}: {key}={value}"


def test_the_published_ledger_is_what_the_reports_give() -> None:
    assert check(ROOT / "results", *make(ROOT / "results")) == []
    assert stale(ROOT / "results", {INDEX: index(ROOT / "results", ROOT / "sweeps")}) == []
