"""Is the report right as often as it says? Simulated studies through the real path, and real runs of one mixer."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from data.randomness import key
from runs.folder import read_json
from sweeps.report import make
from sweeps.reports.collect import Run, read_run
from sweeps.reports.compare import ALPHA, compare, decide
from sweeps.reports.power import POWER, seeds_needed
from sweeps.reports.table import Board, build
from tests.runs.commands import ROOT, folders, train
from tests.sweeps.synthetic_runs import write_run

BITS = "test/bits_per_byte"
STUDIES = 200
N_BYTES = np.full(40, 2000)
SEED_NOISE, DOCUMENT_NOISE, DOCUMENT_SPREAD = 0.01, 0.02, 0.3


def slack(share: float, n: int) -> float:
    """Three standard errors of a share found in ``n`` tries."""
    return 3 * math.sqrt(share * (1 - share) / n)


class Laboratory:
    """Makes run records: a mixer's true bits per byte, plus what a seed, a document, and both together change."""

    def __init__(self, root: Path):
        self.template = read_run(write_run(root, "swa", document_bytes=N_BYTES))

    def run(self, rng: np.random.Generator, name: str, seed: int, bits: float, by_document: np.ndarray) -> Run:
        record = copy.deepcopy(self.template.record)
        record.update(mixer=name, run_id=f"{seed:04d}")
        record["code"]["mixer"] = "one mixer"
        for part in ("seed", "init_seed", "data_seed"):
            record["science"][part] = seed
        per_byte = bits + by_document + rng.normal(0, SEED_NOISE) + rng.normal(0, DOCUMENT_NOISE, len(N_BYTES))
        nats = per_byte * N_BYTES * math.log(2)
        record["metrics"][BITS] = float((per_byte * N_BYTES).sum() / N_BYTES.sum())
        documents = {"nats": nats, "bytes": N_BYTES.astype(np.float64)}
        return Run(self.template.path, record, self.template.status, [], documents)

    def study(self, number: int, gains: dict[str, float], seeds: int) -> Board:
        """One study: mixers with their true gains over the reference, on documents that all share."""
        rng = np.random.default_rng(key(number, "calibration"))
        by_document = rng.normal(0, DOCUMENT_SPREAD, len(N_BYTES))
        runs = [
            self.run(rng, name, seed, 2.0 - gain, by_document) for name, gain in gains.items() for seed in range(seeds)
        ]
        return build(runs, name="aa", reference="reference")

    def verdicts(self, gains: dict[str, float], seeds: int) -> list[dict[str, str]]:
        """Of `STUDIES` studies, by mixer."""
        boards = [self.study(number, gains, seeds) for number in range(STUDIES)]
        return [{row.label: row.comparison.verdict for row in board.rows if row.comparison} for board in boards]


@pytest.fixture
def laboratory(tmp_path: Path) -> Laboratory:
    return Laboratory(tmp_path)


def test_a_mixer_against_itself_is_called_different_in_at_most_a_twentieth(laboratory: Laboratory) -> None:
    found = laboratory.verdicts({"reference": 0.0, "twin": 0.0}, seeds=5)
    wrong = sum(one["twin"] != "not distinguishable" for one in found)
    assert wrong / STUDIES <= ALPHA + slack(ALPHA, STUDIES)
    # Students' interval alone would be wrong in a twentieth too: the test has teeth only if some come near.
    near = sum(
        (row.comparison.seeds.p or 1) < 0.2
        for number in range(50)
        for row in laboratory.study(number, {"reference": 0.0, "twin": 0.0}, 5).rows
        if row.comparison and row.comparison.seeds
    )
    assert near > 0


def test_in_a_family_any_false_verdict_is_as_rare(laboratory: Laboratory) -> None:
    twins = {f"twin{i}": 0.0 for i in range(6)}
    found = laboratory.verdicts({"reference": 0.0, **twins}, seeds=4)
    wrong = sum(any(verdict != "not distinguishable" for verdict in one.values()) for one in found)
    assert wrong / STUDIES <= ALPHA + slack(ALPHA, STUDIES)


