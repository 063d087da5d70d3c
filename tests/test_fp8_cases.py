"""Small inputs on which layers of this kind have failed for real users, with the layer in FP8."""

from __future__ import annotations

import pytest
import torch
from conftest import Place
from inputs import Layout, contiguous, from_m_indices, masked, padded, randn
from layer import Results, by_layer, unit_mlp, unit_results
from places import places
from torch import Tensor, nn

from grouped_experts import FP8Recipe, GroupedMLP
from grouped_experts.nn import fp8
from grouped_experts.ops import families

BF16, FP32, E5M2 = torch.bfloat16, torch.float32, torch.float8_e5m2
HIDDEN, INNER = 136, 40  # a block of a scale and a part of one

in_every_place = pytest.mark.parametrize("place", places([BF16, FP32], [FP32]), indirect=True)
but_interpreted = pytest.mark.parametrize("place", places([BF16, FP32], []), indirect=True)


def layer_of(experts: int, place: Place) -> GroupedMLP:
    return GroupedMLP(HIDDEN, INNER, experts, precision="fp8", dtype=place.dtype, device=place.device)


def spread(rows: list[list[Tensor]], layout: Layout) -> list[Tensor]:
    """x, dy and probs of each expert's rows (`rows_of`) at their places in a layout, with NaN in rows of no expert."""
    made = []
    for each in rows:
        t = each[0].new_full((layout.num_rows, *each[0].shape[1:]), torch.nan)
        for (start, end), mine in zip(layout.bounds, each, strict=True):
            t[start:end] = mine
        made.append(t)
    return made


