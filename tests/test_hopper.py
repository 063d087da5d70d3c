"""The Gluon kernels for sm_90 where they differ from the portable ones: which calls take them, and their tiles' edges.

`test_gpu_layouts.py` runs them on a thousand random layouts, `test_gpu_compile.py` compiles them without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import on_hopper
from inputs import ACTIVATIONS, Layout, contiguous
from layer import by_layer
from torch import Tensor

from grouped_experts import GroupedMLP, RowRanges
from grouped_experts.ops import (
    fc1_activation,
    fc2_dgrad_activation,
    k_grouped_gemm,
    k_grouped_gemm_accumulate,
    m_grouped_gemm,
    scaled_activation,
    scaled_activation_backward,
)
from grouped_experts.ops.families import choose_family, use_family
from grouped_experts.ops.hopper import k_grouped as hopper_k_grouped
from grouped_experts.ops.hopper.plan import make_plan
from grouped_experts.ops.portable.launch import num_processors

BF16 = torch.bfloat16
# 118 rows on average: tiles of 128. One row, half a tile, a row more, a whole one, several; spare rows behind.
LAYOUT = contiguous([130, 0, 1, 64, 65, 128, 300, 256], spare=5)
E = LAYOUT.num_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not on_hopper, reason="needs a Hopper GPU"),
]


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def random_rows(columns: int, layout: Layout = LAYOUT, dtype: torch.dtype = BF16) -> Tensor:
    """NaN in rows of no expert."""
    rows = torch.full((layout.num_rows, columns), torch.nan, device="cuda", dtype=dtype)
    for start, end in layout.bounds:
        rows[start:end] = randn(end - start, columns, dtype=dtype)
    return rows


def product(x: Tensor, w: Tensor, layout: Layout = LAYOUT) -> Tensor:
    """x[r] @ w[e] in fp64, zero in rows of no expert."""
    y = x.new_zeros(x.shape[0], w.shape[2], dtype=torch.float64)
    for e, (start, end) in enumerate(layout.bounds):
        y[start:end] = x[start:end].double() @ w[e].double()
    return y


def weight_product(a: Tensor, b: Tensor, layout: Layout = LAYOUT) -> Tensor:
    return torch.stack([a[start:end].double().T @ b[start:end].double() for start, end in layout.bounds])


def close(actual: Tensor, exact: Tensor) -> None:
    """Within three roundings of the norm of each row, or of each expert's weight."""
    error, size = ((t.double()).flatten(1).norm(dim=1) for t in (actual.double() - exact, exact))
    assert bool((error <= 3 * torch.finfo(actual.dtype).eps / 2 * size).all()), (error / size).max()


def test_a_hopper_gpu_takes_them() -> None:
    device = torch.device("cuda")
    assert choose_family(device, [BF16]) == choose_family(device, [torch.float16]) == "hopper"
    assert choose_family(device, [torch.float32]) == "portable"
    assert choose_family(device, [BF16, torch.float64]) == "reference"


@pytest.mark.parametrize("columns", [8, 128, 136, 256, 520, 4104])
@pytest.mark.parametrize("depth", [8, 64, 200, 512])
def test_edges_of_tiles(depth: int, columns: int, paths: list[str]) -> None:
    rows = LAYOUT.rows("cuda")
    x, dy, w = random_rows(depth), random_rows(columns), randn(E, columns, depth)
    close(m_grouped_gemm(x, w, rows), product(x, w.mT))
    close(m_grouped_gemm(dy, w, rows, transpose_w=False), product(dy, w))
    close(k_grouped_gemm(dy, x, rows), weight_product(dy, x))
    assert paths == [
        "m_grouped_gemm: Gluon",
        "m_grouped_gemm: Gluon",
        "k_grouped_gemm: Gluon",
    ]


@pytest.mark.parametrize("columns", [40, 136, 264])
def test_accumulation(columns: int, paths: list[str]) -> None:
    """Whole blocks of rows alone, with a few more, only a few, and none."""
    layout = contiguous([1024, 3000, 1, 0, 2500], spare=3)
    a, b = random_rows(200, layout), random_rows(columns, layout)
    c = randn(5, 200, columns, dtype=torch.float32)
    exact = c.double() + weight_product(a, b, layout)
    k_grouped_gemm_accumulate(c, a, b, layout.rows("cuda"))
    assert paths == ["k_grouped_gemm_accumulate: Gluon"]
    close_sums(c, exact, layout)


