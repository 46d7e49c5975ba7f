"""Tokenizers made elsewhere, in the two styles that can be exact, and what must be refused."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import tokenizers

from data.config import BpeConfig, BytesConfig, CorpusConfig, HfConfig
from data.dataset import open_dataset
from data.prepare import prepare
from data.pretrained import HfTokenizer, fetch_tokenizer
from data.sources import documents
from data.tokenizers import BpeTokenizer, load_tokenizer
from tests.data.test_tokenizers import AWKWARD

TEXTS = [document.text for document in documents(CorpusConfig())[:40]]
SPECIAL = ("<unk>", "<s>", "</s>")
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def added(content: str, number: int, **changes: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": content, **flags, **changes}


def byte_level(vocab_size: int = 600) -> dict[str, Any]:
    """As GPT-2's tokenizer.json: one special token, in the vocabulary and marked as special."""
    spec: dict[str, Any] = json.loads(BpeTokenizer.train(TEXTS, vocab_size=vocab_size)._bpe.to_str())
    number = len(spec["model"]["vocab"])
    spec["model"]["vocab"]["<|endoftext|>"] = number
    spec["added_tokens"] = [added("<|endoftext|>", number)]
    spec["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    return spec


def llama3() -> dict[str, Any]:
    """As Llama 3's: another pattern, special tokens beyond the vocabulary."""
    spec = byte_level()
    del spec["model"]["vocab"]["<|endoftext|>"]
    number = len(spec["model"]["vocab"])
    spec["added_tokens"] = [added("<|begin_of_text|>", number), added("<|end_of_text|>", number + 1)]
    split = {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Isolated", "invert": False}
    byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte]}
    return spec


def metaspace() -> dict[str, Any]:
    """As Llama 2's: special tokens, bytes, characters and merges; a space put before each text."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="never")
    bpe.train_from_iterator(TEXTS, tokenizers.trainers.BpeTrainer(vocab_size=400, show_progress=False))
    learnt = json.loads(bpe.to_str())["model"]
    words = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(learnt["vocab"], key=learnt["vocab"].get)]
    model = learnt | {
        "vocab": {word: number for number, word in enumerate(dict.fromkeys(words))},
        "byte_fallback": True,
        "unk_token": "<unk>",
        "fuse_unk": True,
    }
    steps = [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added(word, number) for number, word in enumerate(SPECIAL)],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": model,
    }


def newer_metaspace() -> dict[str, Any]:
    """As sentencepiece tokenizers are converted since 2024: the space is the pre-tokenizer's affair."""
    spec = metaspace()
    spec["normalizer"] = None
    spec["pre_tokenizer"] = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    return spec


STYLES: dict[str, tuple[Callable[[], dict[str, Any]], str | None]] = {
    "byte_level": (byte_level, "<|endoftext|>"),
    "llama3": (llama3, "<|begin_of_text|>"),
    "metaspace": (metaspace, "<s>"),
    "newer_metaspace": (newer_metaspace, None),
}


@pytest.fixture(scope="module", params=STYLES)
def style(request: pytest.FixtureRequest) -> tuple[dict[str, Any], HfTokenizer]:
    make, bos = STYLES[request.param]
    spec = make()
    return spec, HfTokenizer(json.dumps(spec), bos)


def test_bytes_are_exact(style: tuple[dict[str, Any], HfTokenizer]) -> None:
    _, tokenizer = style
    names = [
        "<unk>",
        "<s>",
        "</s>",
        "<0x0A>",
        "<|endoftext|>",
        "<|begin_of_text|>",
        "\u2581",
        " \u2581 \u2581\u2581a\u2581",
    ]
    every = "".join(chr(code) for code in [*range(0xD800), *range(0xE000, 0x20000, 11)])
    for text in [*AWKWARD, "".join(AWKWARD), *names, "".join(names), "\n".join(TEXTS), every]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
        assert not (ids == tokenizer.bos_id).any() and (ids.size == 0 or ids.max() < tokenizer.vocab_size)
    assert tokenizer.token_bytes[tokenizer.bos_id] == 0
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("a\ud800")


