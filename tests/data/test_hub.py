"""The hub's loading code on folders laid out as data sets of the hub are, with the rows of those data sets."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import OmegaConf

import data.hub
from data.config import BpeConfig, BytesConfig, CorpusConfig
from data.dataset import open_dataset
from data.prepare import prepare
from data.sources import documents, units

CONF = Path(__file__).parents[2] / "conf"
SOURCES = ("RedPajamaC4", "RedPajamaGithub", "RedPajamaBook")


def texts(split: str, n: int) -> list[str]:
    return [f"{split} {number} " + "é word" * (number % 7) for number in range(n)]


def slimpajama(text: str, number: int) -> dict[str, Any]:
    return {"text": text, "meta": {"redpajama_set_name": SOURCES[number % 3]}}


def wikitext(text: str, number: int) -> dict[str, Any]:
    return {"page": text}


def qasper(text: str, number: int) -> dict[str, Any]:
    first, rest = text.split(" ", 1)
    return {"id": str(number), "full_text": {"section_name": ["A", "B"], "paragraphs": [[first], [rest]]}}


def fineweb(text: str, number: int) -> dict[str, Any]:
    return {"text": text, "id": f"<urn:{number}>", "dump": "CC-MAIN-2024-10", "score": 3.5, "token_count": number}


def make(folder: Path, row: Any, splits: dict[str, int], config: str | None = None, files: int = 3) -> str:
    """A data set: parquet files by split, or under a config that the README names."""
    where = folder / (config or "data")
    where.mkdir(parents=True)
    for split, n in splits.items():
        rows = [row(text, number) for number, text in enumerate(texts(split, n))]
        for part in range(files):
            piece = rows[len(rows) * part // files : len(rows) * (part + 1) // files]
            table = pyarrow.Table.from_pylist(piece, schema=pyarrow.Table.from_pylist(rows).schema)
            pyarrow.parquet.write_table(table, where / f"{split}-{part:05}-of-{files:05}.parquet")
    if config is not None:
        entries = "".join(f"  - split: {split}\n    path: {config}/{split}-*\n" for split in splits)
        other = "- config_name: other\n  data_files:\n  - split: train\n    path: other/train-*\n"
        (folder / "README.md").write_text(
            f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{entries}{other}---\n"
        )
        (folder / "other").mkdir()
    return str(folder)


def of(name: str, hub: str, **changes: Any) -> CorpusConfig:
    """A committed corpus, read from ``hub`` instead."""
    cfg = OmegaConf.merge(OmegaConf.structured(CorpusConfig), OmegaConf.load(CONF / "data" / f"{name}.yaml"))
    made = OmegaConf.to_object(cfg)
    assert isinstance(made, CorpusConfig)
    return replace(made, hub=hub, **changes)


OWN = {"train": 90, "validation": 11, "test": 12}
CASES = {
    "slimpajama": (slimpajama, OWN, None),
    "wikitext2": (wikitext, OWN, "wikitext-2-raw-v1"),
    "qasper": (qasper, OWN, None),
    "fineweb_edu_10bt": (fineweb, {"train": 300}, "sample-10BT"),
    "tinystories": (fineweb, {"train": 300, "validation": 11}, None),
}


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_committed_corpora_read_their_rows(tmp_path: Path, name: str, streaming: bool) -> None:
    row, splits, config = CASES[name]
    cfg = of(name, make(tmp_path / "hub", row, splits, config), seq_len=16)
    if name in ("fineweb_edu_10bt", "tinystories"):  # not a thousandth of 300
        cfg = replace(cfg, val_fraction=0.1, test_fraction=0.1)
    folder = prepare(cfg, BytesConfig(), tmp_path / "cache", fetch=True, streaming=streaming)
    # From now on it opens as any other, with no look at the hub.
    dataset: Any = open_dataset(cfg, BytesConfig(), global_batch=2, seed=0, cache=tmp_path / "cache")
    assert dataset.folder == folder
    found = {}
    for split in ("train", "val", "test"):
        tokens, starts = dataset.splits[split].files
        found[split] = [dataset.tokenizer.decode(part) for part in np.split(tokens, starts[1:])]
    join = (lambda text: text.replace(" ", "\n\n", 1)) if name == "qasper" else (lambda text: text)
    wanted = {split: [join(text) for text in texts(split, n)] for split, n in splits.items()}
    assert sorted(chain(*found.values())) == sorted(chain(*wanted.values()))
    if "validation" in splits:
        assert sorted(found["val"]) == sorted(wanted["validation"])
    if "test" in splits:
        assert sorted(found["test"]) == sorted(wanted["test"]) and sorted(found["train"]) == sorted(wanted["train"])
    assert dataset.document_tokens("val").tolist() == [len(text.encode()) for text in found["val"]]
    domains = dataset.document_domains("test")
    if name == "slimpajama":
        names, numbers = domains
        assert names == sorted(SOURCES)
        of_text = {text: SOURCES[number % 3] for number, text in enumerate(texts("test", 12))}
        assert [names[number] for number in numbers] == [of_text[text] for text in found["test"]]
    else:
        assert domains is None


def test_the_hub_and_local_files_make_the_same_corpus(tmp_path: Path) -> None:
    hub = make(tmp_path / "hub", slimpajama, {"train": 200})
    shares = {"name": "mine", "domain": "meta.redpajama_set_name", "val_fraction": 0.2, "test_fraction": 0.2}
    remote, local = CorpusConfig(hub=hub, **shares), CorpusConfig(paths=[f"{hub}/data/*.parquet"], **shares)
    assert len(units(remote)) == len(units(local)) == 3
    assert [document.text for document in documents(remote)] == [document.text for document in documents(local)]
    one = prepare(remote, BytesConfig(), tmp_path / "a", fetch=True, processes=2)
    other = prepare(local, BytesConfig(), tmp_path / "b")
    for file in ("manifest.json", "train.bin", "test_domains.npy"):
        assert (one / file).read_bytes() == (other / file).read_bytes()


@pytest.mark.parametrize("streaming", [True, False])
def test_a_part_of_the_hub(tmp_path: Path, streaming: bool) -> None:
    cfg = of("slimpajama", make(tmp_path / "hub", slimpajama, OWN), max_documents=40)
    folder = prepare(cfg, BytesConfig(), tmp_path / "cache", fetch=True, streaming=streaming)
    counts = json.loads((folder / "manifest.json").read_text())["splits"]
    assert {split: count["documents"] for split, count in counts.items()} == {"train": 40, "val": 11, "test": 12}
    assert counts["train"]["bytes"] == sum(len(text.encode()) for text in texts("train", 40))


def test_units_are_few_however_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = CorpusConfig(name="mine", hub=make(tmp_path / "hub", fineweb, {"train": 30}, files=10))
    one_each = [document.text for document in documents(cfg)]
    monkeypatch.setattr(data.hub, "MAX_UNITS", 4)
    assert len(units(cfg)) == 4
    assert [document.text for document in documents(cfg)] == one_each == texts("train", 30)


def test_a_run_never_fetches(tmp_path: Path) -> None:
    cfg = of("slimpajama", make(tmp_path / "hub", slimpajama, OWN))
    with pytest.raises(ValueError) as error:
        open_dataset(cfg, BpeConfig(), global_batch=2, seed=0, cache=tmp_path / "cache")
    message = str(error.value)
    assert message.startswith(f"data.hub={cfg.hub}: not yet prepared under paths.cache={tmp_path / 'cache'}; run ")
    assert "'python -m data.prepare data=slimpajama tokenizer=bpe'" in message and "\n" not in message
    assert not (tmp_path / "cache").exists()


def test_a_corpus_for_evaluation_alone(tmp_path: Path) -> None:
    cfg = of("lambada", make(tmp_path / "hub", fineweb, {"test": 20}, "default"), seq_len=8)
    prepare(cfg, BytesConfig(), tmp_path, fetch=True)
    dataset = open_dataset(cfg, BytesConfig(), global_batch=2, seed=0, cache=tmp_path)
    assert (dataset.n_documents("train"), dataset.n_documents("val"), dataset.n_documents("test")) == (0, 0, 20)
    assert dataset.n_train_tokens == 0 and not list(dataset.eval_batches("val", 4))
    graded = sum(batch.n_targets for batch in dataset.eval_batches("test", 4))
    assert graded == sum(len(text.encode()) for text in texts("test", 20))
    with pytest.raises(ValueError, match=r"^data\.hub_split=null: .*can only be evaluated on"):
        dataset.train_batch(0)
    with pytest.raises(ValueError, match=r"^tokenizer\.kind=bpe: data\.hub_split=null leaves nothing to train it on"):
        prepare(cfg, BpeConfig(), tmp_path, fetch=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hub_split": "learn"}, r"split learn at revision .* cannot be opened \(ValueError: Bad split: learn"),
        ({"hub_config": "small"}, r"data\.hub_config=small, split train .*BuilderConfig 'small' not found"),
        ({"text": "story"}, r"split train, part 1 of 3, row 1: ValueError: no column 'story'; there is: text, "),
    ],
)
def test_what_the_hub_has_not_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    cfg = CorpusConfig(name="mine", hub=make(tmp_path / "hub", fineweb, {"train": 30}), **changes)
    with pytest.raises(ValueError, match=message) as error:
        prepare(cfg, BytesConfig(), tmp_path / "cache", fetch=True)
    assert str(error.value).startswith(f"data.hub={cfg.hub}: ") and "\n" not in str(error.value)


def test_a_hub_that_cannot_be_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    cfg = CorpusConfig(name="mine", hub="owner/name")
    with pytest.raises(ValueError, match=r"^data\.hub=owner/name: not found .*\(ConnectionError: no route to host\)$"):
        prepare(cfg, BytesConfig(), tmp_path, fetch=True)


def test_a_restart_stays_with_the_commit_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = CorpusConfig(
        name="mine", hub=make(tmp_path / "hub", fineweb, {"train": 60}), val_fraction=0.2, test_fraction=0.2
    )
    monkeypatch.setattr(data.hub, "_commit", lambda cfg: "first")
    with monkeypatch.context() as patch:
        patch.setattr("data.prepare.assemble", lambda *_, **__: pytest.fail("stopped here"))
        with pytest.raises(BaseException, match="stopped here"):
            prepare(cfg, BytesConfig(), tmp_path / "cache", fetch=True)
    monkeypatch.setattr(data.hub, "_commit", lambda cfg: pytest.fail("asked for the newest again"))
    monkeypatch.setattr("data.scatter.read", lambda *_, **__: pytest.fail("read again"))
    prepare(cfg, BytesConfig(), tmp_path / "cache", fetch=True)


def test_a_split_of_its_own_is_part_of_what_a_corpus_is(tmp_path: Path) -> None:
    """The same documents, but others are held out."""
    folders = []
    for number, splits in enumerate(({"train": 40, "validation": 9}, {"train": 40, "test": 9})):
        own = {"hub_val": "validation"} if "validation" in splits else {"hub_test": "test"}
        row = lambda text, number: fineweb(text.replace("validation", "x").replace("test", "x"), number)  # noqa: E731
        hub = make(tmp_path / str(number), row, splits)
        cfg = CorpusConfig(name="mine", hub=hub, val_fraction=0.3, test_fraction=0.3, **own)  # type: ignore[arg-type]
        folders.append(prepare(cfg, BytesConfig(), tmp_path / "cache", fetch=True))
    one, other = (json.loads((folder / "manifest.json").read_text()) for folder in folders)
    assert one["source"] != other["source"]
    assert (one["splits"]["val"]["documents"], other["splits"]["test"]["documents"]) == (9, 9)


def test_the_commit_is_asked_for_once_and_then_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    class Info:
        sha = "0123abcd"

    asked: list[Any] = []
    folder = make(tmp_path / "hub", fineweb, {"train": 60})
    load = datasets.load_dataset

    def from_folder(hub: str, config: str | None, **more: Any) -> Any:
        asked.append((hub, config, more.pop("revision"), more["split"]))
        return load(folder, config, **more)

    monkeypatch.setattr(datasets, "load_dataset", from_folder)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, hub, revision: Info)
    shares = {"val_fraction": 0.2, "test_fraction": 0.2}
    prepare(CorpusConfig(name="mine", hub="owner/name", **shares), BytesConfig(), tmp_path / "cache", fetch=True)  # type: ignore[arg-type]
    assert set(asked) == {("owner/name", None, "0123abcd", "train")}