def close_sums(c: Tensor, exact: Tensor, layout: Layout) -> None:
    """wgmma adds the products of 16 rows to an fp32 sum and cuts the rest off: errors of up to 2^-23, half of that on
    average, and less by the size that the sum has by then. A sixth of them, and two roundings behind.
    """
    steps = torch.tensor([end - start for start, end in layout.bounds], device=c.device) / 16
    error, size = ((t.double()).flatten(1).norm(dim=1) for t in (c - exact, exact))
    assert bool((error <= (steps / 6 + 2) * 2**-23 * size).all()), (error / size, steps)


def test_accumulation_into_part_of_a_buffer(paths: list[str]) -> None:
    """TMA addresses it; what lies beside is not touched, nor are the sums of experts without rows."""
    layout = contiguous([2000, 0, 700], spare=3)
    a, b = random_rows(200, layout), random_rows(136, layout)
    buffer = randn(3, 210, 160, dtype=torch.float32)
    buffer[1, 4:204, 8:144] = 1e-40  # which an addition of zero by TMA would take for zero
    before, c = buffer.clone(), buffer[:, 4:204, 8:144]
    exact = c.double() + weight_product(a, b, layout)
    k_grouped_gemm_accumulate(c, a, b, layout.rows("cuda"))
    assert paths == ["k_grouped_gemm_accumulate: Gluon"]
    close_sums(c, exact, layout)
    c[::2] = before[::2, 4:204, 8:144]
    assert torch.equal(buffer, before)


@pytest.mark.parametrize(("rows", "path"), [(640, "Gluon"), (639, "portable, since additions outlast the products")])
def test_sums_of_few_rows_go_to_the_portable_kernels(rows: int, path: str, paths: list[str]) -> None:
    layout = contiguous([rows])
    a, b, c = random_rows(64, layout), random_rows(136, layout), torch.zeros(1, 64, 136, device="cuda")
    k_grouped_gemm_accumulate(c, a, b, layout.rows("cuda"))
    assert paths[0].startswith(f"k_grouped_gemm_accumulate: {path}")
    close_sums(c, weight_product(a, b, layout), layout)


def test_accumulation_into_experts_side_by_side(paths: list[str]) -> None:
    """Rows of c are further apart than its experts."""
    layout = contiguous([2000, 0, 700], spare=3)
    a, b = random_rows(200, layout), random_rows(136, layout)
    c = randn(200, 3, 136, dtype=torch.float32).transpose(0, 1)
    exact = c.double() + weight_product(a, b, layout)
    k_grouped_gemm_accumulate(c, a, b, layout.rows("cuda"))
    assert paths == ["k_grouped_gemm_accumulate: Gluon"]
    close_sums(c, exact, layout)


@pytest.mark.parametrize("accumulate", [False, True], ids=["fresh", "sum"])
@pytest.mark.parametrize(
    ("counts", "claimed"),
    [([5000, *[300] * 7], True), ([0, 0, 7000, 0, 1, 0, 0, 0], True), ([*[900] * 7, 901], False)],
    ids=["skewed", "one", "even"],
)
def test_tiles_are_claimed_or_shared_out(counts: list[int], claimed: bool, accumulate: bool) -> None:
    """Both ways every tile is taken once, whatever program is late, and results repeat to the bit."""
    layout, rows, columns = contiguous(counts, spare=5), 3072, 3840
    a, b = random_rows(rows, layout), random_rows(columns, layout)
    tiles, programs = 24 * (30 if accumulate else 15), num_processors(a.device)
    assert 8 * tiles > 10 * programs  # most are claimed
    ranges = layout.rows("cuda")
    assert bool(make_plan(ranges.starts, ranges.ends, layout.num_rows, tiles, programs)[1]) == claimed
    exact = weight_product(a, b, layout)

    def run() -> Tensor:
        if not accumulate:
            return k_grouped_gemm(a, b, layout.rows("cuda"))
        c = torch.zeros(8, rows, columns, device="cuda")
        k_grouped_gemm_accumulate(c, a, b, layout.rows("cuda"))
        return c

    c = the_same_twenty_times(run)
    close_sums(c, exact, layout) if accumulate else close(c, exact)


def the_same_twenty_times(run: Callable[[], Tensor]) -> Tensor:
    """To the bit, also beside another kernel that occupies part of the GPU."""
    other, m = torch.cuda.Stream(), randn(2048, 2048)
    first = run()
    for repeat in range(1, 20):
        with torch.cuda.stream(other):
            for _ in range(repeat % 4):
                torch.mm(m, m)
        assert torch.equal(run(), first)
    other.synchronize()
    return first


