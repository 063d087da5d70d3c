"""GroupedMLP with operands that are in FP8 already: x as dispatchers send it, weights cast once for many calls."""

from __future__ import annotations

import pytest
import torch
from conftest import Place
from inputs import LAYOUTS, Layout, contiguous, padded, randn
from places import places
from torch import Tensor

from grouped_experts import FP8Recipe, GroupedMLP, MoE, RowRanges
from grouped_experts.nn.fp8 import QuantizedWeights
from grouped_experts.ops import Quantized, quantize_rows, route
from grouped_experts.ops.reference.quantize import dequantize_rows

E5M2, BF16, FP16, FP32 = torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32
HIDDEN, INNER, EXPERTS = 140, 128, 3
SEVERAL_BLOCKS = padded([140, 0, 37], 8, spare=3)

# Scales that are exact, so that what was sent is a tensor in bf16 as well, whose cast stands for the same numbers.
RECIPES = {
    "default": FP8Recipe(power_of_two_scales=True),
    "wgrad-in-bf16": FP8Recipe(power_of_two_scales=True, fp8_wgrad=False),
    "e5m2-gradients": FP8Recipe(power_of_two_scales=True, gradient_dtype=E5M2),
}
by_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())


def layer_of(device: str, recipe: FP8Recipe | None = RECIPES["default"], **options: object) -> GroupedMLP:
    torch.manual_seed(0)
    options = {"dtype": BF16, **options}
    return GroupedMLP(HIDDEN, INNER, EXPERTS, precision=recipe, device=device, **options)  # type: ignore[arg-type]


def sent_rows(layout: Layout, device: str) -> tuple[Quantized, Tensor, Tensor]:
    """x in FP8, probs, dy; NaN in rows of no expert."""
    x, dy = (randn(layout.num_rows, HIDDEN, dtype=BF16, device=device) for _ in range(2))
    probs = torch.rand(layout.num_rows, device=device)
    for t in (x, dy, probs):
        t[layout.unowned()] = torch.nan
    return quantize_rows(x, power_of_two=True), probs.requires_grad_(), dy


def as_tensor(sent: Quantized) -> Tensor:
    return dequantize_rows(*sent).bfloat16()


def results(
    mlp: GroupedMLP,
    x: Tensor | Quantized,
    rows: object,
    probs: Tensor,
    dy: Tensor,
    weights: QuantizedWeights | None = None,
) -> dict[str, Tensor]:
    mlp.zero_grad()
    y = mlp(x, rows, probs, weights=weights)
    (dprobs,) = torch.autograd.grad(y, probs, dy, retain_graph=True)
    y.backward(dy)
    mlp.backward_dw()
    probs.grad = None
    return {"y": y.detach(), "dprobs": dprobs, **{name: p.grad.clone() for name, p in mlp.named_parameters()}}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name], value), name


# ---- x


@by_recipe
@pytest.mark.parametrize("deferred", [False, True], ids=["plain", "deferred"])
@pytest.mark.parametrize("layout", [*LAYOUTS.values(), SEVERAL_BLOCKS], ids=[*LAYOUTS, "several-blocks"])
def test_x_in_fp8_is_what_it_stands_for(layout: Layout, deferred: bool, recipe: FP8Recipe, device: str) -> None:
    torch.manual_seed(0)
    mlp = GroupedMLP(
        HIDDEN, INNER, layout.num_experts, precision=recipe, defer_wgrad=deferred, device=device, dtype=BF16
    )
    sent, probs, dy = sent_rows(layout, device)
    expected = results(mlp, as_tensor(sent), layout.rows(device), probs, dy)
    assert_equal(results(mlp, sent, layout.rows(device), probs, dy), expected)
    by_row = sent._replace(scales=sent.scales.contiguous())  # as a dispatcher has them
    assert_equal(results(mlp, by_row, layout.rows(device), probs, dy), expected)


