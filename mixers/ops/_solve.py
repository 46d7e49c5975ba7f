"""Conjugate gradients for Mesa: (H_t + Lambda) x_t = b_t for all tokens of all chunks at once.

H_t = e^{b_t} H + sum_{i <= t} M_ti k_i k_i^T within a chunk that the state H enters, so that one product with all H_t costs
two products of matrices and H_t itself is never formed (MesaNet, arXiv 2506.05233, Appendix D).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_COMPACT_BELOW = 0.8  # share of chunks still at work below which the others are left out


class Operator(NamedTuple):
    """All H_t + Lambda of P chunks."""

    entered_PKK: Tensor  # H, symmetric
    entry_PC1: Tensor  # e^{b_t}, 0 after a document border
    k_PCK: Tensor
    k_PKC: Tensor  # the same, transposed in memory: a product with it is a third faster
    mask_PCC: Tensor  # M: decay from i to t times beta_i, lower triangular
    lam_P1K: Tensor

    def times(self, x_PCK: Tensor, out_PCK: Tensor, work_PCC: Tensor) -> Tensor:
        """Row t of the result, in ``out_PCK``, is (H_t + Lambda) x_t."""
        torch.bmm(x_PCK, self.entered_PKK, out=out_PCK).mul_(self.entry_PC1).addcmul_(x_PCK, self.lam_P1K)
        torch.bmm(x_PCK, self.k_PKC, out=work_PCC).mul_(self.mask_PCC)
        return torch.baddbmm(out_PCK, work_PCC, self.k_PCK, out=out_PCK)

    def diagonal(self) -> Tensor:
        """(P,C,K)"""
        of_state_P1K = self.entered_PKK.diagonal(dim1=-2, dim2=-1)[:, None]
        return torch.baddbmm(self.entry_PC1 * of_state_P1K + self.lam_P1K, self.mask_PCC, self.k_PCK.square())

    def mean(self) -> Tensor:
        """(P,K,K): the mean of H_t + Lambda over the tokens of a chunk."""
        weight_PC1 = self.mask_PCC.mean(1)[..., None]
        mean_PKK = self.entered_PKK * self.entry_PC1.mean(1, keepdim=True)
        torch.baddbmm(mean_PKK, self.k_PKC, self.k_PCK * weight_PC1, out=mean_PKK)
        mean_PKK.diagonal(dim1=-2, dim2=-1).add_(self.lam_P1K[:, 0])
        return mean_PKK

    def inverse_of_mean(self) -> Tensor:
        """The preconditioner (P,K,K). Within a chunk H_t changes little where memory is long, which is where H + Lambda
        is ill-conditioned and plain steps are many."""
        lower = torch.linalg.cholesky_ex(self.mean()).L
        eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
        # L^-T L^-1 from X L^T = I on transposed views, which are LAPACK's order: half the time of cholesky_inverse
        inverse = torch.linalg.solve_triangular(lower.mT, eye.mT, upper=True, left=False)
        return torch.bmm(inverse, inverse.mT)

    def of(self, chunks: Tensor) -> Operator:
        """The operator of some of the chunks."""
        return Operator(*(x[chunks] for x in self))


def solve(
    operator: Operator, b_PCK: Tensor, *, steps: int, tol: float | None, inverse_PKK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x_PCK and how many steps each token took, (P,C) int64.

    Starts at b / diag(H + Lambda), or at the preconditioner's answer. With a tolerance a row is frozen once |residual| <=
    tol |b|, and the work ends with the last row that is at work. Without one all ``steps`` are taken, but a row whose
    residual is below its own rounding error stays as it is. Right-hand sides are normalised, so that a factor on b is a
    factor on x, however small it is. ``b_PCK`` is used up: its memory becomes the residual's.
    """
    size_PC1 = torch.linalg.vector_norm(b_PCK, dim=-1, keepdim=True)
    b_PCK.div_(torch.where(size_PC1 > 0, size_PC1, 1.0))
    x_PCK = b_PCK / operator.diagonal() if inverse_PKK is None else torch.bmm(b_PCK, inverse_PKK)
    floor = torch.finfo(b_PCK.dtype).eps * 1e-2
    iteration = _Iteration(operator, inverse_PKK, b_PCK, x_PCK, max(tol or 0.0, floor))
    taken_PC = torch.zeros(b_PCK.shape[:2], dtype=torch.int64, device=b_PCK.device)
    # While decoding on a CPU what is converged may end the work as well: nothing changes, and looking is cheap there.
    looks = tol is not None or (b_PCK.shape[1] == 1 and b_PCK.device.type == "cpu")
    chunks: Tensor | None = None  # of what is still at work; None: all
    for _ in range(steps):
        if looks:
            working = iteration.active_PC1.flatten(1).any(1)
            count = int(working.sum())
            if count == 0:
                break
            if count < _COMPACT_BELOW * len(working):
                if chunks is not None:
                    x_PCK[chunks], taken_PC[chunks] = iteration.x, iteration.taken_PC
                else:
                    x_PCK, taken_PC = iteration.x, iteration.taken_PC
                picked = working.nonzero()[:, 0]
                chunks = picked if chunks is None else chunks[picked]
                iteration = iteration.of(picked)
        iteration.step()
    if chunks is None:
        x_PCK, taken_PC = iteration.x, iteration.taken_PC
    else:
        x_PCK[chunks], taken_PC[chunks] = iteration.x, iteration.taken_PC
    return x_PCK.mul_(size_PC1), taken_PC


