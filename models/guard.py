"""Numbers that are not finite stop a run before they reach its weights, and the first layer that makes them is named."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from data.dataset import Batch


class NotFinite(FloatingPointError):
    """A loss or gradient became NaN or infinite."""


def _finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, tuple | list):
        return all(map(_finite, value))
    return True


def locate(module: Any, batch: Batch) -> str:
    """Run the loss once more and say where the first value that is not finite comes from."""
    for name, parameter in module.model.named_parameters():
        if not _finite(parameter.data):
            return f"the weights of {name} are not finite"
    first: list[str] = []

    def watch(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if not first and not _finite(output):
                first.append(name)

        return hook

    handles = [m.register_forward_hook(watch(name)) for name, m in module.model.named_modules() if name]
    try:
        module.reseed(0)
        with torch.no_grad(), module.trainer.precision_plugin.train_step_context():
            module.model.loss(batch, module.global_step)
    finally:
        for handle in handles:
            handle.remove()
    if first:
        return f"the first layer whose output is not finite is {first[0]}"
    broken = [name for name, p in module.model.named_parameters() if p.grad is not None and not _finite(p.grad)]
    if broken:  # the backward pass runs from the last layer to the first
        return f"the outputs are finite; the gradient is not, first at {broken[-1]}"
    return "outputs and gradients of the last micro batch are finite; an earlier one's were not"


class Spikes:
    """Counts loss spikes: losses more than six standard deviations above their running mean (decay 0.98).

    Tensors on the model's device, so that counting costs no synchronisation.
    """

    WARMUP = 50  # steps until the running mean is worth comparing with
    DECAY = 0.98
    DEVIATIONS = 6

    def __init__(self) -> None:
        self.mean, self.variance = torch.zeros(()), torch.zeros(())
        self.steps, self.count = torch.zeros(()), torch.zeros(())

    def add(self, loss: Tensor) -> None:
        """Take in the loss of a step."""
        for name in ("mean", "variance", "steps", "count"):
            setattr(self, name, getattr(self, name).to(loss.device))
        gap = loss - self.mean
        spike = (gap > self.DEVIATIONS * self.variance.sqrt()) & (self.steps >= self.WARMUP)
        rate = torch.maximum(1 / (self.steps + 1), self.steps.new_tensor(1 - self.DECAY))
        # A spike must not drag the mean along, or the next one would go unseen.
        gap = torch.where(spike, torch.zeros_like(gap), gap)
        self.mean = self.mean + rate * gap
        self.variance = (1 - rate) * (self.variance + rate * gap.square())
        self.steps, self.count = self.steps + 1, self.count + spike

    def state_dict(self) -> dict[str, Tensor]:
        """For the checkpoint."""
        return {name: getattr(self, name).cpu() for name in ("mean", "variance", "steps", "count")}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """From the checkpoint."""
        for name, value in state.items():
            setattr(self, name, value)
