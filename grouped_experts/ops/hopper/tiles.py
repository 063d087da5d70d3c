"""Tile configurations: data, as measured on an H200."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """128 rows (k-grouped: rows of a weight), block_n columns of the output, in steps of block_k contracted.

    With gate and up side by side, twice block_n columns. 128 x 256 x 64 at three stages takes 144 KiB of shared memory,
    and its output, which leaves by way of shared memory, 64 KiB.
    """

    block_n: int
    block_k: int = 64
    stages: int = 3
    group_m: int = 8  # tiles of rows that share a column of tiles, so that both operands stay in the L2 cache


BLOCK_M = 128
ANY = sys.maxsize
# By product: up to how many columns of the output (of each part, with a gate), and the tile.
TILES = {
    "product": ((128, Tile(128, stages=4, group_m=4)), (4096, Tile(256, group_m=4)), (ANY, Tile(256))),
    "gated": ((64, Tile(64, stages=4, group_m=4)), (ANY, Tile(128, group_m=4))),
    "ungated": ((128, Tile(128, stages=4)), (ANY, Tile(256, group_m=4))),
    "wgrad": ((128, Tile(128, stages=4)), (ANY, Tile(256))),
    # A tile in fp32, 64 KiB, stands in shared memory while the next is contracted.
    "dgrad": ((256, Tile(128, stages=5, group_m=4)), (ANY, Tile(128, stages=4, group_m=4))),
    "sum": ((ANY, Tile(128, stages=5)),),
    "fp8 product": ((ANY, Tile(256, block_k=128)),),
    "fp8 gated": ((ANY, Tile(128, block_k=128)),),
    "fp8 wgrad": ((ANY, Tile(256, block_k=128)),),
}


def choose_tile(kind: str, columns: int) -> Tile:
    """kind: "product", fc1 "gated" (gate and up) or "ungated", fc2 "dgrad" with the activation's backward, "wgrad", or
    "sum" for wgrad added to fp32; "fp8 ..." for FP8 operands.
    """
    return next(tile for most, tile in TILES[kind] if columns <= most)
