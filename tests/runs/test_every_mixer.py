"""Every mixer config trains on the embedded corpus: one multirun over all of `conf/mixer/`, as a user would type it."""

from __future__ import annotations

import pytest

from runs.folder import read_json, read_rows
from tests.runs.commands import ROOT, folders, train

MIXERS = sorted(path.stem for path in (ROOT / "conf" / "mixer").glob("*.yaml"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Run folders by mixer, with diagnostics on."""
    results = tmp_path_factory.mktemp("every")
    size = ("model.d_model=32", "model.n_layers=2", "mixer=glob(*)", "optimizer.lr=1e-2", "logger=none")
    train(results, "-m", *size, "model.n_heads=2", "steps=25", "evaluation.every=0", "logger.diagnostics=true")
    return {folder.name.rsplit("-", 1)[0]: folder for folder in folders(results)}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXERS)
def test_trains_on_the_embedded_corpus(finished, name):
    folder = finished[name]
    assert read_json(folder / "status.json")["state"] == "done"
    rows = read_rows(folder / "metrics.jsonl")
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses[-1] < losses[0] - 1.5, losses
    record = read_json(folder / "run.json")
    assert record["metrics"]["test/bits_per_byte"] < 6 and record["counts"]["params_mixer"] > 0
    looked_at = {key.split("/")[1] for row in rows for key in row if key.startswith("diagnostics/")}
    expected = {
        "mesa": {"half_life", "state_norm", "effective_rank", "cg_steps"},
        "gated_deltanet": {"half_life", "state_norm", "effective_rank"},
        "hawk_mesa": {"half_life", "cg_steps"},
        "xlstm": {"half_life", "state_norm"},
        "transformer": set(),
    }
    assert expected.get(name, set()) <= looked_at
    if name == "transformer":
        assert not looked_at
