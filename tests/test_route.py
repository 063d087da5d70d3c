"""The Triton kernels that sort slots by expert, against the reference: for few slots, for many, and at their border."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from conftest import needs_cuda, no_synchronisation
from hypothesis import given
from hypothesis import strategies as st
from inputs import seeds, unchanged
from torch import Tensor

from grouped_experts import ops
from grouped_experts.ops import reference
from grouped_experts.ops.families import use_family

pytest.importorskip("triton", reason="needs Triton")

from grouped_experts.ops.portable.launch import cdiv, kernel
from grouped_experts.ops.portable.schedule import scheduled_ranges

# `portable.route` is the function, which hides the module of its name.
module = importlib.import_module("grouped_experts.ops.portable.route")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where there is no GPU, in Triton's interpreter
FREE_GIB = 40  # the largest test takes about 30

Outputs = tuple[Tensor, Tensor, Tensor]
Way = Callable[[Tensor, int], Outputs]
# What lies between and around the ids is an expert's id, too.
STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "transposed": lambda t: t.t().contiguous().t(),
    "in-wider-rows": lambda t: torch.cat([t * 0, t, t * 0], 1)[:, t.shape[1] : 2 * t.shape[1]],
    "every-second-column": lambda t: torch.stack([t, t * 0], 2).flatten(1)[:, ::2],
    "every-second-row": lambda t: torch.stack([t, t * 0], 1).flatten(0, 1)[::2],
    "base-off-by-one": lambda t: torch.cat([t.new_zeros(1), t.flatten(), t.new_zeros(1)])[1:-1].view(t.shape),
    "one-row": lambda t: t[:1].expand_as(t),
    "one-column": lambda t: t[:, :1].expand_as(t),
    "one-element": lambda t: t[0, 0].expand_as(t),
}
WAYS = {"few": module.route_few, "many": module.route_many}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


def random_ids(num_tokens: int, choices: int, num_experts: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """-2 .. E + 1, with repetitions: some are no expert."""
    return torch.randint(-2, num_experts + 2, (num_tokens, choices), dtype=dtype).to(DEVICE)


def check(way: Way, ids: Tensor, num_experts: int) -> Outputs:
    with unchanged(ids):
        outputs = way(ids, num_experts)
    for actual, expected in zip(outputs, reference.route(ids.cpu(), num_experts), strict=True):
        assert actual.dtype == torch.int32
        assert actual.device == ids.device
        assert actual.is_contiguous()
        assert torch.equal(actual.cpu(), expected)
    return outputs


# ---- values

IDS: dict[str, tuple[list[list[int]], int]] = {
    "one-slot": ([[0]], 1),
    "one-slot-elsewhere": ([[1]], 1),
    "one-takes-all": ([[1] * 40] * 5, 3),
    "more-choices-than-experts": ([[1, 0, 1, 2, 0]] * 3, 3),
    "none-here": ([[3, -1], [4, 3]], 3),
    "in-descending-order": ([[e] for e in reversed(range(150))], 150),
    "first-and-last-idle": ([[1, 2], [2, 1]] * 40, 4),
    "one-expert": ([[0], [1], [-1], [0]] * 50, 1),
    "more-experts-than-slots": ([[500, 7]], 600),
    "beyond-int32": ([[0, 2**32, 2**32 + 1], [-(2**63), 2**63 - 1, 1], [2**31, -(2**31), 0]], 2),
}


@ways
@pytest.mark.parametrize(("ids", "num_experts"), IDS.values(), ids=IDS.keys())
def test_ids(ids: list[list[int]], num_experts: int, way: Way) -> None:
    tensor = torch.tensor(ids, device=DEVICE)
    check(way, tensor, num_experts)
    if tensor.abs().max() < 2**31 and tensor.min() > -(2**31):
        check(way, tensor.int(), num_experts)


@ways
def test_by_hand(way: Way) -> None:
    counts, slot_to_row, row_to_slot = way(torch.tensor([[1, 0], [2, 1], [0, -1]], device=DEVICE), 2)
    assert counts.tolist() == [2, 2]
    assert slot_to_row.tolist() == [[2, 0], [-1, 3], [1, -1]]
    assert row_to_slot.tolist() == [1, 4, 0, 3, -1, -1]


@ways
@pytest.mark.parametrize("num_experts", [1, 2, 31, 128, 256, 257, 1025])
def test_experts(num_experts: int, way: Way) -> None:
    """Around the blocks of experts: counts in those of 256, starts in those of 1024."""
    check(way, random_ids(130, 3, num_experts), num_experts)


@ways
@pytest.mark.parametrize("num_slots", [15, 16, 17, 127, 128, 129, 1023, 1024, 1025])
def test_slots(num_slots: int, way: Way) -> None:
    """Around the blocks of slots: 16 that are compared with 1024 at a time, chunks of 128."""
    check(way, random_ids(num_slots, 1, 5), 5)


@ways
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("how", STRIDES)
def test_strides(how: str, dtype: torch.dtype, way: Way) -> None:
    check(way, STRIDES[how](random_ids(45, 6, 7, dtype)), 7)


@given(
    st.sampled_from(sorted(WAYS)),
    st.integers(1, 80),
    st.integers(1, 10),
    st.sampled_from([1, 2, 3, 8, 60, 300]),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from(sorted(STRIDES)),
    seeds,
)
def test_any_input(
    way: str, num_tokens: int, choices: int, num_experts: int, dtype: torch.dtype, how: str, seed: int
) -> None:
    torch.manual_seed(seed)
    check(WAYS[way], STRIDES[how](random_ids(num_tokens, choices, num_experts, dtype)), num_experts)


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)], ids=str)
def test_no_slots(shape: tuple[int, int]) -> None:
    check(module.route, torch.empty(shape, dtype=torch.int64, device=DEVICE), 5)


# ---- few or many


@pytest.mark.parametrize(
    ("num_slots", "num_experts", "expected"),
    [
        (module.FEW_SLOTS, 9, "few"),
        (module.FEW_SLOTS + 1, 9, "many"),
        (2, module.FEW_EXPERTS + 1, "many"),
    ],
)
def test_border(num_slots: int, num_experts: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def noted(name: str) -> Way:
        def call(ids: Tensor, num_experts: int, *rest: object) -> Outputs:
            taken.append(name)
            # Half a million experts are for a GPU: the interpreter is at them for minutes.
            if num_experts > module.FEW_EXPERTS and DEVICE == "cpu":
                return reference.route(ids, num_experts)
            return WAYS[name](ids, num_experts)

        return call

    for name in WAYS:
        monkeypatch.setattr(module, f"route_{name}", noted(name))
    check(module.route, random_ids(num_slots, 1, num_experts), num_experts)
    assert taken == [expected]


def test_the_largest_keys_are_int32() -> None:
    assert module.FEW_EXPERTS * module.FEW_SLOTS + module.FEW_SLOTS - 1 <= 2**31 - 1
    assert module.FEW_SLOTS % 1024 == 0  # slots are read up to the next multiple


# ---- chunks


@pytest.mark.parametrize(("size", "num_experts"), [(32, 7), (256, 1), (256, 1030), (2048, 7)])
def test_chunks_of_several_blocks(size: int, num_experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 32 slots that a program does one after the other; counts of at most 1024 slots at a time."""
    monkeypatch.setattr(module, "chunk_size", lambda num_slots, num_experts: size)
    num_tokens = 701 if size < 2048 else 1501
    check(module.route_many, random_ids(num_tokens, 3, num_experts), num_experts)
    one_takes_all = torch.full((num_tokens, 1), num_experts - 1, device=DEVICE)
    check(module.route_many, one_takes_all, num_experts)


