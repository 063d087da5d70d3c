"""The routed layer on a GPU beside those of other packages, all in turns. Writes benchmarks/results/h200_routed.json.

python -m benchmarks.gpu_routed [--rounds 20] [--name h200_routed.json] [--shapes 0 1 2 3]

Tokens and their top-k ids in, the weighted sum of their experts out. A peer that is not installed, or whose results are
off, is named with the reason and not timed. Liger's kernels take minutes to tune themselves, for every shape anew.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from statistics import median

import torch
from torch.func import functional_call

from benchmarks.gpu_decode import TOKENS, decode
from benchmarks.gpu_inputs import COUNTS, DTYPE, ROUTED_SHAPES, Shape, path
from benchmarks.gpu_layers import Step, forward_backward
from benchmarks.records import Record, record, write
from benchmarks.routed_case import OURS, Case, Times, failures, label, rounds_beside
from benchmarks.routed_peers import PACKAGES, PEERS, TUNE_THEMSELVES, RoutedExperts, present, transformers_experts
from benchmarks.timing import Run, event_ms_of, waits_for_gpu
from grouped_experts import GroupedMLP, routed_experts
from grouped_experts.nn.function import copy_pays
from grouped_experts.ops import route, unpermute
from grouped_experts.ops.permute import gather_rows_op, route_rows, unpermute_with_values_op

ALONE = "experts alone"
TOGETHER = "together"


@dataclass
class Layers:
    """What is known of the layers of a shape.

    kept: bytes, by layer. pieces: ms in a forward + backward, of all of it as "ours", of each piece alone, and of those
    that are no product one behind the other as "together". failed: why a peer is not timed. waiting: the peers that
    wait for the GPU.
    """

    shape: Shape
    both: Times
    forward: Times
    kept: dict[str, int]
    pieces: dict[str, float]
    failed: dict[str, str]
    waiting: list[str]


def forward_flops(shape: Shape) -> float:
    """Of the products: 2 T k H (2I + I); forward + backward has three times as many."""
    return 6.0 * shape["T"] * shape["top_k"] * shape["H"] * shape["I"]


def least_kept_bytes(shape: Shape) -> int:
    """2 T H + 4 T k I: y, which the caller holds as it holds x, and h, from which the activation's backward starts."""
    return 2 * shape["T"] * shape["H"] + 4 * shape["T"] * shape["top_k"] * shape["I"]


def routed_layers(shape: Shape, peers: dict[str, RoutedExperts], rounds: int) -> Layers:
    case = Case.random(shape)
    runs = {OURS: routed_experts, **peers}
    failed = failures({name: case.step(run) for name, run in runs.items()}, case.exact())
    runs = {name: run for name, run in runs.items() if name not in failed}
    both, waiting = in_turns({name: case.step(run) for name, run in runs.items()}, rounds)
    forward, also = in_turns({name: case.inference(run) for name, run in runs.items()}, rounds)
    waiting += [name for name in also if name not in waiting]
    kept = {name: kept_bytes(case, run) for name, run in runs.items()}
    return Layers(shape, both, forward, kept, time_pieces(case, rounds), failed, waiting)


def in_turns(steps: dict[str, Step], rounds: int) -> tuple[Times, list[str]]:
    """And which of them wait for the GPU."""
    waiting = [name for name, step in steps.items() if name != OURS and waits_for_gpu(step)]
    return event_ms_of(steps, rounds, waiting=waiting), waiting


def pieces(case: Case) -> dict[str, Run]:
    """Kernels of our forward + backward that are no work of the experts. What gathering costs in loads comes on top.

    x is gathered in the loads of fc1 and of its weight gradient, dy in those of fc2's dgrad and weight gradient where I
    is small, and else copied once for both.
    """
    experts, top_k = case.fc1_weight.shape[0], case.ids.shape[1]
    routing = route(case.ids, experts)
    index = routing.row_to_token()
    x, probs, dy = case.x.detach(), case.probs.detach(), case.dy
    y, dprobs = x.repeat_interleave(top_k, dim=0), probs.flatten()
    made: dict[str, Run] = {
        "route": lambda: route_rows(case.ids, experts, x.dtype, probs),
        "combine y": lambda: unpermute(y, routing),
        "combine dx, dprobs": lambda: unpermute_with_values_op(y, dprobs, routing.slot_to_row, index),
    }
    if copy_pays(dy, case.fc2_weight):
        made["copy of dy"] = lambda: gather_rows_op(dy, index)
    return made


def experts_alone(case: Case) -> Step:
    """The same products of the same rows, sorted by expert already, as are the gradients of y."""
    experts, hidden, inner = case.fc2_weight.shape
    mlp = GroupedMLP(hidden, inner, experts, device="meta")
    routing = route(case.ids, experts)
    index = routing.row_to_token()
    x, dy = (gather_rows_op(each.detach(), index) for each in (case.x, case.dy))
    leaves = [x.requires_grad_(), case.probs.detach().flatten().requires_grad_(), case.fc1_weight, case.fc2_weight]
    weights = {"fc1_weight": case.fc1_weight, "fc2_weight": case.fc2_weight}
    return forward_backward(lambda: functional_call(mlp, weights, (x, routing.counts, leaves[1])), leaves, dy)


