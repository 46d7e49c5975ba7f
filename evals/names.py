"""Names of metrics: ``loss/length=512`` is the metric ``loss`` of the slice ``length=512``. Imports no torch: reports read it."""

from __future__ import annotations

from collections.abc import Iterable


def split(metric: str) -> tuple[str, dict[str, str]]:
    """``task/shots=5/acc`` -> ``task/acc`` and ``{"shots": "5"}``; labels in the order in which they stand."""
    name, labels = [], {}
    for part in metric.split("/"):
        key, equals, label = part.partition("=")
        if equals:
            labels[key] = label
        else:
            name.append(part)
    return "/".join(name), labels


def number(label: str) -> int | float | str:
    """A label as a number where it is one: 512, 0.001, ``cg``."""
    try:
        return int(label)
    except ValueError:
        pass
    try:
        return float(label)
    except ValueError:
        return label


def mode_of(metric: str, modes: Iterable[str]) -> tuple[str | None, str]:
    """``test/teacher_forced/loss`` -> ``teacher_forced`` and ``test/loss``, where that is one of ``modes``; else None and
    the metric as it is."""
    parts = metric.split("/")
    for mode in modes:
        if mode in parts:
            return mode, "/".join(part for part in parts if part != mode)
    return None, metric
