"""Tile configurations: data, as measured on an H200."""

from __future__ import annotations

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
WIDE = {
    "product": Tile(256),
    "gated": Tile(128),
    "ungated": Tile(128, stages=4),  # with 256 columns Triton 3.9 spills
    "wgrad": Tile(256),
}
NARROW = {
    "product": Tile(128, stages=4),
    "gated": Tile(64, stages=4),
    "ungated": Tile(128, stages=4),
    "wgrad": Tile(128, stages=4),
}


def choose_tile(kind: str, columns: int) -> Tile:
    """kind: "product", fc1 "gated" (gate and up) or "ungated", or "wgrad"; columns: of the output, of each part."""
    return (NARROW if columns <= NARROW[kind].block_n else WIDE)[kind]
