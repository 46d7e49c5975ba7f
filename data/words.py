"""A byte-pair tokenizer's memory for words: text repeats itself, and looking a word up is several times faster than
taking it apart again."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

# A space after a character that is none: for the tokenizers that use this, no token and no rule reaches across.
_BORDER = re.compile(r"(?<=\S) ")

MAX_WORDS = 1 << 20
MAX_CHARS = 48
"""Longer words are rare and come once: they are not kept."""


class WordMemory:
    """``encode`` of a text as the ids of its words, joined. Gives what the whole text at once would give, if no token
    crosses from a character that is no white space into a space after it."""

    def __init__(self, encode_batch: Callable[[Sequence[str]], list[list[int]]], token_bytes: np.ndarray) -> None:
        """``encode_batch``: texts -> ids of each, without special tokens. ``token_bytes``: as ``Tokenizer``'s."""
        self._encode_batch, self._token_bytes = encode_batch, token_bytes
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> np.ndarray:
        """(n,) uint32 ids."""
        first, *words = _BORDER.split(text)  # the first has no space before it
        if not words:
            return np.array(self._encode_batch([text])[0], dtype=np.uint32)
        last = words.pop()  # white space may end it, and then a space after it is no border
        if len(self._known) > MAX_WORDS:
            self._known = {}
        known = self._known
        missing = [word for word in dict.fromkeys(words) if word not in known]
        ids, begin, end = self._encode_batch(["".join(f" {word}" for word in missing), first, f" {last}"])
        known.update(zip(missing, self._parts(ids, missing), strict=True))
        found = chain(begin, chain.from_iterable(map(known.__getitem__, words)), end)
        out = np.fromiter(found, dtype=np.uint32)
        for word in missing:
            if len(word) > MAX_CHARS:
                del known[word]
        return out

    def _parts(self, ids: list[int], words: Sequence[str]) -> list[list[int]]:
        """The ids of each word in those of all of them, told by their bytes: one call of the library costs as much as a
        hundred characters.

        Raises RuntimeError if a token crosses a border after all.
        """
        if not words:
            return []
        wanted = np.cumsum([1 + len(word.encode()) for word in words], dtype=np.int64)
        there = np.cumsum(self._token_bytes[ids], dtype=np.int64)
        ends = np.searchsorted(there, wanted) + 1
        if len(there) != ends[-1] or (there[ends - 1] != wanted).any():
            raise RuntimeError("a token crosses the border between two words: this tokenizer must not use WordMemory")
        return [ids[begin:end] for begin, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)]
