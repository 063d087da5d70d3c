"""GroupedMLP as a module: copies, state dicts, the meta device, and what it refuses."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exact import eps
from layer import (
    assert_same,
    by_layer,
    check,
    rand,
    running,
)
from torch import Tensor, nn

import grouped_experts
from grouped_experts import GroupedMLP, RowRanges

BF16, FP32 = torch.bfloat16, torch.float32


# ---- module state


def test_copies_are_independent(device: str) -> None:
    mlp = GroupedMLP(6, 4, 2, device=device, bias=True, activation="geglu", defer_wgrad=True)
    x = rand(7, 6, dtype=FP32, device=device)
    for make in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _through_torch_save):
        twin = make(mlp)
        assert repr(twin) == repr(mlp)
        assert torch.equal(twin(x, [3, 4]), mlp(x, [3, 4]))
        with torch.no_grad():
            twin.fc1_weight.zero_()
        assert mlp.fc1_weight.ne(0).any()


def _through_torch_save(mlp: GroupedMLP) -> GroupedMLP:
    file = io.BytesIO()
    torch.save(mlp, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_state_dict(device: str) -> None:
    source, target = (GroupedMLP(6, 4, 2, device=device, bias=True) for _ in range(2))
    state = source.state_dict()
    assert list(state) == ["fc1_weight", "fc2_weight", "fc1_bias", "fc2_bias"]
    target.load_state_dict(state)
    for name, p in target.named_parameters():
        assert torch.equal(p, state[name])
        assert p.data_ptr() != state[name].data_ptr()


def test_state_dict_is_strict() -> None:
    mlp = GroupedMLP(6, 4, 2)
    state = mlp.state_dict()
    renamed = {"w1": state["fc1_weight"], "fc2_weight": state["fc2_weight"]}
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*fc1_weight.*Unexpected key.*w1"):
        mlp.load_state_dict(renamed)
    with pytest.raises(RuntimeError, match="size mismatch for fc1_weight"):
        mlp.load_state_dict(state | {"fc1_weight": state["fc1_weight"].mT})
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*fc1_bias"):
        GroupedMLP(6, 4, 2, bias=True).load_state_dict(state)


@pytest.mark.parametrize("target_device", ["cpu", "meta"])
def test_state_dict_by_assignment(target_device: str) -> None:
    source, target = GroupedMLP(6, 4, 2, dtype=BF16), GroupedMLP(6, 4, 2, device=target_device)
    target.load_state_dict(source.state_dict(), assign=True)
    x = rand(7, 6, dtype=BF16, device="cpu")
    assert target.fc1_weight.dtype == BF16
    dy = torch.ones_like(x)
    assert_same(by_layer(target, x, [3, 4], None, dy), by_layer(source, x, [3, 4], None, dy))


@pytest.mark.parametrize("how", ["context", "argument"])
def test_meta_device(how: str, device: str) -> None:
    """The parameters stay the same objects: an optimizer may hold them already."""
    if how == "context":
        with torch.device("meta"):
            mlp = GroupedMLP(64, 32, 4, bias=True, dtype=BF16)
    else:
        mlp = GroupedMLP(64, 32, 4, bias=True, dtype=BF16, device=torch.device("meta"))
    assert all(p.is_meta for p in mlp.parameters())
    mlp.to_empty(device=device)
    before = [id(p) for p in mlp.parameters()]
    mlp.reset_parameters()
    assert [id(p) for p in mlp.parameters()] == before
    fresh = GroupedMLP(64, 32, 4, bias=True, dtype=BF16, device=device)
    for (name, p), q in zip(mlp.named_parameters(), fresh.parameters(), strict=True):
        bound = 1 / math.sqrt(32 if name.startswith("fc2") else 64)
        assert p.dtype == BF16
        assert p.device.type == device
        assert 0.9 * bound < p.abs().max() <= bound * (1 + eps(BF16))
        # of a uniform sample's n squares: mean bound^2 / 3, standard error bound^2 sqrt(4 / 45 n); five of them
        for sample in (p, q):
            squares = sample.double().square().mean() / bound**2
            assert abs(squares - 1 / 3) < 5 * math.sqrt(4 / 45 / p.numel()) + eps(BF16)
    x = rand(4, 64, dtype=BF16, device=device)
    assert mlp(x, [1, 1, 1, 1]).isfinite().all()


def test_forward_on_the_meta_device() -> None:
    mlp = GroupedMLP(6, 4, 2, device="meta", bias=True)
    x = torch.empty(7, 6, device="meta", requires_grad=True)
    y = mlp(x, torch.empty(2, dtype=torch.int32, device="meta"))
    y.sum().backward()
    assert y.shape == x.grad.shape == (7, 6)
    assert all(p.grad.shape == p.shape for p in mlp.parameters())


def test_conversion_of_the_module(device: str) -> None:
    mlp = GroupedMLP(6, 4, 2, bias=True).to(device, BF16)
    x = rand(7, 6, dtype=BF16, device=device)
    check(mlp, x, running([3, 4]), [3, 4], None, torch.ones_like(x))


def test_repr() -> None:
    assert repr(GroupedMLP(6, 4, 2)) == (
        "GroupedMLP(hidden_size=6, intermediate_size=4, num_experts=2, activation='swiglu', bias=False)"
    )
    assert repr(GroupedMLP(6, 4, 2, activation="squared_relu", bias=True, defer_wgrad=True)) == (
        "GroupedMLP(hidden_size=6, intermediate_size=4, num_experts=2, activation='squared_relu', bias=True, "
        "defer_wgrad=True)"
    )


@pytest.mark.parametrize(("activation", "width"), [("swiglu", 8), ("squared_relu", 4)])
def test_parameters(activation: str, width: int) -> None:
    mlp = GroupedMLP(6, 4, 2, activation=activation, bias=True)
    assert {name: tuple(p.shape) for name, p in mlp.named_parameters()} == {
        "fc1_weight": (2, width, 6),
        "fc2_weight": (2, 6, 4),
        "fc1_bias": (2, width),
        "fc2_bias": (2, 6),
    }
    assert [name for name, _ in GroupedMLP(6, 4, 2).named_parameters()] == ["fc1_weight", "fc2_weight"]


def test_import_and_use_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, grouped_experts\n"
        "mlp = grouped_experts.GroupedMLP(5, 3, 2)\n"
        "x = torch.ones(7, 5, requires_grad=True)\n"
        "mlp(x, [0, 7]).sum().backward()\n"
        "assert x.grad.ne(0).all() and mlp.fc1_weight.grad[0].eq(0).all() and mlp.fc2_weight.grad[1].ne(0).all()\n"
    )
    root = Path(grouped_experts.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr


# ---- what is refused


def x_of(*shape: int, dtype: torch.dtype = FP32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


ROWS = RowRanges.contiguous([3, 5])
REFUSED: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "x-a-list": (([[1.0] * 6], [1, 0]), TypeError, "x: wanted a tensor, got list"),
    "x-integers": ((x_of(8, 6, dtype=torch.int64), [3, 5]), TypeError, "x: wanted a dtype of .* got int64"),
    "x-of-another-width": ((x_of(8, 7), [3, 5]), ValueError, r"x: wanted shape \(T, H\) = \(any, 6\), got \(8, 7\)"),
    "x-a-row": ((x_of(6), [3, 5]), ValueError, r"x: wanted shape"),
    "x-four-dimensional": ((x_of(2, 2, 2, 6), [3, 5]), ValueError, "x: wanted shape"),
    "x-masked-of-other-experts": ((x_of(3, 4, 6), [3, 4]), ValueError, r"x: wanted shape \(E, C, H\) = \(2, any, 6\)"),
    "x-wider-than-the-weights": (
        (x_of(8, 6, dtype=torch.float64), [3, 5]),
        TypeError,
        "fc1_weight: wanted the dtype of x, torch.float64, or a wider one, got torch.float32",
    ),
    "x-on-another-device": ((x_of(8, 6, device="meta"), ROWS), ValueError, "fc1_weight: wanted a tensor on meta"),
    "weights-on-another-device": (
        (x_of(8, 6, device="meta"), torch.empty(2, dtype=torch.int32, device="meta")),
        ValueError,
        "fc1_weight: wanted a tensor on meta, got one on cpu",
    ),
    "counts-of-other-experts": ((x_of(8, 6), [4, 4, 0]), ValueError, "tokens_per_expert: wanted 2 counts, .* got 3"),
    "counts-tensor-of-other-experts": ((x_of(8, 6), torch.tensor([8])), ValueError, "tokens_per_expert: .* got 1"),
    "counts-beyond-the-rows": ((x_of(8, 6), [5, 5]), ValueError, "counts: wanted rows within the 8 rows there are"),
    "counts-tensor-beyond-the-rows": ((x_of(8, 6), torch.tensor([5, 5])), ValueError, "counts: wanted rows within"),
    "counts-negative": ((x_of(8, 6), [-1, 9]), ValueError, "counts: wanted counts >= 0, got -1 for expert 0"),
    "counts-tensor-negative": ((x_of(8, 6), torch.tensor([9, -1])), ValueError, "counts: wanted counts >= 0, got -1"),
    "counts-of-float": ((x_of(8, 6), [3.0, 5.0]), TypeError, "counts: wanted a list of int, got a float"),
    "counts-of-bool": ((x_of(8, 6), [True, False]), TypeError, "counts: wanted a list of int, got a bool"),
    "counts-tensor-of-float": (
        (x_of(8, 6), torch.tensor([3.0, 5.0])),
        TypeError,
        "counts: wanted dtype int32 or int64",
    ),
    "counts-tensor-of-bool": (
        (x_of(8, 6), torch.tensor([True, True])),
        TypeError,
        "counts: wanted dtype int32 or int64",
    ),
    "counts-two-dimensional": ((x_of(8, 6), torch.tensor([[3], [5]])), ValueError, "counts: wanted one dimension"),
    "counts-a-number": ((x_of(8, 6), 8), TypeError, "counts: wanted a list of int or an integer tensor, got int"),
    "counts-beyond-the-capacity": ((x_of(2, 4, 6), [3, 5]), ValueError, "counts: wanted at most capacity = 4 rows"),
    "ranges-of-other-experts": (
        (x_of(8, 6), RowRanges.contiguous([8])),
        ValueError,
        r"rows.starts: wanted shape \(E,\)",
    ),
    "ranges-beyond-the-rows": ((x_of(7, 6), ROWS), ValueError, "rows: wanted ascending, disjoint ranges within 7 rows"),
    "probs-a-list": ((x_of(8, 6), [3, 5], [1.0] * 8), TypeError, "probs: wanted a tensor, got list"),
    "probs-of-other-rows": (
        (x_of(8, 6), [3, 5], x_of(7)),
        ValueError,
        r"probs: wanted shape \(T,\) = \(8,\), got \(7,\)",
    ),
    "probs-a-column": ((x_of(8, 6), [3, 5], x_of(8, 1)), ValueError, r"probs: wanted shape \(T,\)"),
    "probs-masked-but-flat": ((x_of(2, 4, 6), [3, 4], x_of(8)), ValueError, r"probs: wanted shape \(E, C\) = \(2, 4\)"),
    "probs-integers": ((x_of(8, 6), [3, 5], x_of(8, dtype=torch.int64)), TypeError, "probs: wanted a dtype of"),
    "probs-on-another-device": (
        (x_of(8, 6), [3, 5], x_of(8, device="meta")),
        ValueError,
        "probs: wanted a tensor on cpu",
    ),
}


@pytest.mark.parametrize("defer", [False, True], ids=["plain", "deferred"])
@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_arguments(arguments: tuple[Any, ...], error: type[Exception], message: str, defer: bool) -> None:
    mlp = GroupedMLP(6, 4, 2, defer_wgrad=defer)
    with pytest.raises(error, match=message):
        mlp(*arguments)


def test_transposed_fc1_is_refused_in_the_forward() -> None:
    """(E, I, 2H) fits no product of x (T, H), and must not be read as something else."""
    mlp = GroupedMLP(6, 4, 2)
    mlp.fc1_weight = nn.Parameter(torch.zeros(2, 4, 12))
    with pytest.raises(ValueError, match="fc1_weight: wanted shape"):
        mlp(torch.zeros(8, 6), [3, 5])


@pytest.mark.parametrize(
    ("name", "shape"),
    [("fc2_weight", (2, 4, 6)), ("fc1_bias", (2, 4)), ("fc2_bias", (1, 6)), ("fc1_weight", (3, 8, 6))],
)
def test_weights_of_another_shape_are_refused_by_name(name: str, shape: tuple[int, ...]) -> None:
    mlp = GroupedMLP(6, 4, 2, bias=True)
    setattr(mlp, name, nn.Parameter(torch.zeros(shape)))
    with pytest.raises(ValueError, match=f"{name}: wanted shape"):
        mlp(torch.zeros(8, 6), [3, 5])


def test_narrower_weights_outside_autocast_are_refused(device: str) -> None:
    mlp = GroupedMLP(6, 4, 2, dtype=BF16, device=device)
    x = torch.zeros(8, 6, device=device)
    with pytest.raises(TypeError, match="fc1_weight: wanted the dtype of x, torch.float32"):
        mlp(x, [3, 5])
    with torch.autocast(device, BF16):
        assert mlp(x, [3, 5]).dtype == BF16


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "num_experts"])
def test_sizes_below_one_are_refused(name: str) -> None:
    sizes = {"hidden_size": 6, "intermediate_size": 4, "num_experts": 2} | {name: 0}
    with pytest.raises(ValueError, match=f"{name}: wanted an int >= 1, got 0"):
        GroupedMLP(**sizes)


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("activation: wanted one of swiglu, geglu") + ".*'relu6'"):
        GroupedMLP(6, 4, 2, activation="relu6")


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("defer", [False, True], ids=["plain", "deferred"])
def test_dtensor_weights_are_refused_by_name(mesh: Any, defer: bool) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    mlp = GroupedMLP(6, 4, 2, defer_wgrad=defer)
    mlp.fc2_weight = nn.Parameter(distribute_tensor(mlp.fc2_weight.detach(), mesh, [Replicate()]))
    with pytest.raises(TypeError, match="fc2_weight: wanted a plain tensor, got a DTensor"):
        mlp(torch.zeros(8, 6), [3, 5])
