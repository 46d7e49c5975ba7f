"""What the operations must compute, in float64 and with plain loops over tokens: independent of the code under test."""

import torch
from torch import Tensor


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = (I - beta k k^T) e^g S_{t-1} + beta k v^T, o_t = scale S_t^T q_t, one sequence and one head at a time."""
    batch, steps, heads, key_dim = q.shape
    rows, states = [], []
    for b in range(batch):
        for h in range(heads):
            state = q.new_zeros(key_dim, v.shape[-1]) if initial_state is None else initial_state[b, h]
            for t in range(steps):
                if segment_ids is not None and t > 0 and segment_ids[b, t] != segment_ids[b, t - 1]:
                    state = torch.zeros_like(state)
                key, strength = k[b, t, h], beta[b, t, h]
                decayed = state if g is None else torch.exp(g[b, t, h]) * state
                erase = torch.eye(key_dim, dtype=q.dtype) - strength * torch.outer(key, key)
                state = erase @ decayed + strength * torch.outer(key, v[b, t, h])
                rows.append(scale * (q[b, t, h] @ state))
            states.append(state)
    o_BTHV = torch.stack(rows).view(batch, heads, steps, -1).transpose(1, 2)
    return o_BTHV, torch.stack(states).view(batch, heads, key_dim, -1)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, segment_ids: Tensor | None = None
) -> Tensor:
    """Every query's softmax over exactly the keys it may see, picked out by their indices."""
    batch, steps, heads, key_dim = q.shape
    rows = []
    for b in range(batch):
        for h in range(heads):
            for t in range(steps):
                first = 0 if window is None else max(0, t - window + 1)
                if segment_ids is not None:
                    while segment_ids[b, first] != segment_ids[b, t]:
                        first += 1
                weights = torch.softmax(k[b, first : t + 1, h] @ q[b, t, h] / key_dim**0.5, dim=0)
                rows.append(weights @ v[b, first : t + 1, h])
    return torch.stack(rows).view(batch, heads, steps, -1).transpose(1, 2)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||; the absolute error where nothing is expected."""
    actual, expected = actual.detach().double(), expected.detach().double()
    size = expected.norm().item()
    return (actual - expected).norm().item() / (size if size > 0 else 1.0)


def assert_close(actual: list[Tensor], expected: list[Tensor], tolerance: float, names: str) -> None:
    """Each tensor of ``actual`` within a relative RMS error; NaN fails."""
    labels = names.split()
    assert len(labels) == len(actual) == len(expected)
    errors = {label: relative_error(a, e) for label, a, e in zip(labels, actual, expected, strict=True)}
    wrong = {label: f"{error:.1e}" for label, error in errors.items() if not error <= tolerance}
    assert not wrong, f"relative errors above {tolerance:.0e}: {wrong}"


def documents(batch: int, steps: int, seed: int = 0, borders: float = 0.15) -> Tensor:
    """Random non-decreasing segment ids (B,T), different borders in each row, with gaps between the ids."""
    generator = torch.Generator().manual_seed(seed)
    return 3 + 2 * (torch.rand(batch, steps, generator=generator) < borders).long().cumsum(1)
