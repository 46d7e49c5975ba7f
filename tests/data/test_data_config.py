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

from data.config import DATA, TOKENIZERS, BpeConfig, BytesConfig, CorpusConfig

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
        ({"packing": "none"}, "data.packing=none: must be one of bos, bos_reset"),
        ({"val_fraction": 0.0}, "data.val_fraction=0.0: must be greater than 0 and less than 0.5"),
        ({"test_fraction": 0.5}, "data.test_fraction=0.5: must be greater than 0 and less than 0.5"),
        ({"cut_chars": 0}, "data.cut_chars=0: must be at least 1"),
        ({"kind": "corpse"}, "data.kind=corpse: a corpus has kind corpus"),
        ({"name": "mine", "paths": ["/nope.txt"]}, "data.paths[0]=/nope.txt: no such file"),
        ({"name": "mine", "paths": ["/nope/*.txt"]}, "data.paths[0]=/nope/*.txt: the pattern matches no file"),
        ({"name": "mine", "paths": [__file__]}, f"data.paths[0]={__file__}: {__file__} is neither a .txt nor a .jsonl"),
        ({"name": "mine", "paths": ["/tmp/"]}, "data.paths[0]=/tmp/: is a folder; name its files, as in /tmp/*.txt"),
        ({"name": "mine"}, "data.paths=[]: name the .txt or .jsonl files"),
        ({"paths": ["a.txt"]}, "data.name=kjv: is the embedded corpus, which reads no files; use data=files"),
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


def test_checking_a_config_imports_nothing_heavy() -> None:
    code = (
        "import sys; from data.config import CorpusConfig; CorpusConfig().check('data');"
        "assert not {'torch', 'numpy', 'tokenizers', 'bible'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=CONF.parent)
