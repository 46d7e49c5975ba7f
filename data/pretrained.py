"""Byte-pair tokenizers of the Hugging Face ``tokenizers`` library, made elsewhere: GPT-2's, Llama's and their like.

Every token must stand for known bytes, and those of a document's tokens must be the document's bytes, or bits per byte
would be wrong. Two families can promise that: byte-level BPE, and sentencepiece-style BPE, which writes a space as
``\u2581`` and falls back to tokens such as ``<0x0A>``. What they add to a text (a space at its start, BOS, EOS) is
switched off, special tokens are never recognised in a text, and what else would change a text is refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.config import HfConfig
from data.tokenizers import TOKENIZER_FILE, _PieceTokenizer, byte_characters
from data.words import GPT2_ASCII, Cut, WordMemory, cut_at_spaces, cut_by_pattern

log = logging.getLogger(__name__)

SPACE = "\u2581"
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")

_CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K_ASCII = (
    r"[^\r\nA-Za-z0-9']?[A-Za-z]+|'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|'[A-Za-z]+|[0-9]{1,3}"
    r"| ?[^\t-\r A-Za-z0-9]+[\r\n]*|[\t-\r ]*[\r\n]+|[\t-\r ]+(?![^\t-\r ])|[\t-\r ]+"
)
PATTERNS = {  # with its form for ASCII, as GPT2_ASCII; no alternative goes on from another character to a space
    _CL100K: _CL100K_ASCII,  # cl100k and Llama 3
    _CL100K.replace("{1,3}", ""): _CL100K_ASCII.replace("{1,3}", ""),  # Qwen 2
}

PROBES = (
    "",
    " ",
    "  two  spaces  ",
    "\n\r\n\t \u00a0\u2003\u2581 \u2581\u2581a",
    "\x00\x01\x7f\x80\xff",
    "nai\u0308ve na\u00efve \ufb01 \u212b",  # one letter in two forms, a ligature: nothing may be normalised
    "A CAPITAL, I'LL 1234567 a_b-c\u2026",
    "\u65e5\u672c\u8a9e \U0001f469\u200d\U0001f469 \U0010ffff\ufeff",
    "<s></s><unk><|endoftext|>[CLS] <0x0A>",
)


def fetch_tokenizer(cfg: HfConfig) -> HfTokenizer:
    """From a file, a folder or the hub. Raises ValueError naming the key."""
    file = cfg.file()
    if file is None:
        import huggingface_hub

        try:
            file = Path(huggingface_hub.hf_hub_download(cfg.path, TOKENIZER_FILE, revision=cfg.revision))
        except Exception as error:  # noqa: BLE001 - the network, the hub and its gates have errors of their own
            reason = " ".join(str(error).split())
            raise ValueError(
                f"tokenizer.path={cfg.path}: no {TOKENIZER_FILE} can be had from the hub ({reason})"
            ) from None
    try:
        return HfTokenizer(file.read_text(encoding="utf-8"), cfg.bos)
    except ValueError as error:
        raise ValueError(f"tokenizer.path={cfg.path}: {error}") from None


class HfTokenizer(_PieceTokenizer):
    """A tokenizer.json, made exact."""

    def __init__(self, serialized: str, bos: str | None = None) -> None:
        """``serialized``: the contents of the file. Raises ValueError, without a key, if it cannot be exact."""
        import tokenizers  # only when used: it loads a native library

        self._serialized, self._bos = serialized, bos
        try:
            spec: dict[str, Any] = json.loads(serialized)
            model, added = spec["model"], spec.get("added_tokens") or []
            vocab: dict[str, int] = model["vocab"]
            if model["type"] != "BPE":
                raise ValueError(f"its model is {model['type']}, and only BPE keeps every byte of a text")
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"is no tokenizer.json ({type(error).__name__}: {error})") from None
        self._metaspace = _make_exact(spec)
        special = {token["content"]: token["id"] for token in added if token["special"]}
        plain = {token["content"]: token["id"] for token in added if not token["special"]}
        for token in added:
            if not token["special"] and (token["lstrip"] or token["rstrip"]):
                raise ValueError(f"its token {token['content']!r} swallows the spaces around it")
        spec["added_tokens"] = [token for token in added if not token["special"]]
        size = 1 + max([*vocab.values(), *special.values(), *plain.values()])
        pieces = [b""] * size
        byte_of = {char: byte for byte, char in enumerate(byte_characters())}
        for token, number in vocab.items():
            if token not in special and token != model.get("unk_token"):
                pieces[number] = _metaspace_bytes(token) if self._metaspace else _byte_level_bytes(token, byte_of)
        for token, number in plain.items():
            pieces[number] = token.encode()
        bos_id = None
        if bos is not None:
            bos_id = special.get(bos, vocab.get(bos))
            if bos_id is None:
                raise ValueError(f"has no token {bos!r} (tokenizer.bos)")
            pieces[bos_id] = b""
        self._space_bytes = [vocab.get(f"<0x{byte:02X}>", -1) for byte in SPACE.encode()]
        self._check_bytes(model, vocab)
        self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(spec))
        canonical = hashlib.sha256(json.dumps([spec, bos], sort_keys=True).encode()).hexdigest()
        super().__init__("hf", pieces, canonical, bos_id)
        self._words: WordMemory | None = None
        self._probe([*special, bos or ""])
        if cut := self._cut(spec, plain):
            self._words = WordMemory(cut, self._encode_batch, self.token_bytes)

    def encode(self, text: str) -> np.ndarray:
        text.encode()  # the library's own error for a lone surrogate is a TypeError about something else
        if not self._metaspace or SPACE not in text:
            return self._encode(text)
        # To the library this character is a space. Its bytes have tokens of their own.
        parts = [self._encode(part) for part in text.split(SPACE)]
        between = np.array(self._space_bytes, dtype=np.uint32)
        return np.concatenate([ids for part in parts for ids in (between, part)][1:])

    def _encode(self, text: str) -> np.ndarray:
        if self._words is not None:
            return self._words.encode(text)
        return np.array(self._encode_batch([text])[0], dtype=np.uint32)

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [found.ids for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def save(self, folder: Path) -> None:
        (folder / TOKENIZER_FILE).write_text(self._serialized, encoding="utf-8")

    def __reduce__(self) -> tuple[type[HfTokenizer], tuple[str, str | None]]:
        return HfTokenizer, (self._serialized, self._bos)

    def _check_bytes(self, model: dict[str, Any], vocab: dict[str, int]) -> None:
        if self._metaspace:
            wanted = [f"<0x{byte:02X}>" for byte in range(256)]
            if not model.get("byte_fallback"):
                raise ValueError("has no byte fallback: a character that it does not know would be lost")
        else:
            wanted = byte_characters()
        if missing := [token for token in wanted if token not in vocab]:
            raise ValueError(f"has no token for {len(missing)} of the 256 bytes, the first is {missing[0]!r}")

    def _cut(self, spec: dict[str, Any], added: Collection[str]) -> Cut | None:
        """How a text may be cut without changing its tokens; None if a token or rule may reach across any border."""
        if any(re.search(r"\S ", token) for token in added):
            return None
        if self._metaspace:
            if spec["model"].get("ignore_merges"):
                return None
            across = any(re.search(rf"[^\s{SPACE}]{SPACE}", token) for token in spec["model"]["vocab"])
            return None if across else cut_at_spaces
        pattern = _ascii_pattern(spec["pre_tokenizer"])
        if pattern is None:
            return None
        return cut_at_spaces if added else cut_by_pattern(pattern)  # an added token may span pieces

    def _probe(self, special: Iterable[str]) -> None:
        for text in (*PROBES, "".join(PROBES), *special):
            ids = self.encode(text)
            if self.decode(ids) != text or self.token_bytes[ids].sum() != len(text.encode()):
                raise ValueError(f"does not keep the bytes of a text: {text!r} comes back as {self.decode(ids)!r}")
            if (ids == self.bos_id).any():
                raise ValueError(f"a text can spell BOS: {text!r}")


def _make_exact(spec: dict[str, Any]) -> bool:
    """Takes out of a tokenizer.json, in place, what adds to a text; True for the sentencepiece style, False for byte
    level. Raises ValueError for anything else."""
    spec["post_processor"] = spec["truncation"] = spec["padding"] = None
    if dropout := spec["model"].get("dropout"):
        raise ValueError(f"has dropout {dropout}: a text would have no fixed tokens")
    steps, normalizers = _chain(spec.get("pre_tokenizer")), _chain(spec.get("normalizer"))
    if any(step["type"] == "ByteLevel" for step in steps):
        for step in steps:
            if step.get("add_prefix_space"):
                step["add_prefix_space"] = False
                log.info("the tokenizer's space at the start of a text is left out: it would be no byte of the text")
        if normalizers:
            raise ValueError(f"its normalizer {normalizers[0]['type']} changes the text")
        return False
    kept = [step for step in normalizers if step != {"type": "Prepend", "prepend": SPACE}]
    if len(kept) < len(normalizers):
        log.info("the tokenizer's space at the start of a text is left out: it would be no byte of the text")
    writes_spaces = False
    for step in kept:
        if step != {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}:
            raise ValueError(f"its normalizer {step['type']} changes the text")
        writes_spaces = True
    for step in steps:
        if step["type"] != "Metaspace" or step.get("replacement") != SPACE:
            raise ValueError(f"its pre-tokenizer {step['type']} is neither byte-level nor a metaspace")
        step["prepend_scheme"] = "never"
        step.pop("add_prefix_space", None)
        writes_spaces = True
    if not writes_spaces:
        raise ValueError("is neither byte-level nor in the style of sentencepiece")
    spec["normalizer"] = {"type": "Sequence", "normalizers": kept} if kept else None
    return True


def _chain(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A step, or the steps of a sequence."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        return list(step.get("normalizers") or step.get("pretokenizers") or [])
    return [step]


def _ascii_pattern(pre_tokenizer: dict[str, Any]) -> str | None:
    """The form for ASCII of the pattern that takes text apart, if it is a known one."""
    steps = _chain(pre_tokenizer)
    if len(steps) == 1:
        return GPT2_ASCII if steps[0].get("use_regex", True) else None
    if len(steps) != 2 or steps[0]["type"] != "Split" or steps[0]["behavior"] != "Isolated":
        return None
    return None if steps[1].get("use_regex", True) else PATTERNS.get(steps[0]["pattern"].get("Regex"))


def _metaspace_bytes(token: str) -> bytes:
    if byte := BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace(SPACE, " ").encode()


def _byte_level_bytes(token: str, byte_of: dict[str, int]) -> bytes:
    if all(char in byte_of for char in token):
        return bytes(byte_of[char] for char in token)
    return token.encode()  # no text becomes it: it holds a character that stands for no byte
