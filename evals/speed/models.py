"""Whole training steps of our models against transformers' at equal shape: d=256, 4 layers, T=512, batch 4, vocabulary 4096."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from evals.peers import version
from evals.speed.measure import Pass, Row, compare

WIDTH, LAYERS, STEPS, BATCH, VOCABULARY, MLP, HEADS = 256, 4, 512, 4, 4096, 768, 4
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "tie_word_embeddings": True,
    "use_cache": False,
}
ATTENTION: dict[str, Any] = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "intermediate_size": MLP,
    "head_dim": WIDTH // HEADS,
}


def tokens() -> torch.Tensor:
    """(B, T + 1)"""
    return torch.randint(0, VOCABULARY, (BATCH, STEPS + 1), generator=torch.Generator().manual_seed(0))


def ours(mixer: str, *overrides: str) -> Pass:
    """One step of our model: loss, gradients, AdamW."""
    from hydra import compose, initialize_config_dir

    from data.dataset import Batch
    from models.lm import build_model
    from models.optim import make_optimizer
    from runs.validate import validate

    size = [
        f"model.d_model={WIDTH}",
        f"model.n_layers={LAYERS}",
        f"model.n_heads={HEADS}",
        f"model.mlp_width={MLP}",
        "model.tied=true",
        "model.logit_cap=null",  # theirs have none
        f"data.seq_len={STEPS}",
    ]
    root = Path(__file__).resolve().parents[2]
    with initialize_config_dir(str(root / "conf"), version_base="1.3"):
        config = validate(compose("config", overrides=[f"mixer={mixer}", "logger=none", *size, *overrides]))
    model = build_model(config, VOCABULARY)
    optimizer = make_optimizer(model, config.optimizer)
    ids = tokens()
    fields: dict[str, Any] = dict.fromkeys(Batch._fields)
    fields |= {"inputs_BT": ids[:, :-1], "targets_BT": ids[:, 1:], "n_targets": BATCH * STEPS}
    batch = Batch(**fields)

    def step() -> None:
        model.loss(batch)[0].backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def theirs(model: Any) -> Pass:
    """The same step of a transformers model."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids = tokens()[:, :-1]

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def pairs() -> Iterator[tuple[str, str, Callable[[], Pass], Callable[[], Pass]]]:
    """(our mixer, their model, ours, theirs)"""
    import transformers as hf

    yield (
        "transformer",
        "llama",
        lambda: ours("transformer"),
        lambda: theirs(hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, **ATTENTION))),
    )
    yield (
        "swa, W=128",
        "mistral, window 128",
        lambda: ours("swa", "mixer.window=128"),
        lambda: theirs(hf.MistralForCausalLM(hf.MistralConfig(**SHAPE, **ATTENTION, sliding_window=128))),
    )
    mamba: dict[str, Any] = {"num_heads": 8, "head_dim": 64, "state_size": 128, "n_groups": 1, "expand": 2}
    for chunk in (64, 256):
        yield (
            "mamba2_native, no MLP",
            f"mamba2, chunk {chunk}",
            lambda: ours("mamba2_native", "model.mlp=none"),
            lambda c=chunk: theirs(hf.Mamba2ForCausalLM(hf.Mamba2Config(**SHAPE, **mamba, chunk_size=c))),  # type: ignore
        )
    gated: dict[str, Any] = {
        "linear_num_key_heads": HEADS,
        "linear_num_value_heads": HEADS,
        "linear_key_head_dim": 48,
        "linear_value_head_dim": 96,
        "layer_types": ["linear_attention"] * LAYERS,
        "mlp_only_layers": list(range(LAYERS)),
        "num_experts": 0,
    }
    yield (
        "gated_deltanet_native",
        "qwen3_next, linear layers only",
        lambda: ours("gated_deltanet_native"),
        lambda: theirs(hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**SHAPE, **ATTENTION, **gated))),
    )
    griffin: dict[str, Any] = {
        "num_attention_heads": HEADS,
        "intermediate_size": 2 * MLP,
        "lru_width": 320,
        "block_types": ["recurrent"],
        "conv1d_width": 4,
    }
    yield (
        "hawk",
        "recurrent_gemma, recurrent layers only",
        lambda: ours("hawk", "model.mlp=geglu"),
        lambda: theirs(hf.RecurrentGemmaForCausalLM(hf.RecurrentGemmaConfig(**SHAPE, **griffin))),
    )


def rows(repeats: int, only: str) -> Iterator[Row]:
    """Every pair; a row's ``ours_ms`` is one whole step of B x T tokens."""
    if (found := version("transformers")) is None:
        return
    setting = f"d={WIDTH}, {LAYERS} layers, T={STEPS}, batch {BATCH}, vocabulary {VOCABULARY}: one training step"
    for name, peer, make_ours, make_theirs in pairs():
        if only in name:
            torch.manual_seed(0)
            yield compare(name, f"transformers {found} {peer}", setting, 1.2, make_ours(), make_theirs(), repeats)