def time_pieces(case: Case, rounds: int) -> dict[str, float]:
    each = pieces(case)
    together = one_behind_the_other(list(each.values()))
    runs = {OURS: case.step(routed_experts), ALONE: experts_alone(case), **each, TOGETHER: together}
    return medians(event_ms_of(runs, rounds))


def one_behind_the_other(runs: list[Run]) -> Run:
    def run() -> None:
        for each in runs:
            each()

    return run


def kept_bytes(case: Case, run: RoutedExperts) -> int:
    """What a forward leaves allocated: y and what its backward needs."""
    for leaf in case.leaves:
        leaf.grad = None
    before = torch.cuda.memory_allocated()
    y = case.forward(run)()
    kept = torch.cuda.memory_allocated() - before
    del y
    return kept


def medians(times: Times) -> dict[str, float]:
    return {name: median(each) for name, each in times.items()}


def records_of(layers: Layers) -> list[Record]:
    """One of each peer, forward + backward and forward alone."""
    made = []
    flops = forward_flops(layers.shape)
    for variant, times, work in ((None, layers.both, 3 * flops), ("forward", layers.forward, flops)):
        for name in [name for name in times if name != OURS]:
            rounds, peer = rounds_beside(times, name), label(name, layers.waiting)
            made.append(
                record("routed_layer", layers.shape, COUNTS, DTYPE, path(), peer, rounds, flops=work, variant=variant)
            )
    return made


def show(layers: Layers) -> None:
    flops, least = forward_flops(layers.shape), least_kept_bytes(layers.shape)
    both, forward = medians(layers.both), medians(layers.forward)
    print(f"{'':28}  both ways, ms  TFLOP/s  of ours  forward, ms  TFLOP/s  of ours  kept, MB  of 2TH + 4TkI")
    for name in both:
        mark = " *" if name in layers.waiting else ""
        columns = (
            f"{name + mark:28}",
            f"{both[name]:13.3f}  {3 * flops / both[name] / 1e9:7.0f}  {both[name] / both[OURS]:6.2f}x",
            f"{forward[name]:11.3f}  {flops / forward[name] / 1e9:7.0f}  {forward[name] / forward[OURS]:6.2f}x",
            f"{layers.kept[name] / 1e6:8.0f}  {layers.kept[name] / least:13.2f}x",
        )
        print("  ".join(columns))
    for name, why in layers.failed.items():
        print(f"{name} is not timed: {why}"[:130])
    if layers.waiting:
        print("* waits for the GPU in every call: what it launches after that counts with the launches")
    parts = ", ".join(f"{name} {ms:.3f}" for name, ms in layers.pieces.items() if name != OURS)
    print(f"routing, gather and combine: {share_of_routing(layers):.1%} of both ways,")
    print(f"  {share_of_kernels(layers):.1%} in kernels of their own")
    print(f"  ms of {parts}", flush=True)


def share_of_routing(layers: Layers) -> float:
    """Of our forward + backward, what it takes beyond the experts alone: routing, gathering and sums."""
    return 1 - layers.pieces[ALONE] / layers.pieces[OURS]


def share_of_kernels(layers: Layers) -> float:
    """Of our forward + backward, the kernels that route, copy or sum: without what gathering costs in loads."""
    return layers.pieces[TOGETHER] / layers.pieces[OURS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds of each comparison (default 20)")
    parser.add_argument("--name", default="h200_routed.json", help="result file (default h200_routed.json)")
    parser.add_argument(
        "--shapes", type=int, nargs="+", default=list(range(len(ROUTED_SHAPES))), help="which of them (default all)"
    )
    parser.add_argument(
        "--tune", type=int, nargs="*", help="of these shapes, those with the peers that tune themselves (default all)"
    )
    given = parser.parse_args()
    torch.manual_seed(0)
    peers, missing = present({name: find() for name, find in PEERS.items()})
    model, model_missing = present(transformers_experts())
    missing |= model_missing
    for name, why in missing.items():
        print(f"{name}: {why}"[:130])
    records: list[Record] = []
    more: dict[str, list[dict[str, object]]] = {"kept_memory": [], "pieces": [], "failed": []}
    hardware: dict[str, str | int] = {"gpu": torch.cuda.get_device_name()}
    for tokens in TOKENS:
        decoded = decode(tokens, model, 5 * given.rounds)
        records += decoded.records
        more["failed"].append({"shape": decoded.shape, **decoded.failed})
    for position in given.shapes:
        shape = ROUTED_SHAPES[position]
        print(shape, flush=True)
        tuned = given.tune is None or position in given.tune
        chosen = {name: run for name, run in peers.items() if tuned or name not in TUNE_THEMSELVES}
        layers = routed_layers(shape, chosen, given.rounds)
        show(layers)
        records += records_of(layers)
        more["kept_memory"].append({"shape": shape, "least": least_kept_bytes(shape), **layers.kept})
        shares = {"share": round(share_of_routing(layers), 4), "share_of_kernels": round(share_of_kernels(layers), 4)}
        more["pieces"].append({"shape": shape, **shares, "ms": layers.pieces})
        more["failed"].append({"shape": shape, **layers.failed})
        torch.cuda.empty_cache()
        # Every time, so that a run that is ended early leaves what it has measured.
        print(f"wrote {write(given.name, hardware, records, PACKAGES, missing=missing, **more)}", flush=True)


if __name__ == "__main__":
    main()
