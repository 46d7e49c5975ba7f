"""Each committed corpus on a folder with the files, the README and the rows that its data set has on the hub.

What else lies there (other configs, a file that the README does not name) must not be read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from omegaconf import OmegaConf

from data.config import BytesConfig
from data.dataset import open_dataset
from data.prepare import prepare
from tests.data.test_hub import CASES, CONF, OWN, SOURCES, of, private_cache, qasper, texts  # noqa: F401 - a fixture

Row = Callable[[str, int], dict[str, Any]]


class Hub(NamedTuple):
    """A data set: one row for each text, its files by split, what its README says, and files that are not meant."""

    row: Row
    files: dict[str, list[str]]
    configs: dict[str, dict[str, str]] = {}  # noqa: RUF012 - config -> split -> pattern, as in a README's head
    strangers: tuple[str, ...] = ()


def finemath(text: str, number: int) -> dict[str, Any]:
    warc = {"warc_filename": "crawl-data/a.warc.gz", "warc_record_offset": number, "warc_record_length": 9}
    page = {"url": f"https://a.org/{number}", "fetch_time": 1_600_000_000, "content_mime_type": "text/html", **warc}
    counts = {"token_count": number, "char_count": len(text), "metadata": '{"found_math": true}'}
    grade = {"score": 4.25, "int_score": 4, "crawl": "CC-MAIN-2022-21", "snapshot_type": "latest"}
    return {**page, "text": text, **counts, **grade, "language": "en", "language_score": 0.98}


def simplestories(text: str, number: int) -> dict[str, Any]:
    prompt = {"topic": "hidden treasures", "theme": "Hope", "style": "lyric", "feature": "dialogue", "grammar": None}
    start = {"persona": None, "initial_word_type": "noun", "initial_letter": "t"}
    counts = {"word_count": number, "character_count": len(text), "num_paragraphs": 1, "avg_word_length": 4.5}
    return {"story": text, **prompt, **start, **counts, "generation_id": f"{number:x}", "model": "gpt-4o-mini"}


def pg19(text: str, number: int) -> dict[str, Any]:
    url = f"http://www.gutenberg.org/ebooks/{number}"
    return {"short_book_title": f"Book {number}", "publication_date": 1850, "url": url, "text": text}


def govreport(text: str, number: int) -> dict[str, Any]:
    return {"report": text, "summary": f"summary {number}"}


def wikitext(text: str, number: int) -> dict[str, Any]:
    return {"page": text}


def slimpajama(text: str, number: int) -> dict[str, Any]:
    return {"text": text, "meta": {"redpajama_set_name": SOURCES[number % 3]}}


def slimpajama_6b(text: str, number: int) -> dict[str, Any]:
    return slimpajama(text, number) | {"__index_level_0__": 10 * number}


def fineweb(text: str, number: int) -> dict[str, Any]:
    page = {
        "id": f"<urn:uuid:{number}>",
        "dump": "CC-MAIN-2013-20",
        "url": "http://a.org",
        "file_path": "s3://a.warc.gz",
    }
    return {
        "text": text,
        **page,
        "language": "en",
        "language_score": 0.9,
        "token_count": 7,
        "score": 3.5,
        "int_score": 4,
    }


def whole_qasper(text: str, number: int) -> dict[str, Any]:
    answer = {"unanswerable": False, "extractive_spans": ["a span"], "yes_no": None, "free_form_answer": ""}
    questions = {"question": ["why?"], "question_id": ["0"], "answers": [{"answer": [answer], "worker_id": ["w"]}]}
    figures = {"caption": ["a table"], "file": ["1.png"]}
    paper = {"title": f"Paper {number}", "abstract": "in short"}
    return qasper(text, number) | paper | {"qas": questions, "figures_and_tables": figures}


def numbered(pattern: str, n: int) -> list[str]:
    return [pattern.format(i, n) for i in range(n)]


HUBS = {
    "finemath_4plus": Hub(
        finemath,
        {"train": numbered("finemath-4plus/train-{:05}-of-{:05}.parquet", 3)},
        {name: {"train": f"{name}/train-*"} for name in ("finemath-3plus", "finemath-4plus", "infiwebmath-4plus")},
        ("finemath-3plus/train-00000-of-00001.parquet", "infiwebmath-4plus/train-00000-of-00001.parquet"),
    ),
    "simplestories": Hub(
        simplestories,
        {"train": numbered("data/train-{:05}-of-{:05}.parquet", 2), "test": ["data/test-00000-of-00001.parquet"]},
        {"default": {"train": "data/train-*", "test": "data/test-*"}},
        ("processed.parquet",),
    ),
    "pg19": Hub(pg19, {split: numbered(f"data/{split}-{{:05}}-of-{{:05}}-29a5719.parquet", 2) for split in OWN}),
    "govreport": Hub(
        govreport,
        {split: numbered(f"document/{split}-{{:05}}-of-{{:05}}.parquet", 2) for split in OWN},
        {"document": {split: f"document/{split}-*" for split in OWN}},
    ),
    "wikitext103": Hub(
        wikitext,
        {split: [f"wikitext-103-raw-v1/wikitext-103-raw-v1-{split}.parquet"] for split in OWN},
        {
            name: {split: f"{name}/*-{split}.parquet" for split in OWN}
            for name in ("wikitext-103-raw-v1", "wikitext-103-v1", "wikitext-2-raw-v1")
        },
        ("wikitext-103-v1/wikitext-103-v1-train.parquet", "wikitext-2-raw-v1/wikitext-2-raw-v1-test.parquet"),
    ),
    "slimpajama_6b": Hub(
        slimpajama_6b, {split: numbered(f"data/{split}-{{:05}}-of-{{:05}}-ab12.parquet", 3) for split in OWN}
    ),
    "fineweb_edu_100bt": Hub(
        fineweb,
        {
            "train": [
                "sample/100BT/000_00000.parquet",
                "sample/100BT/000_00001.parquet",
                "sample/100BT/001_00000.parquet",
            ]
        },
        {
            "default": {"train": "data/*/*"},
            "sample-10BT": {"train": "sample/10BT/*"},
            "sample-100BT": {"train": "sample/100BT/*"},
        },
        ("data/CC-MAIN-2013-20/train-00000-of-00001.parquet", "sample/10BT/000_00000.parquet"),
    ),
    "qasper": Hub(whole_qasper, {split: [f"qasper/{split}/0000.parquet"] for split in OWN}),
    "slimpajama": Hub(
        slimpajama,
        {
            split: [f"{split}/chunk{part}/example_{kind}_{part}.jsonl.zst" for part in (1, 2)]
            for split, kind in (("train", "train"), ("validation", "holdout"), ("test", "holdout"))
        },
    ),
}


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        file.write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))


def lay_out(folder: Path, hub: Hub, counts: dict[str, int]) -> None:
    for split, files in hub.files.items():
        rows = [hub.row(text, number) for number, text in enumerate(texts(split, counts[split]))]
        for part, name in enumerate(files):
            write(folder / name, rows[len(rows) * part // len(files) : len(rows) * (part + 1) // len(files)])
    for name in hub.strangers:
        write(folder / name, [hub.row("not meant", 0)])
    if hub.configs:
        lines = ["---", "configs:"]
        for config, patterns in hub.configs.items():
            lines += [f"- config_name: {config}", "  data_files:"]
            lines += [f"  - split: {split}\n    path: {pattern}" for split, pattern in patterns.items()]
        (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


def documents_of(dataset: Any, split: str) -> Iterator[tuple[str, str | None]]:
    """Text and domain of each document."""
    tokens, starts = dataset.splits[split].files
    names, numbers = dataset.document_domains(split) or ([None], np.zeros(len(starts), dtype=int))
    for part, number in zip(np.split(tokens, starts[1:]), numbers, strict=True):
        yield dataset.tokenizer.decode(part), names[number]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("name", HUBS)
def test_the_hubs_own_files_are_read(tmp_path: Path, name: str, streaming: bool) -> None:
    hub = HUBS[name]
    counts = {split: 300 if split == "train" and len(hub.files) < 3 else OWN[split] for split in hub.files}
    lay_out(tmp_path / "hub", hub, counts)
    cfg = of(name, str(tmp_path / "hub"), seq_len=16)
    if cfg.hub_val is None:  # not a thousandth of 300
        cfg = replace(cfg, val_fraction=0.1, test_fraction=0.1)
    prepare(cfg, BytesConfig(), tmp_path / "cache", fetch=True, streaming=streaming)
    dataset = open_dataset(cfg, BytesConfig(), global_batch=2, seed=0, cache=tmp_path / "cache")

    def expected(text: str, number: int) -> tuple[str, str | None]:
        if name == "qasper":  # its two paragraphs
            text = text.replace(" ", "\n\n", 1)
        return text, SOURCES[number % 3] if name.startswith("slimpajama") else None

    found = {split: sorted(documents_of(dataset, split)) for split in ("train", "val", "test")}
    wanted = {
        split: sorted(expected(text, number) for number, text in enumerate(texts(split, n)))
        for split, n in counts.items()
    }
    assert all(found.values())
    by_hash = [*found["train"]]
    for split, own in (("val", cfg.hub_val), ("test", cfg.hub_test)):
        if own is None:
            by_hash += found[split]
        else:
            assert found[split] == wanted.pop(own)
    assert {cfg.hub_split: sorted(by_hash)} == wanted


def test_every_corpus_of_the_hub_has_its_format_here() -> None:
    named = {path.stem for path in (CONF / "data").glob("*.yaml") if OmegaConf.load(path).get("hub")}
    assert named == {*HUBS, *CASES, "lambada"}
