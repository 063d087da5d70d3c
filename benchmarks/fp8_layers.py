"""The layer in FP8 against itself in bf16, in training and in decoding, and how far its results are from fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from benchmarks.fp8_products import DTYPE, IN_BF16, path
from benchmarks.gpu_decode import COPY, captured
from benchmarks.gpu_inputs import COUNTS, DEVICE, Shape, check, normal, uneven_ends
from benchmarks.gpu_layers import Step, forward_backward
from benchmarks.peers import loop_over_experts
from benchmarks.records import Record, record
from benchmarks.timing import Round, Run, event_ms_of
from grouped_experts import GroupedMLP, QuantizedWeights
from grouped_experts.ops.families import use_family

BF16 = torch.bfloat16
DECODE = {"E": 32, "H": 7168, "I": 2048, "C": 256}
TOKENS = (1, 8, 32, 128)  # of each expert
SMALL: tuple[Shape, ...] = (
    {"E": 4, "M": 2048, "H": 1024, "I": 512},
    {"E": 16, "M": 4096, "H": 512, "I": 256},
)
LIMITS = {"fp8": 0.1, "bf16": 2e-2}  # of |result - fp32| / |fp32|
OUTCOMES = ("y", "dx", "dprobs", "fc1_weight", "fc2_weight")
CASTS = "casts of the weights"
CAST_BEFORE, CAST_EACH_TIME = "weights cast before", "weights cast at every call"


class Case:
    """Layers in bf16 and in FP8 that share their weights, and inputs for them."""

    def __init__(self, shape: Shape) -> None:
        sizes = (shape["H"], shape["I"], shape["E"])
        self.layers = {
            name: GroupedMLP(*sizes, device=DEVICE, dtype=BF16, precision=precision)
            for name, precision in (("bf16", None), ("fp8", "fp8"))
        }
        self.weights = list(self.layers["bf16"].parameters())
        self.layers["fp8"].fc1_weight, self.layers["fp8"].fc2_weight = self.weights
        ends = uneven_ends(shape["M"], shape["E"])
        self.counts = ends.diff(prepend=ends.new_zeros(1))
        self.x, self.dy = normal(shape["M"], shape["H"]).requires_grad_(), normal(shape["M"], shape["H"])
        self.probs = torch.rand(shape["M"], device=DEVICE, requires_grad=True)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, self.probs, *self.weights]

    def cast_weights(self) -> QuantizedWeights:
        return self.layers["fp8"].quantize_weights()

    def forward(self, name: str, casts: QuantizedWeights | None = None) -> Callable[[], Tensor]:
        return lambda: self.layers[name](self.x, self.counts, self.probs, weights=casts)

    def both(self, name: str, casts: QuantizedWeights | None = None) -> Step:
        return forward_backward(self.forward(name, casts), self.leaves, self.dy)

    def exact(self, dtype: torch.dtype) -> list[Tensor]:
        """y and every gradient from the same values, by a loop in that dtype."""
        x, probs, w1, w2 = leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in self.leaves]
        y = loop_over_experts(x, w1, w2, self.counts.tolist(), probs)
        return [y.detach(), *torch.autograd.grad(y, leaves, self.dy.to(dtype))]


def layers(shape: Shape, rounds: int) -> list[Record]:
    """Forward without gradients, and forward + backward.

    With weights that are cast once for all micro-batches of an optimizer step, and with casts at every call: two in the
    forward, two more, transposed, in the backward. What `quantize_weights` takes is timed in the same rounds.
    """
    case = Case(shape)
    exact = case.exact(torch.float32)
    for name, limit in LIMITS.items():
        check(f"layer in {name}", case.both(name)(), exact, limit)
    casts = case.cast_weights()
    check("layer with cast weights", case.both("fp8", casts)(), exact, LIMITS["fp8"])
    del exact
    kinds: dict[str, tuple[str, QuantizedWeights | None]] = {
        "bf16": ("bf16", None),
        CAST_BEFORE: ("fp8", casts),
        CAST_EACH_TIME: ("fp8", None),
    }
    runs: dict[str, Run] = {CASTS: case.cast_weights}
    for kind, (name, given) in kinds.items():
        runs[kind] = case.both(name, given)
        runs[f"{kind}, forward"] = without_gradients(case.forward(name, given))
    times = event_ms_of(runs, rounds)
    flops = 6.0 * shape["M"] * shape["H"] * shape["I"]
    records = []
    for suffix, work in (("", 3 * flops), (", forward", flops)):
        for kind in (CAST_BEFORE, CAST_EACH_TIME):
            pairs = [Round(*pair) for pair in zip(times[kind + suffix], times[f"bf16{suffix}"], strict=True)]
            made = record(
                "fp8_layer", shape, COUNTS, DTYPE, path(), IN_BF16, pairs, flops=work, variant=kind + suffix
            )  # fmt: skip
            print(f"layer, {made.variant:42} {made.tflops:6.0f} TFLOP/s  {made.ratio:5.2f}x in bf16", flush=True)
            records.append(made)
    print(f"{CASTS}: {median(times[CASTS]):.3f} ms", flush=True)
    return records


def without_gradients(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.no_grad():
            return forward()

    return run


def decode_bytes(shape: Shape) -> dict[str, int]:
    """Of R = tokens E rows in use, by what runs; scales, less than 1 % of the data, are not counted.

    bf16: the weights 6 E H I, x 2 R H, h 4 R I and a 2 R I written, a 2 R I read, y 2 E C H written.
    fp8: the weights 3 E H I; x 2 R H read, its cast R H written and read; h 4 R I and a R I written, a R I read, y 2 E
    C H written.
    """
    experts, hidden, inner, capacity = (shape[name] for name in ("E", "H", "I", "C"))
    rows, room = experts * shape["tokens"], experts * capacity
    weights = 3 * experts * hidden * inner
    bf16 = 2 * weights + 2 * rows * hidden + 8 * rows * inner + 2 * room * hidden
    fp8 = weights + 4 * rows * hidden + 6 * rows * inner + 2 * room * hidden
    return {"bf16": bf16, "fp8": fp8}


def decode(tokens: int, rounds: int, sizes: Shape = DECODE) -> list[Record]:
    """The masked layout, as CUDA graphs, against copies that move as many bytes as each must.

    In tiles for C rows an expert, and in tiles for as many as there are (expected_rows). The weights are cast before.
    """
    shape = {**sizes, "tokens": tokens}
    experts, hidden, inner, capacity = (sizes[name] for name in ("E", "H", "I", "C"))
    case = Case({"E": experts, "M": experts, "H": hidden, "I": inner})
    x = normal(experts, capacity, hidden)
    counts = torch.full((experts,), tokens, dtype=torch.int32, device=DEVICE)
    casts = {"bf16": None, "fp8": case.cast_weights()}
    exact = exact_decode(x, case.weights, tokens)
    num_bytes = decode_bytes(shape)
    runs: dict[str, Run] = {}
    for name in LIMITS:
        for variant, expected_rows in ((name, None), (f"{name}, expected_rows", tokens)):
            step = decode_step(case.layers[name], x, counts, casts[name], expected_rows)
            check(f"decode in {variant}", [step()], [exact], LIMITS[name])
            runs[variant] = captured(step)
        source = normal(num_bytes[name] // 4)  # of 2 bytes each: half of the bytes are read, half are written
        runs[f"copy for {name}"] = copy_of(source)
    del exact
    times = event_ms_of(runs, rounds)
    records = []
    for variant in [run for run in runs if not run.startswith("copy")]:
        name = variant.split(",")[0]
        pairs = [Round(*pair) for pair in zip(times[variant], times[f"copy for {name}"], strict=True)]
        dtype = "bfloat16" if name == "bf16" else DTYPE
        made = record(
            "masked_decode",
            shape,
            "all as many",
            dtype,
            path(),
            COPY,
            pairs,
            num_bytes=num_bytes[name],
            variant=variant,
        )
        print(f"decode, {tokens:3} tokens an expert, {variant:20} {made.ms * 1e3:7.0f} us  {made.ratio:5.2f}x a copy")
        records.append(made)
    return records


def decode_step(
    layer: GroupedMLP, x: Tensor, counts: Tensor, casts: QuantizedWeights | None, expected_rows: int | None
) -> Callable[[], Tensor]:
    return without_gradients(lambda: layer(x, counts, weights=casts, expected_rows=expected_rows))


def exact_decode(x: Tensor, weights: Sequence[Tensor], tokens: int) -> Tensor:
    """In fp32; zero behind the first `tokens` rows of every expert."""
    experts, used = x.shape[0], x[:, :tokens].float()
    w1, w2 = (w.detach().float() for w in weights)
    ones = torch.ones(experts * tokens, device=x.device)
    y = torch.zeros(x.shape, device=x.device)
    y[:, :tokens] = loop_over_experts(used.flatten(0, 1), w1, w2, [tokens] * experts, ones).view(used.shape)
    return y


def copy_of(source: Tensor) -> Run:
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def accuracy(shape: Shape) -> dict[str, object]:
    """|result - fp64| / |fp64| of y and every gradient: in bf16, in FP8, and in FP8 as the reference emulates it."""
    case = Case(shape)
    exact = case.exact(torch.float64)
    errors = {name: errors_of(case.both(name)(), exact) for name in case.layers}
    with use_family("reference"):
        errors["fp8, emulated"] = errors_of(case.both("fp8")(), exact)
    print(f"relative errors at {shape}")
    for name, each in errors.items():
        print(f"{name:14}", "  ".join(f"{what} {error:.2e}" for what, error in each.items()), flush=True)
    return {"shape": shape, "errors": errors}


def errors_of(got: list[Tensor], exact: list[Tensor]) -> dict[str, float]:
    pairs = zip(OUTCOMES, got, exact, strict=True)
    return {name: float(f"{float((mine.double() - right).norm() / right.norm()):.3e}") for name, mine, right in pairs}
