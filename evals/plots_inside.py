"""Figures of what is inside a mixer: Mesa's solver, the information that survives, Fredholm indices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from evals.drawing import DEPLOYED, MUTED, OTHER_MODE, Dashes, log_x, log_y, name_at, panels, plain, short
from evals.shown import NATS, Draw, Shown, curve, middles

# ---- Mesa ------------------------------------------------------------------------------------------------------------


def mesa(shown: Sequence[Shown]) -> dict[str, Figure]:
    """``compute``: loss over the steps that were taken. ``positions``: what fewer steps cost, by position. ``inside``:
    steps and condition numbers by layer, head and position."""
    known = [one for one in shown if "curves" in one.tables]
    if not known:
        return {}
    return {"compute": _compute(known), "positions": _cost(known), "inside": _inside(known)}


def _settings(one: Shown) -> Iterator[tuple[str, str, float, dict[str, Any]]]:
    """(kind, value, mean steps, table) of each setting, fixed numbers of steps first."""
    for name, table in one.tables["curves"].items():
        kind, _, value = name.partition("=")
        yield kind, value, float(one.metrics[f"steps/{name}"] or 0.0), table


def _compute(known: Sequence[Shown]) -> Figure:
    figure, (row,) = panels(1, len(known), width=5.6, height=3.8)
    for axes, one in zip(row, known, strict=True):
        for kind, name, marker, dashes in (
            ("cg_steps", "a fixed number of steps", "o", DEPLOYED),
            ("tol", "until a relative residual", "s", OTHER_MODE),
        ):
            found = [(steps, table["loss"], value) for k, value, steps, table in _settings(one) if k == kind]
            if not found:
                continue
            colour = one.look.colour if kind == "cg_steps" else MUTED
            x, y, values = zip(*found, strict=True)
            axes.plot(x, y, color=colour, marker=marker, dashes=dashes, label=name)
            above = 11 if kind == "cg_steps" else -12
            last = None
            for place, loss, value in zip(x, y, values, strict=True):
                if last is None or abs(place - last) > 0.03 * max(1.0, max(x)):  # names of points on one spot once
                    name_at(axes, value, place, loss, above, colour)
                    last = place
        axes.margins(x=0.06, y=0.14)
        plain(axes, one.label, "steps of the solver, mean over tokens, heads and layers", NATS)
    return figure


def _cost(known: Sequence[Shown]) -> Figure:
    """Loss by position minus that of the most steps."""
    figure, (row,) = panels(1, len(known), width=5.6, height=3.8)
    for axes, one in zip(row, known, strict=True):
        fixed = [(int(value), table) for kind, value, _, table in _settings(one) if kind == "cg_steps"]
        if not fixed:
            axes.set_axis_off()
            continue
        most, best = max(fixed, key=lambda pair: pair[0])
        others: list[tuple[str, dict[str, Any], Dashes]] = [
            (f"{n} steps", table, DEPLOYED) for n, table in fixed if n != most
        ]
        others += [(f"tol {value}", table, OTHER_MODE) for kind, value, _, table in _settings(one) if kind == "tol"]
        for number, (name, table, dashes) in enumerate(others):
            gap = [a - b for a, b in zip(table["mean"], best["mean"], strict=True)]
            shade = _shade(number, len(others))
            axes.plot(middles(table["edges"]), gap, color=shade, marker="o", dashes=dashes, label=name)
        axes.axhline(0, color=MUTED, linewidth=1)
        log_x(axes, [2**k for k in range(best["edges"][-1].bit_length())])
        plain(axes, f"{one.label}, minus {most} steps", "tokens read", NATS)
    return figure


def _shade(number: int, count: int) -> Any:
    """Shades in an order that can be seen."""
    return matplotlib.colormaps["viridis"](0.9 * number / max(1, count - 1))


def _inside(known: Sequence[Shown]) -> Figure:
    """Two maps for each run, a line for each head."""
    lines = max(len(heads) * len(heads[0]) for one in known if (heads := one.tables["internals"]["condition"]))
    figure, grid = panels(len(known), 2, width=5.4, height=min(9.0, 1.6 + 0.26 * lines))
    for (left, right), one in zip(grid, known, strict=True):
        inside = one.tables["internals"]
        name, table = _finest(one)
        steps = [head for layer in table["steps"] for head in layer]
        condition = [head for layer in inside["condition"] for head in layer]
        heads = len(inside["condition"][0])
        names = [f"{layer}.{head}" for layer in inside["layers"] for head in range(heads)]
        lives = [life for layer in inside["half_life"] for life in layer or [None] * heads]
        lived = [name if life is None else f"{name} ({short(life)})" for name, life in zip(names, lives, strict=True)]
        ranges = [f"{a + 1}" if b == a + 1 else f"to {b}" for a, b in zip(table["edges"], table["edges"][1:], strict=False)]  # fmt: skip
        _map(figure, left, steps, names, ranges, Normalize(0, max(map(max, steps)) or 1))
        low, high = min(map(min, condition)), max(map(max, condition))
        _map(
            figure, right, condition, names, [f"{n}" for n in inside["positions"]], LogNorm(low, max(high, 1.01 * low))
        )
        plain(left, f"{one.label}: steps taken, {name}", "position", "layer.head")
        plain(right, f"{one.label}: condition number of H + Λ", "tokens read", "layer.head (half-life in tokens)")
        every = -(-len(names) // 32)
        for axes, rows in ((left, names), (right, lived)):
            axes.grid(visible=False)
            axes.set_yticks(range(0, len(rows), every), rows[::every])
    return figure


def _finest(one: Shown) -> tuple[str, dict[str, Any]]:
    """The setting whose steps are shown: the smallest residual, or else the most steps."""
    settings = list(_settings(one))
    tolerances = [(float(value), f"residual {value}", table) for kind, value, _, table in settings if kind == "tol"]
    if tolerances:
        return min(tolerances, key=lambda found: found[0])[1:]
    _, value, _, table = max(settings, key=lambda found: int(found[1]))
    return f"at most {value}", table


def _map(
    figure: Figure, axes: Axes, values: list[list[float]], names: list[str], columns: list[str], norm: Any
) -> None:
    picture = axes.imshow(values, cmap="viridis", aspect="auto", norm=norm, interpolation="nearest")
    axes.set_xticks(range(len(columns)), columns, rotation=45 if max(map(len, columns)) > 3 else 0)
    if len(names) <= 32 and len(columns) <= 12:
        for i, row in enumerate(values):
            for j, value in enumerate(row):
                light = norm(value) > 0.6
                axes.text(j, i, short(round(value, 2)), ha="center", va="center", fontsize=8, color="black" if light else "white")  # fmt: skip
    else:
        figure.colorbar(picture, ax=axes)


# ---- information -----------------------------------------------------------------------------------------------------


def information(shown: Sequence[Shown]) -> dict[str, Figure]:
    """Retained share over the compute, a panel for each way."""
    settings = shown[0].content["settings"]
    figure, (row,) = panels(1, len(settings["ways"]), width=5.0, height=3.6)
    for axes, way in zip(row, settings["ways"], strict=True):
        steps = sorted(max(1, round(share * settings["steps"])) for share in settings["fractions"])
        for one in shown:
            shares = [one.metrics.get(f"retained/{way}/compute={share:g}") for share in sorted(settings["fractions"])]
            if any(share is not None for share in shares):
                curve(axes, one, steps, shares)
        axes.axhline(0, color=MUTED, linewidth=1)
        low, high = axes.get_ylim()
        if high > 0.4:
            axes.axhline(1, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_ylim(min(low, -0.02), 1.03 if high > 0.4 else max(0.1, 1.2 * high))
        log_x(axes, steps)
        titles = {"frozen": "the run's own weights, frozen", "end_to_end": "a fresh encoder, trained with the decoder"}
        plain(axes, titles[way], "training steps of the decoder", "share of the input retained")
    return {"": figure}


# ---- Fredholm --------------------------------------------------------------------------------------------------------


def fredholm(shown: Sequence[Shown]) -> dict[str, Figure]:
    """Index by layer, with each filter's own and the init's beside it, and how near the circle a filter's values come."""
    known = [one for one in shown if "filters" in one.tables]
    if not known:
        return {}
    figure, (row,) = panels(1, 2, width=5.0, height=3.6)
    near = known[0].content["settings"]["near_zero"]
    layers = sorted({row["layer"] for one in known for row in one.tables["filters"]})
    for number, one in enumerate(known):
        filters = one.tables["filters"]
        shift = 0.12 * (number - (len(known) - 1) / 2)
        own = sorted({row["layer"] for row in filters})
        for key, mode, symbol in (
            ("index", None, one.look.marker),
            ("initial_index", "at the start", ""),
            ("autoencoder_index", "rebuilding", ""),
        ):
            if f"{key}/layer={own[0]}" not in one.metrics:
                continue
            curve(row[0], one, own, [one.metrics[f"{key}/layer={layer}"] for layer in own], mode, marker=symbol)
        for kind, axes in (("index", row[0]), ("margin", row[1])):
            found = [(f["layer"] + shift, f[kind], f["near_zero"]) for f in filters if f[kind] is not None]
            for hollow in (False, True):
                chosen = [(x, y) for x, y, close in found if close == hollow]
                if chosen:
                    axes.scatter(
                        [x for x, _ in chosen], [y for _, y in chosen], s=16, facecolors="none" if hollow else one.look.colour,
                        edgecolors=one.look.colour, alpha=0.45, linewidths=1,
                    )  # fmt: skip
    row[1].axhline(near, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label="near zero: the index says little")
    log_y(row[1])
    for axes, title, unit in zip(row, ("index: mean of a layer, and each filter", "smallest of |A| on the circle"), ("index", "share of the largest"), strict=True):  # fmt: skip
        plain(axes, title, "layer", unit)
        axes.set_xticks(layers)
        axes.set_xlim(layers[0] - 0.5, layers[-1] + 0.5)
    return {"": figure}


DRAW_INSIDE: dict[str, Draw] = {"mesa": mesa, "information": information, "fredholm": fredholm}
