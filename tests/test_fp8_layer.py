"""GroupedMLP in FP8: its recipe in plain torch, what it shares with the layer in bf16, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from conftest import Place
from exact import plain_activation
from inputs import ACTIVATIONS, LAYOUTS, Layout, contiguous, padded, randn
from layer import subsets
from places import places
from torch import Tensor

from grouped_experts import FP8Recipe, GroupedMLP, MoE, backward_dw
from grouped_experts.nn import fp8
from grouped_experts.ops import (
    k_grouped_gemm,
    k_grouped_gemm_fp8,
    m_grouped_gemm_fp8,
    quantize_blocks,
    quantize_columns,
    quantize_rows,
    reference,
    route,
    scaled_activation,
)
from grouped_experts.ops.reference.fused_fp8 import dtype_of_da
from grouped_experts.ops.reference.quantize import dequantize_blocks, dequantize_rows

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP32, BF16 = torch.float32, torch.bfloat16
HIDDEN, INNER, EXPERTS = 140, 130, 3

RECIPES = {
    "default": FP8Recipe(),
    "power-of-two": FP8Recipe(power_of_two_scales=True),
    "e5m2-gradients": FP8Recipe(gradient_dtype=E5M2),
    "wgrad-in-bf16": FP8Recipe(fp8_wgrad=False),
}
by_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
LARGE = contiguous([140, 0, 37], spare=3)


def layer_of(recipe: FP8Recipe | None, device: str, experts: int = EXPERTS, **options: object) -> GroupedMLP:
    torch.manual_seed(0)
    dtype, inner = options.pop("dtype", BF16), options.pop("inner", INNER)
    return GroupedMLP(HIDDEN, inner, experts, precision=recipe, device=device, dtype=dtype, **options)  # type: ignore[arg-type]


def inputs_of(layout: Layout, device: str, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    """x, probs, dy; NaN in rows of no expert."""
    x, dy = (randn(layout.num_rows, HIDDEN, dtype=dtype, device=device) for _ in range(2))
    probs = torch.rand(layout.num_rows, device=device)
    for t in (x, dy, probs):
        t[layout.unowned()] = torch.nan
    return x.requires_grad_(), probs.requires_grad_(), dy


def gradients_of(mlp: GroupedMLP, layout: Layout, x: Tensor, probs: Tensor, dy: Tensor) -> dict[str, Tensor]:
    y = mlp(x, layout.rows(x.device.type), probs)
    leaves = [x, probs, *mlp.parameters()]
    names = ["dx", "dprobs", "fc1", "fc2"][: len(leaves)]
    return {"y": y.detach(), **dict(zip(names, torch.autograd.grad(y, leaves, dy), strict=True))}


# ---- the recipe in plain torch, expert by expert


def rows_as_fp8(x: Tensor, recipe: FP8Recipe, dtype: torch.dtype = E4M3) -> Tensor:
    return dequantize_rows(*reference.quantize_rows(x, dtype, recipe.power_of_two_scales))


def columns_as_fp8(x: Tensor, recipe: FP8Recipe, dtype: torch.dtype = E4M3) -> Tensor:
    return rows_as_fp8(x.t(), recipe, dtype).t() if recipe.fp8_wgrad else x.float()


def weight_as_fp8(w: Tensor, recipe: FP8Recipe) -> Tensor:
    return dequantize_blocks(*reference.quantize_blocks(w[None], E4M3, recipe.power_of_two_scales, False))[0]


def emulated(
    mlp: GroupedMLP, recipe: FP8Recipe, layout: Layout, x: Tensor, probs: Tensor, dy: Tensor
) -> dict[str, Tensor]:
    made = {
        "y": torch.zeros_like(x),
        "dx": torch.zeros_like(x),
        "dprobs": torch.zeros_like(probs),
        "fc1": torch.zeros_like(mlp.fc1_weight),
        "fc2": torch.zeros_like(mlp.fc2_weight),
    }
    x, dtype, gradient = x.detach(), x.dtype, recipe.gradient_dtype
    for e, (start, end) in enumerate(layout.bounds):
        rows = slice(start, end)
        w1, w2 = (weight_as_fp8(w[e].detach(), recipe) for w in (mlp.fc1_weight, mlp.fc2_weight))
        h = (rows_as_fp8(x[rows], recipe) @ w1.t()).to(dtype).float().requires_grad_()
        s = plain_activation(h, mlp.activation)
        p = probs.detach()[rows, None].float()
        a = (p * s).detach().to(dtype)
        made["y"][rows] = (rows_as_fp8(a, recipe) @ w2.t()).to(dtype)
        da = (rows_as_fp8(dy[rows], recipe, gradient) @ w2).to(dtype_of_da(h.to(dtype))).float()
        made["dprobs"][rows] = (da * s.detach()).sum(1)
        (dh,) = torch.autograd.grad(s, h, p * da) if end > start else (torch.zeros_like(h),)
        dh = dh.to(dtype)
        made["dx"][rows] = (rows_as_fp8(dh, recipe, gradient) @ w1).to(dtype)
        made["fc1"][e] = columns_as_fp8(dh, recipe, gradient).t() @ columns_as_fp8(x[rows], recipe)
        made["fc2"][e] = columns_as_fp8(dy[rows], recipe, gradient).t() @ columns_as_fp8(a, recipe)
    return {name: t.detach() for name, t in made.items()}


def limit(device: str) -> float:
    """Of `difference`. Tensor cores sum in 14 bits, 32 products at a time: more numbers are rounded the other way."""
    return 4e-3 if device == "cpu" else 1.2e-2


def difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


@by_recipe
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_is_its_recipe(activation: str, recipe: FP8Recipe, device: str) -> None:
    """But for sums in another order, which now and then round a number the other way."""
    mlp = layer_of(recipe, device, activation=activation)
    given = inputs_of(LARGE, device)
    actual, expected = gradients_of(mlp, LARGE, *given), emulated(mlp, recipe, LARGE, *given)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        assert difference(actual[name], value) < limit(device), name


@by_recipe
@pytest.mark.parametrize("layout", [*LAYOUTS.values(), LARGE], ids=[*LAYOUTS, "large"])
def test_every_layout(layout: Layout, recipe: FP8Recipe, device: str) -> None:
    """Rows of no expert are zero and spoil nothing; an expert without rows has gradients of zero."""
    mlp = layer_of(recipe, device, layout.num_experts, dtype=FP32)
    given = inputs_of(layout, device, FP32)
    actual, expected = gradients_of(mlp, layout, *given), emulated(mlp, recipe, layout, *given)
    for name in ("y", "dx", "dprobs"):
        assert not actual[name][layout.unowned()].any(), name
    for name in ("fc1", "fc2"):
        assert not actual[name][layout.empty_experts()].any(), name
    for name, value in expected.items():
        assert actual[name].isfinite().all(), name
        assert difference(actual[name], value) < limit(device), name


@by_recipe
def test_errors_are_those_of_fp8(recipe: FP8Recipe, device: str) -> None:
    """Against the layer in fp32: a few percent, and not less, so that FP8 was what was computed in."""
    given = inputs_of(LARGE, device, FP32)
    actual = gradients_of(layer_of(recipe, device, dtype=FP32), LARGE, *given)
    exact = gradients_of(layer_of(None, device, dtype=FP32), LARGE, *given)
    for name, value in exact.items():
        assert 1e-3 < difference(actual[name], value) < (0.15 if recipe.gradient_dtype == E5M2 else 0.08), name


# ---- what is fused, one step after the other


def one_by_one(
    mlp: GroupedMLP, recipe: FP8Recipe, layout: Layout, x: Tensor, probs: Tensor, dy: Tensor
) -> dict[str, Tensor]:
    """Every cast by a function of its own."""
    rows, dtype, scales = layout.rows(x.device.type), x.dtype, recipe.power_of_two_scales
    x, probs, w1, w2 = (t.detach() for t in (x, probs, mlp.fc1_weight, mlp.fc2_weight))

    def product(x: Tensor, w: Tensor, cast: torch.dtype = E4M3, out: torch.dtype = dtype, **options: bool) -> Tensor:
        operands = quantize_rows(x, dtype=cast, power_of_two=scales), quantize_blocks(w, power_of_two=scales, **options)
        return m_grouped_gemm_fp8(*operands, rows, out_dtype=out)

    def contraction(left: Tensor, right: Tensor, like: Tensor) -> Tensor:
        if not recipe.fp8_wgrad:
            return k_grouped_gemm(left, right, rows, out_dtype=like.dtype)
        left_cast = quantize_columns(left, rows, dtype=recipe.gradient_dtype, power_of_two=scales)
        right_cast = quantize_columns(right, rows, power_of_two=scales)
        return k_grouped_gemm_fp8(left_cast, right_cast, rows, out_dtype=like.dtype)

    h = product(x, w1)
    y = product(scaled_activation(h, probs, rows, activation=mlp.activation), w2)
    da = product(dy, w2, recipe.gradient_dtype, dtype_of_da(h), transpose=True)
    ranges = rows.starts, rows.ends
    dh, a, dprobs = torch.ops.grouped_experts.scaled_activation_backward(da, h, probs, *ranges, mlp.activation)
    return {
        "y": y,
        "dx": product(dh, w1, recipe.gradient_dtype, transpose=True),
        "dprobs": dprobs,
        "fc1": contraction(dh, x, w1),
        "fc2": contraction(dy, a.to(dtype), w2),
    }


@pytest.mark.parametrize("place", places([BF16, torch.float16, FP32], interpreted=[torch.float16]), indirect=True)
@pytest.mark.parametrize(
    ("inner", "activation", "name"),
    [
        (128, "swiglu", "default"),
        (130, "swiglu", "e5m2-gradients"),
        (128, "geglu", "power-of-two"),
        (130, "squared_relu", "default"),
        (128, "swiglu", "wgrad-in-bf16"),
    ],
)
def test_bit_for_bit_as_one_by_one(inner: int, activation: str, name: str, place: Place) -> None:
    recipe, layout = RECIPES[name], padded([33, 0, 7] if place.interpreted else [131, 0, 37], 8, spare=3)
    given = inputs_of(layout, place.device, place.dtype)
    mlp = layer_of(recipe, place.device, dtype=place.dtype, inner=inner, activation=activation)
    actual, expected = gradients_of(mlp, layout, *given), one_by_one(mlp, recipe, layout, *given)
    for name, value in expected.items():
        if name == "dprobs":  # where kernels add up, in another order
            torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(actual[name], value), name


@by_recipe
def test_only_wanted_gradients_come(recipe: FP8Recipe, device: str) -> None:
    """Each the same, whatever else is wanted."""
    layout = contiguous([30, 0, 140], spare=2)
    mlp, (x, probs, dy) = layer_of(recipe, device, inner=128), inputs_of(layout, device)
    whole, names = gradients_of(mlp, layout, x, probs, dy), ["dx", "dprobs", "fc1", "fc2"]
    leaves = dict(zip(names, (x, probs, mlp.fc1_weight, mlp.fc2_weight), strict=True))
    for wanted in subsets(names):
        for name, leaf in leaves.items():
            leaf.requires_grad_(name in wanted)
        if wanted:
            y = mlp(x, layout.rows(device), probs)
            made = torch.autograd.grad(y, [leaves[name] for name in names if name in wanted], dy, retain_graph=True)
            again = torch.autograd.grad(y, [leaves[name] for name in names if name in wanted], dy)
            for name, value, repeated in zip(sorted(wanted, key=names.index), made, again, strict=True):
                if name == "dprobs" and device != "cpu":  # another kernel may add up in another order
                    torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-5)
                else:
                    assert torch.equal(value, whole[name]), (name, wanted)
                assert torch.equal(repeated, value), (name, wanted)


@by_recipe
@pytest.mark.parametrize("deferred", [False, True], ids=["plain", "deferred"])
def test_routed_gradients(deferred: bool, recipe: FP8Recipe, device: str) -> None:
    """Those of the rows that the tokens are."""
    x, _, dy = inputs_of(contiguous([40]), device)
    ids, probs = torch.randint(0, EXPERTS + 1, (40, 2), device=device), torch.rand(40, 2, device=device)
    routing = route(ids, EXPERTS)
    mlp, plain = layer_of(recipe, device, defer_wgrad=deferred), layer_of(recipe, device)
    mlp(x, routing, probs).backward(dy)
    mlp.backward_dw()
    token, count = routing.row_to_token(), int(routing.counts.sum())
    token = token[:count].long()
    rows, of_rows = x.detach()[token].requires_grad_(), probs.flatten()[routing.row_to_slot[:count].long()]
    plain(rows, routing.counts, of_rows).backward(dy[token])
    for name in ("fc1_weight", "fc2_weight"):
        assert torch.equal(getattr(mlp, name).grad, getattr(plain, name).grad), name
    dx = torch.zeros(40, HIDDEN, device=device).index_add_(0, token, rows.grad.float())
    torch.testing.assert_close(x.grad.float(), dx, rtol=2**-7, atol=1e-3)


def test_what_waits_is_cast(device: str) -> None:
    """A deferred layer keeps dy, dh and a in FP8; x, which the forward keeps, as it is."""
    mlp, (x, probs, dy) = layer_of(FP8Recipe(), device, defer_wgrad=True), inputs_of(LARGE, device)
    mlp(x, LARGE.rows(device), probs).backward(dy)
    kept = {pending.name: pending.gradient.tensors() for pending in mlp._wgrad_queue.pending()}
    assert [t.dtype for t in kept["fc2_weight"][:4]] == [E4M3, FP32, E4M3, FP32]
    assert [t.dtype for t in kept["fc1_weight"][:3]] == [E4M3, FP32, BF16]


# ---- what it shares with the layer


@by_recipe
def test_deferred_gradients(recipe: FP8Recipe, device: str) -> None:
    x, probs, dy = inputs_of(LARGE, device, FP32)
    plain = gradients_of(layer_of(recipe, device, dtype=FP32), LARGE, x, probs, dy)
    mlp = layer_of(recipe, device, dtype=FP32, defer_wgrad=True)
    for passes in (1, 2):
        for _ in range(passes):
            mlp(x, LARGE.rows(device), probs).backward(dy)
        assert mlp.fc1_weight.grad is None
        backward_dw(mlp)
        for name, weight in (("fc1", mlp.fc1_weight), ("fc2", mlp.fc2_weight)):
            assert weight.grad is not None
            torch.testing.assert_close(weight.grad, passes * plain[name], rtol=1e-5, atol=1e-5)
        mlp.zero_grad()


def test_routed_and_masked(device: str) -> None:
    """As its rows are; of few tokens without gradients as well."""
    mlp = layer_of(FP8Recipe(), device)
    x, ids = (
        randn(5, HIDDEN, dtype=BF16, device=device),
        torch.tensor([[0, 1], [2, 2], [3, 0], [1, 1], [3, 3]], device=device),
    )
    probs = torch.rand(5, 2, device=device)
    with torch.no_grad():
        y = mlp(x, route(ids, EXPERTS), probs)
    for t in range(5):
        rows = [(int(e), float(p)) for e, p in zip(ids[t], probs[t], strict=True) if e < EXPERTS]
        sums = x.new_zeros(HIDDEN, dtype=FP32)
        for e, p in rows:
            counts = [int(e == other) for other in range(EXPERTS)]
            sums += mlp(x[t : t + 1], counts, torch.tensor([p], device=device))[0].float()
        torch.testing.assert_close(y[t].float(), sums, rtol=2**-7, atol=1e-3)
    masked = randn(EXPERTS, 4, HIDDEN, dtype=BF16, device=device)
    masked[1, 2:] = torch.nan
    counts = torch.tensor([4, 2, 0], device=device)
    out = mlp(masked, counts)
    assert not out[1, 2:].any()
    assert not out[2].any()
    assert torch.equal(out[1, :2], mlp(masked[1, :2], [0, 2, 0]))


def test_weights_are_cast_at_every_call(device: str) -> None:
    """A weight that changes behind autograd's back is seen."""
    mlp, (x, probs, _) = layer_of(FP8Recipe(), device), inputs_of(LARGE, device)
    before = mlp(x, LARGE.rows(device), probs)
    mlp.fc2_weight.data.mul_(2)
    assert torch.equal(mlp(x, LARGE.rows(device), probs), 2 * before)