@pytest.mark.parametrize("num_chunks", [1, 1023, 1024, 1025, 3000])
@pytest.mark.parametrize("num_experts", [1, 4, 6])
def test_sums_over_chunks(num_experts: int, num_chunks: int) -> None:
    counts = torch.randint(0, 130, (num_chunks, num_experts), dtype=torch.int32, device=DEVICE)
    matrix, totals = counts.clone(), counts.new_empty(num_experts)
    kernel(module.sum_chunks_kernel, num_warps=8, CHUNKS=1024, EXPERTS=4, OVERLAP=False).launch(
        (cdiv(num_experts, 4),), counts.device, matrix, totals, num_chunks, num_experts
    )
    sums = counts.cpu().cumsum(0)
    assert torch.equal(totals.cpu().long(), sums[-1])
    assert torch.equal(matrix.cpu().long(), sums - counts.cpu())


@given(st.integers(1, 2**31 - 1), st.integers(1, 2**22))
def test_chunks_are_bounded(num_slots: int, num_experts: int) -> None:
    size = module.chunk_size(num_slots, num_experts)
    chunks = cdiv(num_slots, size)
    assert size >= 128
    assert size & (size - 1) == 0
    assert chunks <= 8192
    assert chunks * num_experts <= max(2**20, 256 * num_experts)
    # No larger than they must be: many chunks are many programs.
    assert size == 128 or cdiv(num_slots, size // 2) > min(8192, max(256, 2**20 // num_experts))


# ---- the op


def test_the_op_takes_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def noted(ids: Tensor, num_experts: int, *rest: object) -> Outputs:
        called.append(num_experts)
        return reference.route(ids, num_experts)

    monkeypatch.setattr(module, "route_few", noted)
    ids = torch.tensor([[0, 3]], device=DEVICE)
    with use_family("reference"):
        ops.route(ids, 3)
    assert called == []
    with use_family("portable"):
        ops.route(ids, 3)
    assert called == [3]


@pytest.mark.skipif(DEVICE != "cpu", reason="ids are checked on a CPU, where kernels need Triton's interpreter")
def test_ids_on_the_cpu_are_checked_for_every_family() -> None:
    for family in ("reference", "portable"):
        with use_family(family), pytest.raises(ValueError, match="top_k_ids: wanted ids from 0 to num_experts = 3"):
            ops.route(torch.tensor([[0, 4]]), 3)


@ways
def test_bit_identical_from_run_to_run(way: Way) -> None:
    ids = random_ids(500 if DEVICE == "cuda" else 50, 8, 20)
    first = way(ids, 20)
    for _ in range(20 if DEVICE == "cuda" else 2):
        assert all(torch.equal(a, b) for a, b in zip(way(ids, 20), first, strict=True))


# ---- what only a GPU shows


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("num_experts", [8, 128, 3000])
@pytest.mark.parametrize("num_tokens", [1, 64, 512, 4096, 32768, 300_000])
def test_sizes_of_real_layers(num_tokens: int, num_experts: int) -> None:
    check(module.route, random_ids(num_tokens, 8, num_experts), num_experts)
    skewed = (torch.rand(num_tokens, 8).pow(8) * num_experts).to(torch.int64)
    check(module.route, skewed.to(DEVICE), num_experts)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("num_tokens", [16, 4096])
def test_graph_follows_the_ids_and_the_host_does_not_wait(num_tokens: int) -> None:
    batches = [random_ids(num_tokens, 8, 32) for _ in range(3)]
    ids = batches[0].clone()
    module.route(ids, 32)  # compiles
    with no_synchronisation():
        module.route(ids, 32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = module.route(ids, 32)
    for batch in batches:
        ids.copy_(batch)
        graph.replay()
        for actual, expected in zip(outputs, reference.route(batch.cpu(), 32), strict=True):
            assert torch.equal(actual.cpu(), expected)


@pytest.mark.gpu
@needs_cuda
def test_offsets_beyond_int32() -> None:
    """As many slots as there can be; ids that lie 2^31 elements behind the first."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < FREE_GIB * 2**30:
        pytest.skip(f"needs {FREE_GIB} GiB of free GPU memory")
    most = 2**31 - 1
    ids = torch.ones(1, 1, dtype=torch.int32, device=DEVICE).expand(most, 1)
    counts, slot_to_row, row_to_slot = module.route(ids, 2)
    assert counts.tolist() == [0, most]
    slots = torch.arange(most, dtype=torch.int32, device=DEVICE)
    assert torch.equal(slot_to_row[:, 0], slots)
    assert torch.equal(row_to_slot, slots)
    del slots, slot_to_row, row_to_slot

    far = torch.zeros(5, 2**29, dtype=torch.int32, device=DEVICE)[:, :2000]
    far.copy_(random_ids(5, 2000, 6))
    for way in (module.route_many, module.route_few):
        part = far if way is module.route_many else far[:, :700]
        for actual, expected in zip(way(part, 6), reference.route(part.cpu(), 6), strict=True):
            assert torch.equal(actual.cpu(), expected)


few_and_many = [(1, 8, 128), (5, 3, 4), (40, 6, 3), (64, 8, 128), (300, 4, 9), (0, 2, 3)]
# Of many experts the interpreter takes half a minute.
SHAPES = [*few_and_many, *((1400, 3, experts) for experts in ((1, 9, 255, 256) if DEVICE == "cuda" else (1, 9)))]


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_scheduled_as_they_are_apart(shape: tuple[int, int, int], foreign: bool) -> None:
    """`route_rows` is `route`, the tokens and probs of the rows, and the ranges and tiles of its counts."""
    tokens, choices, experts = shape
    ids = torch.randint(0, experts + foreign, (tokens, choices), device=DEVICE)
    probs = torch.rand(tokens, choices, device=DEVICE, dtype=torch.float64 if foreign else torch.float32)
    probs[ids == experts] = torch.nan
    *routed, row_to_token, row_probs, starts, ends, tiles = module.route_rows(ids, experts, torch.float32, probs)
    assert torch.equal(row_probs, reference.permute(probs.view(-1, 1), routed[1].view(-1, 1), routed[2])[:, 0])
    assert module.route_rows(ids, experts, torch.float32, None)[4].shape == (0,)
    apart = module.route(ids, experts)
    for mine, theirs in zip(routed, apart, strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(row_to_token, torch.where(apart[2] < 0, -1, apart[2] // choices))
    wanted_starts, wanted_ends, wanted = scheduled_ranges(apart[0], 0, ids.numel(), torch.float32)
    assert torch.equal(starts, wanted_starts)
    assert torch.equal(ends, wanted_ends)
    written = 1 + int(wanted[0, 1])
    assert torch.equal(tiles[0, :2], wanted[0, :2])
    assert torch.equal(tiles[1:written, :3], wanted[1:written, :3])


@pytest.mark.parametrize("id_", [0, 6, 7])
def test_rows_of_one_expert_or_of_nobody_are_scheduled(id_: int) -> None:
    ids = torch.full((1100, 4), id_, device=DEVICE)
    *_, starts, ends, tiles = module.route_rows(ids, 7, torch.float32, None)
    counts = [4400 * (e == id_) for e in range(7)]
    assert ends.tolist() == [sum(counts[: e + 1]) for e in range(7)]
    assert starts.tolist() == [sum(counts[:e]) for e in range(7)]
    owner, owned = (id_, 35) if id_ < 7 else (-1, 0)
    assert tiles[0, :2].tolist() == [owned, 35]
    assert tiles[1:36, :3].tolist() == [[owner, m, min(m + 128, 4400)] for m in range(0, 4400, 128)]


@pytest.mark.parametrize("shape", [(5, 3, 4), (1, 8, 300), (0, 2, 3), (4, 0, 3)])
def test_opcheck_of_rows(shape: tuple[int, int, int]) -> None:
    ids = torch.randint(0, shape[2] + 1, shape[:2], device=DEVICE)
    for probs in (None, torch.rand(ids.shape, device=DEVICE)):
        torch.library.opcheck(torch.ops.grouped_experts.route_rows.default, (ids, shape[2], torch.float32, probs))
