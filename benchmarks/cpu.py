"""The layer on a CPU: time, memory, host cost and error against the composites. Writes benchmarks/results/cpu.json.

python -m benchmarks.cpu [--rounds 15]

Where tensors happen to lie makes the same comparison differ by 5 % from one case to the next, and by 25 % from one
process to the next. So each is made of several cases, with data, allocations and a process of their own, whose rounds
are taken together (`records.Record`). All of it takes about five minutes.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.peers import grouped_mm_composite, loop_over_experts
from benchmarks.records import Record, record, write
from benchmarks.timing import Round, interleaved_ms, steady_malloc
from grouped_experts import GroupedMLP

SHAPES = (
    {"T": 4096, "H": 256, "I": 512, "E": 64},
    {"T": 2048, "H": 512, "I": 1024, "E": 8},
)
CASES = 5  # of each comparison
UNEVEN = "uneven (+-30 %)"
PEERS = {"grouped_mm": "F.grouped_mm + eager activation", "loop": "autograd loop over w[e], default malloc"}


@dataclass(frozen=True)
class Case:
    """One layer with its inputs, and the runs of forward + backward over them."""

    mlp: GroupedMLP
    x: Tensor
    probs: Tensor
    counts: list[int]
    ends: Tensor
    dy: Tensor

    @classmethod
    def random(cls, shape: dict[str, int], dtype: torch.dtype, even: bool) -> Case:
        rows, hidden, experts = shape["T"], shape["H"], shape["E"]
        mlp = GroupedMLP(hidden, shape["I"], experts, dtype=dtype)
        x = torch.randn(rows, hidden, dtype=dtype, requires_grad=True)
        probs = torch.rand(rows, requires_grad=True)
        counts = [rows // experts] * experts if even else uneven_counts(rows, experts)
        ends = torch.tensor(counts).cumsum(0).to(torch.int32)
        return cls(mlp, x, probs, counts, ends, torch.randn(rows, hidden, dtype=dtype))

    def run(self, name: str) -> Tensor:
        w1, w2 = self.mlp.fc1_weight, self.mlp.fc2_weight
        if name == "layer":
            return self.mlp(self.x, self.counts, self.probs)
        if name == "grouped_mm":
            return grouped_mm_composite(self.x, w1, w2, self.ends, self.probs)
        return loop_over_experts(self.x, w1, w2, self.counts, self.probs)

    def step(self, name: str) -> Callable[[], None]:
        leaves = [self.x, self.probs, *self.mlp.parameters()]

        def forward_backward() -> None:
            for leaf in leaves:
                leaf.grad = None
            self.run(name).backward(self.dy)

        return forward_backward


def uneven_counts(rows: int, experts: int) -> list[int]:
    """Random counts that differ by about 30 % and sum to `rows`."""
    share = 1 + 0.3 * (2 * torch.rand(experts) - 1)
    ends = (share.cumsum(0) / share.sum() * rows).round().long()
    return ends.diff(prepend=ends.new_zeros(1)).tolist()


def compare(
    shape: dict[str, int], dtype: torch.dtype, even: bool, peer: str, rounds: int, warmup: int = 1
) -> list[Round]:
    """The rounds of several cases, each in a process of its own."""
    num_cases = min(CASES, rounds)
    times = []
    for seed in range(num_cases):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh_process:
            job = fresh_process.submit(time_case, shape, dtype, even, peer, rounds // num_cases, warmup, seed)
            times += job.result()
    return times


def time_case(
    shape: dict[str, int], dtype: torch.dtype, even: bool, peer: str, rounds: int, warmup: int, seed: int
) -> list[Round]:
    """The layer beside one peer alone: a second one would leave its mark on caches and allocator."""
    torch.manual_seed(seed)
    if peer != "loop":  # which is timed with the allocator as everybody has it
        steady_malloc()
    case = Case.random(shape, dtype, even)
    return interleaved_ms(case.step("layer"), case.step(peer), rounds, warmup)


def time_layers(peer: str, rounds: int) -> list[Record]:
    records = []
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for even in (False, True):
                times = compare(shape, dtype, even, peer, rounds)
                flops = 18.0 * shape["T"] * shape["H"] * shape["I"]
                counts, kind = "even" if even else UNEVEN, str(dtype).removeprefix("torch.")
                made = record("experts_layer", shape, counts, kind, "reference", PEERS[peer], times, flops=flops)
                records.append(made)
                ratio = f"{made.ratio:5.2f}x  {made.peer}"
                print(f"{shape}  {kind:8}  {counts:15}  {made.ms:7.1f} ms  {ratio}", flush=True)
    return records


def host_cost(rounds: int) -> Record:
    """Forward + backward of a layer so small that hardly more than the calls themselves remains: T = 64, H = I = 8."""
    shape = {"T": 64, "H": 8, "I": 8, "E": 8}
    times = compare(shape, torch.float32, False, "grouped_mm", rounds * 40, warmup=50)
    made = record(
        "experts_layer", shape, UNEVEN, "float32", "reference", PEERS["grouped_mm"], times, variant="host cost"
    )
    print(f"host cost at T = 64: {made.ms * 1e3:.0f} us, {1 / made.ratio:.2f} times the composite's")
    return made


def kept_memory() -> list[dict[str, object]]:
    """Bytes that autograd keeps after a forward, weights and what the caller holds (y) not counted."""
    results = []
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            case = Case.random(shape, dtype, even=False)
            kept = {name: saved_bytes(case, name) for name in ("layer", "grouped_mm")}
            least = shape["T"] * (shape["H"] + 2 * shape["I"]) * dtype.itemsize
            results.append({"shape": shape, "dtype": str(dtype), "h_plus_2i_bytes": least, **kept})
            over, less = kept["layer"] / least - 1, kept["grouped_mm"] / kept["layer"]
            print(f"{shape}  {dtype}: kept H + 2I elements a row {over:+.2%}; the composite keeps {less:.2f}x as much")
    return results


def saved_bytes(case: Case, name: str) -> int:
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = case.run(name)
    held = [y, *case.mlp.parameters()]
    return sum(
        size for pointer, size in storages.items() if pointer not in {t.untyped_storage().data_ptr() for t in held}
    )


def errors() -> list[dict[str, object]]:
    """Largest error of y and every gradient against fp64, over that of the composite in the same dtype."""
    results: list[dict[str, object]] = []
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            case = Case.random(shape, dtype, even=False)
            mlp = GroupedMLP(shape["H"], shape["I"], shape["E"], dtype=torch.float64)
            mlp.load_state_dict(case.mlp.state_dict())
            x, probs = (t.detach().double().requires_grad_() for t in (case.x, case.probs))
            exact = Case(mlp, x, probs, case.counts, case.ends, case.dy.double())
            wanted = outcome(exact, "loop")
            error = {name: largest_errors(outcome(case, name), wanted) for name in ("layer", "grouped_mm")}
            ratio = {name: round(error["layer"][name] / error["grouped_mm"][name], 3) for name in OUTCOMES}
            results.append({"shape": shape, "dtype": str(dtype), "error_over_composite": ratio})
            print(f"{shape}  {dtype}: largest error over the composite's: {ratio}")
    return results


OUTCOMES = ("y", "dx", "dprobs", "fc1_weight", "fc2_weight")


def largest_errors(got: list[Tensor], wanted: list[Tensor]) -> dict[str, float]:
    pairs = zip(OUTCOMES, got, wanted, strict=True)
    return {name: float((mine.double() - exact).abs().max()) for name, mine, exact in pairs}


def outcome(case: Case, name: str) -> list[Tensor]:
    leaves = [case.x, case.probs, case.mlp.fc1_weight, case.mlp.fc2_weight]
    y = case.run(name)
    return [y.detach(), *torch.autograd.grad(y, leaves, case.dy)]


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=15, help="timed rounds of a comparison, in all its cases (default 15)"
    )
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    records = [*time_layers("loop", max(3, rounds // 5)), *time_layers("grouped_mm", rounds), host_cost(rounds)]
    hardware: dict[str, str | int] = {"cpu": cpu_name(), "threads": torch.get_num_threads()}
    path = write("cpu.json", hardware, records, kept_memory=kept_memory(), errors=errors())
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