def test_zeros_stay_exactly_zero(device: str) -> None:
    layout = padded([3, 2, 4], 8)
    mlp, (x, probs, dy) = layer_of(FP8Recipe(), device), inputs_of(layout, device)
    with torch.no_grad():
        x[1] = 0
        mlp.fc1_weight[1] = 0
    made = gradients_of(mlp, layout, x, probs, dy)
    assert not made["y"][1].any()
    assert not made["y"][8:10].any()
    assert all(t.isfinite().all() for t in made.values())


def test_an_expert_s_gradient_does_not_depend_on_its_neighbours(device: str) -> None:
    layout = contiguous([44, 3, 81])
    mlp, (x, probs, dy) = layer_of(FP8Recipe(), device), inputs_of(layout, device)
    with torch.no_grad():
        x[:44] *= 1000
        x[44:47] *= 0.001
    together = gradients_of(mlp, layout, x, probs, dy)
    alone = contiguous([0, 3, 0])
    part = [t.detach()[44:47].clone() for t in (x, probs, dy)]
    apart = gradients_of(mlp, alone, part[0].requires_grad_(), part[1].requires_grad_(), part[2])
    for name in ("fc1", "fc2"):
        if device == "cpu":
            assert torch.equal(together[name][1], apart[name][1])
        else:  # kernels for another number of rows
            assert difference(together[name][1], apart[name][1]) < limit(device)


