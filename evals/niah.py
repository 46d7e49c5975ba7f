"""A needle in a haystack (RULER, arXiv 2404.06654, single NIAH): a sentence with a number is hidden in a long text, and the
number is asked for at its end.

Small models can hardly say a number in full, so two things are measured: **accuracy**, the true number is the likeliest of
``candidates`` (chance: one in so many), and **exact**, greedy decoding gives it digit by digit. A two-pass model's accuracy
is also shown teacher-forced; what it says is its recurrence's alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.dataset import IGNORED, Batch
from data.randomness import key
from data.tokenizers import Tokenizer
from evals.suite import Parts, Result, Subject, suite
from models.config import at_least, one_of
from models.evaluate import autocast

NAMES = ("Adam", "Ruth", "Noah", "Leah", "Saul", "Mary", "Amos", "Joel", "Ezra", "Seth", "Dan", "Eve")
NEEDLE = " The number of {name} is {number}. "
QUESTION = " The number of {name} is"
ANSWER = " {number}"
"""With its space, as in the needle: tokenizers join a space to what follows it."""


@dataclass
class NiahConfig:
    """See `conf/suite/niah.yaml`."""

    lengths: list[int] = field(default_factory=lambda: [256, 512, 1024])
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    samples: int = 20
    candidates: int = 10
    digits: int = 4
    haystack: str = "corpus"
    seed: int = 0

    def check(self, path: str) -> None:
        one_of(f"{path}.haystack", self.haystack, ("corpus", "noise"))
        for name in ("samples", "digits"):
            at_least(f"{path}.{name}", getattr(self, name), 1)
        at_least(f"{path}.candidates", self.candidates, 2)
        if not self.lengths or min(self.lengths) < 64:
            raise ValueError(
                f"{path}.lengths={self.lengths}: each must be at least 64 tokens, to hold needle and question"
            )
        if not self.depths or min(self.depths) < 0 or max(self.depths) > 1:
            raise ValueError(f"{path}.depths={self.depths}: shares of the text before the needle, from 0 to 1")
        if self.candidates > 10**self.digits - 10 ** (self.digits - 1):
            raise ValueError(f"{path}.candidates={self.candidates}: there are fewer numbers of {self.digits} digits")


@suite("niah", NiahConfig)
def evaluate(subject: Subject, config: NiahConfig, parts: Parts) -> Result:
    """Metrics ``accuracy/length=<n>`` and ``exact/length=<n>`` over all depths, and ``accuracy/length=<n>/depth=<d>``;
    ``<mode>/accuracy/...`` in other modes than the deployed one."""
    result = Result(tables={"chance": 1 / config.candidates})
    tokenizer = subject.dataset.tokenizer
    if tokenizer is None:
        raise ValueError(f"data.kind={subject.config.data.kind}: niah needs a model of text")
    longest = subject.config.mixer.max_len()
    for length in config.lengths:
        room = length + 4 * config.digits
        if longest is not None and longest < room:
            name = f"accuracy/length={length}"
            result.metrics[name] = None
            result.reasons[name] = f"mixer {subject.config.mixer.kind} takes at most {longest} tokens, not {room}"
            continue
        for mode in subject.model.modes:
            deployed = mode == subject.model.modes[0]
            prefix, name = ("", f"{length}") if deployed else (f"{mode}/", f"{length}/{mode}")
            found = []
            for depth in config.depths:
                cell = partial(_cell, subject, tokenizer, config, length, depth, mode)
                part = parts(f"{name}/{depth}", cell)
                result.metrics[f"{prefix}accuracy/length={length}/depth={depth:g}"] = part[0]
                found.append(part)
            result.metrics[f"{prefix}accuracy/length={length}"] = float(np.mean([part[0] for part in found]))
            if deployed:
                result.metrics[f"exact/length={length}"] = float(np.mean([part[1] for part in found]))
    return result


def _cell(
    subject: Subject, tokenizer: Tokenizer, config: NiahConfig, length: int, depth: float, mode: str
) -> list[float]:
    """(accuracy, exact) at one length and depth; accuracy alone in another mode than the deployed one."""
    rng = np.random.default_rng(key("niah", config.seed, length, round(1000 * depth)))
    right, exact = 0.0, 0
    rows, deployed = subject.rows(mode), mode == subject.model.modes[0]
    was_training = subject.model.training
    subject.model.eval()
    try:
        for begin in range(0, config.samples, rows):
            n = min(rows, config.samples - begin)
            prompts, answers = _samples(subject, tokenizer, config, length, depth, n, rng)
            if deployed:
                nats, greedy = _answer(subject, prompts, answers)
                exact += int(greedy.sum())
            else:
                nats = _told(subject, prompts, answers)
            right += float(found_share(nats).sum())
    finally:
        subject.model.train(was_training)
    return [right / config.samples, exact / config.samples] if deployed else [right / config.samples]


def found_share(nats_BC: np.ndarray) -> np.ndarray:
    """(B, candidates) nats, the true one's first -> (B,): 1 where it is the likeliest alone, a half where it shares that
    with another, and so on: a model that cannot tell them apart is at chance. Sums of equal terms count as equal."""
    best_B1 = nats_BC.min(axis=1, keepdims=True)
    among_BC = nats_BC <= best_B1 + 1e-6 * np.abs(best_B1)
    return among_BC[:, 0] / among_BC.sum(axis=1)


def _samples(
    subject: Subject,
    tokenizer: Tokenizer,
    config: NiahConfig,
    length: int,
    depth: float,
    n: int,
    rng: np.random.Generator,
) -> tuple[Tensor, list[list[list[int]]]]:
    """Prompts (n, length), and for each the candidates' tokens, the true one first."""
    prompts, answers = [], []
    for _ in range(n):
        low = 10 ** (config.digits - 1)
        numbers = low + rng.choice(9 * low, size=config.candidates, replace=False)
        name = NAMES[rng.integers(len(NAMES))]
        needle = tokenizer.encode(NEEDLE.format(name=name, number=numbers[0])).tolist()
        question = tokenizer.encode(QUESTION.format(name=name)).tolist()
        hay = _hay(subject, tokenizer, config, length - 1 - len(needle) - len(question), rng)
        cut = round(depth * len(hay))
        prompts.append([tokenizer.bos_id, *hay[:cut], *needle, *hay[cut:], *question])
        answers.append([tokenizer.encode(ANSWER.format(number=number)).tolist() for number in numbers])
    return torch.tensor(prompts), answers


