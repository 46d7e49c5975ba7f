"""Tokenizers: bytes, byte-level BPE trained on the train split, and those made elsewhere (``data.pretrained``).

All are exact: ``decode(encode(text)) == text`` for any text that has a UTF-8 form, and the bytes of the tokens add up
to the bytes of the text, which is what makes bits per byte comparable across tokenizers.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data.config import BpeConfig, HfConfig, TokenizerConfig
from data.words import GPT2_ASCII, WordMemory, cut_by_pattern

log = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"


class Tokenizer(Protocol):
    """What the rest of the project may ask of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """All ids, BOS included."""

    @property
    def bos_id(self) -> int:
        """Marks the start of a document; no text encodes to it."""

    @property
    def token_bytes(self) -> np.ndarray:
        """(vocab_size,) int64: bytes of text that each token stands for, 0 for BOS."""

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of kind and vocabulary: equal fingerprints encode alike."""

    def encode(self, text: str) -> np.ndarray:
        """(n,) integer ids, without BOS. Raises UnicodeEncodeError for text without a UTF-8 form (lone surrogates)."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text; BOS is dropped, and bytes that are no UTF-8 (a model's, or a cut character's) become U+FFFD."""

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Text as tokens arrive: a character is held back until all its bytes are there. The joined text is
        ``decode(ids)``."""

    def save(self, folder: Path) -> None:
        """Writes what ``load_tokenizer`` needs into an existing folder."""


class _PieceTokenizer:
    """The half that is common to all tokenizers whose tokens are strings of bytes. BOS is the last id, or ``bos_id``."""

    def __init__(self, kind: str, pieces: Sequence[bytes], merges: object = (), bos_id: int | None = None) -> None:
        self._pieces = [*pieces, b""] if bos_id is None else [*pieces]
        self._bos_id = len(pieces) if bos_id is None else bos_id
        description = json.dumps([kind, [piece.hex() for piece in pieces], merges], separators=(",", ":"))
        self._fingerprint = hashlib.sha256(description.encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    @property
    def bos_id(self) -> int:
        return self._bos_id

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @cached_property
    def token_bytes(self) -> np.ndarray:
        return np.array([len(piece) for piece in self._pieces], dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self._pieces[token] for token in ids).decode("utf-8", errors="replace")

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in ids:
            if text := decoder.decode(self._pieces[token]):
                yield text
        if text := decoder.decode(b"", final=True):
            yield text


class BytesTokenizer(_PieceTokenizer):
    """Id = byte; BOS = 256."""

    def __init__(self) -> None:
        super().__init__("bytes", [bytes([byte]) for byte in range(256)])

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def save(self, folder: Path) -> None:
        """Nothing to store."""


class BpeTokenizer(_PieceTokenizer):
    """Byte-level BPE of the ``tokenizers`` library. The library knows no special token, so that no text can spell
    BOS."""

    def __init__(self, serialized: str) -> None:
        """``serialized``: the contents of a tokenizer.json file."""
        import tokenizers  # only when used: it loads a native library

        self._bpe = tokenizers.Tokenizer.from_str(serialized)
        byte_of = {char: byte for byte, char in enumerate(byte_characters())}
        size = self._bpe.get_vocab_size(with_added_tokens=False)
        pieces = [bytes(byte_of[char] for char in self._bpe.id_to_token(token) or "") for token in range(size)]
        model: dict[str, Any] = json.loads(serialized)["model"]
        super().__init__("bpe", pieces, model["merges"])
        self._words = WordMemory(
            cut_by_pattern(GPT2_ASCII), self._encode_batch, self.token_bytes
        )  # as ``train`` has it

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int) -> BpeTokenizer:
        """Learns merges until there are ``vocab_size`` tokens (BOS among them), or, with a warning, until none is left.

        Deterministic: the result depends on the texts only, not on threads.
        """
        import tokenizers

        bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            initial_alphabet=byte_characters(),  # all 256 bytes, seen or not: any text can be encoded
            special_tokens=[],
            show_progress=False,
        )
        bpe.train_from_iterator(texts, trainer)
        trained = cls(bpe.to_str())
        if trained.vocab_size < vocab_size:
            log.warning("the train split gives a vocabulary of %d, not %d", trained.vocab_size, vocab_size)
        return trained

    def encode(self, text: str) -> np.ndarray:
        text.encode()  # the library's own error for a lone surrogate is a TypeError about something else
        return self._words.encode(text)

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [found.ids for found in self._bpe.encode_batch_fast(texts, add_special_tokens=False)]

    def save(self, folder: Path) -> None:
        (folder / TOKENIZER_FILE).write_text(self._bpe.to_str(), encoding="utf-8")

    def __reduce__(self) -> tuple[type[BpeTokenizer], tuple[str]]:
        return BpeTokenizer, (self._bpe.to_str(),)


def byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte, by byte.

    A byte that prints in Latin-1 stands for itself; the others get the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def build_tokenizer(cfg: TokenizerConfig, train_texts: Iterable[str]) -> Tokenizer:
    """Makes a tokenizer, training it on ``train_texts`` (the train split, nothing else) if its kind learns.

    Raises ValueError for one made elsewhere that cannot be had or is not exact.
    """
    if isinstance(cfg, BpeConfig):
        return BpeTokenizer.train(train_texts, vocab_size=cfg.vocab_size)
    if isinstance(cfg, HfConfig):
        from data.pretrained import fetch_tokenizer

        return fetch_tokenizer(cfg)
    return BytesTokenizer()


def load_tokenizer(cfg: TokenizerConfig, folder: Path) -> Tokenizer:
    """The tokenizer that was saved in a prepared folder. Raises ValueError if its file is missing."""
    if not isinstance(cfg, BpeConfig | HfConfig):
        return BytesTokenizer()
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        raise ValueError(f"{file}: is missing; remove the folder to have it made again")
    if isinstance(cfg, BpeConfig):
        return BpeTokenizer(file.read_text(encoding="utf-8"))
    from data.pretrained import HfTokenizer

    return HfTokenizer(file.read_text(encoding="utf-8"), cfg.bos)
