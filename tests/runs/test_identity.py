"""run_id hashes the science and nothing else; the comparison key leaves out what a comparison may vary."""

import pytest
from hydra import compose, initialize_config_dir

from runs import identity
from runs.validate import validate
from tests.runs.commands import ROOT


def identify(*overrides, study=None):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("config", overrides=list(overrides), return_hydra_config=True)
    name = cfg.hydra.runtime.choices["mixer"]
    if study is not None:
        cfg.study = study
    return identity.identify(cfg, validate(cfg), name)


BASE = identify()


@pytest.mark.parametrize(
    "same",
    [
        ["optimizer.lr=0.003"],
        ["optimizer.clip=1"],
        ["trainer=ddp"],
        ["trainer.micro_batch=4", "trainer.threads=1", "trainer.compile=true"],
        ["logger=none", "paths.results=elsewhere", "paths.cache=elsewhere"],
        ["steps=null", "tokens=1638400"],
        ["model.head_dim=32", "model.mlp_width=384"],
        ["init_seed=0"],
    ],
    ids=str,
)
def test_same_run(same):
    assert identify(*same).run_id == BASE.run_id


@pytest.mark.parametrize(
    "other",
    [
        ["optimizer.lr=0.004"],
        ["seed=1"],
        ["init_seed=1"],
        ["data_seed=1"],
        ["mixer=swa"],
        ["mixer.rope_base=500"],
        ["model.n_layers=3"],
        ["steps=401"],
        ["global_batch=32"],
        ["precision=bf16"],
        ["model.dropout=0.1"],
        ["data.seq_len=128"],
        ["tokenizer=bpe"],
        ["schedule=linear"],
        ["evaluation.test_tokens=10"],
    ],
    ids=str,
)
def test_other_run(other):
    assert identify(*other).run_id != BASE.run_id


@pytest.mark.parametrize("free", [["mixer=swa"], ["mixer=gated_deltanet"], ["seed=3"], ["init_seed=3"]], ids=str)
def test_comparable(free):
    assert identify(*free).comparison_key == BASE.comparison_key


@pytest.mark.parametrize(
    "bound",
    [
        ["optimizer.lr=0.004"],
        ["model.n_layers=3"],
        ["model.qk_norm=true"],
        ["evaluation.test_tokens=10"],
        ["data.seq_len=128"],
        ["precision=bf16"],
        ["model.head_dim=16"],
    ],
    ids=str,
)
def test_not_comparable(bound):
    assert identify(*bound).comparison_key != BASE.comparison_key


def test_keys_that_a_study_tunes_are_free_and_so_is_what_follows_them():
    study = {
        "name": "s",
        "phase": "seeds",
        "mixers": {"swa": {"optimizer.lr": [1e-3]}, "transformer": {"mixer.x": [1]}},
    }
    one, two = identify("optimizer.lr=0.004", study=study), identify("mixer=swa", study=study)
    assert one.comparison["optimizer.lr"] == identity.SENTINEL
    assert one.comparison_key == two.comparison_key != BASE.comparison_key
    assert identify("optimizer.eps=1e-9", study=study).comparison_key != one.comparison_key
    follows = ["optimizer.weight_decay=${optimizer.lr}"]
    assert identify(*follows, study=study).comparison["optimizer.weight_decay"] == identity.SENTINEL
    seeded = identify("optimizer.weight_decay=${seed}")
    assert seeded.comparison["optimizer.weight_decay"] == identity.SENTINEL


def test_a_tuned_group_is_free_as_a_whole():
    study = {"name": "s", "phase": "seeds", "mixers": {"swa": {"schedule": ["cosine", "linear"]}}}
    one, two = identify("schedule=linear", study=study), identify("mixer=swa", study=study)
    assert one.comparison_key == two.comparison_key
    assert one.comparison["schedule.kind"] == one.comparison["schedule.final"] == identity.SENTINEL


@pytest.mark.parametrize(
    ("key", "free", "bound"),
    [
        ("model.n_heads", ["model.n_heads=2"], ["model.n_heads=2", "model.head_dim=16"]),
        ("model.d_model", ["model.d_model=32"], ["model.d_model=32", "model.mlp_width=48"]),
        ("tokens", ["tokens=409600"], ["global_batch=8"]),
    ],
)
def test_what_is_derived_from_a_free_key_is_free_unless_it_is_set(key, free, bound):
    study = {"name": "s", "phase": "seeds", "mixers": {"swa": {key: [1]}}}
    base = identify(study=study)
    assert identify(*free, study=study).comparison_key == base.comparison_key
    assert identify(*bound, study=study).comparison_key != base.comparison_key
    assert identify(*free).comparison_key != BASE.comparison_key


def test_folder_is_a_function_of_the_config():
    assert BASE.folder == ROOT / "results" / "runs" / "default" / f"transformer-{BASE.run_id}"
    assert identify("mixer=gated_deltanet_native").folder.name.startswith("gated_deltanet_native-")


def test_code_hashes_see_code_and_not_words(tmp_path, monkeypatch):
    file = tmp_path / "m.py"
    texts = {
        "code": '"""Says."""\nx = 1  # one\n\n\ndef f():\n    """Does."""\n    return x\n',
        "words": '"""Says more."""\n\nx = 1\n\ndef f():\n    """Does so."""\n    return x\n',
        "other": '"""Says."""\nx = 2  # one\n\n\ndef f():\n    """Does."""\n    return x\n',
    }
    monkeypatch.setattr(identity, "ROOT", tmp_path)
    hashes = {}
    for i, (name, text) in enumerate(texts.items()):
        file.write_text(text)
        hashes[name] = identity._hash_code(file, i)
    assert hashes["code"] == hashes["words"] != hashes["other"]


def test_a_mixers_own_code_is_its_module_and_what_it_imports():
    own = {path.name for path in identity._reachable(ROOT / "mixers" / "swa.py")}
    assert {"swa.py", "transformer.py", "attention.py", "parts.py"} <= own
    assert "delta.py" not in own
    swa, delta = identity.code_hashes("swa"), identity.code_hashes("gated_deltanet")
    assert swa["shared"] == delta["shared"] and swa["mixer"] != delta["mixer"]
