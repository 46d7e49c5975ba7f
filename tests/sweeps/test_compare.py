"""The gate and the statistics, against scipy and against figures worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from sweeps.reports.collect import Run, read_run
from sweeps.reports.compare import (
    ONE_SEED,
    Comparison,
    compare,
    compare_fixed,
    decide,
    estimate,
    holm,
    over_documents,
    over_seeds,
)
from sweeps.reports.gate import NotComparable, differences, gate
from sweeps.reports.power import POWER, detectable, power, seeds_needed
from sweeps.reports.wording import needs
from tests.sweeps.synthetic_runs import DOCUMENT_BYTES, write_run

BITS = "test/bits_per_byte"


def runs(root: Path, mixer: str, bits: list[float], **more: object) -> list[Run]:
    """One run for each figure, with seeds 0, 1, ..."""
    return [read_run(write_run(root, mixer, seed=s, bits=b, **more)) for s, b in enumerate(bits)]  # type: ignore[arg-type]


# ---- gate ------------------------------------------------------------------------------------------------------------


def test_mixer_and_seed_may_differ(tmp_path: Path) -> None:
    pair = [read_run(write_run(tmp_path, "swa", seed=0)), read_run(write_run(tmp_path, "mesa", seed=1))]
    proof = gate(pair)
    assert proof.comparison_key == pair[0].record["comparison_key"] == pair[1].record["comparison_key"]
    assert proof.equal["model.d_model"] == 64
    assert proof.free == ["seed", "init_seed", "data_seed"]
    assert not any(key.startswith("mixer.") for key in proof.equal)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model__n_layers": 3}, ["model.n_layers", "2 (", "3 ("]),
        ({"lr": 1e-2}, ["optimizer.lr", "0.003", "0.01", "tuned=[optimizer.lr]"]),
        ({"evaluation__test_tokens": 1000}, ["evaluation.test_tokens", "null", "1000"]),
        ({"code": {"shared": "other", "mixer": "own-mesa"}}, ["code.shared", "5a4ed0000001", "other"]),
        ({"fingerprint": "beef"}, ["data fingerprint", "f00d", "beef"]),
    ],
)
def test_anything_else_is_named_with_both_values(tmp_path: Path, change: dict, named: list[str]) -> None:
    pair = [read_run(write_run(tmp_path, "swa")), read_run(write_run(tmp_path, "mesa", **change))]
    with pytest.raises(NotComparable) as refused:
        gate(pair)
    for word in [*named, pair[0].name, pair[1].name]:
        assert word in str(refused.value)
    assert len(refused.value.differences) == 1


def test_a_mixer_must_be_the_same_code_in_all_its_runs(tmp_path: Path) -> None:
    code = {"shared": "5a4ed0000001", "mixer": "rewritten"}
    pair = [read_run(write_run(tmp_path, "swa", seed=0)), read_run(write_run(tmp_path, "swa", seed=1, code=code))]
    assert [d.key for d in differences(pair)] == ["code.mixer of swa"]


def test_a_key_that_one_run_lacks_is_a_difference(tmp_path: Path) -> None:
    pair = [read_run(write_run(tmp_path, "swa")), read_run(write_run(tmp_path, "mesa"))]
    del pair[1].comparison["model.dropout"]
    found = differences(pair)
    assert [d.key for d in found] == ["model.dropout"] and '"<absent>"' in found[0].values


def test_tuned_keys_may_differ_when_asked(tmp_path: Path) -> None:
    pair = [read_run(write_run(tmp_path, "swa", lr=1e-3)), read_run(write_run(tmp_path, "mesa", lr=1e-2))]
    proof = gate(pair, ["optimizer.lr"])
    assert "optimizer.lr" in proof.free and "optimizer.lr" not in proof.equal
    # A study that freed the key itself gives the same key.
    other = read_run(write_run(tmp_path, "hyena", lr=1e-2, tuned=["optimizer.lr"]))
    assert other.record["comparison_key"] == proof.comparison_key
    with pytest.raises(ValueError, match=r"tuned=optimizer\.learning_rate: no run has this key.*optimizer\.lr"):
        gate(pair, ["optimizer.learning_rate"])


def test_what_is_measured_cannot_be_freed(tmp_path: Path) -> None:
    pair = [
        read_run(write_run(tmp_path, "swa")),
        read_run(write_run(tmp_path, "mesa", evaluation__test_tokens=1000)),
    ]
    with pytest.raises(ValueError, match=r"tuned=evaluation\.test_tokens: what is measured must be equal"):
        gate(pair, ["evaluation.test_tokens"])
    with pytest.raises(NotComparable) as refused:
        gate(pair)
    assert "tuned=" not in str(refused.value)


def test_a_run_continued_with_other_code_is_flagged(tmp_path: Path) -> None:
    mixed = read_run(write_run(tmp_path, "swa", record={"code_changed": True}))
    assert any(mixed.name in flag and "mix" in flag for flag in gate([mixed]).flags)
    assert gate([read_run(write_run(tmp_path, "mesa"))]).flags == []


def test_other_hardware_is_flagged_not_refused(tmp_path: Path) -> None:
    hardware = {"hardware": {"cpu": "Another", "gpu": None, "devices": 1}}
    pair = [read_run(write_run(tmp_path, "swa")), read_run(write_run(tmp_path, "mesa", record=hardware))]
    assert any("hardware" in flag for flag in gate(pair).flags)


# ---- intervals -------------------------------------------------------------------------------------------------------


def test_interval_over_seeds_is_students() -> None:
    x = [2.01, 1.97, 2.05, 2.00]
    found = over_seeds(x)
    expected = stats.t.interval(0.95, len(x) - 1, loc=np.mean(x), scale=stats.sem(x))
    assert found.ci95 == pytest.approx(expected)
    assert (found.n, found.over) == (4, "seeds")
    assert over_seeds([-0.1, -0.2, -0.12]).p == pytest.approx(stats.ttest_1samp([-0.1, -0.2, -0.12], 0).pvalue)


def test_interval_of_two_by_hand() -> None:
    """mean 1, s = sqrt 2, standard error 1; t(1 df, 0.975) = 12.7062."""
    assert over_seeds([0.0, 2.0]).ci95 == pytest.approx([1 - 12.7062, 1 + 12.7062], abs=1e-3)


def test_equal_values_have_no_width_and_say_so() -> None:
    assert over_seeds([0.0, 0.0, 0.0]).p == 1
    same = over_seeds([0.5, 0.5])
    assert same.p == 0 and same.ci95 == [0.5, 0.5]


def test_interval_over_documents_by_hand() -> None:
    """Two documents, 10 bytes with 10 bits and 30 bytes with 50: R = 1.5, residuals -5 and 5,
    variance 2/1 * 50 / 40^2 = 1/16, t(1 df) = 12.7062."""
    found = over_documents(np.array([10.0, 50.0]), np.array([10, 30]))
    assert found.mean == pytest.approx(1.5)
    assert found.ci95 == pytest.approx([1.5 - 12.7062 / 4, 1.5 + 12.7062 / 4], abs=1e-3)
    assert found.over == "documents"


def test_interval_over_documents_agrees_with_a_bootstrap() -> None:
    rng = np.random.default_rng(0)
    size = rng.integers(500, 5000, 200)
    bits = size * rng.normal(2, 0.2, 200)
    found = over_documents(bits, size)
    draws = rng.integers(0, 200, (4000, 200))
    ratios = bits[draws].sum(1) / size[draws].sum(1)
    assert found.high is not None and found.low is not None
    assert found.high - found.low == pytest.approx(np.subtract(*np.percentile(ratios, [97.5, 2.5])), rel=0.08)


def test_documents_without_graded_bytes_are_left_out() -> None:
    whole = over_documents(np.array([1.0, 2.0, 2.5]), np.array([1, 2, 3]))
    padded = over_documents(np.array([1.0, 0.0, 2.0, 2.5]), np.array([1, 0, 2, 3]))
    assert whole == padded
    assert over_documents(np.array([1.0]), np.array([1])).ci95 is None


def test_one_seed_gives_an_interval_over_documents(tmp_path: Path) -> None:
    (one,) = runs(tmp_path, "swa", [2.0])
    found = estimate([one], BITS)
    assert (found.over, found.n) == ("documents", 1)
    assert found.mean == one.metrics[BITS] == pytest.approx(2.0)
    loss = estimate([one], "test/loss")
    assert loss.ci95 == pytest.approx([end * math.log(2) for end in found.ci95 or []])
    assert estimate([one], "test/perplexity").ci95 is None
    several = estimate(runs(tmp_path, "mesa", [2.0, 2.1]), BITS)
    assert (several.over, several.n) == ("seeds", 2)


# ---- differences -----------------------------------------------------------------------------------------------------


def test_pairing_by_seed_removes_what_seeds_share(tmp_path: Path) -> None:
    reference = runs(tmp_path, "swa", [2.0, 2.3, 1.8])
    mixer = runs(tmp_path, "mesa", [1.91, 2.19, 1.7])
    found = compare(mixer, reference, BITS, "swa")
    expected = stats.ttest_rel([1.91, 2.19, 1.7], [2.0, 2.3, 1.8])
    assert found.seeds is not None and found.pairs == 3
    assert found.seeds.p == pytest.approx(expected.pvalue, rel=1e-6)
    assert found.seeds.ci95 == pytest.approx(list(expected.confidence_interval(0.95)), rel=1e-6)
    assert found.documents is not None and found.documents.mean == pytest.approx(found.seeds.mean)
    # Unpaired, this would be lost in the spread of the seeds.
    assert stats.ttest_ind([1.91, 2.19, 1.7], [2.0, 2.3, 1.8]).pvalue > 0.5


def test_only_common_seeds_are_paired(tmp_path: Path) -> None:
    reference = runs(tmp_path, "swa", [2.0, 2.1, 2.2])
    found = compare(list(reversed(runs(tmp_path, "mesa", [1.9, 2.0]))), reference, BITS, "swa")
    assert found.pairs == 2 and found.seeds is not None and found.seeds.mean == pytest.approx(-0.1)
    apart = [read_run(write_run(tmp_path, "hyena", seed=7))]
    assert decide({"hyena": compare(apart, reference, BITS, "swa")})["hyena"].verdict == "not paired"


def test_documents_are_paired_by_the_sum_of_their_nats(tmp_path: Path) -> None:
    shape = np.linspace(0.5, 1.5, len(DOCUMENT_BYTES))  # documents differ far more than the two mixers do
    a = runs(tmp_path, "swa", [2.0], document_bits=shape)
    b = runs(tmp_path, "mesa", [1.98], document_bits=shape)
    found = compare(b, a, BITS, "swa")
    alone = estimate(b, BITS)
    assert found.seeds is None and found.p is None and found.documents is not None
    assert found.documents.mean == pytest.approx(-0.02)
    assert alone.high is not None and found.documents.high is not None
    assert (found.documents.high - found.documents.mean) < 0.02 * (alone.high - alone.mean)
    gap = (b[0].documents["nats"] - a[0].documents["nats"]).sum() / math.log(2) / DOCUMENT_BYTES.sum()
    assert found.documents.mean == pytest.approx(gap)


def test_other_documents_cannot_be_paired(tmp_path: Path) -> None:
    a = runs(tmp_path, "swa", [2.0])
    b = runs(tmp_path, "mesa", [1.9], document_bytes=DOCUMENT_BYTES[::-1].copy())
    with pytest.raises(ValueError, match="different parts"):
        compare(b, a, BITS, "swa")


def test_one_seed_decides_nothing(tmp_path: Path) -> None:
    found = decide({"mesa": compare(runs(tmp_path, "mesa", [1.0]), runs(tmp_path, "swa", [2.0]), BITS, "swa")})["mesa"]
    assert found.verdict == ONE_SEED and "seed noise is not in it" in found.note
    assert found.shown is not None and found.shown.over == "documents"


def test_verdicts(tmp_path: Path) -> None:
    reference = runs(tmp_path, "swa", [2.0, 2.1, 2.2])
    shape = np.linspace(0.9, 1.1, len(DOCUMENT_BYTES))
    found = decide(
        {
            "mesa": compare(runs(tmp_path, "mesa", [1.9, 2.001, 2.1], document_bits=shape), reference, BITS, "swa"),
            "hyena": compare(runs(tmp_path, "hyena", [2.5, 2.601, 2.7], document_bits=shape), reference, BITS, "swa"),
            "mamba2": compare(runs(tmp_path, "mamba2", [2.0, 2.0, 2.31], document_bits=shape), reference, BITS, "swa"),
        }
    )
    assert {name: c.verdict for name, c in found.items()} == {
        "mesa": "better",
        "hyena": "worse",
        "mamba2": "not distinguishable",
    }
    assert decide({"mesa": found["mesa"]}, lower_is_better=False)["mesa"].verdict == "worse"


def test_a_verdict_needs_the_documents_as_well(tmp_path: Path) -> None:
    """All the gain is in one document: every seed shows it, but another test set might not have that document."""
    n = len(DOCUMENT_BYTES)
    flat, odd = np.ones(n), np.ones(n)
    odd[2] = 0.6
    reference = runs(tmp_path, "swa", [2.0, 2.001, 1.999], document_bits=flat)
    gain = 2.0 * (DOCUMENT_BYTES[2] * 0.4) / DOCUMENT_BYTES.sum()
    mixer = runs(tmp_path, "mesa", [2.0 - gain, 2.0 - gain, 2.0 - gain], document_bits=odd)
    found = decide({"mesa": compare(mixer, reference, BITS, "swa")})["mesa"]
    assert found.seeds is not None and found.seeds.p is not None and found.seeds.p < 0.01
    assert found.documents is not None and found.documents.p == found.p and found.p is not None and found.p > 0.05
    assert found.verdict == "not distinguishable" and "documents" in found.note


def test_holm_by_hand() -> None:
    """0.01 x 4, 0.02 x 3 and 0.03 x 2 (not below the one before), 0.5 x 1."""
    assert holm([0.5, 0.01, 0.03, 0.02]) == pytest.approx([0.5, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_many_comparisons_need_clearer_differences() -> None:
    def case(p: float) -> Comparison:
        seeds = over_seeds([-0.1, -0.11, -0.09])
        return Comparison("swa", seeds.__class__(**{**seeds.__dict__, "p": p}), None, 3, p)

    assert decide({"mesa": case(0.03)})["mesa"].verdict == "better"
    crowd = decide({"mesa": case(0.03), "hyena": case(0.6), "gla": case(0.7)})
    assert crowd["mesa"].verdict == "not distinguishable" and "Holm" in crowd["mesa"].note
    assert crowd["mesa"].p_holm == pytest.approx(0.09)


# ---- power -----------------------------------------------------------------------------------------------------------


def test_power_agrees_with_simulation_and_with_the_textbook() -> None:
    """Cohen 1988, table 2.4.1: a medium effect of 0.5 needs 34 pairs, one of 1 needs 10, at 5 % and 80 %."""
    assert (seeds_needed(0.5, 1.0, alpha=0.05), seeds_needed(1.0, 1.0, alpha=0.05)) == (34, 10)
    rng = np.random.default_rng(0)
    p = stats.ttest_1samp(rng.normal(1.2, 1.0, (4000, 6)), 0, axis=1).pvalue
    assert power(1.2, 6, 0.05) == pytest.approx((p < 0.05).mean(), abs=3 * math.sqrt(0.25 / 4000))
    assert power(0.0, 8, 0.05) == pytest.approx(0.05, abs=1e-9)
    assert power(60.0, 300, 0.001) == 1.0 and power(3.0, 1, 0.05) == 0.0


def test_seeds_needed_are_the_fewest_with_that_power() -> None:
    for difference, tests in ((0.3, 1), (0.7, 3), (-0.7, 9), (2.5, 9)):
        n = seeds_needed(difference, 1.0, alpha=0.05, tests=tests)
        assert n is not None
        assert power(difference, n, 0.05 / tests) >= POWER > power(difference, n - 1, 0.05 / tests)
        assert detectable(1.0, n, alpha=0.05, tests=tests) <= abs(difference)
        assert detectable(1.0, n - 1, alpha=0.05, tests=tests) > abs(difference)
    few, many = (seeds_needed(0.5, 1.0, alpha=0.05, tests=tests) or 0 for tests in (1, 9))
    assert few < many  # a larger family asks for more
    assert seeds_needed(0.5, 2.0, alpha=0.05) == seeds_needed(0.25, 1.0, alpha=0.05)
    assert seeds_needed(0.0, 1.0, alpha=0.05) is None and seeds_needed(0.001, 1.0, alpha=0.05) is None
    assert detectable(0.0, 3, alpha=0.05) == 0.0
    with pytest.raises(ValueError, match="standard deviation of -1"):
        seeds_needed(1.0, -1.0, alpha=0.05)


def test_what_is_not_told_apart_says_how_many_seeds_would(tmp_path: Path) -> None:
    reference = runs(tmp_path, "swa", [2.0, 2.1, 2.2])
    near = compare(runs(tmp_path, "mesa", [1.99, 2.13, 2.16]), reference, BITS, "swa")
    far = compare(runs(tmp_path, "hyena", [2.5, 2.601, 2.7]), reference, BITS, "swa")
    found = decide({"mesa": near, "hyena": far})
    sd = float(np.std([-0.01, 0.03, -0.04], ddof=1))
    assert found["mesa"].seeds is not None and found["mesa"].seeds.sd == pytest.approx(sd)
    mean = float(np.mean([-0.01, 0.03, -0.04]))
    assert found["mesa"].seeds_needed == seeds_needed(mean, sd, alpha=0.05, tests=2)
    assert found["mesa"].detectable == pytest.approx(detectable(sd, 3, alpha=0.05, tests=2), rel=1e-5)
    assert found["hyena"].seeds_needed is None  # told already
    alone = decide({"mesa": near})["mesa"]
    assert alone.seeds_needed is not None and alone.seeds_needed < (found["mesa"].seeds_needed or 0)


def test_where_documents_leave_it_open_no_number_of_seeds_is_promised(tmp_path: Path) -> None:
    n = len(DOCUMENT_BYTES)
    odd = np.ones(n)
    odd[2] = 0.6
    gain = 2.0 * (DOCUMENT_BYTES[2] * 0.4) / DOCUMENT_BYTES.sum()
    reference = runs(tmp_path, "swa", [2.0, 2.001, 1.999], document_bits=np.ones(n))
    mixer = runs(tmp_path, "mesa", [2.0 - gain] * 3, document_bits=odd)
    found = decide({"mesa": compare(mixer, reference, BITS, "swa")})["mesa"]
    assert found.verdict == "not distinguishable" and found.seeds_needed is None
    assert needs(found, 3) == "more test documents would tell"


def test_against_something_without_seeds(tmp_path: Path) -> None:
    bits = 2.0 * DOCUMENT_BYTES
    found = compare_fixed(runs(tmp_path, "mesa", [1.5, 1.51, 1.49]), 2.0, bits, BITS, "5-gram")
    assert found.seeds is not None and found.seeds.mean == pytest.approx(-0.5)
    assert found.documents is not None and found.documents.mean == pytest.approx(-0.5)
    assert decide({"mesa": found})["mesa"].verdict == "better"


def test_examples_of_a_task_are_paired_by_what_was_graded(tmp_path: Path) -> None:
    graded = np.array([4.0, 4, 2, 0])

    def write(mixer: str, seed: int, correct: list[float]) -> Run:
        folder = write_run(tmp_path, mixer, seed=seed)
        np.savez(folder / "test_documents.npz", nats=np.array([1.0, 2, 3, 0]), correct=np.array(correct), graded=graded)
        run = read_run(folder)
        run.metrics["test/accuracy"] = sum(correct) / 10
        return run

    swa = [write("swa", seed, [1.0, 2, 0, 0]) for seed in (0, 1)]
    mesa = [write("mesa", seed, [4.0, 4, 2 - seed, 0]) for seed in (0, 1)]
    found = compare(mesa, swa, "test/accuracy", "swa")
    assert found.seeds is not None and found.seeds.mean == pytest.approx((0.7 + 0.6) / 2)
    assert found.documents is not None and found.documents.mean == pytest.approx((0.7 + 0.6) / 2)
    assert decide({"mesa": found}, lower_is_better=False)["mesa"].favours
    values, sizes = swa[0].by_document("test/loss") or (None, None)
    assert values.tolist() == [1.0, 2, 3, 0] and sizes.tolist() == graded.tolist()  # type: ignore[union-attr]
    assert swa[0].by_document("test/bits_per_byte") is None


def test_json_round_trip_keeps_the_figures(tmp_path: Path) -> None:
    """What the statistics read is what `runs.run` writes: nothing depends on numpy types."""
    (one,) = runs(tmp_path, "swa", [2.0])
    json.dumps(one.record)
    assert one.document_bytes is not None and one.document_bytes.sum() == DOCUMENT_BYTES.sum()
