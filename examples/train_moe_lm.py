"""Train a small Mixture-of-Experts language model on real text: `python train_moe_lm.py --help`."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts; see make_deterministic
# Threads that spin while they wait starve the one that they wait for when another program runs beside them: with one
# such program on two cores a step took 1.0 s instead of 0.3 s. On idle cores, spinning gains 0.14 s against 0.18 s.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import tyro
from moe_lm.data import load_corpus
from moe_lm.errors import UserError
from moe_lm.settings import Settings
from moe_lm.trainer import CHECKPOINT, CURVES, LOG, Trainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

INTERRUPTED_TWICE = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 for a run that ended or was stopped by Ctrl-C and saved, 1 for an error."""
    arguments = sys.argv[1:] if arguments is None else arguments
    settings = tyro.cli(Settings, args=arguments, config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff))
    console = Console(soft_wrap=True, highlight=False)
    try:
        train(settings, console, arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename or settings.out}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped at once; the last checkpoint is as it was", file=sys.stderr)
        return INTERRUPTED_TWICE
    return 0


def train(settings: Settings, console: Console, arguments: Sequence[str]) -> None:
    settings.check()
    device = choose_device(settings.device)
    check_folder(settings)
    corpus = load_corpus(settings.data, settings.model.context)
    make_deterministic()
    trainer = Trainer(settings, corpus, device)
    if settings.resume:
        trainer.resume(settings.out)
    else:
        begin_folder(settings.out)
    describe(trainer, console)
    with StopRequest() as stop:
        started, first = time.perf_counter(), trainer.step
        run_steps(trainer, console, stop)
        trainer.save(settings.out)
    if trainer.step < settings.steps:
        resume = [a for a in arguments if a not in ("--resume", "--overwrite")] + ["--resume"]
        console.print(f"stopped after step {trainer.step}, saved in {settings.out}; to go on:")
        console.print(f"    {shlex.join([sys.executable, sys.argv[0], *resume])}", markup=False)
        return
    seconds = time.perf_counter() - started
    loss = trainer.log.validation_loss.get(trainer.step) or trainer.validation_loss()
    console.print(f"{trainer.step - first} steps in {seconds:.0f} s; {CHECKPOINT}, {LOG}, {CURVES} in {settings.out}")
    console.print(f"validation loss {loss:.4f} nats per byte")
    console.print(f"bigram model    {trainer.bigram:.4f} nats per byte, on the same {trainer.targets:,} bytes")


def choose_device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("device: wanted cuda, but PyTorch finds no GPU here")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def check_folder(settings: Settings) -> None:
    """Refuse to lose a run that nobody asked to lose."""
    if settings.out.exists() and not settings.out.is_dir():
        raise UserError(f"{settings.out}: wanted a folder, got a file")
    if settings.out.exists() and not os.access(settings.out, os.W_OK):
        raise UserError(f"{settings.out}: cannot be written to")
    held = [name for name in (CHECKPOINT, LOG, CURVES) if (settings.out / name).exists()]
    if held and not (settings.resume or settings.overwrite):
        raise UserError(
            f"{settings.out}: holds a run already ({', '.join(held)}): say --resume to go on with it, "
            "--overwrite to lose it, or --out FOLDER to leave it alone"
        )


def begin_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in (CHECKPOINT, LOG, CURVES):
        (folder / name).unlink(missing_ok=True)


def make_deterministic() -> None:
    """So that a resumed run gives the same bits as one that was not interrupted, on a GPU too."""
    torch.use_deterministic_algorithms(True)
    # A help in the search for bugs, at a price.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def describe(trainer: Trainer, console: Console) -> None:
    corpus = trainer.corpus
    parameters = sum(p.numel() for p in trainer.model.parameters())
    console.print(
        f"text: {corpus.source}, {len(corpus.train):,} bytes to learn, {len(corpus.validation):,} to validate"
    )
    console.print(f"model: {parameters:,} parameters, on {trainer.device}")
    console.print("load: tokens of the least and of the most used expert, over an even share")
    if trainer.step:
        console.print(f"resumed after step {trainer.step}")


class StopRequest:
    """Takes note of the first Ctrl-C (or SIGTERM), so that the step at hand can end; the second one stops at once."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> StopRequest:
        self.before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def run_steps(trainer: Trainer, console: Console, stop: StopRequest) -> None:
    """Until the last step or a request to stop."""
    settings = trainer.settings
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=settings.steps, completed=trainer.step)
        while trainer.step < settings.steps and not stop.requested:
            show_step(trainer, progress, task)
            if trainer.step % settings.eval_every == 0:
                loss = trainer.log.validation_loss[trainer.step] = trainer.validation_loss()
                train_loss = trainer.log.train_loss[-1]
                progress.console.print(f"step {trainer.step}: training loss {train_loss:.4f}, validation {loss:.4f}")
            if trainer.step % settings.checkpoint_every == 0 and trainer.step < settings.steps:
                trainer.save(settings.out)


def show_step(trainer: Trainer, progress: Progress, task: TaskID) -> None:
    """Do a step and tell of it."""
    settings, began = trainer.settings, time.perf_counter()
    counts = trainer.train_step().double()
    seconds = time.perf_counter() - began
    load = counts / counts.mean(1, keepdim=True)
    progress.update(
        task,
        completed=trainer.step,
        description=f"loss {trainer.log.train_loss[-1]:.3f}  "
        f"{settings.batch_size * settings.model.context / seconds:,.0f} tokens/s  "
        f"load {load.min():.2f}-{load.max():.2f}",
    )


if __name__ == "__main__":
    sys.exit(main())
