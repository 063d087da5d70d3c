"""Text as bytes: where it comes from, how it is split, how batches are drawn, and the bigram model to beat."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_lm.errors import UserError
from moe_lm.model import VOCABULARY

VALIDATION_SHARE = 0.1
# Installed packages are not the standard library, and its own tests hold large tables of data.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """train and validation: bytes, uint8 on the CPU, the last tenth for validation. digest: SHA-256 of all the text."""

    train: Tensor
    validation: Tensor
    digest: str
    source: str


def load_corpus(path: Path | None, context: int) -> Corpus:
    """The text of the file at `path`, or without one the source of Python's standard library on this machine.

    Raises UserError if there is no such file, or if a part of it is shorter than one sequence and its next byte.
    """
    text = read_standard_library() if path is None else read_file(path)
    source = "the Python standard library" if path is None else str(path)
    if not text:
        raise UserError(f"{source}: wanted text, got nothing: it is empty")
    validation_size = int(len(text) * VALIDATION_SHARE)
    if validation_size < context + 1:
        least = int((context + 1) / VALIDATION_SHARE) + 1
        raise UserError(f"{source}: wanted at least {least} bytes for a context of {context}, got {len(text)}")
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Corpus(tokens[:-validation_size], tokens[-validation_size:], hashlib.sha256(text).hexdigest(), source)


def read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def read_standard_library() -> bytes:
    """Every module's source, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [(path.relative_to(root).as_posix(), path) for path in root.rglob("*.py")]
    return b"".join(read_file(path) for name, path in sorted(files) if SKIPPED_FOLDERS.isdisjoint(name.split("/")))


def draw_batch(tokens: Tensor, batch_size: int, context: int, generator: torch.Generator) -> Tensor:
    """Sequences from random places: (B, C + 1) int64, the last C of them being the targets of the first C."""
    starts = torch.randint(tokens.numel() - context, (batch_size, 1), generator=generator)
    return tokens[starts + torch.arange(context + 1)].long()


def validation_sequences(tokens: Tensor, count: int, context: int) -> Tensor:
    """At most `count` sequences, evenly spread and not overlapping in their targets: (N, C + 1) int64."""
    count = min(count, (tokens.numel() - 1) // context)
    starts = torch.linspace(0, tokens.numel() - context - 1, count, dtype=torch.float64).floor().long()
    return tokens[starts[:, None] + torch.arange(context + 1)].long()


def bigram_loss(train: Tensor, sequences: Tensor) -> float:
    """Mean of -log p(byte | byte before) over the targets of `sequences`, in nats per byte.

    p is counted on `train` (N,) uint8 with one added to each of the 256 x 256 counts; sequences (N, C + 1) int64.
    """
    pairs = train[:-1].long() * VOCABULARY + train[1:].long()
    counts = torch.bincount(pairs, minlength=VOCABULARY**2).view(VOCABULARY, VOCABULARY).double() + 1
    log_p = (counts / counts.sum(1, keepdim=True)).log()
    return -log_p[sequences[:, :-1], sequences[:, 1:]].mean().item()
