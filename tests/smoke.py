"""Imports grouped_experts where triton looks absent, and runs the layer once on the CPU.

A script, not a test: `make wheel` runs it on the installed wheel, `test_architecture.py` on the checkout.
"""

import sys


class NoTriton:
    """A finder for `sys.meta_path` to which triton is not installed, and which notes who asked for it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "triton":
            self.asked.append(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def main() -> None:
    no_triton = NoTriton()
    sys.meta_path.insert(0, no_triton)
    import torch

    before = top_level_modules()
    no_triton.asked.clear()
    import grouped_experts

    # Not even through torch: torch._dynamo asks for triton and takes a second to load.
    new = top_level_modules() - before - set(sys.stdlib_module_names)
    assert new == {"grouped_experts"}, f"importing grouped_experts imported {sorted(new)}"
    assert not no_triton.asked, f"importing grouped_experts asked for {no_triton.asked}"

    mlp = grouped_experts.GroupedMLP(8, 4, 3)
    x = torch.randn(5, 8, requires_grad=True)
    mlp(x, [2, 0, 3], torch.rand(5)).sum().backward()
    assert x.grad is not None
    assert mlp.fc1_weight.grad is not None
    print(f"grouped_experts {grouped_experts.__version__} from {grouped_experts.__path__[0]}")


def top_level_modules() -> set[str]:
    return {name.partition(".")[0] for name in sys.modules}


if __name__ == "__main__":
    main()
