"""The picture of a run: its losses, and how evenly the experts were used."""

from __future__ import annotations

from pathlib import Path

from einops import rearrange
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moe_lm.checkpoint import replacing
from moe_lm.log import RunLog


def draw_curves(log: RunLog, bigram: float, path: Path) -> None:
    """Write a PNG: training and validation loss and the bigram model's; below, the load of every expert over time."""
    figure = Figure(figsize=(9, 8), layout="constrained")  # no pyplot: it would choose a backend for the whole process
    loss_axes, load_axes = figure.subplots(2, 1, sharex=True)
    _draw_losses(loss_axes, log, bigram)
    _draw_loads(figure, load_axes, log)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def _draw_losses(axes: Axes, log: RunLog, bigram: float) -> None:
    marker = "o" if len(log.train_loss) < 2 else None  # one point is no line
    steps = range(1, len(log.train_loss) + 1)
    axes.plot(steps, log.train_loss, color="tab:blue", marker=marker, alpha=0.4, label="training")
    axes.plot(
        list(log.validation_loss), list(log.validation_loss.values()), "o-", color="tab:orange", label="validation"
    )
    axes.axhline(bigram, color="black", linestyle="--", label="bigram model, validation")
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
