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


# One mean for every bucket of rows an expert; the tables of fp32 differ by the rows of a tile alone.
CASES: list[Case] = [
    (90, "bfloat16", ("hopper",)),  # these first, since they take longest
    (90, "float16", ("hopper",)),
    *[(arch, "bfloat16", ("8", "24", "60", "200", "3000")) for arch in SHARED_MEMORY],
    *[(arch, "float32", ("200",)) for arch in SHARED_MEMORY],
    *[(arch, "bfloat16", ("fp8",)) for arch in SHARED_MEMORY if arch >= 89],
]


@pytest.fixture(scope="module")
def compilations(request: pytest.FixtureRequest) -> Iterator[dict[Case, Future[Any]]]:
    """All cases that were asked for, as many at a time as there are processors: they take half of the tests' time."""
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
            "UTMASTG" in k["instructions"] or "UTMAREDG" in k["instructions"]
            for k in kernels
            if "k_grouped" in k["name"]
        )
    for kernel in kernels:
        assert not kernel["gluon"] or {"HGMMA", "QGMMA"} & kernel["instructions"].keys(), kernel
        assert kernel["complaints"] == [], kernel
        assert kernel["shared"] <= SHARED_MEMORY[arch] * 1024, kernel
        assert kernel["spills"] == 0, kernel
