"""The compiled library of CPU experts, ``source/``: its structures, its calls, and why it is missing where it is.

Calls release the interpreter's lock. What a structure points at must stay alive as long as it is used: the classes here
keep it. Nothing is kept of experts but in a ``Layer``, which is made for each call, or by who keeps them.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from ctypes import POINTER, byref, c_double, c_int, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from vllm_spac.errors import ConfigError, SpacError
from vllm_spac.kernels.formats import ACTIVATIONS, Format
from vllm_spac.kernels.types import Mail

logger = logging.getLogger("vllm.spac")

ISAS = ("plain", "avx2", "avx512", "avx512_bf16", "neon")  # as ``enum Isa`` has them, later ones are faster
PATIENCE = 5.0  # seconds after which a thread of the pool is given up that has not finished its tile

_CODES = ("float32", "float16", "bfloat16", "int8", "e4m3", "int4", "e2m1")
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_REFUSALS = (
    "", "the format is not one of its own", "a tensor of the experts is smaller than their shapes say, or missing",
    "an id is not an expert of the layer", "there is no memory for its intermediate results",
    "the processor lacks the instruction set", "its threads belong to another process, or are closed",
    f"one of its threads has not finished within {PATIENCE:g} s",
)  # fmt: skip
_STUCK = 7
_given_up: list[Any] = []  # what threads that did not finish may read when they go on
_SPEC = ("codes", "group", "rows", "zeros", "activations", "dtype", "activation", "hidden", "intermediate", "experts")
_TENSORS = ("w13_weight", "w2_weight", "w13_scale", "w2_scale", "w13_bias", "w2_bias")


class Spec(ctypes.Structure):
    """What a layer's experts are."""

    _fields_ = [(name, c_int32) for name in _SPEC]


class Table(ctypes.Structure):
    """The address of each expert's part of a tensor, and its bytes."""

    _fields_ = [("at", POINTER(c_uint64)), ("bytes", c_uint64)]


class Tables(ctypes.Structure):
    """The tensors of a layer's experts; whoever makes it keeps what they point at."""

    _fields_ = [(name, Table) for name in _TENSORS]


class _Request(ctypes.Structure):
    _fields_ = [
        ("spec", POINTER(Spec)), ("layer", POINTER(Tables)), ("x", c_void_p), ("weights", c_void_p),
        ("ids", c_void_p), ("rows", c_int32), ("top_k", c_int32), ("out", c_void_p),
    ]  # fmt: skip


class _Mail(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("asked", "answered", "head", "ids", "weights", "x", "results")),
        ("rows", c_int32), ("top_k", c_int32),
    ]  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL:
    """Loads the library; ``ConfigError``: it was not built with this installation, or cannot be loaded here."""
    try:
        loaded = ctypes.CDLL(importlib.import_module(f"{__package__}._simd").__file__)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"spac: the compiled kernels for CPU experts are missing ({error}): they are built when vllm_spac is "
            "installed, where there is a C compiler: install one, then vllm_spac again"
        ) from error
    calls: dict[str, tuple[Any, list[Any]]] = {
        "spac_isa": (c_int, [c_int]),
        "spac_pool": (c_void_p, [c_int, POINTER(c_int32), c_int, c_double]),
        "spac_run": (c_int, [c_void_p, POINTER(_Request)]),
        "spac_close_pool": (None, [c_void_p]),
        "spac_mailbox": (c_void_p, [c_void_p, POINTER(_Mail), POINTER(Spec), POINTER(Tables), c_int, c_int]),
        "spac_wake": (None, [c_void_p]),
        "spac_refused": (c_int, [c_void_p]),
        "spac_answers": (c_int64, [c_void_p]),
        "spac_close_mailbox": (None, [c_void_p]),
    }
    for name, (result, arguments) in calls.items():
        call = getattr(loaded, name)
        call.restype, call.argtypes = result, arguments
    return loaded


def missing() -> str:
    """Returns why the library cannot be used; empty if it can."""
    try:
        library()
    except ConfigError as error:
        return str(error)
    return ""


def isas() -> tuple[str, ...]:
    """Returns the instruction sets that this processor has, the fastest one last; ``plain`` is C without any."""
    return tuple(name for number, name in enumerate(ISAS) if library().spac_isa(number))


def spec_of(
    dtype: torch.dtype, activation: str, hidden: int, intermediate: int, experts: int, kind: Format | None
) -> Spec:
    """Describes experts to the library; ``dtype`` is of rows, and of plain weights."""
    codes = _DTYPES[dtype] if kind is None else _CODES.index(kind.codes)
    group, rows, zeros, activations = (
        (0, 1, False, None) if kind is None else (kind.group, kind.rows, kind.zeros, kind.activations)
    )
    rounding = -1 if activations is None else activations
    number = ACTIVATIONS.index(activation)
    return Spec(codes, group, rows, zeros, rounding, _DTYPES[dtype], number, hidden, intermediate, experts)


class Layer:
    """The experts of a layer, as the library takes them.

    Args:
        experts: name -> [experts, ...] on the CPU, each expert's part contiguous.
    """

    def __init__(self, experts: Mapping[str, Tensor]) -> None:
        tables = [_table(experts.get(name)) for name in _TENSORS]
        self._kept = tuple(experts.values()), tables
        self.structure = Tables(*tables)


