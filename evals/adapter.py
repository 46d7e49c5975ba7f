"""lm-eval's view of a model: log-likelihoods, rolling log-likelihoods and greedy generation, in the deployed mode; of
another mode the log-likelihoods.

Nothing here depends on how requests are put together into batches. Rows that are read in one pass are padded at their
ends, which no causal model can see; what a state is carried on from is never padded. Where many continuations share a
context (multiple choice) the context is read once, and its state is handed to each of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from torch import Tensor

from data.dataset import Batch
from evals.suite import Subject
from models.evaluate import autocast
from models.lm import LMState

SPREAD = 64
"""Contexts of one batch of generations differ by at most so many tokens: the shorter ones begin while the longer ones
are still being read, one token at a time."""

Tokens = tuple[int, ...]


class Adapter(TemplateLM):
    """A subject as lm-eval wants it. ``max_length``: tokens that the model is fed at most; contexts are cut at their
    left. ``max_gen_toks``: of tasks that do not say. ``bos``: contexts begin with BOS, as documents do in training.
    ``mode``: one of the model's; None is the deployed one, and no other generates."""

    def __init__(
        self,
        subject: Subject,
        *,
        max_length: int,
        max_gen_toks: int = 48,
        bos: bool = True,
        mode: str | None = None,
    ):
        super().__init__()
        tokenizer = subject.dataset.tokenizer
        if tokenizer is None:
            raise ValueError(
                f"data.kind={subject.config.data.kind}: its tokens stand for no text; this suite needs text"
            )
        self.subject, self.model, self.text = subject, subject.model, tokenizer
        self.max_length, self.max_gen_toks, self.bos = max_length, max_gen_toks, bos
        mode = mode or subject.model.modes[0]
        self.deployed, self.rows = mode == subject.model.modes[0], subject.rows(mode)
        self.truncated = 0  # requests whose context was cut

    # ---- text and tokens ----

    @property
    def eot_token_id(self) -> int:
        """BOS: it ends a document by starting the next one."""
        return self.text.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids, led by BOS where contexts are and ``add_special_tokens`` is not False."""
        ids: list[int] = self.text.encode(string).tolist()
        return [self.eot_token_id, *ids] if self.bos and add_special_tokens is not False else ids

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of a context, at least one, and of what follows it. Both are encoded as one text, as lm-eval does."""
        if context.strip():
            before, after = self._encode_pair(context, continuation)
        else:
            before, after = [self.eot_token_id], self.tok_encode(context + continuation, add_special_tokens=False)
        if not after:
            raise ValueError(f"continuation {continuation!r}: has no token of its own after {context[-20:]!r}")
        return before, after

    # ---- what lm-eval asks for ----

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """(log p in nats, is each token the likeliest) of each continuation after its context."""
        return self.score([self.pair(*request.args) for request in requests])

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        return self.score([(before, after) for _, before, after in requests])

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = True) -> list[float]:
        """Log p in nats of whole texts from BOS on, in windows that score each token once."""
        windows: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            for window in utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.eot_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append(utils.make_disjoint_window(window))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (nats, _) in zip(owners, self.score(windows), strict=True):
            totals[owner] += nats
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = True) -> list[str]:
        """Greedy continuations, up to a stop sequence (left out), BOS, or the number of tokens that the task allows."""
        asked = [(*_settings(request.args[1], self.max_gen_toks), request.args[0]) for request in requests]
        texts = [""] * len(requests)
        contexts: dict[int, list[int]] = {}
        for i, (_, limit, context) in enumerate(asked):
            room = self.max_length - limit
            if room < 1:
                raise ValueError(
                    f"suite.downstream.max_length={self.max_length}: must be more than the {limit} tokens that "
                    "the task generates"
                )
            ids = self.tok_encode(context) or [self.eot_token_id]
            self.truncated += len(ids) > room
            contexts[i] = ids[-room:]
        order = sorted(contexts, key=lambda i: (asked[i][:2], -len(contexts[i]), contexts[i]))
        batches: list[list[int]] = []
        for i in order:
            first = batches[-1][0] if batches else i
            full = not batches or len(batches[-1]) == self.rows or asked[i][:2] != asked[first][:2]
            if full or len(contexts[first]) - len(contexts[i]) > SPREAD:
                batches.append([])
            batches[-1].append(i)
        for batch in batches:
            until, limit, _ = asked[batch[0]]
            for i, text in zip(batch, self._generate([contexts[i] for i in batch], until, limit), strict=True):
                texts[i] = text
        return texts

    # ---- scoring ----

    def score(self, requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """For each (context, continuation), both of at least one token: log p in nats of the continuation and whether
        each of its tokens is the likeliest. Raises ValueError for a continuation that is longer than ``max_length``."""
        groups: dict[Tokens, list[int]] = {}
        for i, (before, after) in enumerate(requests):
            room = self.max_length + 1 - len(after)  # the last token is predicted and not fed
            if room < 1:
                raise ValueError(
                    f"suite.downstream.max_length={self.max_length}: must be at least {len(after)}, the tokens of a "
                    "continuation that is to be scored whole"
                )
            self.truncated += len(before) > room
            groups.setdefault(tuple(before[-room:]), []).append(i)
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for batch in self._batches(groups):
            afters = [tuple(requests[i][1]) for _, members in batch for i in members]
            scores = self._score_batch([(before, len(members)) for before, members in batch], afters)
            for i, one in zip((i for _, members in batch for i in members), scores, strict=True):
                found[i] = one
        return found

    def _batches(self, groups: dict[Tokens, list[int]]) -> Iterator[list[tuple[Tokens, list[int]]]]:
        """Contexts with their requests, alike in length, at most ``rows`` requests. Shared contexts are apart from the
        others, and so nearly of one length that reading what they have in common once is worth it."""
        for shared in (True, False):
            chosen = [(c, m) for c, m in groups.items() if (len(m) > 1) == shared]
            batch: list[tuple[Tokens, list[int]]] = []
            for context, members in sorted(chosen, key=lambda pair: (-len(pair[0]), pair[0])):
                for begin in range(0, len(members), self.rows):
                    part = members[begin : begin + self.rows]
                    full = sum(len(m) for _, m in batch) + len(part) > self.rows
                    if batch and (full or (shared and len(context) < 0.75 * len(batch[0][0]) - 8)):
                        yield batch
                        batch = []
                    batch.append((context, part))
            if batch:
                yield batch

    @torch.no_grad()
    def _score_batch(self, contexts: list[tuple[Tokens, int]], afters: list[Tokens]) -> list[tuple[float, bool]]:
        """``contexts`` with the number of continuations of each, whose tokens ``afters`` holds in order."""
        # All but the last token of the shortest context is read once for each context; the rest with each continuation.
        common = min(len(before) for before, _ in contexts) - 1
        if all(n == 1 for _, n in contexts) or not self.deployed:  # only the deployed model has a state
            common = 0
        befores = [before for before, n in contexts for _ in range(n)]
        fed = [(before[common:] + after)[:-1] for before, after in zip(befores, afters, strict=True)]
        with autocast(self.subject.device, self.subject.config.precision):
            inputs_BT = self._padded(fed)
            if common == 0:
                read = self.model.deployed_features if self.deployed else self.model.features
                features_BTD = read(inputs_BT)
            else:
                state = self.model.init_state(len(contexts), common + inputs_BT.shape[1])
                _, state = self.model.read(self._padded([c[:common] for c, _ in contexts]), state, donate_state=True)
                owners = [number for number, (_, n) in enumerate(contexts) for _ in range(n)]
                state = rows_of(state, torch.tensor(owners))
                features_BTD, _ = self.model.read(inputs_BT, state, donate_state=True)
            rows = [row for row, after in enumerate(afters) for _ in after]
            times = [t for row, after in zip(fed, afters, strict=True) for t in range(len(row) - len(after), len(row))]
            targets_1N = self._padded([tuple(token for after in afters for token in after)])
            batch = Batch(targets_1N, targets_1N, None, targets_1N.numel(), None)
            graded = self.model.graded(features_BTD[rows, times][None], batch)
        sizes = [len(after) for after in afters]
        nats = graded.nats_BT[0].double().cpu().split(sizes)
        right = graded.correct_BT[0].cpu().split(sizes)
        return [(-float(n.sum()), bool(r.all())) for n, r in zip(nats, right, strict=True)]

    def _padded(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """(B, longest) int64 on the model's device, padded at the ends."""
        longest = max(map(len, rows))
        return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=self.subject.device)

    # ---- generation ----

    @torch.no_grad()
    def _generate(self, contexts: list[list[int]], until: tuple[str, ...], limit: int) -> list[str]:
        """Texts that follow the contexts. What they have in length is read at once; then each row is fed what is left of
        its context, and after that what the model says."""
        position = min(map(len, contexts))
        made: list[list[int]] = [[] for _ in contexts]
        texts: list[str | None] = [None for _ in contexts]
        with autocast(self.subject.device, self.subject.config.precision):
            state = self.model.init_state(len(contexts), max(map(len, contexts)) + limit)
            features_BTD, state = self.model.read(
                self._padded([context[:position] for context in contexts]), state, donate_state=True
            )
            logits_BV = self.model.logits(features_BTD[:, -1])
            while True:
                tokens = logits_BV.argmax(-1).tolist()
                for row, context in enumerate(contexts):
                    if position < len(context):
                        tokens[row] = context[position]
                    elif texts[row] is None:
                        texts[row] = self._ended(made[row], tokens[row], until, limit)
                if all(text is not None for text in texts):
                    return [text or "" for text in texts]
                fed_B = torch.tensor(tokens, device=self.subject.device)
                logits_BV, state = self.model.step(fed_B, state, donate_state=True)
                position += 1

    def _ended(self, made: list[int], token: int, until: tuple[str, ...], limit: int) -> str | None:
        """Adds a token; the whole text, without the stop sequence, where it ends there."""
        if token == self.eot_token_id:
            return self.text.decode(made)
        made.append(token)
        text = self.text.decode(made)
        cuts = [text.index(stop) for stop in until if stop in text]
        if cuts:
            return text[: min(cuts)]
        return text if len(made) == limit else None


def _settings(options: dict[str, Any], default: int) -> tuple[tuple[str, ...], int]:
    """Stop sequences and number of tokens. Raises ValueError for a task that samples."""
    if options.get("do_sample") or float(options.get("temperature") or 0) > 0:
        raise ValueError(f"generation_kwargs={options}: this adapter generates greedily; set do_sample: false")
    until = options.get("until") or []
    names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    limit = next((int(options[name]) for name in names if options.get(name) is not None), default)
    return tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop), limit


def rows_of(state: LMState, rows_N: Tensor) -> LMState:
    """A state whose rows are copies of those named, in any order and any number of times."""

    def pick(tensor: Tensor) -> Tensor:
        return tensor.index_select(0, rows_N.to(tensor.device))

    layers = [{name: pick(tensor) for name, tensor in layer.items()} for layer in state.layers]
    others: dict[str, Any] = {
        field.name: pick(value)
        for field in dataclasses.fields(state)
        if isinstance(value := getattr(state, field.name), Tensor)
    }
    return dataclasses.replace(state, layers=layers, **others)
