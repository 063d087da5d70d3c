"""What the package promises by its names and docstrings."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

import grouped_experts
from grouped_experts import ops

OPS = [name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))]
SHAPE = re.compile(r"\((T|E|C)(,| \*)[^()]*\)")  # (T, H), (E,), (T * k, H)


def test_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+([abrc.]+(dev|post)?\d+)?", grouped_experts.__version__)


def test_is_marked_as_typed() -> None:
    assert (Path(grouped_experts.__path__[0]) / "py.typed").is_file()


@pytest.mark.parametrize("package", ["grouped_experts", "grouped_experts.nn", "grouped_experts.ops"])
def test_all_names_exist_once(package: str) -> None:
    module = import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


@pytest.mark.parametrize("name", OPS)
def test_op_names_its_arguments_shapes_and_errors(name: str) -> None:
    function = getattr(ops, name)
    doc = inspect.getdoc(function) or ""
    assert SHAPE.search(doc), "no shape in the docstring"
    said = doc + "".join(inspect.getdoc(getattr(ops, other)) or "" for other in OPS if f"`{other}`" in doc)
    unnamed = [p for p in inspect.signature(function).parameters if not re.search(rf"\b{re.escape(p)}\b", said)]
    assert unnamed == []
    assert re.search(r"\b[Rr]aises?\b", doc)
