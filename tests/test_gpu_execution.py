"""How the layer runs on a GPU: without waiting for it, in CUDA graphs, on streams, from threads and processes."""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import gpu_small_cases
import pytest
import torch
from conftest import needs_cuda, no_synchronisation
from inputs import unchanged
from layer import WEIGHTS, Results, assert_same, by_layer, gradients, rand
from torch import Tensor

from grouped_experts import GroupedMLP, MoE

BF16, FP32 = torch.bfloat16, torch.float32

# One size for all tests here, which then compile their kernels once.
E, H, I, T = 8, 256, 128, 1024  # noqa: E741
COUNTS = {
    "contiguous": [[100, 0, 17, 211, 1, 64, 500, 3], [0] * 8, [3, 300, 0, 0, 129, 128, 127, 40], [0] * 7 + [T]],
    "masked": [[100, 0, 17, 128, 1, 64, 127, 3], [0] * 8, [3, 77, 0, 0, 128, 16, 127, 40], [T // E] * 8],
}
LONG = 1_000_000_000  # clock cycles: about half a second

knows_fp8 = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)
needs_fp8 = pytest.mark.skipif(not knows_fp8, reason="needs a GPU with FP8")
by_precision = pytest.mark.parametrize("precision", [None, pytest.param("fp8", marks=needs_fp8)], ids=["bf16", "fp8"])


class Batch(NamedTuple):
    """A layer and what a step of it takes: `by_layer(*make(...))`."""

    mlp: GroupedMLP
    x: Tensor
    counts: Tensor
    probs: Tensor | None
    dy: Tensor


def make(
    layout: str = "contiguous",
    device: str = "cuda",
    *,
    counts_dtype: torch.dtype = torch.int32,
    with_probs: bool = True,
    precision: str | None = None,
    **options: Any,
) -> Batch:
    shape = (T,) if layout == "contiguous" else (E, T // E)
    options |= {"bias": precision is None, "precision": precision}  # FP8 has no biases
    mlp = GroupedMLP(H, I, E, dtype=BF16, device="cpu", **options).to(device)  # the CPU's random numbers
    return Batch(
        mlp,
        rand(*shape, H, dtype=BF16, device=device),
        torch.tensor(COUNTS[layout][0], dtype=counts_dtype, device=device),
        rand(*shape, dtype=FP32, device=device, low=0) if with_probs else None,
        rand(*shape, H, dtype=BF16, device=device, requires_grad=False),
    )


@torch.no_grad()
def refill(batch: Batch, counts: list[int]) -> None:
    """Other counts and other values, in the same memory."""
    batch.counts.copy_(torch.tensor(counts))
    for t in (batch.x, batch.probs, batch.dy):
        t.copy_(rand(*t.shape, dtype=t.dtype, device="cpu", low=0 if t is batch.probs else -1))


def copied(results: Results) -> Results:
    return {name: None if t is None else t.clone() for name, t in results.items()}


# ---- the host does not wait


def two_micro_batches(batch: Batch) -> None:
    for _ in range(2):
        batch.mlp(batch.x, batch.counts, batch.probs).backward(batch.dy)
    batch.mlp.backward_dw()


@pytest.mark.gpu
@needs_cuda
def test_synchronisation_is_noticed() -> None:
    counts = torch.tensor([3], device="cuda")
    with pytest.raises(RuntimeError, match="synchronizing"), no_synchronisation():
        counts.tolist()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("defer", [False, True], ids=["plain", "deferred"])
@pytest.mark.parametrize("with_probs", [False, True], ids=["no-probs", "probs"])
@pytest.mark.parametrize("counts_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("layout", COUNTS)
@by_precision
def test_no_host_synchronisation(
    precision: str | None, layout: str, counts_dtype: torch.dtype, with_probs: bool, defer: bool
) -> None:
    batch = make(layout, precision=precision, counts_dtype=counts_dtype, with_probs=with_probs, defer_wgrad=defer)
    two_micro_batches(batch)  # compiles
    with no_synchronisation():
        two_micro_batches(batch)
        with torch.no_grad():
            batch.mlp(batch.x, batch.counts, batch.probs)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("defer", [False, True], ids=["plain", "deferred"])
def test_the_host_runs_ahead_of_the_gpu(defer: bool) -> None:
    """What torch's debug mode cannot see: everything is queued while the GPU is still busy with what came before."""
    batch = make(defer_wgrad=defer)
    two_micro_batches(batch)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    slept = torch.cuda.current_stream().record_event()
    two_micro_batches(batch)
    assert not slept.query(), "the host waited for the GPU"
    slept.synchronize()


@pytest.mark.gpu
@needs_cuda
def test_no_host_synchronisation_of_the_whole_moe_layer() -> None:
    torch.use_deterministic_algorithms(False)  # torch's own backward of a gather is another one there
    moe = MoE(H, I, E, 2, bias=True, shared_intermediate_size=I, dtype=BF16, device="cuda")
    x = rand(T // 2, H, dtype=BF16, device="cuda")

    def step() -> None:
        y, loss, _ = moe(x)
        (y.float().square().mean() + loss).backward()

    step()
    with no_synchronisation():
        step()


@pytest.mark.gpu
@needs_cuda
def test_nothing_is_compiled_anew_for_another_number_of_rows() -> None:
    """Once the kernels have met a T that 16 divides and one that it does not."""
    batch = make()

    def step(num_rows: int) -> None:
        x, dy = (rand(num_rows, H, dtype=BF16, device="cuda") for _ in range(2))
        probs = rand(num_rows, dtype=FP32, device="cuda", low=0)
        counts = torch.randint(0, num_rows // E, (E,), device="cuda")
        by_layer(batch.mlp, x, counts, probs, dy.detach())

    step(T)
    step(T + 1)
    before = compiled_kernels()
    assert before >= 10
    for num_rows in [T + 2, T + 16, *torch.randint(T, 2 * T, (20,)).tolist()]:
        step(num_rows)
    assert compiled_kernels() == before


def compiled_kernels() -> int:
    """Entries in the caches of all Triton functions of the package, in this process."""
    from triton.runtime.jit import JITFunction

    modules = [module for name, module in sys.modules.items() if name.startswith("grouped_experts.ops.portable")]
    kernels = {f for module in modules for f in vars(module).values() if isinstance(f, JITFunction)}
    return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())


# ---- counts that are wrong, on the device, where the host cannot refuse them

WRONG_COUNTS = {
    "beyond": ("contiguous", [1000, 1000, 0, 5, 0, 0, 0, 0], [1000, 24, 0, 0, 0, 0, 0, 0]),
    "negative": ("contiguous", [-1, 9, -100, 0, 0, 70, 0, 0], [0, 9, 0, 0, 0, 70, 0, 0]),
    "overflow": ("contiguous", [2**62] * 8, [T, 0, 0, 0, 0, 0, 0, 0]),
    "masked-beyond": ("masked", [129, 1, 2**40, -7, 128, 0, 0, 4], [128, 1, 128, 0, 128, 0, 0, 4]),
}


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(("layout", "wrong", "clamped"), WRONG_COUNTS.values(), ids=WRONG_COUNTS.keys())
def test_wrong_device_counts_are_clamped_to_the_rows(layout: str, wrong: list[int], clamped: list[int]) -> None:
    mlp, x, _, probs, dy = make(layout)
    actual = by_layer(mlp, x, torch.tensor(wrong, device="cuda"), probs, dy)
    assert_same(actual, by_layer(mlp, x, clamped, probs, dy))


# ---- CUDA graphs


def captured(function: Callable[[], Any], before_capture: Callable[[], None] = lambda: None) -> tuple[Any, Any]:
    """The graph of `function` and what it returned, captured after a warm-up on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    before_capture()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("layout", COUNTS)
@by_precision
def test_graph_of_the_forward_follows_the_counts(precision: str | None, layout: str) -> None:
    batch = make(layout, precision=precision)

    @torch.no_grad()
    def forward() -> Results:
        return {"y": batch.mlp(batch.x, batch.counts, batch.probs)}

    graph, static = captured(forward)
    for counts in COUNTS[layout]:
        refill(batch, counts)
        graph.replay()
        assert_same(copied(static), forward())


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("defer", [False, True], ids=["plain", "deferred"])
@pytest.mark.parametrize("layout", COUNTS)
@by_precision
def test_graph_of_forward_and_backward_follows_the_counts(precision: str | None, layout: str, defer: bool) -> None:
    """The gradients are None when the capture begins, so that they lie in the graph's memory; deferred ones delivered.

    All rows are in use, or only the first ones, with other counts than at the capture.
    """
    batch = make(layout, precision=precision, defer_wgrad=defer)
    graph, static = captured(lambda: by_layer(*batch))
    assert all(t is not None for t in static.values())
    for counts in COUNTS[layout]:
        refill(batch, counts)
        graph.replay()
        actual = copied(static)
        assert_same(actual, by_layer(*batch))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("layout", COUNTS)
@by_precision
def test_graph_of_backward_dw_alone(precision: str | None, layout: str) -> None:
    """Two graphs, forward and backward, then delivery into gradients that are there: each replay adds."""
    batch = make(layout, precision=precision, defer_wgrad=True)
    mlp = batch.mlp

    def forward_and_backward() -> Results:
        batch.x.grad = batch.probs.grad = None
        y = mlp(batch.x, batch.counts, batch.probs)
        y.backward(batch.dy)
        return {"y": y.detach(), "x": batch.x.grad, "probs": batch.probs.grad}

    first, static = captured(forward_and_backward, mlp.discard_wgrads)
    assert mlp.pending_wgrads == 1
    # The delivery is warm from here: a layer of its own, lest the captured work be delivered now, and its own leaves.
    twin = copy.deepcopy(mlp)
    x, probs = (t.detach().clone().requires_grad_() for t in (batch.x, batch.probs))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            twin(x, batch.counts, probs).backward(batch.dy)
            twin.backward_dw()
    torch.cuda.current_stream().wait_stream(side)
    for p in mlp.parameters():
        p.grad = torch.zeros_like(p)
    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second):
        mlp.backward_dw()
    assert mlp.pending_wgrads == 0

    for counts in COUNTS[layout]:
        refill(batch, counts)
        for p in mlp.parameters():
            p.grad.zero_()
        first.replay()
        second.replay()
        once = copied(gradients(mlp))
        second.replay()
        twice = copied(gradients(mlp))
        actual = copied(static) | once
        assert_same(actual, by_layer(twin, *batch[1:]))
        assert_same(twice, {name: 2 * g for name, g in once.items()})


@pytest.mark.gpu
@needs_cuda
@by_precision
def test_graph_of_the_whole_moe_layer(precision: str | None) -> None:
    """The counts come from the router within the graph."""
    torch.use_deterministic_algorithms(False)  # torch's own backward of a gather is another one there
    options: dict[str, Any] = {"bias": precision is None, "precision": precision}
    moe = MoE(H, I, E, 2, shared_intermediate_size=I, dtype=BF16, device="cuda", **options)
    x = rand(T // 2, H, dtype=BF16, device="cuda")

    def step() -> Results:
        for t in (x, *moe.parameters()):
            t.grad = None
        y, loss, counts = moe(x)
        (y.float().square().mean() + loss).backward()
        return {"y": y.detach(), "loss": loss.detach(), "counts": counts, "x": x.grad} | gradients(moe)

    graph, static = captured(step)
    chosen = []
    for _ in range(3):
        with torch.no_grad():
            x.copy_(rand(*x.shape, dtype=BF16, device="cpu"))
        graph.replay()
        actual = copied(static)
        assert_same(actual, step())
        chosen.append(actual["counts"].tolist())
    assert chosen[0] != chosen[1], "the routing never changed"


@pytest.mark.parametrize("capacity", [1, 5, 16, 128, 200])
@by_precision
def test_masked_decoding_follows_the_counts(precision: str | None, capacity: int, device: str) -> None:
    """On a GPU as a graph, captured without rows. Behind the counts NaN in x and zero in y; nothing else is written."""
    mlp = GroupedMLP(H, I, E, dtype=BF16, precision=precision).to(device)
    x = torch.zeros(E, capacity, H, dtype=BF16, device=device)
    counts = torch.zeros(E, dtype=torch.int32, device=device)

    @torch.no_grad()
    def decode() -> Tensor:
        return mlp(x, counts)

    graph, static = captured(decode) if device == "cuda" else (None, None)
    full = [capacity] * E
    for each in (full, [0] * E, *torch.randint(0, capacity + 1, (3, E)).tolist(), full):
        x.copy_(rand(*x.shape, dtype=BF16, device="cpu", requires_grad=False))
        counts.copy_(torch.tensor(each))
        unused = torch.arange(capacity, device=device) >= counts[:, None]
        x[unused] = torch.nan
        with unchanged(x, counts, *mlp.parameters()):
            if graph is None:
                y = decode()
            else:
                graph.replay()
                y = static.clone()
        assert not y[unused].any()
        assert torch.equal(y, decode())
        with torch.no_grad():
            alone = mlp(x[~unused], each)
        error = (y[~unused].float() - alone.float()).norm(dim=1)
        # Tiles of another size sum in another order, after which numbers are rounded, in FP8 to four bits.
        assert (error <= (2**-7 if precision is None else 2**-4) * alone.float().norm(dim=1)).all()


# ---- streams


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("defer", [False, True], ids=["plain", "deferred"])
def test_everything_runs_on_the_current_stream(defer: bool) -> None:
    """x is written late, on a side stream: a kernel on another stream would read NaN."""
    batch = make(defer_wgrad=defer)
    expected = copied(by_layer(*batch))
    values = batch.x.detach().clone()
    with torch.no_grad():
        batch.x.fill_(torch.nan)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG // 10)
        with torch.no_grad():
            batch.x.copy_(values)
        actual = by_layer(*batch)
    torch.cuda.current_stream().wait_stream(side)
    assert_same(actual, expected)


def deferred_on_streams() -> tuple[Batch, Results, torch.cuda.Stream, torch.cuda.Stream]:
    """A deferred layer with its inputs, the weights' gradients, and two streams, the first up with the current one."""
    batch = make(defer_wgrad=True)
    full = by_layer(*batch)
    expected = {name: full[name].clone() for name in WEIGHTS}
    batch.mlp.zero_grad()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    first.wait_stream(torch.cuda.current_stream())
    return batch, expected, first, second


@pytest.mark.gpu
@needs_cuda
def test_delivery_runs_on_its_own_stream() -> None:
    """Behind the backward on another stream, of which what follows there must not hold it up."""
    batch, expected, first, second = deferred_on_streams()
    with torch.cuda.stream(first):
        torch.cuda._sleep(LONG // 10)  # the backward has yet to run when its delivery is queued
        batch.mlp(batch.x, batch.counts, batch.probs).backward(batch.dy)
        second.wait_stream(first)
        torch.cuda._sleep(LONG)
        behind = first.record_event()
    with torch.cuda.stream(second):
        batch.mlp.backward_dw()
        actual = copied(gradients(batch.mlp))
    second.synchronize()
    assert not behind.query(), "the delivery waited for what came behind the backward on its stream"
    assert_same(actual, expected)
    behind.synchronize()


@pytest.mark.gpu
@needs_cuda
def test_operands_outlive_a_delivery_on_another_stream() -> None:
    """The backward's stream may not have their memory back before the delivery has read them."""
    batch, expected, first, second = deferred_on_streams()
    with torch.cuda.stream(first):
        batch.mlp(batch.x, batch.counts, batch.probs).backward(batch.dy)
    second.wait_stream(first)
    with torch.cuda.stream(second):
        torch.cuda._sleep(LONG // 10)
        read = second.record_event()
        batch.mlp.backward_dw()
    with torch.cuda.stream(first):  # dh (T, 2I), a (T, I) and the ranges (E,)
        poison = [torch.full((T, n * I), torch.nan, dtype=BF16, device="cuda") for n in (1, 2) for _ in range(4)]
        poison += [torch.full((E,), 2**30, dtype=torch.int32, device="cuda") for _ in range(8)]
        written = first.record_event()
    written.synchronize()
    assert not read.query(), "the poison came too late"
    torch.cuda.synchronize()
    assert_same(gradients(batch.mlp), expected)


# ---- threads and processes


def test_several_threads_at_once_give_the_results_of_one(device: str) -> None:
    """Each with a layer of its own, on a GPU also on a stream of its own."""
    batches = [make(device=device, defer_wgrad=i % 2 == 1) for i in range(4)]
    expected = [copied(by_layer(*batch)) for batch in batches]
    if device == "cuda":
        torch.cuda.synchronize()
    actual: list[list[Results]] = [[] for _ in batches]
    start = threading.Barrier(len(batches))

    def run(i: int) -> None:
        stream = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()
        start.wait(timeout=60)
        with stream:
            for _ in range(5):
                actual[i].append(copied(by_layer(*batches[i])))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if device == "cuda":
        torch.cuda.synchronize()
    for results, right in zip(actual, expected, strict=True):
        assert len(results) == 5, "a thread failed"
        for result in results:
            assert_same(result, right)


def in_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def backward_and_delivery_in_new_threads() -> None:
    """Forward here; no torch operation in the threads comes before."""
    batch = make(defer_wgrad=True)
    y = batch.mlp(batch.x, batch.counts, batch.probs)
    in_thread(lambda: torch.autograd.backward(y, batch.dy))
    in_thread(batch.mlp.backward_dw)
    actual = {"y": y.detach(), "x": batch.x.grad, "probs": batch.probs.grad} | gradients(batch.mlp)
    assert_same(actual, by_layer(*batch))


def everything_in_a_new_thread() -> None:
    batch = make()
    results: list[Results] = []
    in_thread(lambda: results.append(by_layer(*batch)))
    assert_same(copied(results[0]), by_layer(*batch))


def backward_of_what_is_compiled_already() -> None:
    """Compiled in this thread; autograd's own has launched nothing before. Sizes that TMA suits."""
    mlp = GroupedMLP(64, 64, 2, dtype=torch.bfloat16, device="cuda")
    x, probs = rand(256, 64, dtype=torch.bfloat16, device="cuda"), rand(256, dtype=torch.float32, device="cuda")
    dy = rand(256, 64, dtype=torch.bfloat16, device="cuda", requires_grad=False)
    with torch.autograd.set_multithreading_enabled(False):
        expected = copied(by_layer(mlp, x, [130, 126], probs, dy))
    assert_same(copied(by_layer(mlp, x, [130, 126], probs, dy)), expected)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(
    "what",
    [backward_and_delivery_in_new_threads, everything_in_a_new_thread, backward_of_what_is_compiled_already],
)
def test_new_threads_in_a_new_process(what: Callable[[], None]) -> None:
    """A kernel's first launch, in a thread that has no CUDA context of its own yet."""
    code = f"import test_gpu_execution; test_gpu_execution.{what.__name__}()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def digests() -> dict[str, str]:
    """Of the bytes of every result of a step."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    results = by_layer(*make())
    return {
        name: hashlib.sha256(t.flatten().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
        for name, t in results.items()
    }


@pytest.mark.gpu
@needs_cuda
def test_another_process_computes_the_same_bits() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        child = pool.submit(digests).result(timeout=300)
    assert child == digests()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("layout", COUNTS)
def test_on_a_gpu_that_is_not_the_current_one(layout: str) -> None:
    torch.cuda.set_device(0)
    results = []
    for device in ("cuda:0", "cuda:1"):
        torch.manual_seed(0)
        batch = make(layout, device, defer_wgrad=True)
        results.append({name: t.cpu() for name, t in by_layer(*batch).items()})
        assert {t.device for t in by_layer(*batch).values()} == {torch.device(device)}
        assert_same({"y": batch.mlp(batch.x, batch.counts.tolist(), batch.probs).cpu()}, {"y": results[-1]["y"]})
    assert_same(*results)
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_moe_layer_on_a_gpu_that_is_not_the_current_one() -> None:
    torch.cuda.set_device(0)
    results = []
    on_cpu = MoE(H, I, E, 2, bias=True, shared_intermediate_size=I, dtype=BF16)
    values = rand(T // 2, H, dtype=BF16, device="cpu")
    for device in ("cuda:0", "cuda:1"):
        moe, x = copy.deepcopy(on_cpu).to(device), values.detach().to(device).requires_grad_()
        y, loss, counts = moe(x)
        (y.float().square().mean() + loss).backward()
        tensors = {"y": y.detach(), "counts": counts, "x": x.grad} | gradients(moe)
        results.append({name: t.cpu() for name, t in tensors.items()})
    assert_same(*results)
    assert torch.cuda.current_device() == 0


# ---- repeats, memory, precision


@pytest.mark.gpu
@needs_cuda
def test_twenty_repeats_are_equal_to_the_bit() -> None:
    counts = [1500, 0, 17, 1011, 1, 64, 1500, 3]
    mlp = GroupedMLP(H, I, E, bias=True, dtype=BF16, device="cuda")
    x, dy = (rand(sum(counts), H, dtype=BF16, device="cuda") for _ in range(2))
    probs = rand(sum(counts), dtype=FP32, device="cuda", low=0)
    first = copied(by_layer(mlp, x, counts, probs, dy.detach()))
    for _ in range(20):
        assert_same(by_layer(mlp, x, counts, probs, dy.detach()), first)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("defer", [False, True], ids=["plain", "deferred"])
def test_forwards_without_a_backward_leave_no_memory_behind(defer: bool) -> None:
    mlp, x, counts, probs, _ = make(defer_wgrad=defer)

    def allocated_after(forwards: int) -> int:
        for _ in range(forwards):
            mlp(x, counts, probs)
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    assert allocated_after(1) == allocated_after(200)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("deliver", [False, True], ids=["discard", "deliver"])
def test_pending_gradients_hold_their_operands_until_they_are_done_with(deliver: bool) -> None:
    """dh (T, 2I) and a (T, I) a micro-batch, in bf16; x and dy are the caller's."""
    mlp, x, counts, probs, dy = make(defer_wgrad=True)

    def allocated() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def backwards(times: int) -> None:
        for _ in range(times):
            mlp(x, counts, probs).backward(dy)

    backwards(1)
    mlp.backward_dw()  # x, probs and the weights have their gradients now
    before = allocated()
    backwards(10)
    operands = 10 * T * 3 * I * x.element_size()
    assert operands <= allocated() - before <= 1.1 * operands
    mlp.backward_dw() if deliver else mlp.discard_wgrads()
    assert allocated() == before


@pytest.mark.gpu
@needs_cuda
def test_tf32_only_where_torch_asks_for_it() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    mlp = GroupedMLP(256, 256, 2, device="cuda")
    x = rand(64, 256, dtype=FP32, device="cuda", requires_grad=False)
    with torch.no_grad():
        exact = copy.deepcopy(mlp).double()(x.double(), [30, 34])

        def error() -> float:
            return float((mlp(x, [30, 34]) - exact).norm() / exact.norm())

        assert error() < 1e-5
        matmul.fp32_precision = "tf32"
        try:
            assert 5e-5 < error() < 5e-3  # 10 bits of the operands' fraction are left
        finally:
            matmul.fp32_precision = before
        assert error() < 1e-5


def test_small_cases_of_every_kernel(device: str) -> None:
    """The script that is meant for compute-sanitizer."""
    gpu_small_cases.main(device)