@by_recipe
def test_masked_and_routed(recipe: FP8Recipe, device: str) -> None:
    mlp, counts = layer_of(device, recipe), torch.tensor([5, 0, 3], device=device)
    sent, probs, dy = sent_rows(contiguous([15]), device)
    masked = Quantized(sent.data.view(3, 5, HIDDEN), sent.scales.reshape(3, 5, -1))
    probs = probs.detach().view(3, 5).requires_grad_()
    expected = results(mlp, as_tensor(sent).view(3, 5, HIDDEN), counts, probs, dy.view(3, 5, HIDDEN))
    assert_equal(results(mlp, masked, counts, probs, dy.view(3, 5, HIDDEN)), expected)
    ids, top_k_probs = torch.randint(0, EXPERTS + 1, (15, 2), device=device), torch.rand(15, 2, device=device)
    for deferred in (False, True):
        mlp = layer_of(device, recipe, defer_wgrad=deferred)
        routed = route(ids, EXPERTS), top_k_probs.requires_grad_(), dy
        assert_equal(results(mlp, sent, *routed), results(mlp, as_tensor(sent), *routed))


@pytest.mark.parametrize("place", places([FP16], [FP16]), indirect=True)
def test_in_every_place(place: Place) -> None:
    """Rows and routed tokens, with weights that are cast already."""
    mlp, layout = layer_of(place.device, dtype=FP16), padded([20, 0, 3], 8)
    weights, (sent, probs, dy) = mlp.quantize_weights(), sent_rows(layout, place.device)
    x, dy = as_tensor(sent).to(FP16), dy.to(FP16)
    given = layout.rows(place.device), probs, dy
    assert_equal(results(mlp, sent, *given, weights), results(mlp, x, *given))
    sent, x, dy = (Quantized(*(t[:12] for t in sent)), x[:12], dy[:12])
    ids, top_k_probs = torch.randint(0, EXPERTS + 1, (12, 2)), torch.rand(12, 2, device=place.device)
    routed = route(ids.to(place.device), EXPERTS), top_k_probs.requires_grad_(), dy
    assert_equal(results(mlp, sent, *routed, weights), results(mlp, x, *routed))


def test_inference_and_dtypes(device: str) -> None:
    sent, probs, _ = sent_rows(SEVERAL_BLOCKS, device)
    rows = SEVERAL_BLOCKS.rows(device)
    for dtype, expected in ((BF16, BF16), (FP32, BF16), (FP16, FP16)):
        mlp = layer_of(device, dtype=dtype)
        with torch.no_grad():
            y = mlp(sent, rows, probs)
            assert y.dtype == expected
            assert torch.equal(y, mlp(as_tensor(sent).to(expected), rows, probs))
    with torch.no_grad(), torch.autocast(device, dtype=FP16):
        assert layer_of(device, dtype=FP32)(sent, rows, probs).dtype == FP16


def test_frozen_weights(device: str) -> None:
    """Only fc1 wants x again."""
    sent, probs, dy = sent_rows(SEVERAL_BLOCKS, device)
    mlp = layer_of(device)
    expected = results(mlp, sent, SEVERAL_BLOCKS.rows(device), probs, dy)
    mlp.fc1_weight.requires_grad_(False)
    y = mlp(sent, SEVERAL_BLOCKS.rows(device), probs)
    dprobs, dw = torch.autograd.grad(y, (probs, mlp.fc2_weight), dy)
    assert torch.equal(dprobs, expected["dprobs"])
    assert torch.equal(dw, expected["fc2_weight"])


