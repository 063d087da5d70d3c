"""What a launch would compile, for a GPU that is not here: registers, spills, shared memory, ptxas's complaints."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from grouped_experts.activations import ACTIVATIONS
from grouped_experts.ops import hopper, portable, reference
from grouped_experts.ops.hopper import fc2_dgrad as hopper_fc2_dgrad
from grouped_experts.ops.hopper import gradients_fp8 as hopper_gradients_fp8
from grouped_experts.ops.hopper import k_grouped as hopper_k_grouped
from grouped_experts.ops.hopper import k_grouped_fp8 as hopper_k_grouped_fp8
from grouped_experts.ops.hopper import products as hopper_products
from grouped_experts.ops.hopper import products_fp8 as hopper_products_fp8
from grouped_experts.ops.hopper import quantize as hopper_quantize
from grouped_experts.ops.portable import fp4, fp8, k_grouped, launch, products, products_fp8, quantize, schedule
from grouped_experts.ops.reference.fp4 import quantize_fp4
from grouped_experts.ops.reference.quantize import empty_columns


@dataclass(frozen=True)
class Compiled:
    """One kernel as the compiler made it. spills: bytes of stack; complaints: ptxas's codes on serialised wgmma.

    instructions: how many there are of those that tests ask for, in PTX.
    """

    name: str
    arch: int
    gluon: bool
    registers: int
    spills: int
    shared: int
    instructions: dict[str, int]
    complaints: list[str]


INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async\b",
    "TMA store": r"\bcp\.async\.bulk\.tensor\.\dd\.global\.shared",
    "TMA reduction": r"\bcp\.reduce\.async\.bulk\.tensor\b",
}


def compile_launches(patch: pytest.MonkeyPatch, arch: int, cache: str, call: Callable[[], Any]) -> list[Compiled]:
    """Run `call` on CPU tensors as if on a GPU of compute capability `arch`, every launch replaced by a compilation.

    cache: an empty folder for what Triton compiles.
    """
    made: dict[str, Compiled] = {}  # by what Triton names a compilation: many launches share one

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        for value in kwargs.values():  # Triton's cache would not notice when a function in a tuple changes
            assert not (isinstance(value, tuple) and any(isinstance(part, JITFunction) for part in value)), value
        target = GPUTarget("cuda", arch, 32)
        backend = make_backend(target)
        binder = create_function_from_signature(self.signature, self.params, backend)
        bound, specialization, options = binder(*args, **{**kwargs, "debug": False})
        options, signature, constexprs, attrs = self._pack_args(
            backend, {**kwargs, "debug": False}, bound, specialization, options
        )
        source = (GluonASTSource if self.is_gluon() else ASTSource)(self, signature, constexprs, attrs)
        with contextlib.redirect_stdout(io.StringIO()) as log:
            kernel = triton.compile(source, target=target, options=options.__dict__)
        if kernel.hash not in made:
            made[kernel.hash] = inspect_kernel(self.__name__, arch, self.is_gluon(), kernel, log.getvalue())

    patch.setenv("TRITON_CACHE_DIR", cache)  # an empty one: what is not compiled has no log
    patch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
    patch.setenv("TRITON_DISABLE_LINE_INFO", "1")  # the same code, a tenth sooner
    patch.setattr(JITFunction, "run", compile_only)
    for module in (launch, products, products_fp8, k_grouped):
        patch.setattr(module, "capability", lambda device: arch)
    for module in (
        products,
        products_fp8,
        fp4,
        k_grouped,
        hopper_products,
        hopper_products_fp8,
        hopper_k_grouped,
        hopper_k_grouped_fp8,
        hopper_gradients_fp8,
        hopper_quantize,
        hopper_fc2_dgrad,
    ):
        patch.setattr(module, "num_processors", lambda device: 132)
    for module in (fp8, fp4, quantize, products_fp8):
        patch.setattr(module, "is_native", lambda data: True)
    call()
    return list(made.values())


def inspect_kernel(name: str, arch: int, gluon: bool, kernel: Any, log: str) -> Compiled:
    """log: what ptxas said of it under -v, which Triton always gives it."""
    stack = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)
    counts = {what: len(re.findall(pattern, kernel.asm["ptx"])) for what, pattern in INSTRUCTIONS.items()}
    return Compiled(
        name,
        arch,
        gluon,
        int(re.search(r"Used (\d+) registers", log).group(1)),
        max(map(int, stack)),
        kernel.metadata.shared,
        {what: count for what, count in counts.items() if count},
        re.findall(r"\((C7\d\d\d)\)", log),
    )


def launch_everything(rows: int, dtype: torch.dtype) -> None:
    """Every kernel in every form, for a layer of E = 64 experts with T = `rows` rows, H = 256, I = 128."""
    experts, hidden, inner = 64, 256, 128
    x, h, a = (torch.empty(rows, n, dtype=dtype) for n in (hidden, 2 * inner, inner))
    w1, w2 = torch.empty(experts, 2 * inner, hidden, dtype=dtype), torch.empty(experts, hidden, inner, dtype=dtype)
    ends, probs = torch.empty(experts, dtype=torch.int32), torch.empty(rows)
    slots = torch.empty(rows // 2, 2, dtype=torch.int32)
    tiles = schedule.schedule_of(None, ends, ends, rows)
    portable.ranges_from_tensor(ends, 1, 0, rows, False)
    portable.scheduled_ranges(ends, 0, rows, dtype)
    portable.m_grouped_gemm(x, w1, ends, ends, None, None, True, tiles)
    portable.m_grouped_gemm(h, w1, ends, ends, w2[:, :, 0].contiguous(), probs, False, tiles)
    deep_x, deep_w = torch.empty(rows, 1024, dtype=dtype), torch.empty(experts, hidden, 1024, dtype=dtype)
    portable.m_grouped_gemm(deep_x, deep_w, ends, ends, None, None, True, tiles)
    for activation in ACTIVATIONS if rows == 200 * experts else ["swiglu"]:
        h_act, w_act = (h, w1) if ACTIVATIONS[activation].gated else (a, w1[:, :inner])
        portable.fc1_activation(x, w_act, ends, ends, w_act[:, :, 0], probs, activation, tiles)
        portable.fc2_dgrad_activation(x, w2, h_act, ends, ends, probs, w2[:, :, 0], activation, True, True, tiles)
    portable.k_grouped_gemm(x, a, ends, ends, dtype)
    portable.k_grouped_gemm_accumulate(torch.empty(experts, hidden, inner), x, a, ends, ends)
    portable.k_grouped_sum(x, ends, ends, probs, dtype)
    launch_with_an_index(rows, dtype, tiles)
    for bounds in ((ends, ends), (None, None)):
        portable.scaled_activation(h, probs, *bounds, "swiglu")
        portable.scaled_activation_backward(a, h, probs, *bounds, "swiglu")
    portable.permute(x[: rows // 2], slots, ends)
    portable.unpermute(x, slots, ends)
    portable.unpermute_with_values(x, probs, slots, ends)
    for activation in ACTIVATIONS:
        w_act = w1 if ACTIVATIONS[activation].gated else w1[:, :inner]
        for each_probs, b1, b2 in ((probs, w_act[:, :, 0], w2[:, :, 0]), (None, None, None)):
            portable.few_tokens(x[:4], slots[:4].long(), each_probs, w_act, w2, b1, b2, activation)
    wide_x, wide_w1 = torch.empty(1, 2048, dtype=dtype), torch.empty(experts, 1536, 2048, dtype=dtype)
    wide_w2 = torch.empty(experts, 2048, 768, dtype=dtype)
    portable.few_tokens(wide_x, slots[:1].long(), probs[:2].view(1, 2), wide_w1, wide_w2, None, None, "swiglu")
    for num_tokens in (16, 4096):  # few slots, which one kernel sorts, and many
        ids = torch.empty(num_tokens, 8, dtype=torch.int64)
        portable.route(ids, experts)
        portable.route_rows(ids, experts, dtype, ids.float())


def launch_with_an_index(rows: int, dtype: torch.dtype, tiles: torch.Tensor) -> None:
    """The portable products of `rows` rows that an index names among a quarter as many; sizes as above."""
    experts, hidden, inner = 64, 256, 128
    ends, index = torch.empty(experts, dtype=torch.int32), torch.empty(rows, dtype=torch.int32)
    x, h, a, probs = (
        torch.empty(n, dtype=dtype) for n in ((rows // 4, hidden), (rows, 2 * inner), (rows, inner), (rows,))
    )
    w1, w2 = torch.empty(experts, 2 * inner, hidden, dtype=dtype), torch.empty(experts, hidden, inner, dtype=dtype)
    for zero_gaps in (True, False):
        portable.m_grouped_gemm(x, w1, ends, ends, None, None, True, tiles, index, zero_gaps)
        portable.m_grouped_gemm(h, w1, ends, ends, None, None, False, tiles, None, zero_gaps)
    portable.fc1_activation(x, w1, ends, ends, None, probs, "swiglu", tiles, index)
    portable.fc2_dgrad_activation(x, w2, h, ends, ends, probs, w2[:, :, 0], "swiglu", True, True, tiles, index)
    for a_index, b_index in ((index, None), (None, index)):
        left, right = a if a_index is None else x, a if b_index is None else x
        portable.k_grouped_gemm(left, right, ends, ends, dtype, a_index, b_index)
        total = torch.empty(experts, left.shape[1], right.shape[1])
        portable.k_grouped_gemm_accumulate(total, left, right, ends, ends, a_index, b_index)
    portable.k_grouped_sum(x, ends, ends, probs, dtype, index)
    portable.gather_rows(x, index)


def launch_hopper(dtype: torch.dtype) -> None:
    """Every Gluon kernel with its biases and activations; E = 8 experts with 200 rows each.

    In bf16 with every tile of its table and sizes that fill them; in fp16, of which the compiler makes the same but for
    the products' type, with one size that does not, an activation with a gate and one without.
    """
    experts, rows, hidden = 8, 1600, 512
    x, ends = torch.empty(rows, hidden, dtype=dtype), torch.empty(experts, dtype=torch.int32)
    probs, index = torch.empty(rows), torch.empty(rows, dtype=torch.int32)  # of some rows of x and dy
    tiles = schedule.schedule_of(None, ends, ends, rows)
    bf16 = dtype == torch.bfloat16
    for inner in (64, 512) if bf16 else (136,):
        w1 = torch.empty(experts, 2 * inner, hidden, dtype=dtype)
        w2, dy = torch.empty(experts, hidden, inner, dtype=dtype), torch.empty(rows, hidden, dtype=dtype)
        bias = torch.empty(experts, inner, dtype=dtype)
        for scale in (None, probs):
            hopper.m_grouped_gemm(x, w1[:, :inner], ends, ends, bias, scale, True, tiles)
        hopper.m_grouped_gemm(x, w1[:, :inner], ends, ends, None, None, True, tiles)
        hopper.m_grouped_gemm(dy, w2, ends, ends, None, None, False, tiles)
        for zero_gaps in (True, False):
            hopper.m_grouped_gemm(x, w1[:, :inner], ends, ends, None, None, True, tiles, index, zero_gaps)
            hopper.m_grouped_gemm(dy, w2, ends, ends, bias, probs, False, tiles, index, zero_gaps)
            hopper.m_grouped_gemm(dy, w2, ends, ends, None, None, False, tiles, None, zero_gaps)
        for activation in ACTIVATIONS if bf16 else ("swiglu", "squared_relu"):
            weight = w1 if ACTIVATIONS[activation].gated else w1[:, :inner]
            fc1_bias = weight[:, :, 0].contiguous()
            for scale, added in ((None, None), (probs, None), (probs, fc1_bias)):
                hopper.fc1_activation(x, weight, ends, ends, added, scale, activation, tiles)
            hopper.fc1_activation(x, weight, ends, ends, None, probs, activation, tiles, index)
            h = torch.empty(rows, weight.shape[1], dtype=dtype)
            hopper.fc2_dgrad_activation(dy, w2, h, ends, ends, probs, None, activation, True, True, tiles)
            hopper.fc2_dgrad_activation(dy, w2, h, ends, ends, probs, None, activation, True, True, tiles, index)
        gated = torch.empty(rows, 2 * inner, dtype=dtype)
        for rows_of_dy in (None, index):
            hopper.fc2_dgrad_activation(
                dy, w2, gated, ends, ends, None, None, "swiglu", False, False, tiles, rows_of_dy
            )  # fmt: skip
        a = torch.empty(rows, inner, dtype=dtype)
        hopper.k_grouped_gemm(x, a, ends, ends, dtype)
        for indices in ((index, None), (None, index)):
            hopper.k_grouped_gemm(x, a, ends, ends, dtype, *indices)
        wide = torch.empty(rows, 132 * 128, dtype=dtype)  # more tiles than programs: no expert in pieces
        hopper.k_grouped_gemm(wide, a, ends, ends, dtype)
        for indices in ((index, None), (None, index)):
            hopper.k_grouped_gemm(wide, a, ends, ends, dtype, *indices)
        sum_of = torch.empty(1, hidden, inner)  # of one expert: many rows
        hopper.k_grouped_gemm_accumulate(sum_of, x, a, ends[:1], ends[:1])
    many = torch.empty(experts, 4104, hidden, dtype=dtype)  # columns, for which tiles are in other groups
    hopper.m_grouped_gemm(x, many, ends, ends, None, None, True, tiles)
    hopper.m_grouped_gemm(x, many.mT.contiguous(), ends, ends, None, None, False, tiles)


def launch_fp8(dtype: torch.dtype) -> None:
    """Casts from `dtype` and products of FP8, with FP4 too, for every tile of rows; E = 8 experts, depth 256."""
    experts, columns, depth = 8, 136, 256
    ends, w = torch.empty(experts, dtype=torch.int32), torch.empty(experts, columns, depth, dtype=dtype)
    for fp8_dtype, power_of_two in ((torch.float8_e4m3fn, False), (torch.float8_e5m2, True)):
        x = torch.empty(experts * 200, depth, dtype=dtype)
        sent = reference.quantize_rows(x.float(), fp8_dtype, power_of_two)
        for transpose in (False, True):
            portable.quantize_blocks(w, fp8_dtype, power_of_two, transpose)
        portable.quantize_columns(x, ends, ends, fp8_dtype, power_of_two)
        portable.quantize_rows(x, fp8_dtype, power_of_two)
        for expected_rows in (10, 20, 100):
            portable.quantize_rows(x, fp8_dtype, power_of_two, ends, ends, None, expected_rows)
        portable.quantize_columns(sent[0], ends, ends, fp8_dtype, power_of_two, sent[1])
        portable.quantize_rows_and_columns(x, ends, ends, fp8_dtype, power_of_two)
        weight = reference.quantize_blocks(w.float(), torch.float8_e4m3fn, False, False)
        weight_fp4 = quantize_fp4(w)
        for rows in (8, 24, 60, 200):
            x = torch.empty(experts * rows, depth)
            quantized = reference.quantize_rows(x, fp8_dtype, False)
            portable.m_grouped_gemm_fp8(*quantized, *weight, ends, ends, dtype)
            by_pointer = weight[0].mT.contiguous().mT, weight[1]  # TMA wants unit strides
            portable.m_grouped_gemm_fp8(*quantized, *by_pointer, ends, ends, dtype)
            portable.m_grouped_gemm_fp8_fp4(*quantized, *weight_fp4, ends, ends, dtype)
            every = rows == 200 and fp8_dtype == torch.float8_e4m3fn
            for activation in ACTIVATIONS if every else ["swiglu"]:
                launch_fused_fp8(activation, rows, dtype, fp8_dtype)
        a, b = (empty_columns(torch.empty(1600, n), experts, fp8_dtype) for n in (columns, depth))
        portable.k_grouped_gemm_fp8(*a, *b, ends, ends, dtype)
        portable.k_grouped_gemm_fp8_accumulate(torch.empty(experts, columns, depth), *a, *b, ends, ends)


def launch_hopper_fp8(dtype: torch.dtype) -> None:
    """The Gluon kernels of FP8 operands, for every dtype of theirs and of the output; E = 8 experts, 200 rows each."""
    experts, rows, columns, depth = 8, 1600, 392, 272
    ends = torch.empty(experts, dtype=torch.int32)
    weight = reference.quantize_blocks(torch.empty(experts, columns, depth), torch.float8_e4m3fn, False, False)
    for fp8_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        x = reference.quantize_rows(torch.empty(rows, depth), fp8_dtype, False)
        a = empty_columns(torch.empty(rows, columns), experts, fp8_dtype)
        b = empty_columns(torch.empty(rows, depth), experts, torch.float8_e4m3fn)
        for out_dtype in (torch.bfloat16, torch.float16, torch.float32):
            hopper.m_grouped_gemm_fp8(*x, *weight, ends, ends, out_dtype)
            hopper.k_grouped_gemm_fp8(*a, *b, ends, ends, out_dtype)
        hopper.m_grouped_gemm_fp8(*x, weight[0].to(torch.float8_e5m2), weight[1], ends, ends, dtype)
        hopper.k_grouped_gemm_fp8_accumulate(torch.empty(experts, columns, depth), *a, *b, ends, ends)
    x, probs = reference.quantize_rows(torch.empty(rows, depth), torch.float8_e4m3fn, False), torch.empty(rows)
    weight = reference.quantize_blocks(torch.empty(experts, 512, depth), torch.float8_e4m3fn, False, False)
    for activation in ACTIVATIONS:
        for h_dtype in (torch.bfloat16, torch.float16):
            for given, power_of_two in ((probs, True), (None, False)):
                hopper.fc1_activation_fp8(*x, *weight, ends, ends, given, activation, h_dtype, power_of_two)
    launch_hopper_casts(dtype)


def launch_hopper_casts(dtype: torch.dtype) -> None:
    """Casts by columns, and those behind fc2's dgrad, whose product is compiled already."""
    experts, rows, inner = 8, 1600, 256
    ends, tiles = torch.empty(experts, dtype=torch.int32), torch.empty(1600, 4, dtype=torch.int32)
    x, probs = torch.empty(rows, 392, dtype=dtype), torch.empty(rows)
    da, h = torch.empty(rows, inner, dtype=dtype), torch.empty(rows, 2 * inner, dtype=dtype)
    for fp8_dtype, power_of_two in ((torch.float8_e4m3fn, False), (torch.float8_e5m2, True)):
        hopper.quantize_columns(x, ends, ends, fp8_dtype, power_of_two)
        hopper.quantize_rows_and_columns(x, ends, ends, fp8_dtype, power_of_two)
        for activation in ("swiglu",) if power_of_two else ACTIVATIONS:
            for given, wanted in ((probs, (True, True, True, True)), (None, (False, True, False, True))):
                hopper_gradients_fp8.quantized_gradients(
                    da, h, ends, ends, given, activation, fp8_dtype, power_of_two, *wanted, tiles, 128
                )  # fmt: skip


