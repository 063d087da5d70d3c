"""Tile configurations: data, by product, dtype, GPU and coarse buckets of rows an expert and of what is contracted."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

ROW_BLOCKS = (16, 32, 64, 128)


@dataclass(frozen=True)
class Tile:
    """block_m rows and block_n columns of the output (k-grouped: of a weight), in steps of block_k contracted."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    split: int = 1  # parts of the columns that the epilogue takes one by one, for want of registers or shared memory
    per_processor: int = 1  # programs on each multiprocessor: with two, one computes while the other stores
    group_m: int = 4  # tiles of rows that share a column of tiles, so that both operands stay in the L2 cache
    tma_rows: bool = True  # rows through TMA, where they suit it: a launch on the host costs less without
    tma_out: bool = True  # outputs through TMA, likewise


def row_block(num_rows: int, num_experts: int, expected_rows: int = 0) -> int:
    """Rows of a tile, for all products of a layer: the mean rows an expert, rounded up within ROW_BLOCKS.

    expected_rows: that mean where the caller knows it, as of buffers that are not full; else 0.
    """
    mean = expected_rows or num_rows / max(1, num_experts)
    return next((block for block in ROW_BLOCKS if mean <= block), ROW_BLOCKS[-1])


# By rows of a tile. "product": a plain store; "fc1": gate and up side by side, twice block_n columns of weight;
# "dgrad": the activation's backward in the epilogue. "shallow" and "deep": where little or much is contracted, so that
# stores weigh more or less. 128 x 256 x 64 at three stages takes 144 KiB of shared memory.
HOPPER = {
    "product": {
        16: Tile(16, 128, 128, 4, 4, tma_rows=False, tma_out=False),
        32: Tile(32, 128, 128, 4, 4, tma_rows=False, tma_out=False),
        64: Tile(64, 256, 64, 8, 4, tma_out=False),
        128: Tile(128, 256, 64, 8, 3, tma_out=False),
    },
    "product, shallow": {128: Tile(128, 128, 64, 4, 3, split=2, per_processor=2)},
    "fc1": {
        16: Tile(16, 64, 128, 4, 4, tma_rows=False, tma_out=False),
        32: Tile(32, 64, 128, 4, 4, tma_rows=False, tma_out=False),
        64: Tile(64, 64, 64, 4, 3, per_processor=2, tma_out=False),
        128: Tile(128, 64, 64, 4, 3, per_processor=2),
    },
    "dgrad": {
        16: Tile(16, 64, 128, 4, 4, split=2, tma_rows=False, tma_out=False),
        32: Tile(32, 64, 128, 4, 4, tma_rows=False, tma_out=False),
        64: Tile(64, 64, 64, 4, 4, split=2, tma_out=False),
        128: Tile(128, 128, 64, 8, 4, split=4, group_m=2, tma_out=False),
    },
    "wgrad": {
        16: Tile(128, 128, 32, 4, 4, split=2, per_processor=2, tma_rows=False, tma_out=False),
        32: Tile(128, 128, 32, 4, 4, split=2, per_processor=2, tma_rows=False, tma_out=False),
        64: Tile(128, 128, 32, 4, 5, split=2, per_processor=2, tma_out=False),
        128: Tile(128, 128, 32, 4, 5, split=2, per_processor=2, tma_out=False),
    },
    "wgrad, deep": {128: Tile(128, 128, 32, 4, 4, split=2, per_processor=2, tma_out=False)},
}

# 99 KiB of shared memory is what sm_86, sm_89 and sm_120 have.
AMPERE = {
    "product": {
        16: Tile(16, 128, 64, 4, 4),
        32: Tile(32, 128, 64, 4, 4),
        64: Tile(64, 128, 32, 4, 4),
        128: Tile(128, 128, 32, 8, 4),
    },
    "fc1": {
        16: Tile(16, 64, 64, 4, 4),
        32: Tile(32, 64, 64, 4, 4),
        64: Tile(64, 64, 32, 4, 4),
        128: Tile(128, 64, 32, 8, 4),
    },
    "dgrad": {
        16: Tile(16, 64, 64, 4, 4),
        32: Tile(32, 64, 64, 4, 4),
        64: Tile(64, 64, 32, 4, 4, split=2),
        128: Tile(128, 64, 32, 8, 4, split=2),
    },
    "wgrad": {block: Tile(128, 128, 32, 8, 4, split=2) for block in ROW_BLOCKS},
}

# True fp32 runs on the plain arithmetic units, out of registers.
FLOAT32 = {
    kind: {
        block: Tile(
            block, 32 if kind == "fc1" else 64, 16, 4 if block < 128 else 8, 2, split=2 if kind == "dgrad" else 1
        )
        for block in ROW_BLOCKS
    }
    for kind in ("product", "fc1", "dgrad")
} | {"wgrad": {block: Tile(64, 64, 16, 8, 2) for block in ROW_BLOCKS}}

# In FP8 block_k is one or two blocks of a scale, loaded together. A sum and a product are what the registers hold, with
# 128 rows of 64 columns. "by pointer": where TMA does not suit the weight. 64 rows at four stages are 3 % faster on an
# H200, and spill on sm_100.
FP8_BY_POINTER = {
    16: Tile(16, 128, 128, 4, 3, per_processor=2),
    32: Tile(32, 128, 128, 8, 3, per_processor=2),
    64: Tile(64, 128, 128, 8, 3, per_processor=2),
    128: Tile(128, 64, 128, 8, 3, per_processor=2),
}
FP8_HOPPER = {
    "product": {
        16: Tile(16, 128, 256, 4, 3, per_processor=2),
        32: Tile(32, 128, 256, 4, 3, per_processor=2),
        64: Tile(64, 128, 128, 8, 3, per_processor=2),
        128: Tile(128, 64, 128, 8, 3, per_processor=2),
    },
    "product, by pointer": FP8_BY_POINTER,
}
FP8_ADA = {"product": FP8_BY_POINTER}


def contraction(depth: int) -> str:
    """The bucket of a contraction over `depth` columns, or for wgrad over as many rows an expert."""
    return "shallow" if depth <= 768 else "deep" if depth >= 2048 else ""


def table(dtype: torch.dtype, capability: int) -> dict[str, dict[int, Tile]]:
    if dtype == torch.float32:
        return FLOAT32
    of_fp8, of_others = (FP8_HOPPER, HOPPER) if capability in (90, 100, 103) else (FP8_ADA, AMPERE)
    return of_fp8 if dtype.itemsize == 1 else of_others


@functools.cache
def choose_tile(kind: str, dtype: torch.dtype, capability: int, rows: int, contraction: str = "") -> Tile:
    """kind: "product", "fc1", "dgrad" or "wgrad"; rows: `row_block`, for wgrad a hint only.

    Most contractions have no entry of their own: then the kind's.
    """
    tiles = table(dtype, capability)
    return tiles.get(f"{kind}, {contraction}", {}).get(rows) or tiles[kind][rows]
