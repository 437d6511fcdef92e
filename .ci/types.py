"""Checks the types of the project with mypy, ``triton_kernels/`` under the name by which it is imported.

    .venv/bin/python .ci/types.py [OPTIONS OF MYPY]

mypy takes a module's name from its folder, and setup.py installs ``triton_kernels/`` as ``vllm_spac.kernels``, so each
file is named here. Settings are in pyproject.toml.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from mypy import build, main
from mypy.errors import CompileError
from mypy.modulefinder import BuildSource

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"vllm_spac": "vllm_spac", "triton_kernels": "vllm_spac.kernels", "benchmarks": "benchmarks"}


def sources() -> Iterator[BuildSource]:
    """Yields every file with the name of its module."""
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([package, *(part for part in parts if part != "__init__")])
            yield BuildSource(str(path.relative_to(ROOT)), name)


def check_types(options: list[str]) -> int:
    """Prints the type errors; returns the exit status."""
    _, settings = main.process_options([*options, "-c", ""])
    try:
        errors = build.build(list(sources()), settings).errors
    except CompileError as error:  # e.g. a syntax error
        errors = error.messages
    print(*errors, f"types: {len(errors)} lines of errors" if errors else "types: no errors", sep="\n")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(check_types(sys.argv[1:]))