def _hay(
    subject: Subject, tokenizer: Tokenizer, config: NiahConfig, length: int, rng: np.random.Generator
) -> list[int]:
    if config.haystack == "noise":
        words = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
        once = tokenizer.encode(words).tolist()
        return (once * (length // len(once) + 1))[:length]
    batches = subject.dataset.eval_batches("test", 64)
    flat = torch.cat([batch.inputs_BT.flatten() for batch, _ in zip(batches, range(64), strict=False)])
    flat = flat[flat != tokenizer.bos_id]
    begin = int(rng.integers(max(1, len(flat) - length)))
    found = flat[begin : begin + length].tolist()
    if len(found) < length:
        raise ValueError(f"length={length}: the test split is too short for such a haystack; use haystack=noise")
    return found


@torch.no_grad()
def _answer(subject: Subject, prompts_BT: Tensor, answers: list[list[list[int]]]) -> tuple[np.ndarray, np.ndarray]:
    """(B, candidates) nats of each, and (B,) bool, whether greedy decoding says the true one, which is the first. The prompt
    is read once; all candidates go on from its state."""
    model, device = subject.model, subject.device
    rows, steps = prompts_BT.shape
    padded = _padded(answers)
    longest = padded[0][0].shape[1]
    with autocast(device, subject.config.precision):
        state = model.init_state(rows, steps + longest)
        features_BTD, state = model.read(prompts_BT.to(device), state)
        last_BD = features_BTD[:, -1:]
        nats = np.zeros((rows, len(padded)))
        for c, (tokens_BT, targets_BT) in enumerate(padded):
            told_BTD, _ = model.read(tokens_BT[:, :-1].to(device), state) if longest > 1 else (last_BD[:, :0], None)
            nats[:, c] = _nats(subject, torch.cat((last_BD, told_BTD), dim=1), targets_BT)
        said = torch.zeros(rows, longest, dtype=torch.int64)
        features_B1D = last_BD
        for t in range(longest):
            said[:, t] = model.logits(features_B1D)[:, -1].argmax(-1).cpu()
            if t + 1 < longest:
                features_B1D, state = model.read(said[:, t : t + 1].to(device), state)
    greedy = np.array([said[row, : len(c[0])].tolist() == c[0] for row, c in enumerate(answers)])
    return nats, greedy


@torch.no_grad()
def _told(subject: Subject, prompts_BT: Tensor, answers: list[list[list[int]]]) -> np.ndarray:
    """(B, candidates) nats of each, teacher-forced: without a state, prompt and candidate are read together, once for each."""
    steps, columns = prompts_BT.shape[1], []
    with autocast(subject.device, subject.config.precision):
        for tokens_BT, targets_BT in _padded(answers):
            whole_BT = torch.cat((prompts_BT, tokens_BT[:, :-1]), dim=1).to(subject.device)
            columns.append(_nats(subject, subject.model.features(whole_BT)[:, steps - 1 :], targets_BT))
    return np.stack(columns, axis=1)


def _padded(answers: list[list[list[int]]]) -> list[tuple[Tensor, Tensor]]:
    """For each candidate, of all rows: (tokens, targets), both (B, longest)."""
    longest = max(len(tokens) for row in answers for tokens in row)
    out = []
    for candidate in zip(*answers, strict=True):
        tokens_BT = torch.full((len(answers), longest), 0)
        targets_BT = torch.full((len(answers), longest), IGNORED)
        for row, tokens in enumerate(candidate):
            tokens_BT[row, : len(tokens)] = targets_BT[row, : len(tokens)] = torch.tensor(tokens)
        out.append((tokens_BT, targets_BT))
    return out


def _nats(subject: Subject, features_BTD: Tensor, targets_BT: Tensor) -> np.ndarray:
    """(B,) of all targets of a row."""
    fields: dict[str, Any] = dict.fromkeys(Batch._fields)
    batch = Batch(**fields | {"inputs_BT": targets_BT, "targets_BT": targets_BT.to(subject.device), "n_targets": 1})
    return subject.model.graded(features_BTD, batch).nats_BT.sum(1).float().cpu().numpy()
