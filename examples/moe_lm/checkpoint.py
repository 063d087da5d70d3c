"""Checkpoints: named tensors and a few facts in one safetensors file that is always whole."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from moe_lm.errors import UserError


@dataclass(frozen=True)
class Checkpoint:
    """tensors by name, on the CPU; facts: what JSON can hold."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]

    def section(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix.`, by the rest of their names."""
        return {n.removeprefix(f"{prefix}."): t for n, t in self.tensors.items() if n.startswith(f"{prefix}.")}


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write beside `path`, then rename: a reader, or a crash, finds the old file or the new one, never a part."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(facts)
    metadata = {"facts": text, "digest": _digest(on_cpu, text)}
    with replacing(path) as temporary:
        temporary.write_bytes(save(on_cpu, metadata))  # save_file would make a file that only its owner can read


def load_checkpoint(path: Path) -> Checkpoint:
    """Raises UserError if the file is missing, cut off, or not what was written."""
    if not path.is_file():
        raise UserError(f"{path}: there is no checkpoint to resume from")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # A copy: the tensors of a mapped file may start at any address, and kernels may round by it.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        facts = json.loads(metadata["facts"])
        whole = metadata["digest"] == _digest(tensors, metadata["facts"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise UserError(f"{path}: is not a whole checkpoint of this program ({error})") from error
    if not whole:
        raise UserError(f"{path}: is damaged: its contents are not those that were written")
    return Checkpoint(tensors, facts)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, which takes the place of `path` if all went well and is removed if not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def flatten_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Its state by `parameter number.name`. Learning rates and the like are not state: the settings give them."""
    state = optimizer.state_dict()["state"]
    return {f"{number}.{name}": value for number, values in state.items() for name, value in values.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, flat: Mapping[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in flat.items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _digest(tensors: Mapping[str, Tensor], facts: str) -> str:
    """SHA-256 of facts, names, dtypes, shapes and bytes; safetensors itself notices a wrong length only."""
    digest = hashlib.sha256(facts.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
