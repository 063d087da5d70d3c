"""The picture of a run: its losses, and how evenly the experts were used. And the losses of several runs in one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

from einops import rearrange
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_lm.checkpoint import replacing
from moe_lm.log import RunLog


def draw_curves(log: RunLog, bigram: float, path: Path) -> None:
    """Write a PNG: training and validation loss and the bigram model's; below, the load of every expert over time."""
    figure = _figure(height=8)
    loss_axes, load_axes = figure.subplots(2, 1, sharex=True)
    _draw_losses(loss_axes, log, "tab:blue", "tab:orange")
    loss_axes.axhline(bigram, color="black", linestyle="--", label="bigram model, validation")
    _label_losses(loss_axes)
    _draw_loads(figure, load_axes, log)
    _save(figure, path)


def draw_comparison(logs: Mapping[str, RunLog], path: Path) -> None:
    """Write a PNG: training and validation loss of every run, by name, each run in a colour of its own."""
    figure = _figure(height=5)
    axes = figure.subplots()
    styles = itertools.cycle(("o-", "x--", "+:"))  # what is drawn last lets what lies below be seen
    for number, ((name, log), style) in enumerate(zip(logs.items(), styles, strict=False)):
        color = f"C{number}"
        _draw_losses(axes, log, color, color, style, prefix=f"{name}, ")
    _label_losses(axes)
    _save(figure, path)


def _figure(height: float) -> Figure:
    return Figure(figsize=(9, height), layout="constrained")  # no pyplot: it would choose a backend for the process


def _save(figure: Figure, path: Path) -> None:
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def _draw_losses(
    axes: Axes, log: RunLog, train_color: str, validation_color: str, validation_style: str = "o-", prefix: str = ""
) -> None:
    marker = "o" if len(log.train_loss) < 2 else None  # one point is no line
    steps = range(1, len(log.train_loss) + 1)
    axes.plot(steps, log.train_loss, color=train_color, marker=marker, alpha=0.4, label=f"{prefix}training")
    validation = log.validation_loss
    axes.plot(
        list(validation),
        list(validation.values()),
        validation_style,
        color=validation_color,
        zorder=3,  # above the training losses of all runs
        label=f"{prefix}validation",
    )


def _label_losses(axes: Axes) -> None:
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.legend()
    axes.grid(alpha=0.3)


def _draw_loads(figure: Figure, axes: Axes, log: RunLog) -> None:
    axes.set(xlabel="step", ylabel="expert, layer by layer", title="tokens of an expert / even share")
    loads = log.loads()
    if not loads.numel():
        return
    steps = list(log.tokens_per_expert)
    interval = steps[1] - steps[0] if len(steps) > 1 else 1  # a column stands for the steps up to the next
    num_layers, num_experts = loads.shape[1:]
    image = axes.imshow(
        rearrange(loads, "n layer expert -> (layer expert) n").numpy(),
        aspect="auto",
        interpolation="nearest",
        cmap="RdBu_r",
        vmin=0,
        vmax=2,
        extent=(steps[0], steps[-1] + interval, num_layers * num_experts, 0),
    )
    for layer in range(1, num_layers):
        axes.axhline(layer * num_experts, color="black", linewidth=0.8)
    axes.set_yticks(
        [(layer + 0.5) * num_experts for layer in range(num_layers)], [f"layer {n + 1}" for n in range(num_layers)]
    )
    figure.colorbar(image, ax=axes, extend="max")