class _Iteration:
    """(Preconditioned) conjugate gradients, each row with its own step sizes."""

    def __init__(self, operator: Operator, inverse_PKK: Tensor | None, b: Tensor, x: Tensor, small: float):
        self.operator, self.inverse, self.small, self.x = operator, inverse_PKK, small, x
        self._make_buffers()
        self.r = b.sub_(operator.times(x, *self.buffers))
        self.p = self.r.clone() if inverse_PKK is None else torch.bmm(self.r, inverse_PKK)
        self.rz = self._dot(self.r, self.p)
        self.active_PC1 = self._size(self.r) > small
        self.taken_PC = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)

    def _make_buffers(self) -> None:
        self.buffers = torch.empty_like(self.x), torch.empty_like(self.operator.mask_PCC)

    @staticmethod
    def _dot(a: Tensor, b: Tensor) -> Tensor:
        """Row by row; as products of a row and a column, which reads both once."""
        return torch.bmm(a.view(-1, 1, a.shape[-1]), b.view(-1, a.shape[-1], 1)).view(*a.shape[:-1], 1)

    @staticmethod
    def _size(a: Tensor) -> Tensor:
        return torch.linalg.vector_norm(a, dim=-1, keepdim=True)

    def _preconditioned(self) -> Tensor:
        return self.r if self.inverse is None else torch.bmm(self.r, self.inverse, out=self.buffers[0])

    def step(self) -> None:
        """One step of every row that has not converged; the others stay as they are."""
        tiny = torch.finfo(self.r.dtype).tiny
        ap = self.operator.times(self.p, *self.buffers)
        pap = self._dot(self.p, ap)
        alpha = torch.where(self.active_PC1, self.rz / pap.clamp_(min=tiny), 0.0)
        self.x.addcmul_(self.p, alpha)
        self.r.addcmul_(ap, alpha, value=-1)
        self.taken_PC += self.active_PC1[..., 0]
        size = self._size(self.r)
        z = self._preconditioned()
        rz = size.square() if self.inverse is None else self._dot(self.r, z)
        torch.addcmul(z, self.p, rz / self.rz.clamp(min=tiny), out=self.p)
        self.rz, self.active_PC1 = rz, self.active_PC1 & (size > self.small)

    def of(self, chunks: Tensor) -> _Iteration:
        """The iteration of some of the chunks, from where it is."""
        part = object.__new__(_Iteration)
        part.operator, part.small = self.operator.of(chunks), self.small
        part.inverse = None if self.inverse is None else self.inverse[chunks]
        for name in ("x", "r", "p", "rz", "active_PC1", "taken_PC"):
            setattr(part, name, getattr(self, name)[chunks])
        part._make_buffers()
        return part
