"""Everything that a run consists of between two steps, and the step."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import grouped_experts
from moe_lm.checkpoint import (
    Checkpoint,
    flatten_optimizer,
    load_checkpoint,
    restore_optimizer,
    save_checkpoint,
)
from moe_lm.data import Corpus, bigram_loss, draw_batch, validation_sequences
from moe_lm.errors import UserError
from moe_lm.log import RunLog
from moe_lm.model import LanguageModel, LanguageModelOutput
from moe_lm.plot import draw_curves
from moe_lm.settings import Settings

CHECKPOINT, LOG, CURVES = "checkpoint.safetensors", "log.jsonl", "curves.png"
GRADIENT_NORM_LIMIT = 1.0
LAST_LEARNING_RATE_SHARE = 0.1


class Trainer:
    """Model, optimizer, the generator that draws batches, and the log: all that a checkpoint holds."""

    def __init__(self, settings: Settings, corpus: Corpus, device: torch.device) -> None:
        self.settings, self.corpus, self.device = settings, corpus, device
        torch.manual_seed(settings.seed)
        precision = "fp8" if settings.fp8 else None
        self.model = LanguageModel(settings.model, defer_wgrad=settings.defer_wgrad, precision=precision).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=settings.weight_decay, fused=True)
        self.optimizer.register_step_pre_hook(lambda *_: grouped_experts.check_no_pending_wgrads(self.model))
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.log = RunLog()
        self.validation = validation_sequences(corpus.validation, settings.eval_sequences, settings.model.context)
        self.bigram = bigram_loss(corpus.train, self.validation)

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.log.train_loss)

    @property
    def targets(self) -> int:
        """Bytes that the validation loss is a mean over."""
        return self.validation[:, 1:].numel()

    def train_step(self) -> Tensor:
        """One step; returns tokens_per_expert (L, E). Raises UserError if the loss is no number."""
        settings = self.settings
        batch = draw_batch(self.corpus.train, settings.batch_size, settings.model.context, self.generator)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step + 1, settings)
        out, loss = self._forward(batch)
        (loss + settings.balance_weight * out.load_balancing_loss).backward()
        grouped_experts.backward_dw(self.model)  # nothing to do unless the gradients were deferred
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM_LIMIT)
        self.optimizer.step()
        self.optimizer.zero_grad()
        value = loss.item()
        if not math.isfinite(value):
            raise UserError(f"the loss is {value} in step {self.step + 1}: try a lower --learning-rate")
        self.log.add_step(value, out.tokens_per_expert, device_name(self.device, settings.fp8))
        return out.tokens_per_expert

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean over the validation targets, in nats per byte."""
        total = 0.0
        for sequences in self.validation.split(self.settings.batch_size):
            total += self._forward(sequences)[1].item() * len(sequences)
        return total / len(self.validation)

    def _forward(self, sequences: Tensor) -> tuple[LanguageModelOutput, Tensor]:
        """sequences (B, C + 1) on the CPU -> what the model says, and its mean loss over the C targets."""
        sequences = sequences.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=uses_bf16(self.device)):
            out = self.model(sequences[:, :-1])
        return out, F.cross_entropy(out.logits.flatten(0, 1).float(), sequences[:, 1:].flatten())

    def save(self, folder: Path) -> None:
        """Checkpoint, log and plot; the checkpoint first, since the others can be made from it."""
        sections = {
            "model": self.model.state_dict(),
            "optimizer": flatten_optimizer(self.optimizer),
            "log": self.log.to_tensors(),
            "generator": {"state": self.generator.get_state()},
        }
        tensors = {f"{section}.{name}": t for section, part in sections.items() for name, t in part.items()}
        facts = {"settings": self.settings.compared(), "text": self.corpus.digest, "device": self.log.device}
        save_checkpoint(folder / CHECKPOINT, tensors, facts)
        self.log.write(folder / LOG)
        draw_curves(self.log, self.bigram, folder / CURVES)

    def resume(self, folder: Path) -> None:
        """Take over the state of the run in `folder`. Raises UserError if it is not a part of the same run."""
        checkpoint = load_checkpoint(folder / CHECKPOINT)
        self._check_same_run(checkpoint, folder / CHECKPOINT)
        self.model.load_state_dict(checkpoint.section("model"))
        restore_optimizer(self.optimizer, checkpoint.section("optimizer"))
        self.generator.set_state(checkpoint.section("generator")["state"])
        self.log = RunLog.from_tensors(checkpoint.section("log"), checkpoint.facts.get("device", {}))
        if self.step > self.settings.steps:
            raise UserError(f"steps: wanted at least the {self.step} that are done, got {self.settings.steps}")

    def _check_same_run(self, checkpoint: Checkpoint, path: Path) -> None:
        theirs, ours = checkpoint.facts["settings"], self.settings.compared()
        for name in ours:
            if theirs.get(name) != ours[name]:
                raise UserError(f"{path}: its run had {name} = {theirs.get(name)}, this one has {ours[name]}")
        if checkpoint.facts["text"] != self.corpus.digest:
            raise UserError(f"{path}: its run learned from another text than {self.corpus.source}")


def uses_bf16(device: torch.device) -> bool:
    return device.type == "cuda"


def device_name(device: torch.device, fp8: bool) -> str:
    """With the dtype that its products are computed in, since the losses of a run depend on both."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    dtype = "bf16" if uses_bf16(device) else "fp32"
    return f"{name} ({dtype}, experts in FP8)" if fp8 else f"{name} ({dtype})"


def learning_rate(step: int, settings: Settings) -> float:
    """Of step 1, 2, ...: a linear rise, then half a cosine down to a tenth, then constant."""
    if step <= settings.warmup_steps:
        return settings.learning_rate * step / settings.warmup_steps
    done = min(1.0, (step - settings.warmup_steps) / max(1, settings.decay_steps - settings.warmup_steps))
    share = LAST_LEARNING_RATE_SHARE + (1 - LAST_LEARNING_RATE_SHARE) * (1 + math.cos(math.pi * done)) / 2
    return settings.learning_rate * share
