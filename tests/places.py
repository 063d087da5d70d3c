"""Where a test of an op runs: every family of kernels, on its devices, with its dtypes. For the fixture `place`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import needs_cuda
from inputs import DTYPES

from grouped_experts.ops.families import FAMILIES, has_triton

FP64, FP32, FP16 = torch.float64, torch.float32, torch.float16


def places(dtypes: Sequence[torch.dtype] = DTYPES, interpreted: Sequence[torch.dtype] = (FP16, FP32)) -> list[Any]:
    """The interpreter, which takes up to a second a launch, has fp16 and fp32 only; the rest is the reference's."""
    made = [("reference", "cpu", dtype) for dtype in dtypes] + [("portable", "cpu", dtype) for dtype in interpreted]
    made += [("reference", "cuda", dtype) for dtype in dtypes]
    # "hopper" is "portable" on another GPU.
    made += [(family, "cuda", dtype) for family in ("portable", "hopper") for dtype in dtypes if dtype != FP64]
    return [pytest.param(each, id="-".join(map(str, each)), marks=MARKS.get(each[:2], ())) for each in made]


no_interpreter = torch.cuda.is_available() or not has_triton()
MARKS: dict[tuple[str, str], list[pytest.MarkDecorator]] = {
    ("portable", "cpu"): [pytest.mark.skipif(no_interpreter, reason="needs Triton's interpreter")],
    **{(family, "cuda"): [pytest.mark.gpu, needs_cuda] for family in FAMILIES},
}


in_every_place = pytest.mark.parametrize("place", places(), indirect=True)