def rows_of(counts: list[int], place: Place) -> list[list[Tensor]]:
    shapes = ((HIDDEN,), (HIDDEN,), ())
    dtypes = (place.dtype, place.dtype, FP32)
    return [
        [randn(count, *shape, dtype=dtype, device=place.device) for count in counts]
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


def step(mlp: GroupedMLP, layout: Layout, rows: list[list[Tensor]]) -> Results:
    x, dy, probs = spread(rows, layout)
    return by_layer(mlp, x.requires_grad_(), layout.rows(x.device.type), probs.requires_grad_(), dy)


def assert_zero(results: Results, layout: Layout) -> None:
    """In rows of no expert and in the gradients of idle ones; finite everywhere."""
    for name, t in results.items():
        assert t is not None
        assert t.isfinite().all(), name
        idle = layout.unowned() if name in ("y", "x", "probs") else layout.empty_experts()
        assert not t[idle].any(), name


def assert_close(name: str, actual: Tensor, expected: Tensor) -> None:
    """Along the last dimension, but for sums in another order: then now and then a number is rounded the other way.

    On a GPU kernels for other numbers of rows may have summed, and where an expert has one row, a row of its gradients
    is as far off as one number of dh that was rounded the other way: the last place of e4m3.
    """
    error, size = (t.double().norm(dim=-1) for t in (actual - expected, expected))
    assert (error <= (4e-3 if actual.device.type == "cpu" else 2**-3) * size).all(), name


def assert_agree(results: Results, layout: Layout, others: Results, other: Layout) -> None:
    """Row by row, and in the weights' gradients."""
    owned, theirs = ([row for bounds in each.bounds for row in range(*bounds)] for each in (layout, other))
    for name, t in results.items():
        expected = others[name]
        assert t is not None
        assert expected is not None
        if name in ("y", "x", "probs"):
            t, expected = t[owned], expected[theirs]
        assert_close(name, t, expected)


@in_every_place
def test_rows_behind_the_last_expert(place: Place) -> None:
    layout, alone = contiguous([10, 0, 7], spare=47), contiguous([10, 0, 7])
    mlp, rows = layer_of(3, place), rows_of([10, 0, 7], place)
    made = step(mlp, layout, rows)
    assert layout.num_rows == 64
    assert_zero(made, layout)
    assert_agree(made, layout, step(mlp, alone, rows), alone)


@in_every_place
def test_masked_rows_are_selected_not_multiplied_by_zero(place: Place) -> None:
    """NaN in x, dy and probs of rows 3 to 7 of the first expert, whose gradients are those of its three rows alone."""
    layout, alone = masked([3, 8], 8), contiguous([3, 0])
    mlp, rows = layer_of(2, place), rows_of([3, 8], place)
    made = step(mlp, layout, rows)
    assert_zero(made, layout)
    expected = step(mlp, alone, [[mine[0], mine[1][:0]] for mine in rows])
    for name in ("fc1_weight", "fc2_weight"):
        assert_close(name, made[name][0], expected[name][0])


LAYOUTS = {
    "masked-8": masked([5, 8], 8),
    "masked-1": masked([1, 0, 1], 1),
    "masked-130": masked([5, 3, 130], 130),
    "three-uneven": contiguous([5, 3, 120]),
    "m-indices": from_m_indices([0, 0, -1, -1, 1], 2),
    "masked-first-idle": masked([0, 4], 4),
}


@but_interpreted  # where products of all layouts have tests of their own
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_any_counts_in_any_layout(layout: Layout, place: Place) -> None:
    """As the same rows where every expert's start at a multiple of 128; NaN before the first expert's weights."""
    counts = [end - start for start, end in layout.bounds]
    mlp, rows = layer_of(layout.num_experts, place), rows_of(counts, place)
    for name in ("fc1_weight", "fc2_weight"):
        weight = getattr(mlp, name).detach()
        setattr(mlp, name, nn.Parameter(torch.cat([torch.full_like(weight[:1], torch.nan), weight])[1:]))
    aligned = padded(counts, 128)
    made = step(mlp, layout, rows)
    assert_zero(made, layout)
    assert_agree(made, layout, step(mlp, aligned, rows), aligned)


@in_every_place
def test_gradients_of_e5m2_are_right_in_size(place: Place) -> None:
    recipe, device = FP8Recipe(gradient_dtype=E5M2), place.device
    mlp = unit_mlp(2, 128, 128, dtype=place.dtype, device=device, precision=recipe)
    x = torch.ones(8, 128, dtype=place.dtype, device=device)
    probs = torch.ones(8, device=device, requires_grad=True)
    made = by_layer(mlp, x.clone().requires_grad_(), [3, 5], probs, x)
    for name, value in unit_results(mlp, [(0, 3), (3, 8)], 8, 1.0, [1.0, 1.0]).items():
        assert ((made[name].double() / value - 1).abs() < 0.1).all(), name


CAPABILITIES = {(8, 0): False, (8, 6): False, (8, 9): True, (9, 0): True, (12, 0): True}


@pytest.mark.parametrize(("capability", "known"), CAPABILITIES.items(), ids=str)
def test_gpus_that_know_fp8(capability: tuple[int, int], known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"a GPU of {capability}")
    monkeypatch.setattr(fp8, "knows_fp8", lambda device: families.knows_fp8(gpu))
    monkeypatch.setattr(families, "has_triton", lambda: True)
    families._choice.cache_clear()
    chosen = families.choose_family(gpu, [torch.float16, torch.float8_e4m3fn])
    families._choice.cache_clear()
    assert (chosen != "reference") == known
    x, mlp = torch.ones(2, 8), GroupedMLP(8, 4, 2, precision="fp8")
    if known:
        assert mlp(x, [1, 1]).isfinite().all()
    else:
        with pytest.raises(RuntimeError, match=r"wanted a GPU with FP8 \(sm_89 or later\) .*, got a GPU of \(8, "):
            mlp(x, [1, 1])
    mlp.precision = FP8Recipe(emulate=True)
    assert mlp(x, [1, 1]).isfinite().all()


def test_loads_weights_of_any_precision_strictly() -> None:
    source = GroupedMLP(24, 8, 2)
    weights = {name: w.clone() for name, w in source.state_dict().items()}
    x, counts = torch.randn(5, 24), [2, 3]
    expected = GroupedMLP(24, 8, 2, precision="fp8")
    expected.load_state_dict(weights)
    on_meta, assigned = (GroupedMLP(24, 8, 2, precision="fp8", device=where) for where in ("meta", "cpu"))
    for mlp in (on_meta, assigned):
        mlp.load_state_dict(weights, assign=True)
        assert mlp.fc1_weight.data_ptr() == weights["fc1_weight"].data_ptr()
    for mlp in (expected, on_meta, assigned):
        assert torch.equal(mlp.fc1_weight, source.fc1_weight)
        assert torch.equal(mlp.fc2_weight, source.fc2_weight)
        assert torch.equal(mlp(x, counts), expected(x, counts))
    before = expected(x, counts)
    with torch.no_grad():
        expected.fc1_weight.zero_()
    expected.load_state_dict(weights)  # nothing of the weights before is kept
    assert torch.equal(expected(x, counts), before)
    wrong = {"w1": weights["fc1_weight"], "fc2_weight": weights["fc2_weight"]}
    with pytest.raises(RuntimeError, match=r'Missing key.*"fc1_weight"[\s\S]*Unexpected key.*"w1"'):
        expected.load_state_dict(wrong)
    missing, unexpected = expected.load_state_dict(wrong, strict=False)
    assert missing == ["fc1_weight"]
    assert unexpected == ["w1"]