def launch_fused_fp8(activation: str, rows: int, dtype: torch.dtype, fp8_dtype: torch.dtype) -> None:
    """Products with activations, gradients in `fp8_dtype`; E = 8 experts of so many rows, H = 256, I = 128 and 136."""
    experts, hidden = 8, 256
    ends, probs = torch.empty(experts, dtype=torch.int32), torch.empty(experts * rows)
    x = torch.empty(experts * rows, hidden)
    for inner in (128, 136):
        width = ACTIVATIONS[activation].width(inner)
        h, w1 = torch.empty(experts * rows, width, dtype=dtype), torch.empty(experts, width, hidden)
        w2 = torch.empty(experts, inner, hidden)
        w1, w2 = (reference.quantize_blocks(w, torch.float8_e4m3fn, False, False) for w in (w1, w2))
        x_fp8, dy_fp8 = (reference.quantize_rows(x, each, False) for each in (torch.float8_e4m3fn, fp8_dtype))
        for given, power_of_two in ((probs, True), (None, False)):
            portable.fc1_activation_fp8(*x_fp8, *w1, ends, ends, given, activation, dtype, power_of_two)
            outcomes = (True, True, True, True), (True, False, False, True), (False, True, True, False)
            for wanted in outcomes if activation == "swiglu" else outcomes[:1]:
                portable.fc2_dgrad_activation_fp8(
                    *dy_fp8, *w2, h, ends, ends, given, activation, fp8_dtype, power_of_two, *wanted
                )


def main() -> None:
    """Arguments: an arch, a dtype, mean rows an expert of each layer or "hopper" or "fp8". Prints JSON."""
    arch, dtype, layers = int(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3:]

    def launch_all() -> None:
        for layer in layers:
            if layer == "hopper":
                launch_hopper(dtype)
            elif layer == "fp8":
                launch_fp8(dtype)
                if arch == 90:
                    launch_hopper_fp8(dtype)
            else:
                launch_everything(64 * int(layer), dtype)

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as cache:
        made = compile_launches(patch, arch, cache, launch_all)
    print(json.dumps([asdict(kernel) for kernel in made]))


if __name__ == "__main__":
    main()
