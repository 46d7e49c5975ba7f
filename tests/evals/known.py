"""Models whose answers are known beforehand, with the interface that suites ask a trained model for."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.lm import Graded, LMState

SURE = 60.0  # the logit of a token against 0 of all others: its nats are below 1e-23


class Known(nn.Module):
    """The next token's logits are a function of all tokens so far; a state is the tokens themselves."""

    modes = ("parallel",)
    backbone = SimpleNamespace(layers=())

    def __init__(self, vocabulary: int):
        super().__init__()
        self.somewhere = nn.Parameter(torch.zeros(1))
        self.vocabulary = vocabulary

    def following(self, history: tuple[int, ...]) -> Tensor:
        """(vocabulary,) logits after these tokens."""
        raise NotImplementedError

    def features(self, tokens_BT: Tensor, segment_ids_BT: Tensor | None = None, since: int = 0) -> Tensor:
        rows = [
            [self.following(tuple(row[: t + 1])) for t in range(since, tokens_BT.shape[1])]
            for row in tokens_BT.tolist()
        ]
        return torch.stack([torch.stack(row) for row in rows])

    def deployed_features(self, tokens_BT: Tensor) -> Tensor:
        return self.features(tokens_BT)

    def logits(self, features: Tensor) -> Tensor:
        return features

    def init_state(self, rows: int, max_len: int) -> LMState:
        return LMState([{"tokens_BT": torch.zeros(rows, 0, dtype=torch.int64)}], 0)

    def read(self, tokens_BT: Tensor, state: LMState, **_: bool) -> tuple[Tensor, LMState]:
        before_BT = state.layers[0]["tokens_BT"]
        whole_BT = torch.cat((before_BT, tokens_BT), dim=1)
        after = LMState([{"tokens_BT": whole_BT}], state.length + tokens_BT.shape[1])
        return self.features(whole_BT, since=before_BT.shape[1]), after

    def step(self, tokens_B: Tensor, state: LMState, **_: bool) -> tuple[Tensor, LMState]:
        features_B1V, state = self.read(tokens_B[:, None], state)
        return features_B1V[:, 0], state

    def graded(self, features_BTD: Tensor, batch: Any) -> Graded:
        targets_BT = batch.targets_BT
        nats = F.cross_entropy(features_BTD.double().transpose(1, 2), targets_BT, ignore_index=-100, reduction="none")
        return Graded(nats, features_BTD.argmax(-1) == targets_BT)

    def grade(self, batch: Any, mode: str | None = None) -> Graded:
        return self.graded(self.features(batch.inputs_BT), batch)

    def counts(self, seq_len: int) -> dict[str, int]:
        return {"state_bytes": 8 * seq_len}


class Unigram(Known):
    """Always the same probabilities; uniform where they are equal."""

    def __init__(self, p_V: Tensor):
        super().__init__(len(p_V))
        self.logits_V = (p_V.double() / p_V.double().sum()).log()

    def following(self, history: tuple[int, ...]) -> Tensor:
        return self.logits_V


def uniform(vocabulary: int) -> Unigram:
    """All tokens alike."""
    return Unigram(torch.ones(vocabulary))


class Oracle(Known):
    """Knows how the texts go on that it has learnt, without choosing among those that begin alike; all tokens alike elsewhere."""

    def __init__(self, vocabulary: int):
        super().__init__(vocabulary)
        self.truth: dict[tuple[int, ...], set[int]] = {}

    def learn(self, tokens: list[int]) -> None:
        for end in range(1, len(tokens)):
            self.truth.setdefault(tuple(tokens[:end]), set()).add(tokens[end])

    def following(self, history: tuple[int, ...]) -> Tensor:
        out = torch.zeros(self.vocabulary, dtype=torch.float64)
        out[list(self.truth.get(history, ()))] = SURE
        return out


class Successor(Known):
    """Knows that each token has one that follows it, once it has read more than ``after`` tokens; all alike before."""

    def __init__(self, vocabulary: int, follows: dict[int, int], after: int = 0):
        super().__init__(vocabulary)
        self.follows, self.after = follows, after

    def following(self, history: tuple[int, ...]) -> Tensor:
        out = torch.zeros(self.vocabulary, dtype=torch.float64)
        if len(history) > self.after:
            out[self.follows[history[-1]]] = SURE
        return out


class LooksUp(Known):
    """Says what followed the longest repeated end of the text so far."""

    def following(self, history: tuple[int, ...]) -> Tensor:
        out = torch.zeros(self.vocabulary)
        out[self._after(history)] = SURE
        return out

    @staticmethod
    def _after(history: tuple[int, ...]) -> int:
        for size in range(min(24, len(history) - 1), 0, -1):
            end = history[-size:]
            for begin in range(len(history) - size - 1, -1, -1):
                if history[begin : begin + size] == end:
                    return history[begin + size]
        return 0


class Sleeper(Known):
    """Takes ``seconds`` for each column of tokens that it reads, whatever the batch."""

    def __init__(self, vocabulary: int, seconds: float):
        super().__init__(vocabulary)
        self.seconds = seconds

    def features(self, tokens_BT: Tensor, segment_ids_BT: Tensor | None = None, since: int = 0) -> Tensor:
        columns = tokens_BT.shape[1] - since
        time.sleep(self.seconds * columns)
        return torch.zeros(len(tokens_BT), columns, self.vocabulary)
