"""What Gluon of Triton 3.6 to 3.9 calls by different names."""

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.hopper import tma

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

__all__ = ["async_load", "async_store"]
