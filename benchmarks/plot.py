"""The products and the layer of a result file as bars, peers beside ours: docs/h200.png.

python -m benchmarks.plot [--name h200.json]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.records import RESULTS

Record = dict[str, Any]

PANELS = {
    "forward": ("m_grouped_nt", None),
    "dgrad": ("m_grouped_nn", None),
    "wgrad": ("k_grouped", None),
    "layer, both ways": ("experts_layer", None),
}


def draw(records: list[Record], path: Path) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), sharey=True, layout="constrained")
    for axis, (title, kind) in zip(axes.flat, PANELS.items(), strict=True):
        shown = [r for r in records if (r["op"], r.get("variant")) == kind]
        theirs = [r["tflops"] / r["ratio"] for r in shown]
        axis.bar([i - 0.2 for i in range(len(shown))], theirs, 0.4, color="#b0b7c3", label=shown[0]["peer"])
        axis.bar([i + 0.2 for i in range(len(shown))], [r["tflops"] for r in shown], 0.4, color="#2f6fb0", label="ours")
        axis.set_xticks(range(len(shown)), [label(r["shape"]) for r in shown], fontsize=6)
        axis.set_title(title, fontsize=10, loc="left")
        axis.legend(fontsize=7, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylabel("TFLOP/s")
    figure.savefig(path, dpi=110)


def label(shape: dict[str, int]) -> str:
    """The sizes, one below the other."""
    return "\n".join(f"{name} {size}" if name != "M" else f"{size // 1024} Ki rows" for name, size in shape.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", default="h200.json", help="result file (default h200.json)")
    result = RESULTS / parser.parse_args().name
    path = RESULTS.parent.parent / "docs" / f"{result.stem}.png"
    draw(json.loads(result.read_text())["records"], path)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
