"""The memory of a tokenizer: its cuts are the library's, and nothing half learnt stays in it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import tokenizers

from data.pretrained import PATTERNS
from data.words import GPT2_ASCII, WordMemory, cut_at_spaces, cut_by_pattern

SPLIT_GPT2 = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLITS = {GPT2_ASCII: SPLIT_GPT2} | {
    form: tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern, form in PATTERNS.items()
}


@pytest.mark.parametrize("form", SPLITS)
def test_patterns_for_ascii_are_the_library_s(form: str) -> None:
    """All texts of up to four characters of all kinds, and pairs of all ASCII characters."""
    kinds = ["a", "s", "L", "7", "'", " ", "\n", "\r", "\t", "\x1c", ".", "_"]
    texts = ["".join(text) for size in (1, 2, 3, 4) for text in product(kinds, repeat=size)]
    texts += [chr(one) + chr(two) for one in range(128) for two in range(128)]
    texts += [f"x{quote}{end}y" for quote in "'`" for end in ("re", "VE", "lL", "m", "D", "T", "sat", "r", "v")]
    texts += ["12345678 1234", "a" * 50 + "  \r\n\r\n  b", "x" + " " * 9 + "\n \n" + " " * 9 + "y"]
    cut = cut_by_pattern(form)
    for text in texts:
        wanted = [text[begin:end] for _, (begin, end) in SPLITS[form].pre_tokenize_str(text)]
        assert cut(text) == wanted, repr(text)


def test_around_other_characters_the_cut_is_at_spaces() -> None:
    cut = cut_by_pattern(GPT2_ASCII)
    start = "(more of) it" * 20
    begin = cut(start)
    for text, wanted in (
        (" it's  na\u00efve-ish, isn't it", [" it", "'s", "  na\u00efve-ish,", " isn", "'t", " it"]),
        (" \u65e5  a.b \u8a9e", [" \u65e5", " ", " a", ".", "b", " \u8a9e"]),
        (" a\u00a0 b c", [" a\u00a0 b", " c"]),  # a space after white space is no border
        (" a   \u00e9", [" a", "   \u00e9"]),
    ):
        assert cut(start + text) == begin + wanted
    assert cut("\u00e9t\u00e9 a.b") == ["\u00e9t\u00e9", " a.b"], "where most is not ASCII, at spaces everywhere"
    assert cut("") == [] and cut_at_spaces("  two  words ") == ["  two", "  words", " "]


def test_a_call_that_fails_leaves_nothing_half_learnt() -> None:
    broken = True

    def encode_batch(texts: list[str]) -> list[list[int]]:
        if broken:
            raise MemoryError
        return [list(text.encode()) for text in texts]

    memory = WordMemory(cut_at_spaces, encode_batch, np.ones(256, dtype=np.int64))
    with pytest.raises(MemoryError):
        memory.encode("a text of words")
    broken = False
    assert bytes(memory.encode("a text of words").tolist()) == b"a text of words"


def test_a_token_across_a_border_is_noticed() -> None:
    memory = WordMemory(cut_at_spaces, lambda texts: [[0] * (len(text) // 2) for text in texts], np.array([2]))
    with pytest.raises(RuntimeError, match="crosses"):
        memory.encode("x abc de f")