def test_master_weights_of_fp32(device: str) -> None:
    mlp, (x, probs, dy) = layer_of(FP8Recipe(), device, dtype=FP32), inputs_of(LARGE, device)
    made = gradients_of(mlp, LARGE, x, probs, dy)
    assert made["y"].dtype == made["dx"].dtype == BF16
    assert made["fc1"].dtype == made["fc2"].dtype == FP32


@pytest.mark.filterwarnings(r"ignore:::torch\.")
def test_compiled_in_one_graph_equals_eager(device: str) -> None:
    torch._dynamo.reset()
    mlp, given = layer_of(FP8Recipe(), device, dtype=FP32), inputs_of(LARGE, device, FP32)
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    actual, expected = gradients_of(compiled, LARGE, *given), gradients_of(mlp, LARGE, *given)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name
    torch._dynamo.reset()


def test_moe_and_copies(device: str) -> None:
    torch.manual_seed(0)
    moe = MoE(HIDDEN, INNER, EXPERTS, 2, precision="fp8", shared_intermediate_size=8, device=device)
    assert moe.experts.precision == moe.shared_expert.precision == FP8Recipe()
    y = moe(torch.randn(6, HIDDEN, device=device)).y
    y.sum().backward()
    assert moe.router.weight.grad is not None
    for copied in (copy.deepcopy(moe), pickle.loads(pickle.dumps(moe))):
        assert copied.experts.precision == FP8Recipe()
    assert "precision=FP8Recipe" in repr(moe)
    plain = MoE(HIDDEN, INNER, EXPERTS, 2, shared_intermediate_size=8, device=device)
    plain.load_state_dict(moe.state_dict())  # the parameters are the same


