"""What every launch needs: the right device, and whether its tensors suit the tensor memory accelerator (TMA)."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def on_device(tensor: Tensor) -> AbstractContextManager[None]:
    """Triton launches on the current device, wherever the tensors are."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


@functools.cache
def capability(device: torch.device) -> int:
    """80, 90, 100 ...; 0 for the interpreter and for AMD's GPUs."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors; the interpreter gets by with a few programs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def suits_tma(tensor: Tensor) -> bool:
    """TMA wants compute capability 9.0, unit inner stride, 16-byte outer strides and base, and at least one element."""
    if capability(tensor.device) < 90 or tensor.numel() == 0 or tensor.stride(-1) != 1:
        return False
    size = tensor.element_size()
    strides = all(s > 0 and s * size % 16 == 0 for s in tensor.stride()[:-1])
    return strides and tensor.data_ptr() % 16 == 0


def descriptor(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(tensor, tensor.shape, tensor.stride(), block)


def dot_precision(dtype: torch.dtype) -> str:
    """fp32 products are true fp32 unless torch's own switch says TF32 (`allow_tf32` sets it as well)."""
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"
