"""What happened in every step of a run, kept in its checkpoint and written out for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_lm.checkpoint import replacing
from moe_lm.errors import UserError

LOAD_EVERY = 10  # steps: every load of a long run would be larger than its model


@dataclass
class RunLog:
    """train_loss[i] is that of step i + 1; validation_loss by step; tokens_per_expert (L, E) int32 by step.

    device: its name by the first step that was done on it; a run may be resumed on another one.
    """

    train_loss: list[float] = field(default_factory=list)
    validation_loss: dict[int, float] = field(default_factory=dict)
    tokens_per_expert: dict[int, Tensor] = field(default_factory=dict)
    device: dict[int, str] = field(default_factory=dict)

    def add_step(self, loss: float, tokens_per_expert: Tensor, device: str) -> None:
        self.train_loss.append(loss)
        step = len(self.train_loss)
        if step % LOAD_EVERY == 1:
            self.tokens_per_expert[step] = tokens_per_expert.cpu()
        if device != next(reversed(self.device.values()), None):
            self.device[step] = device

    def loads(self) -> Tensor:
        """(N, L, E): tokens of each expert over the mean of its layer."""
        if not self.tokens_per_expert:
            return torch.empty(0, 0, 0)
        counts = torch.stack(list(self.tokens_per_expert.values())).double()
        return counts / counts.mean(-1, keepdim=True)

    def to_tensors(self) -> dict[str, Tensor]:
        loads = list(self.tokens_per_expert.values())
        return {
            "train_loss": torch.tensor(self.train_loss, dtype=torch.float64),
            "validation_step": torch.tensor(list(self.validation_loss), dtype=torch.int64),
            "validation_loss": torch.tensor(list(self.validation_loss.values()), dtype=torch.float64),
            "load_step": torch.tensor(list(self.tokens_per_expert), dtype=torch.int64),
            "tokens_per_expert": torch.stack(loads) if loads else torch.empty(0, dtype=torch.int32),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], device: Mapping[str, str]) -> RunLog:
        """device as JSON gives it back: the steps are text."""
        validation = zip(tensors["validation_step"].tolist(), tensors["validation_loss"].tolist(), strict=True)
        loads = zip(tensors["load_step"].tolist(), tensors["tokens_per_expert"].unbind(), strict=True)
        devices = {int(step): name for step, name in device.items()}
        return cls(tensors["train_loss"].tolist(), dict(validation), dict(loads), devices)

    def write(self, path: Path) -> None:
        """One JSON object a step."""
        with replacing(path) as temporary, temporary.open("w") as file:
            for step, loss in enumerate(self.train_loss, start=1):
                line: dict[str, Any] = {"step": step, "train_loss": loss}
                if step in self.validation_loss:
                    line["validation_loss"] = self.validation_loss[step]
                if step in self.tokens_per_expert:
                    line["tokens_per_expert"] = self.tokens_per_expert[step].tolist()
                if step in self.device:
                    line["device"] = self.device[step]
                file.write(json.dumps(line) + "\n")

    @classmethod
    def read(cls, path: Path) -> RunLog:
        """What `write` wrote. Raises UserError for a file that is none of a run."""
        log = cls()
        try:
            for step, line in enumerate(map(json.loads, path.read_text().splitlines()), start=1):
                log.train_loss.append(line["train_loss"])
                if "validation_loss" in line:
                    log.validation_loss[step] = line["validation_loss"]
                if "tokens_per_expert" in line:
                    log.tokens_per_expert[step] = torch.tensor(line["tokens_per_expert"], dtype=torch.int32)
                if "device" in line:
                    log.device[step] = line["device"]
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: is not the log of a run") from error
        return log
