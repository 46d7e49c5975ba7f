from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from data.config import BpeConfig, BytesConfig, CorpusConfig
from data.sources import documents
from data.tokenizers import BpeTokenizer, BytesTokenizer, Tokenizer, build_tokenizer, byte_characters, load_tokenizer

AWKWARD = (
    "",
    " ",
    "\n\r\n\t \u00a0\u2003",
    "\x00\x01\x7f\x80\xff",
    "naïve Ångström",
    "e\u0301 \u00e9",  # one letter in two forms: nothing may be normalised
    "日本語とひらがな",
    "👩‍👩‍👧‍👦 🇸🇪 \U0010ffff \ufffd\ufeff",
    "<|endoftext|><s>[BOS]<|bos|>",
    "שלום עולם مرحبا",
    "  leading, trailing  \n\n",
    "don't I'LL 1234567 a_b-c…",
    "\u2028\u2029\x85\x1c",
)
"""Texts that tokenizers and line readers trip over."""

TEXTS = [document.text for document in documents(CorpusConfig())[:60]]


@pytest.fixture(scope="module")
def bpe() -> BpeTokenizer:
    return BpeTokenizer.train(TEXTS, vocab_size=512)


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest, bpe: BpeTokenizer) -> Tokenizer:
    return BytesTokenizer() if request.param == "bytes" else bpe


@pytest.mark.parametrize("text", [*AWKWARD, "".join(AWKWARD), "\n".join(TEXTS)])
def test_round_trip_and_byte_counts_are_exact(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert not (ids == tokenizer.bos_id).any()
    assert ids.size == 0 or ids.max() < tokenizer.vocab_size


def test_every_character_of_the_first_planes_survives(tokenizer: Tokenizer) -> None:
    text = "".join(chr(code) for code in [*range(0xD800), *range(0xE000, 0x20000, 7)])
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sizes_and_bos(bpe: BpeTokenizer) -> None:
    assert (BytesTokenizer().vocab_size, BytesTokenizer().bos_id) == (257, 256)
    assert (bpe.vocab_size, bpe.bos_id) == (512, 511)
    for tokenizer in (BytesTokenizer(), bpe):
        assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)
        assert tokenizer.token_bytes[tokenizer.bos_id] == 0
        assert tokenizer.token_bytes[:-1].min() == 1
        assert tokenizer.decode([tokenizer.bos_id, *tokenizer.encode("a"), tokenizer.bos_id]) == "a"
    assert bpe.token_bytes.max() > 3
    assert len(bpe.encode("\n".join(TEXTS))) < 0.6 * len("\n".join(TEXTS))


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("a\ud800")


def test_broken_utf8_decodes_to_replacement_characters(tokenizer: Tokenizer) -> None:
    whole = list(tokenizer.encode("é\x80"))
    assert tokenizer.decode([whole[0]]) in ("\ufffd", "é")
    assert BytesTokenizer().decode([0xC3, 0x41, 0xFF]) == "\ufffdA\ufffd"


def test_streaming_decode_holds_back_cut_characters(tokenizer: Tokenizer) -> None:
    text = "".join(AWKWARD)
    assert "".join(tokenizer.decode_stream(tokenizer.encode(text))) == text
    byte = BytesTokenizer()
    assert list(byte.decode_stream(byte.encode("aé👩b"))) == ["a", "é", "👩", "b"]
    broken = [0xF0, 0x9F, 0x41, 256, 0xC3]
    assert "".join(byte.decode_stream(broken)) == byte.decode(broken) == "\ufffdA\ufffd"
    fed: list[int] = []

    def feed() -> object:
        for token in byte.encode("ab"):
            fed.append(int(token))
            yield token

    next(byte.decode_stream(feed()))  # type: ignore[arg-type]
    assert fed == [ord("a")]  # text comes out as soon as it can


def test_byte_characters_are_those_of_byte_level_bpe() -> None:
    assert sorted(byte_characters()) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pre = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    written = "".join(piece for piece, _ in pre.pre_tokenize_str("\x00 A~\x7f é\u07ff日\U0010ffff"))
    assert written == "".join(byte_characters()[byte] for byte in "\x00 A~\x7f é\u07ff日\U0010ffff".encode())


def test_training_is_deterministic_across_processes_and_threads(bpe: BpeTokenizer) -> None:
    code = (
        "from data.config import CorpusConfig; from data.sources import documents; from data.tokenizers import *;"
        "texts = [document.text for document in documents(CorpusConfig())[:60]];"
        "print(BpeTokenizer.train(texts[::-1], vocab_size=512).fingerprint)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert run.stdout.strip() == bpe.fingerprint


def test_fingerprints_tell_vocabularies_apart(bpe: BpeTokenizer) -> None:
    others = [
        BytesTokenizer(),
        BpeTokenizer.train(TEXTS, vocab_size=511),
        BpeTokenizer.train(TEXTS[1:], vocab_size=512),
    ]
    assert len({bpe.fingerprint, *(other.fingerprint for other in others)}) == 4
    assert BytesTokenizer().fingerprint == BytesTokenizer().fingerprint


def test_save_load_and_pickle(bpe: BpeTokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    text = "".join(AWKWARD)
    for other in (load_tokenizer(BpeConfig(), tmp_path), pickle.loads(pickle.dumps(bpe))):
        assert other.fingerprint == bpe.fingerprint
        np.testing.assert_array_equal(other.encode(text), bpe.encode(text))
    assert (
        pickle.loads(pickle.dumps(BytesTokenizer())).fingerprint == load_tokenizer(BytesConfig(), tmp_path).fingerprint
    )


def test_a_text_too_small_for_the_vocabulary_is_said(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = build_tokenizer(BpeConfig(vocab_size=400), ["abab"])
    assert tokenizer.vocab_size < 400
    assert f"gives a vocabulary of {tokenizer.vocab_size}, not 400" in caplog.text
    assert tokenizer.decode(tokenizer.encode(AWKWARD[7])) == AWKWARD[7]
