"""Forward + backward of the experts alone, against a composite of what PyTorch has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.gpu_inputs import COUNTS, DEVICE, DTYPE, Shape, check, normal, path, uneven_ends
from benchmarks.peers import grouped_mm_composite
from benchmarks.records import Record, record
from benchmarks.timing import event_ms, interleaved_ms
from grouped_experts import GroupedMLP
from grouped_experts.ops.families import use_family

Step = Callable[[], list[Tensor]]

COMPOSITE = "F.grouped_mm + eager activation"
LIMIT = 2e-2  # the composites round to bf16 in more places


def experts_layer(shape: Shape, rounds: int) -> Record:
    """GroupedMLP alone, its rows sorted by expert."""
    steps = _experts_steps(shape)
    times = event_ms(*steps, rounds)
    flops = 18.0 * shape["M"] * shape["H"] * shape["I"]
    made = record("experts_layer", shape, COUNTS, DTYPE, path(), COMPOSITE, times, flops=flops)
    print(f"experts_layer {made.tflops:6.0f} TFLOP/s  {made.ratio:5.2f}x the composite", flush=True)
    return made


def host_costs(rounds: int) -> list[Record]:
    """GroupedMLP at T = 64, on the host's clock: hardly more than the calls themselves remains.

    Against the composite, and against the portable kernels, which are chosen in fewer steps.
    """
    shape = {"E": 8, "M": 64, "H": 64, "I": 64}
    ours, composite = _experts_steps(shape)
    portable = _experts_steps(shape)[0]
    records = []
    for variant, peer_name, peer in (
        ("host cost", COMPOSITE, composite),
        ("host cost beside the portable kernels", "portable kernels", portable),
    ):
        family = "portable" if peer is portable else path()
        times = interleaved_ms(in_family(path(), ours), in_family(family, peer), 20 * rounds, warmup=20)
        made = record("experts_layer", shape, COUNTS, DTYPE, path(), peer_name, times, variant=variant)
        print(f"{variant} at T = 64: {made.ms * 1e3:.0f} us, {1 / made.ratio:.2f} times the peer's", flush=True)
        records.append(made)
    return records


def in_family(family: str, run: Callable[[], object]) -> Callable[[], object]:
    def run_in_family() -> object:
        with use_family(family):
            return run()

    return run_in_family


def skewed_layers(shape: Shape, rounds: int) -> list[Record]:
    """The layer with skewed counts against itself with even ones, and as many rows."""
    experts, rows = shape["E"], shape["M"]
    busy = max(1, experts // 10)
    few = torch.randint(1, 16, (experts,)).tolist()
    skews = {
        "one expert with half the rows": [rows // 2, *_even(rows - rows // 2, experts - 1)],
        "90 % of the experts empty": [*_even(rows, busy), *[0] * (experts - busy)],
        "1 to 15 rows an expert": few,
    }
    records = []
    for variant, counts in skews.items():
        sizes = {**shape, "M": sum(counts)}
        ours, even = (_layer_step(sizes, each) for each in (counts, _even(sum(counts), experts)))
        times = event_ms(ours, even, rounds)
        made = record("experts_layer", sizes, variant, DTYPE, path(), "even counts", times, variant=variant)
        print(f"experts_layer, {variant}: {made.ratio:5.2f}x even counts", flush=True)
        records.append(made)
    return records


def _even(rows: int, experts: int) -> list[int]:
    return [rows // experts + (e < rows % experts) for e in range(experts)]


def _layer_step(shape: Shape, counts: list[int]) -> Callable[[], None]:
    mlp, on_device = _mlp(shape), torch.tensor(counts, device=DEVICE)
    x, dy = normal(shape["M"], shape["H"]).requires_grad_(), normal(shape["M"], shape["H"])
    probs = torch.rand(shape["M"], device=DEVICE, requires_grad=True)

    def step() -> None:
        for leaf in (x, probs, *mlp.parameters()):
            leaf.grad = None
        mlp(x, on_device, probs).backward(dy)

    return step


def _experts_steps(shape: Shape) -> tuple[Step, Step]:
    mlp, ends = _mlp(shape), uneven_ends(shape["M"], shape["E"])
    counts = ends.diff(prepend=ends.new_zeros(1))
    x, dy = normal(shape["M"], shape["H"]).requires_grad_(), normal(shape["M"], shape["H"])
    probs = torch.rand(shape["M"], device=DEVICE, requires_grad=True)
    return _checked_steps(
        "experts_layer",
        lambda: mlp(x, counts, probs),
        lambda: grouped_mm_composite(x, mlp.fc1_weight, mlp.fc2_weight, ends, probs),
        [x, probs, *mlp.parameters()],
        dy,
    )


def _mlp(shape: Shape) -> GroupedMLP:
    return GroupedMLP(shape["H"], shape["I"], shape["E"], device=DEVICE, dtype=torch.bfloat16)


def _checked_steps(
    op: str, ours: Callable[[], Tensor], peer: Callable[[], Tensor], leaves: Sequence[Tensor], dy: Tensor
) -> tuple[Step, Step]:
    """Forward + backward of both, once it is certain that y and every gradient agree."""
    steps = forward_backward(ours, leaves, dy), forward_backward(peer, leaves, dy)
    check(op, steps[0](), steps[1](), LIMIT)
    return steps


def forward_backward(forward: Callable[[], Tensor], leaves: Sequence[Tensor], dy: Tensor) -> Step:
    def step() -> list[Tensor]:
        for leaf in leaves:
            leaf.grad = None
        y = forward()
        y.backward(dy)
        return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    return step
