"""Generation with carried state, token by token as they come: greedy, temperature, top-p."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from models.lm import LanguageModel


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt_BT: Tensor,
    n_tokens: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Yields ``n_tokens`` times the next token of each row, int64 (B,).

    ``temperature=0`` is greedy. ``top_p < 1`` samples from the smallest set of tokens whose probability reaches top_p
    (Holtzman et al. 2020). The prompt (B, T >= 1) runs in one parallel pass; each token after it costs one step.
    """
    if prompt_BT.ndim != 2 or prompt_BT.shape[1] < 1:
        raise ValueError(f"prompt of shape {tuple(prompt_BT.shape)}: must be (B, T) with T >= 1; start with BOS")
    if temperature < 0:
        raise ValueError(f"temperature={temperature}: must be at least 0 (0 is greedy)")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: must be in (0, 1]")
    generator = torch.Generator(device=prompt_BT.device).manual_seed(seed)
    was_training = model.training
    model.eval()
    try:
        state = model.init_state(prompt_BT.shape[0], prompt_BT.shape[1] + n_tokens)
        logits_BTV, state = model.prefill(prompt_BT, state, donate_state=True)
        logits_BV = logits_BTV[:, -1]
        for i in range(n_tokens):
            token_B = choose(logits_BV, temperature, top_p, generator)
            yield token_B
            if i + 1 < n_tokens:
                logits_BV, state = model.step(token_B, state, donate_state=True)
    finally:
        model.train(was_training)


def choose(logits_BV: Tensor, temperature: float, top_p: float, generator: torch.Generator | None) -> Tensor:
    """The next token of each row."""
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    p_BV = (logits_BV / temperature).softmax(dim=-1)
    if top_p < 1:
        sorted_BV, order_BV = p_BV.sort(dim=-1, descending=True)
        before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV  # probability of all better tokens
        sorted_BV = sorted_BV.masked_fill(before_BV >= top_p, 0)
        p_BV = torch.zeros_like(p_BV).scatter(-1, order_BV, sorted_BV)
    return torch.multinomial(p_BV, 1, generator=generator)[:, 0]
