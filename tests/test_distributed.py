"""Under data parallelism: two gloo processes on the CPU, DDP and FSDP2, plain and deferred."""

from __future__ import annotations

import copy
import datetime
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from layer import assert_equal_sums, assert_same, gradients, rand
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import grouped_experts
from grouped_experts import GroupedMLP, check_no_pending_wgrads

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")

RANKS = 2
COUNTS = [3, 0, 4]

# Two processes serve all tests of this file: starting them takes longer than any test.


def serve(rank: int, store: str, pipe: Any) -> None:
    """Run each task that comes, and answer with None or the traceback."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timeout)
    for task, kwargs in iter(pipe.recv, None):
        torch.manual_seed(0)  # the same weights on each rank
        try:
            task(rank, **kwargs)
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())
    dist.destroy_process_group()


class Workers:
    def __init__(self, folder: Path) -> None:
        self.folder, self.starts, self.running = folder, 0, []

    def run(self, task: Callable[..., None], **kwargs: Any) -> None:
        if not self.running:
            self._start()
        for _, pipe in self.running:
            pipe.send((task, kwargs))
        answers = [pipe.recv() if pipe.poll(100) else "no answer" for _, pipe in self.running]
        failures = "\n".join(f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer)
        if failures:
            self.stop(kill=True)  # the other rank may hang in a collective
            pytest.fail(failures, pytrace=False)

    def _start(self) -> None:
        self.starts += 1
        context = mp.get_context("spawn")
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            store = str(self.folder / f"store-{self.starts}")
            process = context.Process(target=serve, args=(rank, store, theirs), daemon=True)
            process.start()
            self.running.append((process, ours))

    def stop(self, kill: bool = False) -> None:
        for process, pipe in self.running:
            if kill:
                process.kill()
            else:
                pipe.send(None)
        for process, _ in self.running:
            process.join(timeout=30)
        self.running = []


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    workers = Workers(tmp_path_factory.mktemp("distributed"))
    yield workers
    workers.stop()


# ---- what the ranks do


def make(defer: bool, num_experts: int = 3, **options: Any) -> GroupedMLP:
    return GroupedMLP(6, 4, num_experts, **{"bias": True, "defer_wgrad": defer, "dtype": torch.float32} | options)


def batches(rank: int, number: int, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    """x and dy of each micro-batch, other ones on each rank."""
    torch.manual_seed(100 + rank)
    pairs = [[rand(7, 6, dtype=dtype, device="cpu", requires_grad=False) for _ in range(2)] for _ in range(number)]
    return [(x, dy) for x, dy in pairs]


def run_ddp(
    ddp: DistributedDataParallel, micro_batches: list[tuple[Tensor, Tensor]], x_grad: bool = True
) -> dict[str, Tensor | None]:
    for number, (x, dy) in enumerate(micro_batches):
        last = number == len(micro_batches) - 1
        with nullcontext() if last else ddp.no_sync():
            ddp(x.clone().requires_grad_(x_grad), COUNTS).backward(dy)
            if last:
                grouped_experts.backward_dw(ddp)
    return {name: None if g is None else g.clone() for name, g in gradients(ddp).items()}


def assert_same_on_all_ranks(results: dict[str, Tensor | None]) -> None:
    for name, value in results.items():
        others = [torch.empty_like(value) for _ in range(RANKS)]
        dist.all_gather(others, value)
        assert all(torch.equal(other, value) for other in others), f"the ranks differ in {name}"


def averaged(results: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    for value in results.values():
        if value is not None:
            dist.all_reduce(value)
            value /= RANKS
    return results


def ddp_equals_plain(rank: int, micro_batches: int, x_grad: bool, options: dict[str, Any]) -> None:
    layer = make(False)
    deferred = copy.deepcopy(layer)
    deferred.defer_wgrad = True
    data = batches(rank, micro_batches)
    plain = run_ddp(DistributedDataParallel(layer, **options), data, x_grad)
    ddp = DistributedDataParallel(deferred, **options)
    for _ in range(2):  # a second step as well: the reducer is ready again
        ddp.zero_grad()
        results = run_ddp(ddp, data, x_grad)
        if micro_batches == 1:
            assert_same(results, plain)
        assert_equal_sums(results, plain)
        assert_same_on_all_ranks(results)


def ddp_is_the_average(rank: int, defer: bool) -> None:
    layer = make(defer, dtype=torch.float64)
    alone = copy.deepcopy(layer)
    data = batches(rank, 1, torch.float64)
    results = run_ddp(DistributedDataParallel(layer), data)
    ((x, dy),) = data
    alone(x, COUNTS).backward(dy)
    alone.backward_dw()
    mine = {f"module.{name}": g for name, g in gradients(alone).items()}
    assert not torch.equal(results["module.fc1_weight"], mine["module.fc1_weight"])
    assert_same(results, averaged(mine))


def no_tokens_for_some_experts(rank: int, defer: bool) -> None:
    """Rank 0 has rows for expert 0 only, rank 1 for expert 1 only: each gets half of the other's gradient."""
    layer = make(defer, num_experts=2, dtype=torch.float64)
    alone = copy.deepcopy(layer)
    alone.defer_wgrad = False
    ddp = DistributedDataParallel(layer)
    counts = [4, 0] if rank == 0 else [0, 4]
    x = torch.ones(4, 6, dtype=torch.float64)
    ddp(x, counts).sum().backward()
    layer.backward_dw()
    for e in range(2):
        alone.zero_grad()
        alone(x, [4, 0] if e == 0 else [0, 4]).sum().backward()
        for p, q in zip(layer.parameters(), alone.parameters(), strict=True):
            assert torch.equal(p.grad[e], q.grad[e] / 2)


