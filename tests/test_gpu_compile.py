"""Every kernel compiles for GPUs that are not here: no spill, no serialised wgmma, and within shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs Triton")

Case = tuple[int, str, tuple[str, ...]]  # compute capability, dtype, mean rows an expert, "hopper" or "fp8"

SCRIPT = Path(__file__).parent / "gpu_compile.py"
# KiB of shared memory that a block may ask for. sm_86, sm_89 and sm_120 run what sm_80 does.
SHARED_MEMORY = {80: 99, 90: 227, 100: 227}


# One mean for every bucket of rows an expert. For sm_80 those with most shared memory and with most registers; sm_100
# has the tables of sm_90, and the large tiles for its own instructions. fp32 has one table, of small tiles, for all.
CASES: list[Case] = [
    (90, "bfloat16", ("hopper",)),  # these first, since they take longest
    (90, "float16", ("hopper",)),
    (90, "bfloat16", ("8", "24", "60", "200", "3000")),
    (80, "bfloat16", ("24", "200")),
    (100, "bfloat16", ("200",)),
    (90, "float32", ("200",)),
    *[(arch, "bfloat16", ("fp8",)) for arch in (90, 100)],
]


CASTS = ("quantize_columns_kernel", "gradients_kernel")  # of those in Gluon


@pytest.fixture(scope="module")
def compilations(request: pytest.FixtureRequest) -> Iterator[dict[Case, Future[Any]]]:
    """All cases that were asked for, as many at a time as there are processors: they take long."""
    asked = [
        item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {
            item.callspec.params["case"]: pool.submit(compile_in_a_process, *item.callspec.params["case"])
            for item in asked
        }


def compile_in_a_process(arch: int, dtype: str, layers: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    # In a process of its own: in this one Triton may be its interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), str(arch), dtype, *layers]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: "-".join(map(str, (*case[:2], *case[2][:1] * (not case[2][0].isdigit()))))
)
def test_kernels_compile(case: Case, compilations: dict[Case, Future[Any]]) -> None:
    arch = case[0]
    done = compilations[case].result()
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert len(kernels) >= 18
    if "hopper" in case[2]:
        others = {kernel["name"] for kernel in kernels if not kernel["gluon"]}
        assert others == {"schedule_kernel", "plan_kernel", "sum_partials_kernel"}
        assert all(
            {"TMA store", "TMA reduction"}.intersection(kernel["instructions"])
            for kernel in kernels
            if "k_grouped" in kernel["name"]
        )
    for kernel in kernels:
        multiplies = kernel["gluon"] and kernel["name"] not in CASTS
        assert not multiplies or "wgmma" in kernel["instructions"], kernel
        assert kernel["complaints"] == [], kernel
        assert kernel["shared"] <= SHARED_MEMORY[arch] * 1024, kernel
        assert kernel["spills"] == 0, kernel
