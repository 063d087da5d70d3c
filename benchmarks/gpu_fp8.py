"""Products, casts and the layer in FP8, each against a peer in the same run. Writes benchmarks/results/h200_fp8.json.

python -m benchmarks.gpu_fp8 [--rounds 20] [--name h200_fp8.json] [--shapes A B C] [--parts products aligned casts layer
decode fp4 accuracy]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from benchmarks.fp4_products import fp4_products
from benchmarks.fp8_aligned import PEER as DEEPGEMM
from benchmarks.fp8_aligned import aligned
from benchmarks.fp8_layers import CAST_BEFORE, SMALL, TOKENS, accuracy, decode, layers
from benchmarks.fp8_products import DENSE, DENSE_FAST, casts, products
from benchmarks.gpu import SHAPES
from benchmarks.records import Record, write

PARTS = ("products", "aligned", "casts", "layer", "decode", "fp4", "accuracy")
BY_SHAPE = {"products": products, "aligned": aligned, "casts": casts, "layer": layers}


def asked(r: Record, name: str) -> float | None:
    """What a ratio is to be at least, at the shape of that name; None where nothing is asked."""
    if r.op == "m_grouped_fp8" and r.peer in (DENSE, DENSE_FAST, DEEPGEMM):
        return 0.9
    if r.op == "k_grouped_fp8":
        return 1.35 if name == "A" else 1.25
    if r.op == "quantize":
        return 0.8 if r.variant in ("rows", "blocks") else 0.7
    if r.op == "fp8_layer" and r.variant == CAST_BEFORE:
        return 1.35 if name == "A" else 1.2
    if r.op == "masked_decode":
        return 0.65 if r.shape["tokens"] == 128 else 0.8
    return None


def table(records: list[tuple[str, Record]]) -> Iterator[str]:
    """The ratios for which a figure is asked, as Markdown."""
    yield "| shape | what | beside | ratio | asked |"
    yield "|---|---|---|---|---|"
    for name, r in records:
        wanted = asked(r, name)
        if wanted is not None:
            sizes = f"{name}, N {r.shape['N']}, K {r.shape['K']}" if "N" in r.shape else name
            what = " ".join(filter(None, (r.op, r.variant)))
            yield f"| {sizes} | {what} | {r.peer} | {r.ratio:.2f} | {wanted} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds of each comparison (default 20)")
    parser.add_argument("--name", default="h200_fp8.json", help="result file (default h200_fp8.json)")
    parser.add_argument("--shapes", nargs="+", choices=("A", "B", "C"), default=["A", "B", "C"], help="default all")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default all")
    given = parser.parse_args()
    torch.manual_seed(0)
    named: list[tuple[str, Record]] = []
    errors: list[dict[str, object]] = []

    def save() -> None:  # behind every part, so that a run that is ended early leaves what it has measured
        torch.cuda.empty_cache()
        hardware: dict[str, str | int] = {"gpu": torch.cuda.get_device_name()}
        write(given.name, hardware, [r for _, r in named], accuracy=errors)

    if "accuracy" in given.parts:
        errors += [accuracy(shape) for shape in SMALL]
        save()
    for name in given.shapes:
        print(f"{name}: {SHAPES[name]}", flush=True)
        for part in [part for part in BY_SHAPE if part in given.parts]:
            named += [(name, r) for r in BY_SHAPE[part](SHAPES[name], given.rounds)]
            save()
    if "decode" in given.parts:
        for tokens in TOKENS:
            named += [(f"{tokens} tokens an expert", r) for r in decode(tokens, given.rounds)]
            save()
    if "fp4" in given.parts:
        named += [("decoding", r) for r in fp4_products(given.rounds)]
        save()
    print(*table(named), sep="\n")
    print(f"wrote benchmarks/results/{given.name}")


if __name__ == "__main__":
    main()