def no_tokens_at_all_on_one_rank(rank: int, defer: bool) -> None:
    layer = make(defer, dtype=torch.float64)
    alone = copy.deepcopy(layer)
    alone.defer_wgrad = False
    ddp = DistributedDataParallel(layer)
    x = torch.ones(7, 6, dtype=torch.float64)
    if rank == 0:
        ddp(x[:0], [0, 0, 0]).sum().backward()
    else:
        ddp(x, COUNTS).sum().backward()
    layer.backward_dw()
    alone(x, COUNTS).sum().backward()
    assert_same(gradients(layer), {name: g / 2 for name, g in gradients(alone).items()})


class Two(nn.Module):
    """Two layers that share fc1."""

    def __init__(self, defer: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make(defer, dtype=torch.float64) for _ in range(2))
        self.layers[1].fc1_weight = self.layers[0].fc1_weight

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        return self.layers[1](self.layers[0](x, counts), counts)


def tied_weight(rank: int) -> None:
    plain, deferred = Two(False), Two(True)
    deferred.load_state_dict(plain.state_dict())
    data = batches(rank, 1, torch.float64)
    expected = run_ddp(DistributedDataParallel(plain), data)
    results = run_ddp(DistributedDataParallel(deferred), data)
    assert_equal_sums(results, expected)
    assert_same_on_all_ranks(results)


