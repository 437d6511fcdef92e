"""The compiled CPU experts of 64-bit Arm, in an emulator: NEON beside plain C, and both beside the torch twin."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Iterator
from ctypes import sizeof
from pathlib import Path

import pytest
import torch
from simd_cases import EXPERTS, TOP_K, Case, cases
from test_simd_source import HARNESS, SOURCE
from torch import Tensor
from vllm_spac.kernels.formats import Format

from vllm_spac.cpu_kernels._library import _TENSORS, ACTIVATIONS, ISAS, Spec, spec_of

COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The command that runs the harness."""
    if COMPILER is None or EMULATOR is None:
        pytest.skip("there is no compiler for 64-bit Arm with its emulator (gcc-aarch64-linux-gnu, qemu-user)")
    folder = tmp_path_factory.mktemp("arm")
    options = ["-std=gnu11", "-O2", "-static", "-Wall", "-Wextra", "-Werror"]
    for command in (
        [*options, "-Dcompute=computed", "-c", SOURCE / "layer.c", "-o", folder / "layer.o"],
        [*options, f"-I{SOURCE}", SOURCE / "products.c", SOURCE / "pool.c", folder / "layer.o", HARNESS]
        + ["-o", folder / "harness", "-lm", "-pthread"],
    ):
        subprocess.run([COMPILER, *map(str, command)], check=True)
    return [Path(EMULATOR), folder / "harness"]


@pytest.mark.parametrize("part", ["formats", "each product", "refusals"])
def test_the_harness_finds_nothing(harness: list[Path], part: str) -> None:
    done = subprocess.run([*harness, part], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def written(case: Case, isa: str, request: tuple[Tensor, Tensor, Tensor]) -> Iterator[bytes]:
    """A request as the harness reads it."""

    def raw(tensor: Tensor) -> bytes:
        return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()

    x, weights, ids = request
    spec = spec_of(case.dtype, case.activation, case.hidden, case.intermediate, EXPERTS, case.kind)
    assert sizeof(spec) == sizeof(Spec)
    yield struct.pack("4i", ISAS.index(isa), 2, len(x), TOP_K)
    yield bytes(spec)
    found = [case.experts.get(name) for name in _TENSORS]
    yield struct.pack("6Q", *(0 if tensor is None else tensor[0].nbytes for tensor in found))
    yield from (raw(tensor) for tensor in found if tensor is not None)
    yield from map(raw, (x, weights, ids))


@pytest.mark.parametrize("isa", ["plain", "neon"])
@pytest.mark.parametrize("kind, dtype", list(cases()))
def test_every_format_as_the_twin(harness: list[Path], kind: Format | None, dtype: torch.dtype, isa: str) -> None:
    for number, (hidden, intermediate, rows) in enumerate([(96, 160, 1), (416, 96, 7)]):
        case = Case(kind, hidden, intermediate, dtype, ACTIVATIONS[number], biased=number == 1)
        request = case.request(rows)
        asked = b"".join(written(case, isa, request))
        done = subprocess.run([*harness, "twin"], input=asked, capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout or done.stderr
        found = torch.frombuffer(bytearray(done.stdout), dtype=torch.float32).view(request[0].shape)
        case.check(found, case.twin(*request))