def test_refuses_x() -> None:
    mlp, x = layer_of("cpu"), quantize_rows(torch.ones(4, HIDDEN))
    rows = RowRanges.contiguous([1, 1, 2])
    with pytest.raises(TypeError, match="x: wanted a tensor, got a Quantized, which a layer with a precision takes"):
        layer_of("cpu", None)(x, rows)
    for wrong, error, message in (
        (x._replace(data=x.data.float()), TypeError, "x.data: wanted dtype float8"),
        (x._replace(scales=x.scales[:, :1]), ValueError, r"x.scales: wanted shape .* = \(4, 2\), got \(4, 1\)"),
        (x._replace(scales=x.scales.double()), TypeError, "x.scales: wanted dtype float32"),
        (x._replace(scales=x.scales.clone().requires_grad_()), ValueError, "x: wanted a Quantized without requires_"),
        (quantize_rows(torch.ones(4, 8)), ValueError, r"x: wanted shape \(T, H\)"),
    ):
        with pytest.raises(error, match=message):
            mlp(wrong, rows)


# ---- weights


@by_recipe
@pytest.mark.parametrize("deferred", [False, True], ids=["plain", "deferred"])
def test_weights_that_are_cast_once(deferred: bool, recipe: FP8Recipe, device: str) -> None:
    mlp, (sent, probs, dy) = layer_of(device, recipe, defer_wgrad=deferred), sent_rows(SEVERAL_BLOCKS, device)
    rows, weights = SEVERAL_BLOCKS.rows(device), mlp.quantize_weights()
    x = as_tensor(sent).requires_grad_()
    for given in (x, sent):
        assert_equal(results(mlp, given, rows, probs, dy, weights), results(mlp, given, rows, probs, dy))
    without, with_them = (
        torch.autograd.grad(mlp(x, rows, probs, weights=w), x, dy, retain_graph=True)[0] for w in (None, weights)
    )
    assert torch.equal(without, with_them)


def test_cast_weights_change_when_they_are_told_to(device: str) -> None:
    """Behind autograd's back or in the open: with the casts nothing changes, without them at once."""
    mlp, (sent, probs, dy) = layer_of(device), sent_rows(SEVERAL_BLOCKS, device)
    rows, weights = SEVERAL_BLOCKS.rows(device), mlp.quantize_weights()
    before = results(mlp, sent, rows, probs, dy, weights)
    addresses = [t.data_ptr() for each in weights for t in each]
    mlp.fc1_weight.data.mul_(2)
    with torch.no_grad():
        mlp.fc2_weight.mul_(2)
    after = results(mlp, sent, rows, probs, dy)
    assert not torch.equal(after["y"], before["y"])
    assert_equal(results(mlp, sent, rows, probs, dy, weights), before)
    assert mlp.quantize_weights(into=weights) is weights
    assert_equal(results(mlp, sent, rows, probs, dy, weights), after)
    assert [t.data_ptr() for each in weights for t in each] == addresses


def test_a_step_between_forward_and_backward_raises(device: str) -> None:
    mlp, (sent, probs, dy) = layer_of(device), sent_rows(SEVERAL_BLOCKS, device)
    y = mlp(as_tensor(sent).requires_grad_(), SEVERAL_BLOCKS.rows(device), probs, weights=mlp.quantize_weights())
    with torch.no_grad():
        mlp.fc2_weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_refuses_weights() -> None:
    mlp, x, rows = layer_of("cpu"), torch.ones(4, HIDDEN, dtype=BF16), RowRanges.contiguous([1, 1, 2])
    weights, plain = mlp.quantize_weights(), layer_of("cpu", None)
    with pytest.raises(RuntimeError, match="quantize_weights: wanted a layer with a precision"):
        plain.quantize_weights()
    with pytest.raises(ValueError, match="weights: wanted None without a precision"):
        plain(x, rows, weights=weights)
    with pytest.raises(TypeError, match="weights: wanted what `quantize_weights` returns, got dict"):
        mlp(x, rows, weights={})  # type: ignore[arg-type]
    other = GroupedMLP(HIDDEN, 8, EXPERTS, precision="fp8").quantize_weights()
    with pytest.raises(ValueError, match=r"weights.fc1_weight.data: wanted shape .* got \(3, 16, 140\)"):
        mlp(x, rows, weights=other)