class Model(nn.Module):
    """A layer whose weight gradients are deferred, behind one whose are not."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.experts = nn.Linear(6, 6), make(True)

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        return self.experts(self.inputs(x), counts)


def forgotten_delivery(rank: int) -> None:
    ddp = DistributedDataParallel(Model())
    ((x, dy),) = batches(rank, 1)
    ddp(x, COUNTS).backward(dy)
    with pytest.raises(RuntimeError, match=r"call backward_dw first; .*module\.experts \(1\)"):
        check_no_pending_wgrads(ddp)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
        ddp(x, COUNTS)


# ---- FSDP2


class Block(nn.Module):
    """What is wrapped: the layer, delivering from a hook on its input if asked to."""

    def __init__(self, mlp: GroupedMLP, deliver: bool) -> None:
        super().__init__()
        self.mlp, self.deliver = mlp, deliver

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        if self.deliver:
            x.register_hook(lambda _: self.mlp.backward_dw())
        return self.mlp(x, counts)


def sharded(module: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=init_device_mesh("cpu", (RANKS,)))


def fsdp_equals_plain(rank: int, deferred: bool, x_leaf: bool) -> None:
    alone = make(False, num_experts=4, bias=False)
    mlp = copy.deepcopy(alone)
    mlp.defer_wgrad = deferred
    block = sharded(Block(mlp, deliver=deferred))
    for _ in range(2):
        ((x, dy),) = batches(rank, 1)
        block.zero_grad()
        alone.zero_grad()
        x.requires_grad_()
        block(x if x_leaf else x * 1, [2, 0, 4, 1]).backward(dy)
        alone(x.detach(), [2, 0, 4, 1]).backward(dy)
        assert mlp.pending_wgrads == 0
        expected = averaged(gradients(alone))
        assert_same({name: p.grad.full_tensor() for name, p in mlp.named_parameters()}, expected)


def fsdp_refuses_a_late_delivery(rank: int, x_grad: bool) -> None:
    """After FSDP2's post-backward the gradient would land on a plain copy, and be reduced a step late."""
    mlp = make(True, num_experts=4, bias=False)
    block = sharded(Block(mlp, deliver=False))
    ((x, dy),) = batches(rank, 1)
    block(x.requires_grad_(x_grad), [2, 0, 4, 1]).backward(dy)
    assert mlp.pending_wgrads == 1
    for deliver in (mlp.backward_dw, lambda: grouped_experts.backward_dw(block)):
        with pytest.raises(RuntimeError, match="backward_dw: fc._weight is a DTensor now but was a plain tensor"):
            deliver()
    assert mlp.pending_wgrads == 1
    mlp.discard_wgrads()


def dtensor_weights(rank: int, defer: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mlp = make(defer, num_experts=4)
    mesh = init_device_mesh("cpu", (RANKS,))
    mlp.fc1_weight = nn.Parameter(distribute_tensor(mlp.fc1_weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(TypeError, match="fc1_weight: wanted a plain tensor, got a DTensor"):
        mlp(torch.zeros(7, 6), [2, 0, 4, 1])


# ---- tests


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}], ids=["own-gradients", "gradient_as_bucket_view"]
)
@pytest.mark.parametrize("x_grad", [True, False], ids=["x-with-gradient", "x-without-gradient"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_ddp_deferred_equals_plain(workers: Workers, micro_batches: int, x_grad: bool, options: dict[str, Any]) -> None:
    workers.run(ddp_equals_plain, micro_batches=micro_batches, x_grad=x_grad, options=options)


@pytest.mark.parametrize("defer", [False, True], ids=["plain", "deferred"])
def test_ddp_averages_over_the_ranks(workers: Workers, defer: bool) -> None:
    workers.run(ddp_is_the_average, defer=defer)


@pytest.mark.parametrize("defer", [False, True], ids=["plain", "deferred"])
@pytest.mark.parametrize("task", [no_tokens_for_some_experts, no_tokens_at_all_on_one_rank], ids=["some", "all"])
def test_ddp_with_idle_experts_and_ranks(workers: Workers, task: Callable[..., None], defer: bool) -> None:
    """Without find_unused_parameters: each parameter takes part on each rank."""
    workers.run(task, defer=defer)


def test_ddp_with_a_weight_tied_over_two_layers(workers: Workers) -> None:
    workers.run(tied_weight)


def test_ddp_notices_a_forgotten_delivery(workers: Workers) -> None:
    workers.run(forgotten_delivery)


@pytest.mark.parametrize("x_leaf", [False, True], ids=["x-computed", "x-leaf"])
@pytest.mark.parametrize("deferred", [False, True], ids=["plain", "deferred"])
def test_fsdp2_equals_plain(workers: Workers, deferred: bool, x_leaf: bool) -> None:
    workers.run(fsdp_equals_plain, deferred=deferred, x_leaf=x_leaf)


@pytest.mark.parametrize("x_grad", [True, False], ids=["x-with-gradient", "x-without-gradient"])
def test_fsdp2_refuses_a_late_delivery(workers: Workers, x_grad: bool) -> None:
    workers.run(fsdp_refuses_a_late_delivery, x_grad=x_grad)


@pytest.mark.parametrize("defer", [False, True], ids=["plain", "deferred"])
def test_sharded_dtensor_weights_are_refused(workers: Workers, defer: bool) -> None:
    workers.run(dtensor_weights, defer=defer)
