"""Imports only run down the layers. Read from the source, so that an import inside a function counts too."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SMOKE = ROOT / "tests" / "smoke.py"
PACKAGE = "grouped_experts"

# From the top. Modules of one layer may import one another; layers that share a line may not.
LAYERS = [
    ["grouped_experts"],
    ["integrations"],
    ["nn"],
    ["ops"],
    ["ops.hopper"],
    ["ops.portable"],
    ["ops.reference"],
    ["ops.host_ranges"],
    ["rows"],
    ["activations", "registration"],
]
HEIGHT = {layer: -depth for depth, line in enumerate(LAYERS) for layer in line}
GPU_LAYERS = {"ops.portable", "ops.hopper"}

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / PACKAGE).rglob("*.py"))
}


def layer(module: str) -> str:
    """The longest entry of LAYERS that the module lies in; the package root is a layer of its own."""
    if module == PACKAGE:
        return PACKAGE
    parts = module.split(".")[1:]
    candidates = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    found = next((name for name in candidates if name in HEIGHT), None)
    assert found, f"{module} lies in no layer: add it to LAYERS"
    return found


def imports(module: str, source: str, is_package: bool) -> Iterator[str]:
    """Every module that the source imports, as a full name; `from package import submodule` gives the submodule."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            base = parts[: len(parts) - node.level + is_package] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{origin}.{alias.name}" if f"{origin}.{alias.name}" in MODULES else origin


def imports_of(module: str) -> list[str]:
    path = MODULES[module]
    return list(imports(module, path.read_text(encoding="utf-8"), path.name == "__init__.py"))


def upward(module: str, imported: list[str]) -> list[str]:
    """The imports of the package's own modules that do not run down or stay within a layer."""
    own = [name for name in imported if name.partition(".")[0] == PACKAGE]
    here = layer(module)
    return [name for name in own if layer(name) != here and HEIGHT[layer(name)] >= HEIGHT[here]]


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_down(module: str) -> None:
    assert upward(module, imports_of(module)) == []


@pytest.mark.parametrize(
    ("module", "source", "is_package", "found"),
    [
        ("ops.m_grouped", "from grouped_experts import nn", False, ["grouped_experts.nn"]),
        ("ops.m_grouped", "from grouped_experts import GroupedMLP", False, ["grouped_experts"]),
        ("ops.m_grouped", "def f():\n    import grouped_experts.nn.function", False, ["grouped_experts.nn.function"]),
        ("ops.reference", "from grouped_experts.ops import m_grouped", False, ["grouped_experts.ops.m_grouped"]),
        ("ops.reference", "from . import m_grouped", False, ["grouped_experts.ops.m_grouped"]),
        ("ops.portable.gemm", "from ..checks import check_float", False, ["grouped_experts.ops.checks"]),
        ("ops.portable", "from .. import checks", True, ["grouped_experts.ops.checks"]),
        ("ops.portable.gemm", "import grouped_experts.ops.hopper", False, ["grouped_experts.ops.hopper"]),
        ("registration", "from grouped_experts.activations import F", False, ["grouped_experts.activations"]),
        ("ops.portable.gemm", "from grouped_experts.ops import reference", False, []),
        ("ops.fused", "from grouped_experts.ops.activation import check_h", False, []),
        ("nn", "from .function import Weights", True, []),
    ],
)
def test_an_arrow_that_runs_up_is_found(module: str, source: str, is_package: bool, found: list[str]) -> None:
    module = f"{PACKAGE}.{module}"
    assert upward(module, list(imports(module, source, is_package))) == found


def test_reference_imports_torch_and_its_own_helpers_only() -> None:
    modules = [module for module in MODULES if layer(module) == "ops.reference"]
    assert len(modules) > 1
    for module in modules:
        foreign = {
            name
            for name in imports_of(module)
            if name.partition(".")[0] not in sys.stdlib_module_names | {"torch"} and layer(name) != "ops.reference"
        }
        assert foreign <= {"grouped_experts.activations", "grouped_experts.rows", "grouped_experts.ops.host_ranges"}


@pytest.mark.parametrize("module", [m for m in MODULES if layer(m) not in {*GPU_LAYERS, "integrations"}])
def test_above_the_kernels_only_torch_is_imported(module: str) -> None:
    names = {name.partition(".")[0] for name in imports_of(module)}
    assert names <= sys.stdlib_module_names | {"torch", PACKAGE}


def test_imports_and_runs_without_triton() -> None:
    run = subprocess.run(
        [sys.executable, SMOKE], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert str(ROOT) in run.stdout
