"""The grouped products and the experts-only layer on a GPU, against F.grouped_mm. Writes benchmarks/results/h200.json.

python -m benchmarks.gpu [--rounds 20] [--name h200.json]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers import grouped_mm_composite
from benchmarks.records import Record, record, write
from benchmarks.timing import event_ms, interleaved_ms
from grouped_experts import GroupedMLP, RowRanges
from grouped_experts.ops import k_grouped_gemm, m_grouped_gemm, scaled_activation, scaled_activation_backward
from grouped_experts.ops.families import choose_family

SHAPES = {
    "A": {"E": 8, "M": 32768, "H": 7168, "I": 2048},
    "B": {"E": 128, "M": 131072, "H": 2048, "I": 768},
    "C": {"E": 64, "M": 65536, "H": 2048, "I": 1024},
    "D": {"E": 256, "M": 131072, "H": 4096, "I": 256},
}
COUNTS = "uneven (+-30 %)"
COMPOSITE = "F.grouped_mm + eager activation"


def uneven_ends(rows: int, experts: int) -> Tensor:
    """Running sum of random counts that differ by about 30 % and sum to `rows`, int32, on the GPU."""
    share = 1 + 0.3 * (2 * torch.rand(experts) - 1)
    return (share.cumsum(0) / share.sum() * rows).round().to(torch.int32).cuda()


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def products(shape: dict[str, int], rounds: int) -> list[Record]:
    """Forward, dgrad and wgrad of fc1 (N = 2I, K = H) and fc2 (N = H, K = I)."""
    records = []
    ends = uneven_ends(shape["M"], shape["E"])
    rows = RowRanges.contiguous(ends.diff(prepend=ends.new_zeros(1)), num_rows=shape["M"])
    for layer, n, k in (("fc1", 2 * shape["I"], shape["H"]), ("fc2", shape["H"], shape["I"])):
        x, w, dy = normal(shape["M"], k), normal(shape["E"], n, k), normal(shape["M"], n)
        pairs = product_runs(x, w, dy, rows, ends)
        for op, (ours, theirs) in pairs.items():
            assert relative_error(ours(), theirs()) < 5e-3, op
            ms = event_ms({"ours": ours, "theirs": theirs}, rounds)
            sizes = {"E": shape["E"], "M": shape["M"], "N": n, "K": k}
            records.append(
                record(op, sizes, COUNTS, "bfloat16", path(), ms["ours"], "F.grouped_mm", ms["theirs"], flops(sizes))
            )
            print(
                f"{layer} {op:13} {records[-1].tflops:6.0f} TFLOP/s  {records[-1].ratio:5.2f}x F.grouped_mm", flush=True
            )
    return records


def product_runs(
    x: Tensor, w: Tensor, dy: Tensor, rows: RowRanges, ends: Tensor
) -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]]:
    """Ours and F.grouped_mm's, by op."""
    return {
        "m_grouped_nt": (lambda: m_grouped_gemm(x, w, rows), lambda: F.grouped_mm(x, w.transpose(1, 2), offs=ends)),
        "m_grouped_nn": (
            lambda: m_grouped_gemm(dy, w, rows, transpose_w=False),
            lambda: F.grouped_mm(dy, w, offs=ends),
        ),
        "k_grouped": (lambda: k_grouped_gemm(dy, x, rows), lambda: F.grouped_mm(dy.t(), x, offs=ends)),
    }


def flops(sizes: dict[str, int]) -> float:
    return 2.0 * sizes["M"] * sizes["N"] * sizes["K"]


def path() -> str:
    return choose_family(torch.device("cuda"), {torch.bfloat16})


def layer_step(shape: dict[str, int], which: str, mlp: GroupedMLP, ends: Tensor) -> Callable[[], None]:
    x = normal(shape["M"], shape["H"]).requires_grad_()
    probs = torch.rand(shape["M"], device="cuda", requires_grad=True)
    dy, counts = normal(shape["M"], shape["H"]), ends.diff(prepend=ends.new_zeros(1))
    leaves = [x, probs, *mlp.parameters()]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        if which == "layer":
            mlp(x, counts, probs).backward(dy)
        else:
            grouped_mm_composite(x, mlp.fc1_weight, mlp.fc2_weight, ends, probs).backward(dy)

    return step


def layers(shape: dict[str, int], rounds: int) -> Record:
    ends = uneven_ends(shape["M"], shape["E"])
    mlp = GroupedMLP(shape["H"], shape["I"], shape["E"], device="cuda", dtype=torch.bfloat16)
    ms = event_ms({which: layer_step(shape, which, mlp, ends) for which in ("layer", "composite")}, rounds)
    work = 18.0 * shape["M"] * shape["H"] * shape["I"]
    made = record("experts_layer", shape, COUNTS, "bfloat16", path(), ms["layer"], COMPOSITE, ms["composite"], work)
    print(f"layer forward + backward {made.tflops:6.0f} TFLOP/s  {made.ratio:5.2f}x the composite", flush=True)
    return made


def host_cost(rounds: int) -> Record:
    """Forward + backward at T = 64, on the host's clock: hardly more than the calls themselves remains."""
    shape = {"E": 8, "M": 64, "H": 64, "I": 64}
    ends = uneven_ends(shape["M"], shape["E"])
    mlp = GroupedMLP(shape["H"], shape["I"], shape["E"], device="cuda", dtype=torch.bfloat16)
    runs: dict[str, Callable[[], object]] = {w: layer_step(shape, w, mlp, ends) for w in ("layer", "composite")}
    ms = interleaved_ms(runs, 20 * rounds, warmup=20)
    made = record("host_cost", shape, COUNTS, "bfloat16", path(), ms["layer"], COMPOSITE, ms["composite"])
    print(f"host cost at T = 64: {ms['layer'] * 1e3:.0f} us, {ms['layer'] / ms['composite']:.2f} times the composite's")
    return made


def activations(shape: dict[str, int], rounds: int) -> list[Record]:
    """The activation kernels against a copy that moves as many bytes."""
    h, da = normal(shape["M"], 2 * shape["I"]), normal(shape["M"], shape["I"])
    probs = torch.rand(shape["M"], device="cuda")
    runs: dict[str, tuple[int, Callable[[], object]]] = {
        "activation": (3, lambda: scaled_activation(h, probs)),
        "activation_backward": (7, lambda: scaled_activation_backward(da, h, probs)),
    }
    records = []
    for op, (elements, run) in runs.items():
        size = elements * shape["M"] * shape["I"]
        source = normal(size // 2)
        ms = event_ms({"ours": run, "copy": source.clone}, rounds)
        peer = "clone that moves as many bytes"
        records.append(record(op, shape, "all rows", "bfloat16", path(), ms["ours"], peer, ms["copy"]))
        print(f"{op:20} {2 * size / ms['ours'] / 1e9:5.2f} TB/s  {records[-1].ratio:5.2f}x a copy", flush=True)
    return records


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
        records.append(layers(shape, given.rounds))
        records += activations(shape, given.rounds)
        torch.cuda.empty_cache()
    records.append(host_cost(given.rounds))
    print(f"wrote {write(given.name, {'gpu': torch.cuda.get_device_name()}, records)}")


if __name__ == "__main__":
    main()
