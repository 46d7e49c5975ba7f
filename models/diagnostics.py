"""What goes on inside the mixers: memory and solver, by layer and head. Only looks; nothing in training depends on it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from data.dataset import Batch
from models.lm import LanguageModel

POSITION_BINS = 4


@torch.no_grad()
def diagnose(model: LanguageModel, batch: Batch) -> dict[str, float]:
    """One forward pass over a batch, looked at:

    ``half_life``        tokens after which a gate has halved what was stored: median over tokens (and key channels)
    ``state_norm``       Frobenius norm of the matrix state after the last token, mean over sequences
    ``effective_rank``   exp of the entropy of its singular values' shares
    ``cg_steps``         Mesa's solver: mean over tokens, and for each quarter of the positions
    ``gate_local``       Maglev: mean gate of a token's own key and value, and
    ``gate_memory``      of the memory's (1: neutral)

    Keys are ``diagnostics/<what>/layer<i>/head<h>``; a mixer that has no such thing has no such keys.
    """
    was_training = model.training
    model.eval()
    mixers = [block.mixer for block in model.backbone.layers]
    out: dict[str, float] = {}
    try:
        for mixer in mixers:
            mixer.observed = {}
        tokens_BT = batch.inputs_BT
        states_after = model.states_after(tokens_BT, batch.segment_ids_BT)
        for i, (mixer, state) in enumerate(zip(mixers, states_after, strict=True)):
            assert mixer.observed is not None
            for name, by_head in _of_layer(mixer.observed, state).items():
                out |= {f"diagnostics/{name}/layer{i}/head{h}": float(x) for h, x in enumerate(by_head)}
    finally:
        for mixer in mixers:
            mixer.observed = None
        model.train(was_training)
    return out


def _of_layer(observed: dict[str, Tensor], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """By name, one number for each head."""
    out: dict[str, Tensor] = {}
    if "log_decay" in observed:
        g_BTHK = observed["log_decay"].float()
        g_BTHK = g_BTHK if g_BTHK.ndim == 4 else g_BTHK[..., None]
        half_life = -math.log(2) / g_BTHK.clamp(max=-1e-9)
        out["half_life"] = half_life.movedim(2, 0).flatten(1).median(dim=1).values
    if "matrix" in state:
        singular_BHR = torch.linalg.svdvals(state["matrix"].float())
        share = singular_BHR / singular_BHR.sum(-1, keepdim=True).clamp(min=1e-30)
        out["state_norm"] = singular_BHR.square().sum(-1).sqrt().mean(0)
        out["effective_rank"] = torch.special.entr(share).sum(-1).exp().mean(0)
    for name in ("gate_local", "gate_memory"):
        if name in observed:
            out[name] = observed[name].float().mean((0, 1))
    if "cg_steps" in observed:
        steps_BTH = observed["cg_steps"].float()
        out["cg_steps"] = steps_BTH.mean((0, 1))
        for quarter, part in enumerate(steps_BTH.tensor_split(POSITION_BINS, dim=1), 1):
            if part.shape[1]:
                out[f"cg_steps_quarter{quarter}"] = part.mean((0, 1))
    return out