def library(spec: dict[str, Any]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def test_ids_are_the_library_s(style: tuple[dict[str, Any], HfTokenizer]) -> None:
    """But for the space that sentencepiece puts before a text: with one of its own, they agree."""
    spec, tokenizer = style
    theirs = library(spec)
    prefix = "" if spec["pre_tokenizer"] and "Metaspace" not in str(spec["pre_tokenizer"]) else " "
    rng = np.random.default_rng(0)
    ascii_only = ["a", "the", " ", "  ", "\n", ".", "'ll", "7", "\t", "\x1c", "-", "A"]
    others = ["é", "日", "\u00a0", "\u3000", "\u0301", "²"]
    made = ["x" + "".join(rng.choice(ascii_only, size=40)) for _ in range(300)]
    made += ["x" + "".join(rng.choice(ascii_only + others, size=40)) for _ in range(300)]
    made += ["x" + "".join(rng.choice(ascii_only * 40 + others, size=100)) for _ in range(300)]  # one here and there
    assert tokenizer._words is not None
    for text in [*TEXTS, *made]:
        wanted = theirs.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(prefix + text).tolist() == wanted
        assert tokenizer.encode(prefix + text).tolist() == wanted, "the second time from memory"


def test_the_memory_of_words_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.words.MAX_PARTS", 50)
    monkeypatch.setattr("data.words.MAX_CHARS", 5)
    tokenizer = HfTokenizer(json.dumps(byte_level()), None)
    for text in TEXTS:
        assert tokenizer.encode(text).tolist() == tokenizer._encode_batch([text])[0]
    assert tokenizer._words is not None and max(map(len, tokenizer._words._known)) == 5


def test_words_are_not_remembered_where_tokens_reach_across() -> None:
    spec = metaspace()
    across = len(spec["model"]["vocab"])
    spec["model"]["vocab"] |= {"e\u2581": across}
    spec["model"]["merges"] = [["e", "\u2581"], *spec["model"]["merges"]]
    tokenizer = HfTokenizer(json.dumps(spec), "<s>")
    assert tokenizer._words is None
    assert (tokenizer.encode("the e ") == across).sum() == 2
    other = llama3()
    other["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"\S+ \S*|[\s\S]"}
    assert HfTokenizer(json.dumps(other))._words is None


def test_added_tokens_that_are_text_have_bytes() -> None:
    """As the runs of spaces of GPT-NeoX."""
    spec = byte_level()
    number = len(spec["model"]["vocab"])
    spec["added_tokens"].append(added("   ", number, special=False))
    tokenizer = HfTokenizer(json.dumps(spec), "<|endoftext|>")
    assert tokenizer.token_bytes[number] == 3 and number in tokenizer.encode("a    b")
    assert tokenizer.decode(tokenizer.encode("a    b   c")) == "a    b   c"
    assert tokenizer.encode("a    b   c").tolist() == tokenizer._encode_batch(["a    b   c"])[0]


def test_a_bos_of_its_own_or_a_new_one() -> None:
    spec = metaspace()
    size = len(spec["model"]["vocab"])
    own, new = HfTokenizer(json.dumps(spec), "<s>"), HfTokenizer(json.dumps(spec), None)
    assert (own.vocab_size, own.bos_id, new.vocab_size, new.bos_id) == (size, 1, size + 1, size)
    assert own.fingerprint != new.fingerprint


def changed(make: Callable[[], dict[str, Any]], *path: str, value: Any) -> dict[str, Any]:
    spec = make()
    node = spec
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return spec


def without(make: Callable[[], dict[str, Any]], token: str) -> dict[str, Any]:
    spec = make()
    del spec["model"]["vocab"][token]
    spec["model"]["merges"] = [pair for pair in spec["model"]["merges"] if token not in pair and "".join(pair) != token]
    return spec


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"model": {"type": "WordPiece", "vocab": {}}}, "its model is WordPiece, and only BPE"),
        ({}, "is no tokenizer.json"),
        (changed(byte_level, "normalizer", value={"type": "NFC"}), "its normalizer NFC changes the text"),
        (changed(metaspace, "normalizer", value={"type": "Lowercase"}), "its normalizer Lowercase changes the text"),
        (changed(metaspace, "model", "byte_fallback", value=False), "has no byte fallback"),
        (changed(byte_level, "model", "dropout", value=0.1), "has dropout 0.1"),
        (without(metaspace, "<0x0A>"), "has no token for 1 of the 256 bytes, the first is '<0x0A>'"),
        (changed(byte_level, "pre_tokenizer", value={"type": "Whitespace"}), "its pre-tokenizer Whitespace is neither"),
        (changed(byte_level, "pre_tokenizer", value=None), "is neither byte-level nor in the style of sentencepiece"),
        (
            changed(byte_level, "added_tokens", value=[added("<mask>", 5000, special=False, lstrip=True)]),
            "its token '<mask>' swallows the spaces around it",
        ),
        (
            changed(
                llama3,
                "pre_tokenizer",
                "pretokenizers",
                value=[
                    {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False},
                    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
                ],
            ),
            "does not keep the bytes of a text: ' ' comes back as ''",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused(tmp_path: Path, spec: dict[str, Any], message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ValueError) as error:
        fetch_tokenizer(HfConfig(path=str(tmp_path)))
    assert str(error.value).startswith(f"tokenizer.path={tmp_path}: {message}") and "\n" not in str(error.value)


def test_a_bos_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has no token '<bos>' \(tokenizer\.bos\)"):
        HfTokenizer(json.dumps(byte_level()), "<bos>")
    with pytest.raises(ValueError, match="a text can spell BOS|does not keep the bytes"):
        HfTokenizer(json.dumps(byte_level()), "a")


def test_the_added_space_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        HfTokenizer(json.dumps(metaspace()), "<s>")
        HfTokenizer(json.dumps(changed(byte_level, "pre_tokenizer", "add_prefix_space", value=True)), None)
    assert caplog.text.count("the tokenizer's space at the start of a text is left out") == 2


def test_from_a_file_a_folder_and_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(byte_level()))
    asked: list[Any] = []

    def download(repo: str, name: str, revision: str | None = None) -> str:
        asked.append((repo, name, revision))
        if repo != "openai-community/gpt2":
            raise OSError("gated\nrepository")
        return str(file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    found = [
        fetch_tokenizer(HfConfig(path=path, revision="abc", bos="<|endoftext|>")).fingerprint
        for path in (str(file), str(tmp_path), "openai-community/gpt2")
    ]
    assert len(set(found)) == 1 and asked == [("openai-community/gpt2", "tokenizer.json", "abc")]
    with pytest.raises(
        ValueError, match=r"^tokenizer\.path=a/b: no tokenizer\.json can be had .*\(gated repository\)$"
    ):
        fetch_tokenizer(HfConfig(path="a/b"))


def test_save_load_and_pickle(style: tuple[dict[str, Any], HfTokenizer], tmp_path: Path) -> None:
    _, tokenizer = style
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(HfConfig(path="anything", bos=tokenizer._bos), tmp_path)
    for other in (loaded, pickle.loads(pickle.dumps(tokenizer))):
        assert other.fingerprint == tokenizer.fingerprint
        np.testing.assert_array_equal(other.encode(TEXTS[0]), tokenizer.encode(TEXTS[0]))


@pytest.mark.parametrize("name", STYLES)
def test_a_corpus_in_such_tokens(small_corpus: CorpusConfig, tmp_path: Path, name: str) -> None:
    make, bos = STYLES[name]
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(make()))
    cfg = HfConfig(path=str(file), bos=bos)
    cache = tmp_path / "cache"
    dataset: Any = open_dataset(small_corpus, cfg, global_batch=2, seed=0, cache=cache)
    bytewise: Any = open_dataset(small_corpus, BytesConfig(), global_batch=2, seed=0, cache=cache)
    assert dataset.document_bytes("val").tolist() == bytewise.document_bytes("val").tolist()
    # The same file elsewhere is the same tokenizer; a changed one is another.
    copy = tmp_path / "copy.json"
    copy.write_text(file.read_text())
    assert prepare(small_corpus, HfConfig(path=str(copy), bos=bos, name="copy"), cache) == dataset.folder
    if name == "byte_level":
        file.write_text(json.dumps(byte_level(500)))
        assert prepare(small_corpus, cfg, cache) != dataset.folder


def test_another_tokenizer_than_the_folder_s_is_refused(small_corpus: CorpusConfig, tmp_path: Path) -> None:
    cfg = BpeConfig(vocab_size=300)
    folder = prepare(small_corpus, cfg, tmp_path)
    BpeTokenizer.train(TEXTS, vocab_size=300).save(folder)
    with pytest.raises(ValueError, match=r"was tokenized with another tokenizer; remove the folder"):
        open_dataset(small_corpus, cfg, global_batch=2, seed=0, cache=tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json: is missing; remove the folder to have it made again"):
        open_dataset(small_corpus, cfg, global_batch=2, seed=0, cache=tmp_path)