# ---- what it refuses


def test_refuses() -> None:
    with pytest.raises(ValueError, match=r"precision: wanted None, 'fp8' or an FP8Recipe, got 'fp4'"):
        GroupedMLP(4, 4, 2, precision="fp4")
    with pytest.raises(ValueError, match="bias: wanted False with a precision, got True"):
        GroupedMLP(4, 4, 2, precision="fp8", bias=True)
    with pytest.raises(TypeError, match="gradient_dtype: wanted float8_e4m3fn or float8_e5m2"):
        FP8Recipe(gradient_dtype=BF16)
    with pytest.raises(TypeError, match=r"x: wanted a dtype of .*, got float64"):
        GroupedMLP(4, 4, 2, precision="fp8", dtype=torch.float64)(torch.ones(2, 4, dtype=torch.float64), [1, 1])


def test_refuses_a_gpu_without_fp8_unless_asked_to_emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "knows_fp8", lambda device: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    mlp, x = GroupedMLP(4, 4, 2, precision="fp8"), torch.ones(2, 4)
    with pytest.raises(
        RuntimeError, match=r"wanted a GPU with FP8 \(sm_89 or later\) or FP8Recipe\(emulate=True\), got A100"
    ):
        mlp(x, [1, 1])
    mlp.precision = replace(FP8Recipe(), emulate=True)
    assert mlp(x, [1, 1]).isfinite().all()