def test_without_holm_a_family_would_be_wrong_more_often(laboratory: Laboratory) -> None:
    """The planted fault: each comparison decided alone."""
    wrong = 0
    for number in range(STUDIES):
        board = laboratory.study(number, {"reference": 0.0, **{f"twin{i}": 0.0 for i in range(6)}}, 4)
        alone = [decide({"it": row.comparison})["it"].verdict for row in board.rows if row.comparison]
        wrong += any(verdict != "not distinguishable" for verdict in alone)
    assert wrong / STUDIES > ALPHA + slack(ALPHA, STUDIES)


@pytest.mark.parametrize("others", [0, 3])
def test_a_planted_difference_is_found_with_the_stated_power(laboratory: Laboratory, others: int) -> None:
    """With as many seeds as the report asks for; twins beside it make the family larger, and the seeds more."""
    gain = 0.02
    sd = math.sqrt(2 * (SEED_NOISE**2 + DOCUMENT_NOISE**2 / len(N_BYTES)))
    seeds = seeds_needed(gain, sd, alpha=ALPHA, tests=1 + others)
    assert seeds is not None
    found = laboratory.verdicts({"reference": 0.0, "better": gain, **{f"twin{i}": 0.0 for i in range(others)}}, seeds)
    hits = sum(one["better"] == "better" for one in found)
    assert POWER - slack(POWER, STUDIES) <= hits / STUDIES
    assert not any(one["better"] == "worse" for one in found)
    # One seed fewer than needed by a half is clearly not enough: the number means something.
    half = laboratory.verdicts(
        {"reference": 0.0, "better": gain, **{f"twin{i}": 0.0 for i in range(others)}}, seeds // 2
    )
    assert sum(one["better"] == "better" for one in half) / STUDIES < POWER - slack(POWER, STUDIES)


# ---- real runs -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_mixer_under_another_name_is_the_same_run_and_not_distinguishable(tmp_path: Path) -> None:
    """Same seeds, same data, same weights: not a bit may depend on the name."""
    extra = tmp_path / "conf"
    (extra / "mixer").mkdir(parents=True)
    (extra / "mixer" / "other_name.yaml").write_text((ROOT / "conf" / "mixer" / "swa.yaml").read_text())
    train(tmp_path, "-m", f"--config-dir={extra}", "mixer=swa,other_name", "seed=0,1,2", "logger=none")
    found = {
        (read_json(path / "run.json")["mixer"], read_json(path / "run.json")["science"]["seed"]): path
        for path in folders(tmp_path)
    }
    for seed in range(3):
        a, b = (read_json(found[name, seed] / "run.json") for name in ("swa", "other_name"))
        assert a["weights"] == b["weights"] and a["metrics"] == b["metrics"] and a["run_id"] == b["run_id"]
    board, _, folder = make(study="default", results=tmp_path, reference="swa", yardstick=False)
    (twin,) = [row.comparison for row in board.rows if row.comparison]
    assert twin.verdict == "not distinguishable" and twin.seeds is not None and twin.seeds.mean == 0
    assert twin.seeds_needed is None and "gave the same figures" in (folder / "report.md").read_text()


@pytest.mark.slow
def test_real_runs_of_one_mixer_are_rarely_called_different(tmp_path: Path) -> None:
    """Eight runs of one mixer; seeds of every half stand in for the other half's, as if it were another mixer."""
    train(tmp_path, "-m", "mixer=swa", "seed=0,1,2,3,4,5,6,7", "logger=none", "evaluation.test_tokens=4096")
    runs = [read_run(path) for path in folders(tmp_path)]
    assert len(runs) == 8 and len({run.metrics[BITS] for run in runs}) == 8
    wrong = tries = 0
    for half in itertools.combinations(range(8), 4):
        other = [i for i in range(8) if i not in half]
        for shift in range(4):  # four of the ways to pair the halves
            twins = [
                Run(
                    runs[i].path,
                    {**runs[i].record, "science": runs[j].record["science"]},
                    runs[i].status,
                    [],
                    runs[i].documents,
                )
                for i, j in zip(other[shift:] + other[:shift], half, strict=True)
            ]
            verdict = decide({"twin": compare(twins, [runs[j] for j in half], BITS, "swa")})["twin"].verdict
            wrong, tries = wrong + (verdict != "not distinguishable"), tries + 1
    # The tries share their eight runs, so their own error is that of few: as of the 35 ways to halve them.
    assert tries == 280 and wrong / tries <= ALPHA + slack(ALPHA, 35)
