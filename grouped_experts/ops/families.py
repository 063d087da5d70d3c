"""Which family of kernels an op call takes: one rule in one place.

reference   plain torch: CPU tensors, fp64, and machines without Triton
portable    Triton kernels: GPU tensors in bf16, fp16 and fp32; Triton's interpreter runs fp16 and fp32 on a CPU
hopper      Gluon kernels for sm_90 in bf16, fp16 and FP8, and the portable ones for what those do not take

FP8 goes to kernels from sm_89 on, and to the reference below.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

FAMILIES = ("reference", "portable", "hopper")
GLUON = ((3, 6), (3, 9))  # the oldest and the newest Triton whose Gluon the kernels are compiled with, as a test

FP8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})

_forced: str | None = None


def choose_family(device: torch.device, dtypes: Iterable[torch.dtype]) -> str:
    """The family for tensors on that device, of those floating dtypes."""
    return _choice(_forced, device, tuple(dtypes))


@functools.cache
def _choice(forced: str | None, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> str:
    wanted = forced or _fastest(device)
    if wanted == "hopper" and not (_is_hopper(device) and {torch.bfloat16, torch.float16, *FP8}.intersection(dtypes)):
        wanted = "portable"
    if beyond_portable().intersection(dtypes) or (FP8.intersection(dtypes) and not knows_fp8(device)):
        return "reference"
    return wanted


def _fastest(device: torch.device) -> str:
    if device.type != "cuda" or not has_triton():
        return "reference"
    return "hopper" if _is_hopper(device) and has_gluon() else "portable"


def knows_fp8(device: torch.device) -> bool:
    """On a CPU Triton's interpreter does, whatever a GPU would."""
    if device.type != "cuda":
        return True
    return not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9)


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) == (9, 0)


@contextlib.contextmanager
def use_family(name: str) -> Iterator[None]:
    """Send every op to one family, as tests and benchmarks do; dtypes that it cannot take still go to the reference.

    It holds for all threads, the autograd engine's too, and must span the forward and the backward of a layer, which
    share what one family made. Raises ValueError for a name that is none of FAMILIES.
    """
    global _forced
    if name not in FAMILIES:
        raise ValueError(f"family: wanted one of {', '.join(FAMILIES)}, got {name!r}")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def forced_family() -> str | None:
    """What `use_family` says, where anything does."""
    return _forced


def by_family(name: str, reference: Callable[..., Any] | None = None, operands: int = 1) -> Callable[..., Any]:
    """The implementation of an op that every family has under one name, with one signature.

    The dtypes of its first `operands` arguments and of what it is to return choose the family; those of probs do not.
    reference: what the reference family runs, if that is not a function of its module.
    """

    def call(*args: Any) -> Any:
        dtypes = (*[a.dtype for a in args[:operands]], *[a for a in args if type(a) is torch.dtype])
        family = choose_family(args[0].device, dtypes)
        if family == "reference" and reference is not None:
            return reference(*args)
        return _implementation(family, name)(*args)

    call.__name__ = name
    return call


@functools.cache
def beyond_portable() -> frozenset[torch.dtype]:
    """What Triton's kernels cannot take: fp64; under the interpreter, whose dot is wrong there, bf16 as well."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return frozenset({torch.float64, torch.bfloat16} if interpreted else {torch.float64})


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def has_gluon() -> bool:
    """A Triton whose Gluon is known: it is experimental, and its names move."""
    major, minor = importlib.import_module("triton").__version__.split(".")[:2]
    oldest, newest = GLUON
    return oldest <= (int(major), int(minor)) <= newest


@functools.cache
def _implementation(family: str, name: str) -> Callable[..., Any]:
    """Imported when first needed: the package itself does without Triton."""
    implementation: Callable[..., Any] = getattr(importlib.import_module(f"grouped_experts.ops.{family}"), name)
    return implementation
