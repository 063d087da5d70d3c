"""Every kernel compiles for GPUs that are not here: no spill, no serialised wgmma, and within shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton")

SCRIPT = Path(__file__).parent / "gpu_compile.py"
# KiB of shared memory that a block may ask for. sm_86, sm_89 and sm_120 run what sm_80 does.
SHARED_MEMORY = {80: 99, 90: 227, 100: 227}


# One mean for every bucket of rows an expert; the tables of fp32 differ by the rows of a tile alone.
@pytest.mark.parametrize(
    ("dtype", "mean_rows"),
    [("bfloat16", 8), ("bfloat16", 24), ("bfloat16", 60), ("bfloat16", 200), ("bfloat16", 3000), ("float32", 200)],
)
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_kernels_compile(arch: int, mean_rows: int, dtype: str) -> None:
    # In a process of its own: in this one Triton may be its interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), str(arch), str(mean_rows), dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert len(kernels) >= 18
    for kernel in kernels:
        assert kernel["complaints"] == [], kernel
        assert kernel["shared"] <= SHARED_MEMORY[arch] * 1024, kernel
    assert [kernel for kernel in kernels if kernel["spills"]] == []
