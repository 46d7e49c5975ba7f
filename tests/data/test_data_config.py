from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from data.config import DATA, TOKENIZERS, BpeConfig, BytesConfig, CorpusConfig, HfConfig

CONF = Path(__file__).parents[2] / "conf"


@pytest.mark.parametrize(
    ("group", "name", "expected"),
    [
        ("data", "kjv", CorpusConfig()),
        ("data", "files", CorpusConfig(name="files")),
        ("tokenizer", "bytes", BytesConfig()),
        ("tokenizer", "bpe", BpeConfig()),
    ],
)
def test_yaml_lists_every_field_with_its_default_and_a_reason(group: str, name: str, expected: Any) -> None:
    file = CONF / group / f"{name}.yaml"
    loaded = OmegaConf.load(file)
    assert OmegaConf.to_container(loaded) == asdict(expected)
    assert {"data": DATA, "tokenizer": TOKENIZERS}[group][loaded.kind] is type(expected)
    assert OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(type(expected)), loaded)) == expected
    assert all("#" in line for line in file.read_text().splitlines())


def test_groups_compose_and_refuse_unknown_keys() -> None:
    with initialize_config_dir(str(CONF), version_base=None):
        overrides = ["+data=files", "data.paths=[a.txt,b.jsonl]", "+tokenizer=bpe", "tokenizer.vocab_size=300"]
        cfg = compose(overrides=overrides)
        assert cfg.data.paths == ["a.txt", "b.jsonl"] and cfg.tokenizer.vocab_size == 300
        with pytest.raises(ConfigCompositionException, match=r"data\.seqlen"):
            compose(overrides=["+data=kjv", "data.seqlen=3"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 1}, "data.seq_len=1: must be at least 2"),
        ({"packing": "none"}, "data.packing=none: must be one of bos, bos_reset, best_fit, rows"),
        ({"val_fraction": 0.0}, "data.val_fraction=0.0: must be greater than 0 and less than 0.5"),
        ({"test_fraction": 0.5}, "data.test_fraction=0.5: must be greater than 0 and less than 0.5"),
        ({"cut_chars": 0}, "data.cut_chars=0: must be at least 1"),
        ({"kind": "corpse"}, "data.kind=corpse: a corpus has kind corpus"),
        ({"name": "mine", "paths": ["/nope.txt"]}, "data.paths[0]=/nope.txt: no such file"),
        ({"name": "mine", "paths": ["/nope/*.txt"]}, "data.paths[0]=/nope/*.txt: the pattern matches no file"),
        (
            {"name": "mine", "paths": [__file__]},
            f"data.paths[0]={__file__}: {__file__} is of no known kind; must be one of .txt, .jsonl, ",
        ),
        ({"name": "mine", "paths": ["/tmp/"]}, "data.paths[0]=/tmp/: is a folder; name its files, as in /tmp/*.txt"),
        ({"name": "mine"}, "data.paths=[]: name the files"),
        ({"paths": ["a.txt"]}, "data.name=kjv: is the embedded corpus, which reads no files; use data=files"),
        ({"max_documents": 0}, "data.max_documents=0: must be at least 1"),
        ({"max_bytes": -1}, "data.max_bytes=-1: must be at least 1"),
        ({"text": "a..b"}, "data.text=a..b: must name a column"),
        ({"domain": ""}, "data.domain=: must name a column"),
        ({"hub": "a/b"}, "data.name=kjv: is the embedded corpus"),
        ({"name": "mine", "hub": "nowhere"}, "data.hub=nowhere: is neither owner/name nor a folder"),
        ({"name": "mine", "hub": "a/b", "paths": ["c"]}, "data.paths=['c']: must be empty where data.hub=a/b"),
        ({"name": "mine", "hub": "a/b", "hub_split": None}, "data.hub_split=null: name at least one of"),
        ({"name": "mine", "hub": "a/b", "hub_val": "train"}, "data.hub_split, hub_val, hub_test=train,train: train is"),
        ({"hub_test": "test"}, "data.hub_test=test: needs data.hub"),
        ({"revision": "main"}, "data.revision=main: needs data.hub"),
        ({"hub_split": None}, "data.hub_split=None: needs data.hub"),
    ],
)
def test_check_names_key_value_and_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        CorpusConfig(**changes).check("data")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_tokenizer_checks() -> None:
    BytesConfig().check("tokenizer")
    BpeConfig(vocab_size=257).check("tokenizer")
    with pytest.raises(ValueError, match=r"^tokenizer\.vocab_size=256: must be at least 257"):
        BpeConfig(vocab_size=256).check("tokenizer")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "bpe"}, "tokenizer.kind=bpe: a tokenizer of Hugging Face has kind hf"),
        ({}, "tokenizer.path=: name a tokenizer.json"),
        ({"path": "nowhere.json"}, "tokenizer.path=nowhere.json: is neither a tokenizer.json, nor a folder, nor"),
        ({"path": str(CONF)}, f"tokenizer.path={CONF}: the folder holds no tokenizer.json"),
    ],
)
def test_hf_tokenizer_checks(changes: dict[str, Any], message: str) -> None:
    HfConfig(path="owner/name").check("tokenizer")
    with pytest.raises(ValueError) as error:
        HfConfig(**changes).check("tokenizer")
    assert str(error.value).startswith(message)


CORPORA = sorted(file.stem for file in (CONF / "data").glob("*.yaml") if "kind: corpus" in file.read_text())


@pytest.mark.parametrize("name", CORPORA)
def test_every_corpus_lists_every_field_and_can_be_asked_for_by_its_name(name: str) -> None:
    """``name`` is what the error of an unprepared corpus tells the user to type."""
    loaded = OmegaConf.load(CONF / "data" / f"{name}.yaml")
    assert list(loaded) == list(asdict(CorpusConfig()))
    cfg = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(CorpusConfig), loaded))
    assert isinstance(cfg, CorpusConfig) and cfg.name == name
    if name != "files":
        cfg.check("data")
    assert all("#" in line for line in (CONF / "data" / f"{name}.yaml").read_text().splitlines())


@pytest.mark.parametrize("name", ["gpt2", "llama2", "hf"])
def test_every_hf_tokenizer_lists_every_field(name: str) -> None:
    loaded = OmegaConf.load(CONF / "tokenizer" / f"{name}.yaml")
    assert list(loaded) == list(asdict(HfConfig())) and loaded.name == name
    cfg = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(HfConfig), loaded))
    assert isinstance(cfg, HfConfig)
    if name != "hf":
        cfg.check("tokenizer")


def test_checking_a_config_imports_nothing_heavy() -> None:
    code = (
        "import sys; from data.config import CorpusConfig; CorpusConfig().check('data');"
        "assert not {'torch', 'numpy', 'tokenizers', 'bible'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=CONF.parent)
