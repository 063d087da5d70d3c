"""The ops and the layer on a GPU, each against a peer timed in the same run. Writes benchmarks/results/h200.json.

python -m benchmarks.gpu [--rounds 20] [--name h200.json]
"""

from __future__ import annotations

import argparse
from statistics import geometric_mean

import torch

from benchmarks.gpu_inputs import ROUTED_SHAPES
from benchmarks.gpu_layers import experts_layer, host_costs, skewed_layers
from benchmarks.gpu_moves import activations, permutations
from benchmarks.gpu_products import products
from benchmarks.records import Record, write

SHAPES = {
    "A": {"E": 8, "M": 32768, "H": 7168, "I": 2048},
    "B": {"E": 128, "M": 131072, "H": 2048, "I": 768},
    "C": {"E": 64, "M": 65536, "H": 2048, "I": 1024},
    "D": {"E": 256, "M": 131072, "H": 4096, "I": 256},
}
SUMMARY: dict[str, list[tuple[str, str | None]]] = {
    "m_grouped": [("m_grouped_nt", None), ("m_grouped_nn", None)],
    "k_grouped": [("k_grouped", None)],
    "dense": [("m_grouped_nt", "dense"), ("m_grouped_nn", "dense")],
    "accumulate": [("k_grouped", "accumulate")],
    "fused": [("fc1_activation", None), ("fc2_dgrad_activation", None)],
    "experts_layer": [("experts_layer", None)],
    "skew": [
        ("experts_layer", "one expert with half the rows"),
        ("experts_layer", "90 % of the experts empty"),
        ("experts_layer", "1 to 15 rows an expert"),
    ],
    "activation": [("activation", None), ("activation", "backward")],
    "permute": [("permute", None)],
    "unpermute": [("permute", "unpermute")],
    "host cost": [("experts_layer", "host cost")],
    "portable host": [("experts_layer", "host cost beside the portable kernels")],
}


def summarise(records: list[Record]) -> None:
    for name, kinds in SUMMARY.items():
        ours = [r for r in records if (r.op, r.variant) in kinds]
        ratios = [r.ratio for r in ours]
        mean = geometric_mean(ratios)
        print(
            f"{name:13}  geometric mean {mean:5.3f}x, smallest {min(ratios):5.3f}x of {len(ratios):2}  {ours[0].peer}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds of each comparison (default 20)")
    parser.add_argument("--name", default="h200.json", help="result file (default h200.json)")
    given = parser.parse_args()
    torch.manual_seed(0)
    records = []
    for name, shape in SHAPES.items():
        print(f"{name}: {shape}")
        records += products(shape, given.rounds)
        records.append(experts_layer(shape, given.rounds))
        records += activations(shape, given.rounds)
        torch.cuda.empty_cache()
    for shape in ROUTED_SHAPES:
        print(shape)
        records += permutations(shape, given.rounds)
        torch.cuda.empty_cache()
    records += [*skewed_layers(SHAPES["B"], given.rounds), *host_costs(given.rounds)]
    summarise(records)
    print(f"wrote {write(given.name, {'gpu': torch.cuda.get_device_name()}, records)}")


if __name__ == "__main__":
    main()
