"""The routed layer of a few tokens without gradients: what it takes to read the weights of the experts they choose."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.gpu_inputs import COUNTS, DTYPE, Shape, normal, path
from benchmarks.records import Record, record
from benchmarks.routed_case import OURS, Case, Times, failures, label, rounds_beside
from benchmarks.routed_peers import RoutedExperts, reason
from benchmarks.timing import Run, event_ms_of, waits_for_gpu
from grouped_experts import routed_experts

QWEN3_30B_A3B = {"H": 2048, "I": 768, "E": 128, "top_k": 8}
TOKENS = (1, 4, 16, 64)
COPY = "copy_ that moves as many bytes"
CACHE_BYTES = 2**28  # several times the L2 cache of any GPU
UNCAPTURED, CAPTURED = "events", "CUDA graph"


@dataclass
class Decoded:
    """The records of a number of tokens, and why a peer, or its graph, is not among them."""

    shape: Shape
    records: list[Record]
    failed: dict[str, str]


def touched_bytes(shape: Shape) -> int:
    """Distinct experts that were chosen, times the 3 H I elements of each, of 2 bytes."""
    return shape["touched"] * 3 * shape["H"] * shape["I"] * 2


def decode(tokens: int, peers: dict[str, RoutedExperts], rounds: int, sizes: Shape = QWEN3_30B_A3B) -> Decoded:
    """Ours beside a copy and the peers, launched one by one and as CUDA graphs.

    The weights come from memory, as they do where other layers run in between: before every run the L2 cache is filled
    with something else.
    """
    case = Case.random({"T": tokens, **sizes})
    shape = {"T": tokens, **sizes, "touched": case.ids.unique().numel()}
    steps = {name: case.inference(run) for name, run in {OURS: routed_experts, **peers}.items()}
    failed = failures(steps, case.exact()[:1])
    num_bytes = touched_bytes(shape)
    source = normal(num_bytes // 4)  # of 2 bytes each: half of the bytes are read, half are written
    target = torch.empty_like(source)
    runs: dict[str, Run] = {name: step for name, step in steps.items() if name not in failed}
    runs[COPY] = lambda: target.copy_(source)
    waiting = [name for name, run in runs.items() if name != OURS and waits_for_gpu(run)]
    graphs, not_captured = captured_runs({name: run for name, run in runs.items() if name not in waiting})
    failed |= not_captured
    filler = torch.zeros(CACHE_BYTES // 4, device=source.device)  # read, lest it be written back in a run's time
    times = {UNCAPTURED: event_ms_of(runs, rounds, waiting=waiting, before=filler.sum)}
    if OURS in graphs:
        times[CAPTURED] = event_ms_of(graphs, rounds, before=filler.sum)
    show(shape, times, failed)
    made = []
    for variant, each in times.items():
        for name in [name for name in each if name != OURS]:
            pairs, peer = rounds_beside(each, name), label(name, waiting)
            made.append(
                record("routed_decode", shape, COUNTS, DTYPE, path(), peer, pairs, num_bytes=num_bytes, variant=variant)
            )
    return Decoded(shape, made, failed)


def captured_runs(runs: dict[str, Run]) -> tuple[dict[str, Run], dict[str, str]]:
    """Their CUDA graphs, and why others have none."""
    graphs, failed = {}, {}
    for name, run in runs.items():
        try:
            graphs[name] = captured(run)
        except RuntimeError as error:
            failed[f"{name}, {CAPTURED}"] = reason(error)
    return graphs, failed


def captured(run: Run) -> Run:
    """The replay of a CUDA graph of the run. Raises RuntimeError where it cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what a first run on a stream allocates must not be part of the graph
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def show(shape: Shape, times: dict[str, Times], failed: dict[str, str]) -> None:
    num_bytes = touched_bytes(shape)
    print(f"decode of {shape['T']} tokens: {shape['touched']} experts with {num_bytes / 1e6:.0f} MB of weights")
    for name in times[UNCAPTURED]:
        cells = []
        for variant, each in times.items():
            if name in each:
                ms, ours = median(each[name]), median(each[OURS])
                cells.append(f"{variant} {ms * 1e3:8.1f} us {num_bytes / ms / 1e9:6.2f} TB/s {ms / ours:6.2f}x ours")
        print(f"{name:32}  {'  '.join(cells)}")
    for name, why in failed.items():
        print(f"{name} is not timed: {why}"[:130])
    print(end="", flush=True)
