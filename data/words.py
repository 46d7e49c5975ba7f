"""A byte-pair tokenizer's memory: text repeats itself, and looking a piece of it up is several times faster than taking
it apart again."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

Cut = Callable[[str], list[str]]
"""Cuts a text so that the tokens of the parts, one after the other, are the tokens of the text."""

# A space after a character that is none: for the tokenizers that use this, no token and no rule reaches across.
_BORDER = re.compile(r"(?<=\S) ")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")

GPT2_ASCII = r" ?[A-Za-z]+| ?[0-9]+|'(?:[stmd]|re|ve|ll)| ?[^\t-\r A-Za-z0-9]+|[\t-\r ]+(?![^\t-\r ])|[\t-\r ]+"
"""GPT-2's pattern as it reads where all is ASCII, for Python's ``re``, whose ``\\w`` and ``\\s`` are other sets than the
library's. Alternatives that cannot begin alike stand in the order of how often they match: this is most of the time."""

MAX_PARTS = 1 << 20
MAX_CHARS = 48
"""Longer parts are rare and come once: they are not kept."""


def cut_at_spaces(text: str) -> list[str]:
    """At every space after a character that is none, which begins the next part. Right if no token crosses there."""
    first, *others = _BORDER.split(text)
    return [first, *[f" {word}" for word in others]]


def cut_by_pattern(ascii_pattern: str) -> Cut:
    """At the ends of a pattern's matches, where all is ASCII; around another character as ``cut_at_spaces`` does. Right
    if the tokenizer takes a text apart by the pattern that this is the form for ASCII of."""
    find = re.compile(ascii_pattern).findall

    def cut(text: str) -> list[str]:
        if text.isascii():
            return find(text)
        if len(text.encode()) > 1.05 * len(text):  # it is faster, and most words would be cut so in any case
            return cut_at_spaces(text)
        parts: list[str] = []
        at = 0
        while foreign := _NOT_ASCII.search(text, at):
            start = _border_before(text, at, foreign.start())
            border = _BORDER.search(text, foreign.end())
            end = border.start() if border else len(text)
            parts += find(text, at, start)
            parts.append(text[start:end])
            at = end
        return parts + find(text, at)

    return cut


def _border_before(text: str, least: int, position: int) -> int:
    """The start of the last border in ``text[least:position]``, or ``least``, which is a border too."""
    while (space := text.rfind(" ", least, position)) > least:
        if not text[space - 1].isspace():
            return space
        position = space
    return least


class _Known(dict[str, list[int]]):
    """Ids by part. One that is asked for the first time gets an empty list, to be filled before anyone reads it."""

    def __init__(self) -> None:
        self.missing: list[str] = []

    def __missing__(self, part: str) -> list[int]:
        self.missing.append(part)
        ids: list[int] = []
        self[part] = ids
        return ids


class WordMemory:
    """``encode`` of a text as the ids of its parts, joined."""

    def __init__(
        self, cut: Cut, encode_batch: Callable[[Sequence[str]], list[list[int]]], token_bytes: np.ndarray
    ) -> None:
        """``encode_batch``: texts -> ids of each, without special tokens. ``token_bytes``: as ``Tokenizer``'s."""
        self._cut, self._encode_batch, self._token_bytes = cut, encode_batch, token_bytes
        self._known = _Known()

    def encode(self, text: str) -> np.ndarray:
        """(n,) uint32 ids."""
        if len(self._known) > MAX_PARTS:
            self._known = _Known()
        known = self._known
        try:
            found = list(map(known.__getitem__, self._cut(text)))
            if known.missing:
                self._learn(known)
        except BaseException:
            self._known = _Known()  # some of its lists may be empty still
            raise
        return np.fromiter(chain.from_iterable(found), dtype=np.uint32)

    def _learn(self, known: _Known) -> None:
        """Fills the lists of the missing parts."""
        # One call of the library costs as much as a hundred characters: what can stand in one text goes in one text.
        joined = [part for part in known.missing if part.startswith(" ") and not part[-1].isspace()]
        single = [part for part in known.missing if not part.startswith(" ") or part[-1].isspace()]
        ids, *others = self._encode_batch(["".join(joined), *single])
        for part, its_ids in chain(
            zip(joined, self._parts(ids, joined), strict=True), zip(single, others, strict=True)
        ):
            known[part].extend(its_ids)
        for part in known.missing:
            if len(part) > MAX_CHARS:
                del known[part]
        known.missing.clear()

    def _parts(self, ids: list[int], joined: Sequence[str]) -> list[list[int]]:
        """The ids of each part in those of all of them, told by their bytes.

        Raises RuntimeError if a token crosses a border after all.
        """
        if not joined:
            return []
        wanted = np.cumsum([len(part.encode()) for part in joined], dtype=np.int64)
        there = np.cumsum(self._token_bytes[ids], dtype=np.int64)
        ends = np.searchsorted(there, wanted) + 1
        if len(there) != ends[-1] or (there[ends - 1] != wanted).any():
            raise RuntimeError("a token crosses the border between two words: this tokenizer must not use WordMemory")
        return [ids[begin:end] for begin, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)]
