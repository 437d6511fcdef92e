"""Emulates a CUDA graph on a CPU: device operations are recorded with their memory and run on it again.

No Python of the captured code runs in a replay, and scalars stay constant: a host decision inside a capture is repeated
in every replay, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READS = {"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::is_nonzero", "aten::equal"}


class Graph(TorchDispatchMode):
    """Captures while it is entered. What reads a tensor on the host raises, as in a capture on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._launches: list[Callable[[], object]] = []
        self._made: list[torch.Tensor] = []  # what the capture allocated stays where it is
        self.capturing = False

    def __enter__(self):
        self.capturing = True
        return super().__enter__()

    def __exit__(self, *error):
        self.capturing = False
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        if name in _READS:
            raise RuntimeError(f"{name} reads what a launch has not written yet: not in a capture")
        result = func(*args, **kwargs)
        made, given = _tensors(result), {_storage(t) for t in _tensors((args, kwargs))}
        if func._schema.is_mutable:
            self._launches.append(lambda: func(*args, **kwargs))
        elif all(_storage(t) in given for t in made) or name.startswith("aten::empty"):
            self._made += made  # a view, or memory that something is written to
        else:
            self._made += made
            self._launches.append(lambda: _overwrite(made, _tensors(func(*args, **kwargs))))
        return result

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` stands for one kernel: what it decides, it decides on the device; it is run again as a whole."""

        def launch(*args: Any, **kwargs: Any) -> Any:
            if self.capturing:
                self._launches.append(lambda: function(*args, **kwargs))
                return kwargs.get("out")
            return function(*args, **kwargs)

        return launch

    def replay(self) -> None:
        for launch in self._launches:
            launch()


def _overwrite(old: list[torch.Tensor], new: list[torch.Tensor]) -> None:
    for tensor, value in zip(old, new, strict=True):
        tensor.copy_(value)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