def test_refuses_casts_that_are_of_no_such_weights() -> None:
    mlp, other = GroupedMLP(160, 32, 2, precision="fp8"), GroupedMLP(160, 32, 1, precision="fp8")
    right = mlp.quantize_weights()
    data, scales = right.fc1_weight
    kept = [t.float().clone() for each in right for t in each]
    for wrong, error, message in (
        (Quantized(data.bfloat16(), scales), TypeError, r"fc1_weight.data: wanted dtype float8_e4m3fn or float8_e5m2"),
        (Quantized(data, scales.bfloat16()), TypeError, r"fc1_weight.scales: wanted dtype float32, got torch.bfloat16"),
        (Quantized(data, scales[:1]), ValueError, r"fc1_weight.scales: wanted shape .* got \(1, 1, 2\)"),
        (Quantized(data[:1], scales), ValueError, r"fc1_weight.data: wanted shape .* got \(1, 64, 160\)"),
        (Quantized(data, None), TypeError, "fc1_weight.scales: wanted a tensor, got NoneType"),
        (None, TypeError, "fc1_weight: wanted a Quantized, got NoneType"),
    ):
        casts = right._replace(fc1_weight=wrong)
        with pytest.raises(error, match=rf"weights\.{message}"):
            mlp(torch.randn(3, 160), [1, 2], weights=casts)
        with pytest.raises(error, match=rf"into\.{message}"):
            mlp.quantize_weights(into=casts)
    for wrong in (other.quantize_weights(), tuple(right), True):
        with pytest.raises((TypeError, ValueError), match="^into"):
            mlp.quantize_weights(into=wrong)
    assert all(torch.equal(t.float(), before) for t, before in zip((t for e in right for t in e), kept, strict=True))


def test_moe_takes_casts_of_its_experts() -> None:
    moe = MoE(160, 32, 4, 2, precision="fp8")
    x = torch.randn(7, 160)
    weights = moe.experts.quantize_weights()
    before = moe(x).y
    assert torch.equal(moe(x, weights=weights).y, before)
    moe.experts.fc1_weight.data.mul_(2)
    assert torch.equal(moe(x, weights=weights).y, before)
    assert not torch.equal(moe(x).y, before)


def test_a_precision_is_not_for_a_layer_with_biases() -> None:
    mlp = GroupedMLP(16, 8, 2, bias=True)
    mlp.precision = FP8Recipe()
    with pytest.raises(ValueError, match="precision: wanted None with biases"):
        mlp(torch.randn(3, 16), [1, 2])


def test_recipes_are_of_bools() -> None:
    for name in ("power_of_two_scales", "fp8_wgrad", "emulate"):
        with pytest.raises(TypeError, match=f"{name}: wanted a bool, got 'no'"):
            FP8Recipe(**{name: "no"})
    with pytest.raises(TypeError, match="gradient_dtype: wanted float8_e4m3fn or float8_e5m2, got "):
        FP8Recipe(gradient_dtype=[1])


@pytest.mark.filterwarnings(r"ignore:::torch\.")
def test_compiled_in_one_graph_equals_eager(device: str) -> None:
    torch._dynamo.reset()
    mlp, (sent, probs, dy) = layer_of(device), sent_rows(SEVERAL_BLOCKS, device)
    rows, weights = SEVERAL_BLOCKS.rows(device), mlp.quantize_weights()
    compiled = torch.compile(lambda x, p, w: mlp(x, rows, p, weights=w), fullgraph=True, backend="aot_eager")
    for x, casts in ((sent, None), (as_tensor(sent), weights), (sent, weights)):
        y, expected = compiled(x, probs, casts), mlp(x, rows, probs)
        assert torch.equal(y, expected)
        wanted = probs, mlp.fc1_weight, mlp.fc2_weight
        for actual, value in zip(
            torch.autograd.grad(y, wanted, dy), torch.autograd.grad(expected, wanted, dy), strict=True
        ):
            assert torch.equal(actual, value)
    torch._dynamo.reset()