def _table(tensor: Tensor | None) -> Table:
    if tensor is None:
        return Table(None, 0)
    assert tensor.is_cpu
    return _addresses(tensor.data_ptr(), tensor.element_size(), tensor.shape, tensor.stride())


@functools.lru_cache(1024)  # numbers alone: what has gone from these addresses is no harm, and keeps no memory
def _addresses(first: int, size: int, shape: Sequence[int], stride: Sequence[int]) -> Table:
    part, steps = math.prod(shape[1:]), [math.prod(shape[i + 1 :]) for i in range(1, len(shape))]
    assert all(n == 1 or step == own for n, step, own in zip(shape[1:], stride[1:], steps, strict=True)), "contiguous"
    return Table((c_uint64 * shape[0])(*(first + stride[0] * size * i for i in range(shape[0]))), part * size)


class Pool:
    """Threads that compute requests; the thread that calls ``run`` is one of them. Several may call, one after another.

    A thread that does not finish (a debugger has stopped it, or its processor is another's) is given up, and a request
    computed again by new threads, one fewer: it costs time, and no engine.

    Args:
        cpus: one for each thread, -1: any; the first is the caller's, which is not pinned.
        isa: of ``isas()``.
    """

    def __init__(self, cpus: Sequence[int], isa: str) -> None:
        self._library, self._lock = library(), threading.Lock()
        self.isa = isa
        self._start(tuple(cpus))

    def _start(self, cpus: tuple[int, ...]) -> None:
        self.cpus = cpus
        numbers = (c_int32 * len(cpus))(*cpus)
        self.handle = self._library.spac_pool(len(cpus), numbers, ISAS.index(self.isa), PATIENCE)
        if not self.handle:
            raise SpacError(f"spac: {len(cpus)} threads that compute CPU experts with {self.isa} could not be started")
        self._ends = weakref.finalize(self, self._library.spac_close_pool, self.handle)

    def run(self, spec: Spec, tables: Tables, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Computes [rows, hidden] float32; arguments as of ``CpuExperts.run``, ids int32.

        Raises:
            SpacError: the library refused the request.
        """
        assert x.is_contiguous() and weights.is_contiguous() and ids.is_contiguous()
        assert ids.dtype == torch.int32 and weights.dtype == torch.float32 and ids.shape == weights.shape
        assert x.shape == (len(ids), spec.hidden) and _DTYPES[x.dtype] == spec.dtype
        out = torch.empty(x.shape, dtype=torch.float32)
        request = _Request(
            ctypes.pointer(spec), ctypes.pointer(tables), x.data_ptr(), weights.data_ptr(), ids.data_ptr(),
            *ids.shape, out.data_ptr(),
        )  # fmt: skip
        with self._lock:
            while (refusal := self._library.spac_run(self.handle, byref(request))) == _STUCK:
                _given_up.append((tables, x))
                logger.warning(
                    "spac: a thread that computes experts has not finished its part within %g s: it is given up, and "
                    "new threads take the place of all, one fewer than %s",
                    PATIENCE,
                    len(self.cpus),
                )
                self._ends()
                self._start(self.cpus[:-1])
        if (error := refused(refusal)) is not None:
            raise error
        return out

    def close(self) -> None:
        """Ends the threads, after the request that they compute; later ones are refused."""
        with self._lock:
            self.handle = None
            self._ends()


class Server:
    """Answers the requests in a mailbox, as ``base.MailServer``; ``pool`` serves nobody else meanwhile."""

    def __init__(self, pool: Pool, mail: Mail, spec: Spec, layers: Sequence[Layer]) -> None:
        self._library, self._kept = library(), (pool, mail, layers)
        tensors = mail.asked, mail.answered, mail.head, mail.ids, mail.weights, mail.x, mail.results
        assert all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in tensors)
        structure = _Mail(*(tensor.data_ptr() for tensor in tensors), *mail.ids.shape)
        of_layers = (Tables * len(layers))(*(layer.structure for layer in layers))
        self._handle = self._library.spac_mailbox(
            pool.handle, byref(structure), byref(spec), of_layers, len(layers), pool.cpus[0]
        )
        if not self._handle:
            raise SpacError("spac: the thread that answers requests of layers could not be started")
        self._ends = weakref.finalize(self, self._library.spac_close_mailbox, self._handle)

    def wake(self) -> None:
        """A step may make requests soon."""
        if self._handle:
            self._library.spac_wake(self._handle)

    def failure(self) -> SpacError | None:
        """Returns why it answers no more; None while it does."""
        return refused(self._library.spac_refused(self._handle)) if self._handle else None

    @property
    def answers(self) -> int:
        """Requests answered so far; 0 once it is closed."""
        return self._library.spac_answers(self._handle) if self._handle else 0

    def close(self) -> None:
        """Ends after the request that it computes."""
        if self._handle and self._library.spac_refused(self._handle) == _STUCK:
            _given_up.append(self._kept)
        self._handle = None
        self._ends()


def refused(refusal: int) -> SpacError | None:
    """Returns the error of a number that the library returned; None for 0."""
    return SpacError(f"spac: CPU experts: {_REFUSALS[refusal]}") if refusal else None
