"""What a stretch of code would launch on a GPU: its kernels, and torch's operators that are no views and take no memory
alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

# Of aten: they launch nothing.
FREE = {
    *("view", "_unsafe_view", "slice", "split", "split_with_sizes", "select", "unsqueeze", "squeeze", "expand"),
    *("as_strided", "t", "transpose", "permute", "detach", "alias", "unbind", "lift_fresh", "_reshape_alias"),
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"),
    # As tests fill what is born (``conftest``).
    "fill_",
}


@contextmanager
def launches() -> Iterator[list[str]]:
    """The names of what is launched inside. Kernels run, and what the interpreter does for them is not counted."""
    found: list[str] = []
    inside = False
    usual = InterpretedFunction.run

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            if not inside and name not in FREE:
                found.append(name)
            return func(*args, **(kwargs or {}))

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal inside
        found.append(kernel.__name__)
        inside = True
        try:
            usual(kernel, *args, **kwargs)
        finally:
            inside = False

    with pytest.MonkeyPatch.context() as patch, Operators():
        patch.setattr(InterpretedFunction, "run", run)
        yield found
