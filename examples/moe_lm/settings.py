"""What a run is told on its command line."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from moe_lm.errors import UserError
from moe_lm.model import ModelConfig

# What may change when a run is resumed; all other settings decide its numbers.
NOT_COMPARED = {"data", "out", "steps", "checkpoint_every", "device", "defer_wgrad", "resume", "overwrite"}


@dataclass(frozen=True)
class Settings:
    """Train a small Mixture-of-Experts language model on bytes of text.

    Without --data the text is the source code of Python's own standard library, found on this machine. The run prints
    its validation loss beside that of a bigram model (how often each byte follows each other byte), in nats per byte:
    lower is better. It leaves checkpoint.safetensors, log.jsonl and curves.png in the output folder. Ctrl-C saves a
    checkpoint and stops; the same command with --resume goes on from there as if nothing had happened. compare_runs.py
    draws the losses of several runs into one picture.
    """

    data: Path | None = None
    """a file to learn from; any file will do, it is read as bytes"""
    out: Path = Path("runs/moe_lm")
    """folder for the checkpoint, the log and the plot"""
    resume: bool = False
    """go on with the run in the output folder"""
    overwrite: bool = False
    """begin anew and lose the run in the output folder"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to compute; auto takes a GPU if there is one (with bf16 there, fp32 on a CPU)"""
    defer_wgrad: bool = False
    """compute the experts' weight gradients after the rest of the backward pass; the numbers stay the same"""
    fp8: bool = False
    """compute the experts' products in FP8, which a CPU emulates, slowly"""
    steps: int = 1100
    """training steps in all, those before a resume included"""
    batch_size: int = 16
    """sequences in a step"""
    learning_rate: float = 3e-3
    """highest learning rate of AdamW, reached after the warm-up"""
    warmup_steps: int = 50
    """steps in which the learning rate rises"""
    decay_steps: int = 1100
    """step at which the learning rate has come down to a tenth, where it stays, whatever --steps is"""
    weight_decay: float = 0.01
    """weight decay of AdamW"""
    balance_weight: float = 0.01
    """weight of the loss that spreads the text evenly over the experts"""
    seed: int = 0
    """for the first weights and the order of the text"""
    eval_every: int = 100
    """steps between two measurements of the validation loss"""
    eval_sequences: int = 256
    """sequences of the validation text that are measured"""
    checkpoint_every: int = 200
    """steps between two checkpoints"""
    model: ModelConfig = field(default_factory=ModelConfig)

    def check(self) -> None:
        """Raise UserError for a number out of range or flags that exclude each other."""
        names = ("steps", "batch_size", "decay_steps", "eval_every", "eval_sequences", "checkpoint_every")
        least = {**dict.fromkeys(names, 1), "warmup_steps": 0, "weight_decay": 0, "balance_weight": 0, "seed": 0}
        for name, minimum in least.items():
            if not getattr(self, name) >= minimum:
                raise UserError(f"{name}: wanted at least {minimum}, got {getattr(self, name)}")
        if not 0 < self.learning_rate < float("inf"):
            raise UserError(f"learning_rate: wanted a finite number above 0, got {self.learning_rate}")
        if self.seed >= 2**63:
            raise UserError(f"seed: wanted less than 2**63, got {self.seed}")
        if self.resume and self.overwrite:
            raise UserError("--resume and --overwrite exclude each other")
        self.model.check()

    def compared(self) -> dict[str, Any]:
        """The settings that a resumed run must share with the run it continues, by name."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if name not in NOT_COMPARED}
        return {**values.pop("model"), **values}
