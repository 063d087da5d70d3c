"""Launching a kernel: on the right device, cheaply, and with descriptors for the tensor memory accelerator (TMA)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

INT32_MAX = 2**31 - 1

_thread = threading.local()


class Kernel:
    """A Triton kernel with all its constexprs set, in the order of its signature, and its options.

    A launch is `kernel[grid](*args, **constants, **options)` at a third of its cost on the host: Triton binds and
    specializes every argument anew each time, where here the compiled kernel is found by what Triton specializes on.
    Triton's knobs count when a kernel is launched for the first time; hooks count always. On AMD's GPUs, for which
    Triton specializes on more, every launch is Triton's own.
    """

    def __init__(self, function: Any, options: dict[str, Any], constants: dict[str, Any]) -> None:
        assert list(constants) == function.arg_names[len(function.arg_names) - len(constants) :], function
        self.function, self.options, self.constants = function, options, constants
        self._values = tuple(constants.values())
        self._compiled: dict[Hashable, Compiled] = {}

    def launch(self, grid: tuple[int, ...], device: torch.device, *args: Any) -> None:
        """On the current stream of `device`, wherever the caller is."""
        if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(device):  # Triton launches on the current device, wherever the tensors are
                return self.launch(grid, device, *args)
        if device.type == "cuda" and not getattr(_thread, "has_context", False):
            _bind_context(device)
        key = (device, *_specialization(args))
        compiled = self._compiled.get(key)
        watched = self._is_watched()
        if compiled is None or watched:
            made = self.function[grid](*args, **self.constants, **self.options)
            # In the interpreter nothing is compiled; what is compiled for a profiler is not for later.
            if isinstance(made, CompiledKernel) and not watched and torch.version.hip is None:
                self._compiled[key] = Compiled(made, made.run, made.function, made.packed_metadata)
            return None
        x, y = grid if len(grid) == 2 else (*grid, 1)
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        # As JITFunction.run calls it, without hooks.
        compiled.run(x, y, 1, stream, compiled.function, compiled.metadata, None, None, None, *args, *self._values)
        return None

    def _is_watched(self) -> bool:
        """Hooks, such as those of a profiler, see a launch only through Triton's own."""
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        return bool(self.function.pre_run_hooks or getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _bind_context(device: torch.device) -> None:
    """Give this thread a CUDA context, which the driver, asked for a TMA descriptor, wants but does not make.

    A thread that has done nothing on a GPU yet has none: autograd's, if all it launches is compiled already.
    """
    if not torch.cuda.is_current_stream_capturing():  # a call to the runtime as well; some others are forbidden then
        torch.cuda.mem_get_info(device)
    _thread.has_context = True


class Compiled(NamedTuple):
    """What Triton calls to launch a compiled kernel, and the kernel, which owns the rest."""

    owner: CompiledKernel
    run: Any
    function: int
    metadata: Any


@functools.cache
def kernel(
    function: Any,
    num_warps: int = 4,
    num_stages: int = 3,
    launch_pdl: bool = False,
    max_registers: int | None = None,
    **constants: Any,
) -> Kernel:
    """The one `Kernel` of that function, those options and constexprs.

    launch_pdl: programmatic dependent launch, which only Nvidia's backend knows. The kernel may start when all programs
    of the one before it on the stream have called `gdc_launch_dependents` or ended, and calls `gdc_wait` ahead of what
    it loads of that one's results. max_registers: of a thread, which only Nvidia's backend knows as well.
    """
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
    if launch_pdl:
        options["launch_pdl"] = True
    if max_registers is not None:
        options["maxnreg"] = max_registers
    return Kernel(function, options, constants)


def _specialization(args: tuple[Any, ...]) -> list[Hashable]:
    """What Triton compiles anew for: of a tensor its dtype and whether it is aligned to 16 bytes, of an int whether it
    is a multiple of 16, 1, or wider than 32 bits, of a descriptor the dtype (its block follows from the constexprs).
    """
    return [
        (arg & 15 == 0) + 2 * (arg == 1) + 4 * (abs(arg) > INT32_MAX)
        if type(arg) is int
        else arg.base.dtype
        if isinstance(arg, Unchecked)
        else None
        if arg is None
        else arg.dtype
        if arg.data_ptr() & 15 == 0
        else (arg.dtype,)
        for arg in args
    ]


@functools.cache
def capability(device: torch.device) -> int:
    """80, 90, 100 ...; 0 for the interpreter and for AMD's GPUs."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def has_dependent_launch(device: torch.device) -> bool:
    """Programmatic dependent launch: Hopper and later."""
    return capability(device) >= 90


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors; the interpreter gets by with a few programs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def suits_tma(tensor: Tensor) -> bool:
    """TMA wants compute capability 9.0, unit inner stride, 16-byte outer strides and base, and at least one element."""
    return tensor.data_ptr() % 16 == 0 and _layout_suits_tma(
        capability(tensor.device), tensor.element_size(), tensor.stride(), tensor.numel() > 0
    )


@functools.lru_cache(maxsize=1024)
def _layout_suits_tma(capability: int, size: int, strides: tuple[int, ...], any_elements: bool) -> bool:
    *outer, inner = strides
    return capability >= 90 and any_elements and inner == 1 and all(s > 0 and s * size % 16 == 0 for s in outer)


class Unchecked:
    """A descriptor that checks nothing again that `suits_tma` has: it takes three times as long as the rest."""

    base: Tensor

    def __post_init__(self) -> None: ...


class _Descriptor(Unchecked, TensorDescriptor):  # type: ignore[misc]
    pass


def descriptor(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Of a tensor that `suits_tma`."""
    return _Descriptor(tensor, tensor.shape, tensor.stride(), block)


def dot_precision(dtype: torch.dtype) -> str:
    """fp32 products are true fp32 unless torch's own switch says TF32 (`allow_tf32` sets it as well)."""
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up; Triton's own takes 2 us on the host, as it serves kernels too."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def even_block(width: int, most: int) -> int:
    """Columns of a block, a power of two up to `most`: one that divides the width if that is 128 or more."""
    even = width & -width
    return min(most, even if even >= 128 else next_power_of_2(width))
