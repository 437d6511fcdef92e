"""Records what a pool over pointers would launch on a GPU, on a machine without one.

The launchers run on CPU tensors, each kernel replaced by a recorder; Triton's own binder returns what it would compile.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from vllm_spac.kernels import admit, combine, fetch, grouped_gemm, mailbox
from vllm_spac.kernels.formats import Format

from benchmarks.kernels.compiled import KERNELS, Recorder
from vllm_spac import components
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.decisions.predictor_file import Identity, PredictorFile, kinds
from vllm_spac.decisions.predictors._trained import Maps, Sizes
from vllm_spac.execution.address_table import Kernels
from vllm_spac.execution.base import ExecutionContext
from vllm_spac.execution.device import cpu_share, pointers_execution
from vllm_spac.execution.device.cpu_share import MailKernels
from vllm_spac.execution.device.pointers_execution import PointerExecution
from vllm_spac.execution.exchange import CallerStream

D, FF = 48, 32  # multiples of 16 elements, as in all models


class Device(TorchDispatchMode):
    """Every launch while it is entered, in order: names of kernels, and of torch's operations that are no views.

    Attributes:
        launched: names.
        keys: of kernels, the name and what Triton compiles for.
        ran: of torch's operations, the name and the types and sizes of its tensors: a library may choose by them.
        cold: keys that a capture was the first to launch, of either.
        capturing: whether launches go into a graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []
        self.keys: set[tuple] = set()
        self.ran: set[tuple] = set()
        self.cold: list[tuple] = []
        self.capturing = False
        self._binders: dict[str, Callable] = {}

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        """Record the kernels, and let pools that are made from now on launch them."""
        backend = make_backend(GPUTarget("cuda", 90, 32))
        for name, (module, attribute) in KERNELS.items():
            kernel = getattr(module, attribute)
            self._binders[name] = create_function_from_signature(kernel.signature, kernel.params, backend)
            patch.setattr(module, attribute, Recorder(kernel, lambda *given, name=name: self._launch(name, *given)))
        launchers = (
            *(grouped_gemm.grouped_gemm, admit.admit, mailbox.wait_for_experts, fetch.read_early),
            grouped_gemm.rows_to_compile,
        )
        patch.setattr(pointers_execution, "kernels_for", lambda device: Kernels(*launchers))
        mail = MailKernels(mailbox.wait_for_answer, combine.combine)
        patch.setattr(cpu_share, "mail_kernels_for", lambda device: mail)
        patch.setattr(pointers_execution, "capturing", lambda tensor: self.capturing)
        patch.setattr(
            pointers_execution, "streams", lambda device: (CallerStream(), CallerStream())
        )  # this mode is a thread's

    def _launch(self, name: str, arguments: tuple, named: dict) -> None:
        self.launched.append(name)
        _, specialization, options = self._binders[name](*arguments, **named)
        key = (name, str(specialization), str(options))
        if self.capturing and key not in self.keys:
            self.cold.append(key)
        self.keys.add(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if not func.is_view and not name.startswith(("aten::empty", "aten::new_empty", "aten::_unsafe_view")):
            self.launched.append(name)
            given = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, torch.Tensor)]
            key = name, *((value.dtype, tuple(value.shape)) for value in given)
            if self.capturing and key not in self.ran:
                self.cold.append(key)
            self.ran.add(key)
        return result


def pool(
    experts: int, top_k: int, rows: int, slots: float = 0.25, layers: int = 2, packed: Format | None = None, **options
) -> PointerExecution:
    """Filled with so many layers of tiny experts, in float32 or packed; ``slots`` is a share."""
    sizes = {"w13": (2 * FF, D), "w2": (D, FF)}
    if packed is None:
        specs = {f"{name}_weight": TensorSpec(size, torch.float32) for name, size in sizes.items()}
    else:
        specs = {f"{name}_weight": TensorSpec(packed.code_shape(*size), torch.uint8) for name, size in sizes.items()}
        scales = {name: packed.scale_shape(*size) for name, size in sizes.items()}
        specs |= {f"{name}_scale": TensorSpec(size, packed.scale_dtype) for name, size in scales.items()}
    shape = MoEShape(tuple(map(str, range(layers))), experts, top_k, specs, packed)
    count = max(top_k, int(slots * shape.total))
    store = components.build("stores", "host" if count < shape.total else "resident", shape=shape, fingerprint="")
    blank = {name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
    for key in range(shape.total):
        store.put(key, blank)
    tensors = getattr(store, "tensors", None) or {
        name: torch.zeros(count, *spec.shape, dtype=spec.dtype) for name, spec in specs.items()
    }
    policy = components.build("policies", "lru")
    made = PointerExecution(ExecutionContext(shape, count, policy, store, tensors, path="host", rows=rows, **options))
    for _ in made.fill():
        pass
    return made


def predictor(name: str, experts: int, top_k: int, layers: int = 2) -> Maps:
    """Looks one layer ahead, with tensors of zeros."""
    sizes = Sizes(layers, experts, top_k, D, 1)
    tensors = {
        part: {key: torch.zeros(size, dtype=dtype) for key, (dtype, size) in kinds()[part].specs(sizes).items()}
        for part in ("gate", "quasi_hidden")
    }
    names = tuple(map(str, range(layers)))
    found = PredictorFile(Identity("f", "m", names), sizes, 1, tensors, {}).build(name)
    assert isinstance(found, Maps)
    return found


def forward(pool: PointerExecution, rows: int) -> None:
    """All layers, over rows that come as vLLM's routers give them."""
    k = pool.shape.top_k
    dtype = torch.float32 if pool.shape.packed is None else torch.bfloat16
    x, weights = torch.zeros(rows, D, dtype=dtype), torch.ones(rows, k)
    ids = torch.zeros(rows, k, dtype=torch.int32)
    for layer in range(len(pool.shape.layers)):
        pool.run(layer, x, weights, ids, "silu", torch.empty_like(x))
