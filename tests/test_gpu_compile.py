"""Every kernel compiles for GPUs that are not here: no spill, no serialised wgmma, and within shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="needs Triton")
NEWER_TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2]) > (3, 6)

SCRIPT = Path(__file__).parent / "gpu_compile.py"
# KiB of shared memory that a block may ask for. sm_86, sm_89 and sm_120 run what sm_80 does.
SHARED_MEMORY = {80: 99, 90: 227, 100: 227}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("mean_rows", [8, 200])
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_kernels_compile(arch: int, mean_rows: int, dtype: str) -> None:
    # In a process of its own: in this one Triton may be its interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), str(arch), str(mean_rows), dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert len(kernels) >= 14
    for kernel in kernels:
        assert kernel["complaints"] == [], kernel
        assert kernel["shared"] <= SHARED_MEMORY[arch] * 1024, kernel
    spilling = [kernel["name"] for kernel in kernels if kernel["spills"]]
    known = spilling == ["m_grouped_kernel"] and max(kernel["spills"] for kernel in kernels) <= 48
    if NEWER_TRITON and arch >= 90 and dtype == "bfloat16" and known:
        pytest.xfail("an m-grouped kernel, its tile chosen with Triton 3.6, spills up to 48 bytes under newer ones")
    assert spilling == []
