"""A Hugging Face causal model as a yardstick: what suites ask of a trained run, asked of a model made elsewhere.

    python eval.py run=hf:openai-community/gpt2 suite=[perplexity,positions,downstream]

The corpus is read with the model's own tokenizer, which must be exact (`data/pretrained.py`): bits per byte then compare
with those of any run on the same corpus. Results lie in ``<external.results>/<name>-<hash of the external keys>/eval``.
"""

from __future__ import annotations

import logging
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from data.config import HfConfig
from mixers.base import MixerConfig
from models.config import at_least, one_of
from models.lm import LanguageModel, LMState
from runs.identity import digest
from runs.load import open_data
from runs.schema import Config, Paths
from runs.validate import data_config

log = logging.getLogger(__name__)

PREFIX = "hf:"
PROBE = 8  # tokens on which two ways to the same numbers are compared


@dataclass
class ExternalSettings:
    """The keys of ``external`` in `conf/eval.yaml`."""

    data: str = "kjv"
    seq_len: int | None = None
    bos: str | None = None
    revision: str | None = None
    precision: str = "fp32"
    results: str = "results/runs/external"

    def check(self, path: str) -> None:
        at_least(f"{path}.seq_len", self.seq_len, 2, "null takes that of the data")
        one_of(f"{path}.precision", self.precision, ("fp32", "bf16"))

    def folder(self, name: str) -> Path:
        """Where the results of a model lie: another text, or another length of it, is another folder."""
        settings = {key: value for key, value in asdict(self).items() if key != "results"}
        return Path(self.results) / f"{name}-{digest(settings, 8)}"


@dataclass
class ExternalMixer(MixerConfig):
    """In the place of a mixer's config: what suites ask of it."""

    kind: str = "external"
    longest: int | None = None

    def max_len(self) -> int | None:
        return self.longest


class Memo(NamedTuple):
    """What the model has read last, and its cache after that."""

    tokens_BT: Tensor
    cache: Any


