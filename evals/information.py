"""How much of the input survives in the last hidden state: all tokens are decoded from that one vector.

One fixed decoder for every mixer (in the published comparison it changed with the encoder, and with it the width and the
learning rate): the vector plus an embedding of the wanted position goes through a small bidirectional transformer, which
tells each token. It is trained on a **frozen** encoder, the run's own weights, which shows what training for the next token
keeps; and **end_to_end** with a fresh encoder of the same config, which shows what the mixer can keep.

A two-pass model is scored as it is deployed, by its recurrence, and teacher-forced beside that. Frozen, each of the two has
a decoder of its own; end to end the encoder is trained teacher-forced, as the model itself is, and one decoder reads both.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.randomness import key
from evals.suite import Parts, Result, Subject, suite
from models.config import above_zero, at_least, one_of
from models.lm import LanguageModel, model_for

log = logging.getLogger(__name__)

WAYS = ("frozen", "end_to_end")


@dataclass
class InformationConfig:
    """See `conf/suite/information.yaml`."""

    length: int = 16
    ways: list[str] = field(default_factory=lambda: list(WAYS))
    steps: int = 800
    fractions: list[float] = field(default_factory=lambda: [0.125, 0.5, 1.0])
    batch: int = 32
    lr: float = 3e-3
    width: int = 128
    layers: int = 2
    test_sequences: int = 128
    seed: int = 0

    def check(self, path: str) -> None:
        for name in ("length", "steps", "batch", "layers", "test_sequences"):
            at_least(f"{path}.{name}", getattr(self, name), 1)
        for way in self.ways:
            one_of(f"{path}.ways", way, WAYS)
        above_zero(f"{path}.lr", self.lr, "3e-3 is usual")
        if self.width % 64:
            raise ValueError(f"{path}.width={self.width}: must be a multiple of 64, the width of a head")
        if not self.fractions or min(self.fractions) <= 0 or max(self.fractions) > 1:
            raise ValueError(f"{path}.fractions={self.fractions}: shares of the steps, above 0 and at most 1")


class Decoder(nn.Module):
    """(B, D) to logits (B, T, vocabulary). The same for every mixer, but for the map from the encoder's width."""

    def __init__(self, d_model: int, vocab_size: int, config: InformationConfig):
        super().__init__()
        self.into = nn.Linear(d_model, config.width)
        self.place_TD = nn.Parameter(torch.zeros(config.length, config.width))
        layer = nn.TransformerEncoderLayer(
            config.width, config.width // 64, 4 * config.width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
        self.head = nn.Linear(config.width, vocab_size)

    def forward(self, vector_BD: Tensor) -> Tensor:
        return self.head(self.blocks(self.into(vector_BD)[:, None] + self.place_TD))


@suite("information", InformationConfig)
def evaluate(subject: Subject, config: InformationConfig, parts: Parts) -> Result:
    """Metrics ``nats/<way>/compute=<f>`` of the input's tokens, and ``retained/<way>/compute=<f>``, the share of the
    unigram's nats that the vector takes away (0: nothing survives, 1: all); ``<mode>/nats/...`` in other modes than the
    deployed one."""
    result = Result()
    if subject.dataset.tokenizer is None:
        raise ValueError(f"data.kind={subject.config.data.kind}: information needs a model of text")
    if config.length > subject.dataset.seq_len:
        raise ValueError(
            f"suite.information.length={config.length}: must be at most the training length, {subject.dataset.seq_len}"
        )
    test_NT = _test(subject, config)
    unigram = parts("unigram", lambda: _unigram(subject, config, test_NT))
    result.metrics["nats/unigram"] = unigram
    for way in config.ways:
        found = parts(way, lambda way=way: _measured(subject, config, way, test_NT))  # type: ignore[misc]
        for mode, by_fraction in found.items():
            prefix = "" if mode == subject.model.modes[0] else f"{mode}/"
            for fraction, nats in zip(config.fractions, by_fraction, strict=True):
                result.metrics[f"{prefix}nats/{way}/compute={fraction:g}"] = nats
                result.metrics[f"{prefix}retained/{way}/compute={fraction:g}"] = 1 - nats / unigram
    return result


def _measured(subject: Subject, config: InformationConfig, way: str, test_NT: Tensor) -> dict[str, list[float]]:
    """By mode, nats a token at each fraction of the steps."""
    modes = subject.model.modes
    if way == "end_to_end":
        return _train(subject, config, way, modes, test_NT)[0]
    return {mode: _train(subject, config, way, (mode,), test_NT)[0][mode] for mode in modes}


def autoencoder(subject: Subject, config: InformationConfig) -> tuple[LanguageModel, float]:
    """A fresh encoder of the run's config, trained end to end, and the nats a token that are left."""
    modes = subject.model.modes[:1]
    found, encoder = _train(subject, replace(config, fractions=[1.0]), "end_to_end", modes, _test(subject, config))
    return encoder, found[modes[0]][0]


def _test(subject: Subject, config: InformationConfig) -> Tensor:
    """(N, T) tokens of the test split."""
    found: list[Tensor] = []
    for batch in subject.dataset.eval_batches("test", subject.batch):
        assert batch.document_BT is not None
        whole = (batch.document_BT >= 0).all(dim=1)
        found.append(batch.inputs_BT[whole, : config.length])
        if sum(map(len, found)) >= config.test_sequences:
            break
    return torch.cat(found)[: config.test_sequences]


def _batches(subject: Subject, config: InformationConfig) -> Iterator[Tensor]:
    """(batch, T) tokens of the train split, in the run's own order."""
    step, left = 0, torch.empty(0, config.length, dtype=torch.int64)
    while True:
        while len(left) < config.batch:
            left = torch.cat((left, subject.dataset.train_batch(step).inputs_BT[:, : config.length]))
            step += 1
        yield left[: config.batch].to(subject.device)
        left = left[config.batch :]


def _unigram(subject: Subject, config: InformationConfig, test_NT: Tensor) -> float:
    """Nats a token under the train split's frequencies (of what the decoder is trained on), each token counted once more."""
    counts = np.ones(subject.dataset.vocab_size)
    for tokens_BT, _ in zip(_batches(subject, config), range(config.steps), strict=False):
        counts += np.bincount(tokens_BT.flatten().cpu().numpy(), minlength=len(counts))
    return float(-np.log(counts / counts.sum())[test_NT.flatten().numpy()].mean())


def _train(
    subject: Subject, config: InformationConfig, way: str, modes: Sequence[str], test_NT: Tensor
) -> tuple[dict[str, list[float]], LanguageModel]:
    """By mode, nats a token of the test sequences at each fraction of the steps; and the encoder. The learning rate falls to
    zero over all steps. A frozen encoder is read in the first of ``modes`` while the decoder is trained."""
    encoder = subject.model if way == "frozen" else model_for(subject.config, subject.dataset).to(subject.device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key("information", config.seed, way))
        decoder = Decoder(subject.config.model.d_model, subject.dataset.vocab_size, config).to(subject.device)
    trained = list(decoder.parameters()) + (list(encoder.parameters()) if way == "end_to_end" else [])
    optimizer = torch.optim.AdamW(trained, lr=config.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * (1 + math.cos(math.pi * step / config.steps)) / 2
    )
    wanted = {max(1, round(fraction * config.steps)): i for i, fraction in enumerate(config.fractions)}
    out = {mode: [math.nan] * len(config.fractions) for mode in modes}
    was_training = encoder.training
    try:
        for step, tokens_BT in zip(range(1, config.steps + 1), _batches(subject, config), strict=False):
            encoder.train(way == "end_to_end")
            if way == "end_to_end":
                vector_BD = encoder.features(tokens_BT)[:, -1]
            else:
                with torch.no_grad():
                    vector_BD = _vector(encoder, tokens_BT, modes[0])
            loss = F.cross_entropy(decoder(vector_BD.float()).flatten(0, 1), tokens_BT.flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for p in trained if p.grad is not None], 1.0)
            optimizer.step()
            schedule.step()
            if step in wanted:
                for mode in modes:
                    nats = out[mode][wanted[step]] = _score(subject, config, encoder, decoder, mode, test_NT)
                    log.info("  %s, %s: %d of %d steps, %.4f nats", way, mode, step, config.steps, nats)
    finally:
        encoder.train(was_training)
    return out, encoder


def _vector(encoder: LanguageModel, tokens_BT: Tensor, mode: str) -> Tensor:
    """(B, D): the last hidden state in a mode of the model."""
    deployed = mode == encoder.modes[0]
    return (encoder.deployed_features if deployed else encoder.features)(tokens_BT)[:, -1]


@torch.no_grad()
def _score(
    subject: Subject, config: InformationConfig, encoder: LanguageModel, decoder: Decoder, mode: str, test_NT: Tensor
) -> float:
    encoder.eval()
    decoder.eval()
    total = 0.0
    for tokens_BT in test_NT.split(config.batch):
        tokens_BT = tokens_BT.to(subject.device)
        logits = decoder(_vector(encoder, tokens_BT, mode).float())
        total += float(F.cross_entropy(logits.flatten(0, 1), tokens_BT.flatten(), reduction="sum"))
    decoder.train()
    return total / test_NT.numel()
