"""Run mypy over the project, with ``triton_kernels/`` under the name by which it is imported.

    .venv/bin/python .ci/types.py [mypy's options]

mypy names a module by its folder, and setup.py installs ``triton_kernels/`` as ``vllm_spac.kernels``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mypy import build, main
from mypy.errors import CompileError
from mypy.modulefinder import BuildSource

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"vllm_spac": "vllm_spac", "triton_kernels": "vllm_spac.kernels", "benchmarks": "benchmarks"}


def sources() -> list[BuildSource]:
    found = []
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([package, *(part for part in parts if part != "__init__")])
            found.append(BuildSource(str(path.relative_to(ROOT)), name))
    return found


def check() -> int:
    _, options = main.process_options([*sys.argv[1:], "-c", ""])
    try:
        errors = build.build(sources(), options).errors
    except CompileError as error:
        errors = error.messages
    print(*errors, sep="\n")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(check())
