"""What Gluon of Triton 3.6 to 3.9 calls by different names."""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@builtin
def _async_add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    """Triton 3.6 compiles TMA's addition, but has no name for it in Gluon."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


async_add = getattr(tma, "async_atomic_add", None) or _async_add

async_load_by_pointer = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@builtin
def reinterpret(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Shared memory seen as a block of another shape and dtype."""
    method = getattr(memory, "reinterpret", None) or memory._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


barrier = getattr(gl, "barrier", None) or gl.thread_barrier

__all__ = ["async_add", "async_load", "async_load_by_pointer", "async_store", "barrier", "reinterpret"]
