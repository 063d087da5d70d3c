"""Each product of a result file against the floor of its operations and of its bytes, as a Markdown table.

python -m benchmarks.roofline [--name h200.json]

The rates are those of the same run: of operations, the dense product of as many rows, of bytes, the copies.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.records import RESULTS

Record = dict[str, Any]


def rows_of(records: list[Record]) -> Iterator[str]:
    yield "| product | E, M, N, K | TFLOP | GB | floor, ms | time, ms | floor / time |"
    yield "|---|---|---|---|---|---|---|"
    copies = median(r["tbps"] / r["ratio"] for r in records if r["op"] == "activation")
    dense: dict[tuple[int, ...], float] = {}  # the faster of forward and dgrad
    for r in records:
        if r.get("variant") == "dense":
            shape = tuple(r["shape"].values())
            dense[shape] = max(dense.get(shape, 0.0), r["tflops"] / r["ratio"])
    for r in records:
        shape = tuple(r["shape"].values())
        if "N" not in r["shape"] or r.get("variant") == "dense":
            continue
        tflop, gigabytes = work(r)
        floor = max(tflop / dense[shape], gigabytes / 1e3 / copies) * 1e3
        name = " ".join(filter(None, (r["op"], r.get("variant"))))
        sizes = ", ".join(map(str, shape))
        times = f"{floor:.3f} | {r['ms']:.3f} | {floor / r['ms']:.2f}"
        yield f"| {name} | {sizes} | {tflop:.2f} | {gigabytes:.2f} | {times} |"


def work(r: Record) -> tuple[float, float]:
    """TFLOP, and GB every operand and result moved once, a sum in fp32 twice.

    A fused product moves one operand of the activation's more (a), or five instead of one (h, dh and a, where h and dh
    are twice as wide), and no others.
    """
    experts, rows, n, k = r["shape"].values()
    weight = experts * n * k * (8 if r.get("variant") == "accumulate" else 2)
    columns = n + k
    if r["op"] == "fc1_activation":
        columns += n // 2
    elif r["op"] == "fc2_dgrad_activation":
        columns += 4 * k
    return 2 * rows * n * k / 1e12, (2 * rows * columns + weight) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", default="h200.json", help="result file (default h200.json)")
    name = parser.parse_args().name
    print(*rows_of(json.loads((RESULTS / name).read_text())["records"]), sep="\n")


if __name__ == "__main__":
    main()