@pytest.mark.parametrize("columns", [64, 136, 520])
@pytest.mark.parametrize(
    "counts",
    [[9000], [0, 0, 40000, 0, 1, 0], [20000, *[1500] * 7], [2600, 5300, *[64] * 30]],
    ids=["alone", "all-but-one", "half", "two"],
)
def test_large_experts_are_contracted_in_pieces(
    counts: list[int], columns: int, paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever piece is last, it adds them up in the same order."""
    plans = []

    def make_and_keep(*args: Any) -> Tensor:
        plans.append((make_plan(*args), args[3], args[5]))
        return plans[-1][0]

    monkeypatch.setattr(hopper_k_grouped, "make_plan", make_and_keep)
    layout = contiguous(counts, spare=5)
    a, b = random_rows(200, layout), random_rows(columns, layout)
    c = the_same_twenty_times(lambda: k_grouped_gemm(a, b, layout.rows("cuda")))
    close(c, weight_product(a, b, layout))
    assert paths == ["k_grouped_gemm: Gluon"] * 20
    for plan, tiles, split in plans:
        head, counters = plan[:4].tolist(), plan[4 : 4 + 2 * split * tiles].view(-1, 2 * tiles)
        assert head[2] > len(counts)
        # Every piece of an expert came once to each half of each tile; the counters are those of its first entry.
        entries = plan[4 + 2 * split * tiles :].view(-1, 4)[: head[2]]
        arrived = torch.zeros_like(counters)
        for code in entries[:, 3].tolist():
            if code > 0 and code >> 8 & 255 == 0:
                arrived[code >> 16] = code & 255
        assert torch.equal(counters, arrived)


def test_experts_in_pieces_in_a_graph() -> None:
    """Captured once, replayed with other counts: the counters begin at zero every time."""
    rows = 3050
    counts = torch.tensor([3000, 50], device="cuda", dtype=torch.int32)
    a, b = randn(rows, 200), randn(rows, 264)

    def run() -> Tensor:
        return k_grouped_gemm(a, b, RowRanges.contiguous(counts, num_rows=rows))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = run()
    for now in ([3000, 50], [50, 3000], [0, 0], [3050, 0], [3050, 0]):
        counts.copy_(torch.tensor(now))
        graph.replay()
        assert torch.equal(c, run())
        close(c, weight_product(a, b, contiguous(now)))


def test_bias_and_scale() -> None:
    x, w, bias, scale = random_rows(200), randn(E, 136, 200), randn(E, 136), random_rows(1, dtype=torch.float32)[:, 0]
    exact = product(x, w.mT)
    for e, (start, end) in enumerate(LAYOUT.bounds):
        exact[start:end] += scale[start:end, None].double() * bias[e].double()
    close(m_grouped_gemm(x, w, LAYOUT.rows("cuda"), bias, bias_scale=scale), exact)


@pytest.mark.parametrize("biased", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("scaled", [False, True], ids=["no-probs", "probs"])
@pytest.mark.parametrize("inner", [40, 136, 264])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation(activation: str, inner: int, scaled: bool, biased: bool, paths: list[str]) -> None:
    """Like the portable kernels, which round h, and a of the rounded h, as these do."""
    rows = LAYOUT.rows("cuda")
    x, probs = random_rows(200), random_rows(1, dtype=torch.float32)[:, 0].abs() if scaled else None
    w = randn(E, inner if activation == "squared_relu" else 2 * inner, 200) * 200**-0.5
    bias = randn(*w.shape[:2]) if biased else None
    h, a = fc1_activation(x, w, rows, probs, bias, activation=activation)
    assert paths[-1] == "fc1_activation: Gluon"
    with use_family("portable"):
        h_portable, a_portable = fc1_activation(x, w, rows, probs, bias, activation=activation)
    owned = torch.cat([torch.arange(*bounds, device="cuda") for bounds in LAYOUT.bounds])
    exact_h = product(x, w.mT)
    for e, (start, end) in enumerate(LAYOUT.bounds):
        exact_h[start:end] += 0 if bias is None else bias[e].double()
    exact_h = exact_h[owned]
    close(h[owned], exact_h)
    close(h_portable[owned], exact_h)
    same = (h == h_portable)[owned].all(1)  # a depends on how h is rounded
    assert same.float().mean() > 0.9
    close(a[owned][same], a_portable[owned][same].double())


@pytest.mark.parametrize("wanted", ["all", "dh"])
@pytest.mark.parametrize("scaled", [False, True], ids=["no-probs", "probs"])
@pytest.mark.parametrize("inner", [40, 136, 264])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_backward(activation: str, inner: int, scaled: bool, wanted: str, paths: list[str]) -> None:
    """As the portable kernels: da is fp32 in both, and what follows from it the same functions."""
    rows = LAYOUT.rows("cuda")
    width = inner if activation == "squared_relu" else 2 * inner
    dy, h, w = random_rows(200), random_rows(width), randn(E, 200, inner)
    probs = random_rows(1, dtype=torch.float32)[:, 0].abs() if scaled else None
    bias = randn(E, 200)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        if wanted == "all":
            return fc2_dgrad_activation(dy, w, h, rows, probs, bias, activation=activation)
        return torch.ops.grouped_experts.fc2_dgrad_activation(
            dy, w, h, rows.starts, rows.ends, probs, None, activation, False, False, None
        )

    dh, a, dprobs = run()
    assert paths == ["fc2_dgrad_activation: Gluon"]
    with use_family("portable"):
        dh_portable, a_portable, dprobs_portable = run()
    owned = torch.cat([torch.arange(*bounds, device="cuda") for bounds in LAYOUT.bounds])
    close(dh[owned], dh_portable[owned].double())
    assert a.shape == a_portable.shape
    assert dprobs.shape == dprobs_portable.shape
    if wanted == "all":
        assert torch.equal(a[owned], a_portable[owned])
        close(dprobs[None], dprobs_portable[None].double())  # whose tiles of columns are narrower
        if not scaled:
            da = product(dy, w)[owned]
            exact = scaled_activation_backward(da, h[owned].double(), None, activation=activation)[0]
            close(dh[owned], exact)


@pytest.mark.parametrize("activation", ["swiglu", "squared_relu"])
def test_many_tiles_to_a_program_with_little_to_contract(activation: str) -> None:
    """Stores of one tile meet those of the next, full tiles and others in turn."""
    layout = contiguous([700, 129, 0, 64, 3000, 1, 511, 900], spare=7)
    x, probs = random_rows(8, layout), random_rows(1, layout, dtype=torch.float32)[:, 0].abs()
    w = randn(E, 2048 if activation == "squared_relu" else 4096, 8) * 8**-0.5
    owned = torch.cat([torch.arange(*bounds, device="cuda") for bounds in layout.bounds])
    for _ in range(5):
        h, a = fc1_activation(x, w, layout.rows("cuda"), probs, activation=activation)
        y = m_grouped_gemm(x, w, layout.rows("cuda"))
        assert torch.equal(h[owned], y[owned])
        close(h[owned], product(x, w.mT, layout)[owned])
        with use_family("portable"):
            close(a[owned], scaled_activation(h, probs, layout.rows("cuda"), activation=activation)[owned].double())


@pytest.mark.parametrize("depth", [8, 456])
def test_many_tiles_to_finish(depth: int, paths: list[str]) -> None:
    """fc2 dgrad hands over more tiles than there are programs, faster and slower than they are finished."""
    layout = contiguous([700, 129, 0, 64, 3000, 1, 511, 900], spare=7)
    dy, h, probs = random_rows(depth, layout), random_rows(4096, layout), random_rows(1, layout, torch.float32)[:, 0]
    w = randn(E, depth, 2048)
    owned = torch.cat([torch.arange(*bounds, device="cuda") for bounds in layout.bounds])
    for _ in range(5):
        dh, a, dprobs = fc2_dgrad_activation(dy, w, h, layout.rows("cuda"), probs)
        with use_family("portable"):
            dh_portable, a_portable, dprobs_portable = fc2_dgrad_activation(dy, w, h, layout.rows("cuda"), probs)
        close(dh[owned], dh_portable[owned].double())
        assert torch.equal(a[owned], a_portable[owned])
        # 2048 summands in another order
        assert (dprobs - dprobs_portable).norm() <= 2**-21 * dprobs_portable.norm()
    assert paths == ["fc2_dgrad_activation: Gluon"] * 5


def test_no_expert_has_rows(paths: list[str]) -> None:
    rows = RowRanges.contiguous([0, 0], num_rows=300, device="cuda")
    dy, h, w = random_rows(64, contiguous([0, 0], spare=300)), randn(300, 128), randn(2, 64, 64)
    dprobs = fc2_dgrad_activation(dy, w, h, rows)[2]
    assert bool((dprobs == 0).all())
    assert bool((m_grouped_gemm(dy, w, rows) == 0).all())
    assert bool((k_grouped_gemm(dy, h, rows) == 0).all())
    assert [path.split()[1] for path in paths] == ["Gluon"] * 3


def test_no_experts() -> None:
    rows = RowRanges.contiguous([], num_rows=200, device="cuda")
    assert k_grouped_gemm(randn(200, 64), randn(200, 64), rows).shape == (0, 64, 64)
    assert bool((m_grouped_gemm(randn(200, 64), randn(0, 64, 64), rows) == 0).all())


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_nothing_of_a_neighbour_is_touched(value: float) -> None:
    """Weights of every other expert hold nothing finite; no size is a multiple of a tile."""
    x, dy, w = random_rows(200), random_rows(136), randn(E, 136, 200)
    w[1::2] = value
    rows = LAYOUT.rows("cuda")
    for y, exact in (
        (m_grouped_gemm(x, w, rows), product(x, w.mT)),
        (m_grouped_gemm(dy, w, rows, transpose_w=False), product(dy, w)),
    ):
        for start, end in LAYOUT.bounds[::2]:
            close(y[start:end], exact[start:end])
        assert bool((y[LAYOUT.bounds[-1][1] :] == 0).all())
    x[slice(*LAYOUT.bounds[-2])] = value
    dw = k_grouped_gemm(dy, x, rows)
    others = [e for e in range(E) if e != E - 2]
    close(dw[others], weight_product(dy, x)[others])


@pytest.mark.parametrize(
    ("why", "make"),
    [
        ("are few", lambda: (randn(24, 64), randn(8, 64, 64), [3] * 8)),
        ("no multiple of 8", lambda: (randn(1600, 64), randn(8, 60, 64), [200] * 8)),
        ("TMA cannot address", lambda: (randn(1600, 60), randn(8, 64, 60), [200] * 8)),
        ("TMA cannot address", lambda: (randn(64, 1600).T, randn(8, 64, 64), [200] * 8)),
        ("TMA cannot address", lambda: (randn(1600, 64), randn(8, 64, 64).mT, [200] * 8)),
    ],
    ids=["few-rows", "columns", "row-stride", "rows-transposed", "weight-transposed"],
)
def test_what_they_do_not_take_goes_to_the_portable_kernels(
    why: str, make: Callable[[], tuple[Tensor, Tensor, list[int]]], paths: list[str]
) -> None:
    x, w, counts = make()
    layout = contiguous(counts)
    close(m_grouped_gemm(x, w, layout.rows("cuda")), product(x, w.mT, layout))
    message = paths[-1]
    assert message.startswith("m_grouped_gemm: portable, since")
    assert why in message


def test_repeats_beside_another_kernel_are_equal_to_the_bit() -> None:
    """Another stream keeps part of the GPU busy, so that programs start and end at other times."""
    mlp = GroupedMLP(264, 136, E, dtype=BF16, device="cuda")
    x, dy, probs = random_rows(264), random_rows(264), random_rows(1, dtype=torch.float32)[:, 0]
    x.requires_grad_()
    probs.requires_grad_()
    rows = LAYOUT.rows("cuda")

    def step() -> dict[str, Tensor]:
        return {name: t.clone() for name, t in by_layer(mlp, x, rows, probs, dy).items()}

    first = step()
    other, m = torch.cuda.Stream(), randn(2048, 2048)
    for repeat in range(20):
        with torch.cuda.stream(other):
            for _ in range(repeat % 4):
                torch.mm(m, m)
        for name, t in step().items():
            assert torch.equal(t, first[name]), (repeat, name)
    other.synchronize()


def test_tensors_beyond_2_to_the_31_elements() -> None:
    """The last rows of a tall x, and the last expert of many."""
    rows_count, hidden = 2**31 // 256 + 300, 256
    x, w = torch.zeros(rows_count, hidden, device="cuda", dtype=BF16), randn(4, 256, hidden)
    x[-300:] = randn(300, hidden)
    starts = torch.tensor([0, 200, 400, rows_count - 301], device="cuda", dtype=torch.int32)
    ends = torch.tensor([200, 400, 500, rows_count], device="cuda", dtype=torch.int32)
    y = m_grouped_gemm(x, w, RowRanges(starts, ends))
    close(y[-300:], x[-300:].double() @ w[3].double().T)
    del y
    dw = k_grouped_gemm(x, x, RowRanges(starts, ends))
    close(dw[3:], (x[-300:].double().T @ x[-300:].double())[None])
