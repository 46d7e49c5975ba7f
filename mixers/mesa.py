"""The Mesa layer of MesaNet (arXiv 2506.05233): read-out by the least-squares map of all earlier keys to values.

    G <- gamma G + beta k v^T,   H <- gamma H + beta k k^T,   o = G^T (H + Lambda)^{-1} q
    gamma <- gamma (1 - (1 - gamma_bound) beta^2),   Lambda = lambda_min + softplus(theta)

Every part that the paper adds is a switch. With ``signed_gamma`` (state tracking) gamma = 2 sigmoid(.) - 1 turns the sign
of G; H decays by |gamma|, so that H + Lambda stays positive definite. The paper lets H turn as well and keeps it
definite by a Lambda of 50: set ``lambda_init`` and ``lambda_min`` to 50 and 49 to follow it there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixers import register
from mixers.base import Mixer, State
from mixers.kernels import chosen
from mixers.linear import linear_attention_flops
from mixers.linear_frame import LinearFrame, LinearFrameConfig
from mixers.ops.mesa import SOLVERS, chunk_mesa, steps_taken

CHUNK = 32  # the fastest on a CPU, for both solvers


@register
@dataclass
class MesaConfig(LinearFrameConfig):
    """The solver's accuracy in training and, where it should differ, in evaluation; the paper's switches."""

    kind: str = "mesa"
    solver: str = "cg"
    cg_steps: int = 30
    tol: float | None = None
    eval_cg_steps: int | None = None
    eval_tol: float | None = None
    decay_gate: bool = True
    input_gate: bool = True
    decay_bias: float = 0.0
    beta_bias: float = 0.0
    gamma_bound: float = 0.9975
    signed_gamma: bool = False
    lambda_min: float = 0.25
    lambda_init: float = 1.0
    learn_lambda: bool = True

    @property
    def gates(self) -> int:  # type: ignore[override]
        """Forget and input gate, where they are on."""
        return int(self.decay_gate) + int(self.input_gate)

    def check(self, path: str) -> None:
        super().check(path)
        if self.solver not in SOLVERS:
            raise ValueError(f"{path}.solver={self.solver}: must be one of {', '.join(SOLVERS)}")
        for name in ("cg_steps", "eval_cg_steps"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(
                    f"{path}.{name}={value}: must be at least 0 (0: gated linear attention; 30: the paper)"
                )
        for name in ("tol", "eval_tol"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ValueError(f"{path}.{name}={value}: must be between 0 and 1 (1e-4 is usual), or null")
        if not 0 < self.gamma_bound <= 1:
            raise ValueError(f"{path}.gamma_bound={self.gamma_bound}: must be in (0, 1] (0.9975; 1 is off)")
        if self.lambda_min < 0 or self.lambda_init <= self.lambda_min:
            raise ValueError(
                f"{path}.lambda_init={self.lambda_init}: must be above {path}.lambda_min={self.lambda_min}, and that not "
                "negative"
            )
        if self.signed_gamma and not self.decay_gate:
            raise ValueError(f"{path}.signed_gamma=true: needs {path}.decay_gate=true")

    def gate_parameters(self) -> int:
        return super().gate_parameters() + self.n_heads * self.key_dim * self.learn_lambda

    def accessories(self) -> dict[str, str]:
        gates = []
        if self.decay_gate:
            signed = "signed " if self.signed_gamma else ""
            bound = f", bounded by {self.gamma_bound:g}" if self.gamma_bound < 1 else ""
            gates.append(f"{signed}sigmoid decay{bound}, bias at start {self.decay_bias:g}")
        if self.input_gate:
            gates.append(f"sigmoid beta, bias at start {self.beta_bias:g}")
        accuracy = f"{self.cg_steps} steps" if self.tol is None else f"to {self.tol:g}, at most {self.cg_steps} steps"
        return {**super().accessories(), "gates": "; ".join(gates) or "none", "solver": f"{self.solver}, {accuracy}"}

    def build(self, layer_index: int, n_layers: int) -> Mixer:
        return Mesa(self)


class Mesa(LinearFrame):
    """The linear frame around the Mesa rule."""

    config: MesaConfig

    def __init__(self, config: MesaConfig):
        super().__init__(config)
        if config.learn_lambda:
            self.theta_HK = nn.Parameter(torch.empty(config.n_heads, config.key_dim))

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        return {**super().state_shapes(), "covariance": (c.n_heads, c.key_dim, c.key_dim)}

    def rule(
        self,
        q_BTHK: Tensor,
        k_BTHK: Tensor,
        v_BTHV: Tensor,
        gates: Tensor | None,
        state: State | None,
        segment_ids: Tensor | None,
    ) -> tuple[Tensor, State]:
        q, k, v, beta, g, sign, lam = self._inputs(q_BTHK, k_BTHK, v_BTHV, gates)
        initial = None if state is None else (state["matrix"], state["covariance"])
        if self.observed is not None:
            settings = {**self._solver(), "initial_state": initial, "segment_ids": segment_ids}
            self.observe("cg_steps", steps_taken(q, k, v, beta, g, lam, **settings))
            if g is not None:
                self.observe("log_decay", g)
        o_BTHV, (matrix, covariance) = chosen(chunk_mesa, q)(
            q, k, v, beta, g, lam, **self._solver(), initial_state=initial, segment_ids=segment_ids
        )
        if sign is not None:
            o_BTHV, matrix = o_BTHV * sign[..., None].to(o_BTHV.dtype), matrix * sign[:, -1, :, None, None]
        return o_BTHV, {"matrix": matrix, "covariance": covariance}

    def _solver(self) -> dict[str, Any]:
        c = self.config
        steps = c.cg_steps if self.training or c.eval_cg_steps is None else c.eval_cg_steps
        tol = c.tol if self.training or c.eval_tol is None else c.eval_tol
        return {"cg_steps": steps, "tol": tol, "solver": c.solver, "chunk_size": CHUNK}

    def _inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None) -> tuple[Any, ...]:
        """What the operation takes, and for signed gamma the product of all signs so far (B,T,H): v is turned by it on the
        way in and o on the way out, which gives every pair of tokens the signs between them."""
        c, wide = self.config, torch.promote_types(q.dtype, torch.float32)
        decay = gates[:, :, 0] if gates is not None and c.decay_gate else None
        beta = gates[:, :, -1].sigmoid() if gates is not None and c.input_gate else q.new_ones(q.shape[:3], dtype=wide)
        g = sign = None
        if decay is not None and c.signed_gamma:
            gamma = torch.tanh(decay / 2)
            g = gamma.abs().clamp(min=1e-6).log()
            sign = torch.where(gamma < 0, -1.0, 1.0).to(wide).cumprod(dim=1)
            v = v * sign[..., None].to(v.dtype)
        elif decay is not None:
            g = F.logsigmoid(decay)
        if g is not None and c.gamma_bound < 1:
            g = g + torch.log1p(-(1 - c.gamma_bound) * beta.square())
        return q, k, v, beta, g, sign, self.ridge()

    def ridge(self) -> Tensor:
        """Lambda (H,K), in float32 or wider."""
        c = self.config
        if c.learn_lambda:
            wide = torch.promote_types(self.theta_HK.dtype, torch.float32)
            return c.lambda_min + F.softplus(self.theta_HK.to(wide))
        weight = self.qkv.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        return torch.full((c.n_heads, c.key_dim), c.lambda_init, dtype=wide, device=weight.device)

    def cell_flops_per_token(self, seq_len: int) -> float:
        """Linear attention with the values [v | k], and one product with H + Lambda for each step and for the start."""
        c = self.config
        both = linear_attention_flops(c.n_heads, c.key_dim, c.value_dim + c.key_dim, seq_len)
        return both + self._solver_flops(seq_len) + self.conv_flops_per_token()

    def _solver_flops(self, seq_len: int) -> float:
        """2 K^2 + 4 C K per product (2 K^2 more to precondition): ``cg_steps`` of them, also where ``tol`` needs fewer."""
        c, chunk = self.config, min(64, seq_len)
        product = 2 * c.key_dim**2 + 4 * chunk * c.key_dim + (2 * c.key_dim**2 if c.solver == "pcg" else 0)
        return c.n_heads * (c.cg_steps + 1) * product if c.cg_steps else 0.0

    def train_flops_per_token(self, seq_len: int) -> float:
        """The backward pass solves once more; all else costs two forward passes."""
        solver = self._solver_flops(seq_len)
        return 3 * (self.flops_per_token(seq_len) - solver) + 2 * solver

    @torch.no_grad()
    def init_parameters(self, generator: torch.Generator) -> None:
        super().init_parameters(generator)
        c = self.config
        if c.gates:
            self.set_gate_biases(*[c.decay_bias] * c.decay_gate, *[c.beta_bias] * c.input_gate)
        if c.learn_lambda:
            self.theta_HK.fill_(math.log(math.expm1(c.lambda_init - c.lambda_min)))

    def no_decay(self) -> set[str]:
        return super().no_decay() | ({"theta_HK"} if self.config.learn_lambda else set())
