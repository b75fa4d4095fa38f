"""Which operators of torch a computation calls, and which devices have them."""

import functools
from pathlib import Path

import torchgen
import yaml
from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """The names of the operators that are called inside of this context."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))

    def missing_on_apple_s_gpus(self) -> set[str]:
        """Those that torch would refuse there. Attention has other operators on each device."""
        return {name for name in self.names if not runs_on_mps(name) and "attention" not in name}


def runs_on_mps(name: str) -> bool:
    function = functions()[name]
    if "structured_delegate" in function:
        return runs_on_mps(function["structured_delegate"])
    dispatch = function.get("dispatch", {"CompositeImplicitAutograd": name})
    keys = [key.strip() for several in dispatch for key in several.split(",")]
    return any(key == "MPS" or key.startswith("Composite") for key in keys)


@functools.cache
def functions() -> dict[str, dict]:
    path = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    content = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {function["func"].split("(")[0]: function for function in content}