class External(LanguageModel):
    """A causal model of transformers, or one with its interface such as fla's.

    Its state is the tokens read so far, which is exact for any model. Where the model's own cache goes on to the same
    logits as reading all at once, it is used as long as the tokens are those that it was made from; otherwise everything
    is read again.
    """

    inner: Any

    def __init__(self, inner: Any):
        nn.Module.__init__(self)  # not the base class's: there are no backbone and no weights to draw
        self.readout, self.continuous = None, False
        self.inner = inner
        self.backbone: Any = SimpleNamespace(layers=[])  # suites that look into layers find none of ours
        self._memo: Memo | None = None
        with torch.no_grad():
            tokens_BT = torch.arange(PROBE, device=next(inner.parameters()).device)[None]
            logits_BTV = inner(input_ids=tokens_BT, use_cache=False).logits
            self.vocab_size = logits_BTV.shape[-1]
            self.head_apart = self._head_is_apart(tokens_BT, logits_BTV)
            self.carries = self._cache_is_exact(tokens_BT, logits_BTV)
        log.info(
            "%s: logits %s; tokens that were read %s",
            type(inner).__name__,
            "by its output layer, where they are needed" if self.head_apart else "at all positions",
            "are carried in its cache" if self.carries else "are read again at each call, since its cache is not exact",
        )

    def _head_is_apart(self, tokens_BT: Tensor, logits_BTV: Tensor) -> bool:
        """Whether the logits are the output layer's of the last hidden state, with nothing in between."""
        head = self.inner.get_output_embeddings() if hasattr(self.inner, "get_output_embeddings") else None
        body = getattr(self.inner, "base_model", self.inner)
        if head is None or body is self.inner:
            return False
        hidden_BTD = body(input_ids=tokens_BT, use_cache=False).last_hidden_state
        return torch.allclose(head(hidden_BTD), logits_BTV, rtol=1e-4, atol=1e-5)

    def _cache_is_exact(self, tokens_BT: Tensor, logits_BTV: Tensor) -> bool:
        """Whether 5 tokens, then 2, then 1 give the same logits as all 8 at once."""
        found, cache = [], None
        try:
            for part_BT in tokens_BT.split((5, 2, 1), dim=1):
                out = self.inner(input_ids=part_BT, past_key_values=cache, use_cache=True)
                found.append(out.logits)
                cache = out.past_key_values
        except (TypeError, AttributeError, ValueError, RuntimeError, IndexError) as error:
            log.info("%s: its cache cannot be carried (%s)", type(self.inner).__name__, error)
            return False
        return cache is not None and torch.allclose(torch.cat(found, 1), logits_BTV, rtol=1e-3, atol=1e-4)

    def _run(self, tokens_BT: Tensor, **options: Any) -> tuple[Tensor, Any]:
        """Features, or logits where the output layer is not apart, and the cache."""
        model = self.inner.base_model if self.head_apart else self.inner
        out = model(input_ids=tokens_BT, **options)
        return (out.last_hidden_state if self.head_apart else out.logits), getattr(out, "past_key_values", None)

    def features(self, tokens_BT: Tensor, segment_ids_BT: Tensor | None = None) -> Tensor:
        """(B, T, D), or (B, T, vocabulary) logits. Raises ValueError for documents that must not see each other."""
        _refuse(segment_ids_BT)
        return self._run(tokens_BT, use_cache=False)[0]

    def logits(self, features: Tensor) -> Tensor:
        """(..., vocabulary) in float32."""
        return (self.inner.get_output_embeddings()(features) if self.head_apart else features).float()

    def init_state(self, batch_size: int, max_len: int) -> LMState:
        """No tokens. ``max_len`` sets nothing aside."""
        device = next(self.parameters()).device
        return LMState([{"tokens_BT": torch.zeros(batch_size, 0, dtype=torch.int64, device=device)}], 0)

    def read(
        self,
        tokens_BT: Tensor,
        state: LMState,
        segment_ids_BT: Tensor | None = None,
        *,
        donate_state: bool = False,
        assisted: bool = False,
    ) -> tuple[Tensor, LMState]:
        _refuse(segment_ids_BT)
        before_BT = state.layers[0]["tokens_BT"]
        whole_BT = torch.cat((before_BT, tokens_BT), dim=1)
        memo, self._memo = self._memo, None
        if not self.carries:
            features_BTD, _ = self._run(whole_BT, use_cache=False)
        elif memo is not None and before_BT.shape[1] > 0 and torch.equal(memo.tokens_BT, before_BT):
            features_BTD, cache = self._run(tokens_BT, past_key_values=memo.cache, use_cache=True)
            self._memo = Memo(whole_BT, cache)
        else:
            features_BTD, cache = self._run(whole_BT, use_cache=True)
            self._memo = Memo(whole_BT, cache)
        state = LMState([{"tokens_BT": whole_BT}], state.length + tokens_BT.shape[1])
        return features_BTD[:, -tokens_BT.shape[1] :], state

    @torch.no_grad()
    def counts(self, seq_len: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """Parameters, and the bytes that its cache has after ``seq_len`` tokens, found by reading so many. FLOPs of a foreign
        model are not known."""
        total = sum(p.numel() for p in self.parameters())
        tables = {id(p): p.numel() for m in self.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        if hasattr(self.inner, "get_output_embeddings") and (head := self.inner.get_output_embeddings()) is not None:
            tables |= {id(p): p.numel() for p in head.parameters()}
        tokens_BT = torch.zeros(1, seq_len, dtype=torch.int64, device=next(self.parameters()).device)
        kept = tokens_BT.nbytes
        if self.carries:
            kept = sum(tensor.nbytes for tensor in _tensors(self._run(tokens_BT, use_cache=True)[1]).values())
        return {"params": total, "params_non_embedding": total - sum(tables.values()), "state_bytes": kept}


def _refuse(segment_ids_BT: Tensor | None) -> None:
    if segment_ids_BT is not None:
        raise ValueError("external.data: its documents are packed with a reset, which this model cannot do")


def _tensors(node: Any) -> dict[int, Tensor]:
    """All tensors inside an object, each once, by identity."""
    if isinstance(node, Tensor):
        return {id(node): node}
    inside = node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ()
    if hasattr(node, "__dict__") and not isinstance(node, type | nn.Module):
        inside = vars(node).values()
    return {key: tensor for part in inside for key, tensor in _tensors(part).items()}


def open_external(run: str, settings: ExternalSettings, cache: str) -> tuple[str, Config, Any, External]:
    """(name, config, data set, model on the CPU) of ``run=hf:<folder or hub name>``. Raises ValueError, one sentence, for
    what cannot be had, and for a tokenizer that is not exact."""
    try:
        import transformers
    except ModuleNotFoundError:
        raise ValueError(f"run={run}: needs transformers; pip install 'isomix[eval]'") from None
    where = run.removeprefix(PREFIX)
    options = {"revision": settings.revision} if settings.revision else {}
    try:
        inner = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **options).eval()
        bos = settings.bos or _bos(transformers.AutoTokenizer.from_pretrained(where, **options))
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"run={run}: no causal model and tokenizer of transformers can be had ({reason})") from None
    if bos is None:
        raise ValueError(
            f"external.bos=null: the tokenizer of {where} names no BOS or EOS; name the token that starts a text"
        )
    name = re.sub(r"[^\w.-]+", "--", where.strip("/"))[-80:].strip("-")
    tokenizer = HfConfig(name=name, path=where, revision=settings.revision, bos=bos)
    data = data_config(settings.data)
    if settings.seq_len is not None:
        data.seq_len = settings.seq_len
    longest = getattr(inner.config, "max_position_embeddings", None)
    mixer = ExternalMixer(longest=longest)
    if longest is not None and longest < data.seq_len:
        raise ValueError(f"external.seq_len={data.seq_len}: the model takes at most {longest} tokens; set that or less")
    config = Config(mixer=mixer, data=data, tokenizer=tokenizer, global_batch=1, precision=settings.precision)
    config.paths = Paths(cache=cache)
    dataset = open_data(config)
    model = External(inner).eval()
    if dataset.vocab_size > model.vocab_size:
        raise ValueError(
            f"run={run}: its tokenizer has {dataset.vocab_size} tokens and the model only {model.vocab_size}; "
            "they do not belong together"
        )
    return name, config, dataset, model


def _bos(tokenizer: Any) -> str | None:
    """The token that starts a document: GPT-2 and others have only one that ends it."""
    return tokenizer.bos_token or tokenizer.eos_token
