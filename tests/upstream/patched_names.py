"""Checks the plugin's table of patches against the sources of vLLM's wheels, without installing them.

    python tests/upstream/patched_names.py [VERSION ...]

Downloads each wheel once, with pip, into ``.cache/wheels``. Prints every patched name or import from vLLM that a
version lacks, and patched functions that differ from the first version's. Ends with 1 if a name is missing.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from sources import Sources, parameters  # noqa: E402

from vllm_spac.integration.hooks import patches  # noqa: E402
from vllm_spac.integration.hooks.patches import Patch  # noqa: E402

WHEELS = ROOT / ".cache" / "wheels"
VERSIONS = ("0.32.0", "0.33.0")  # the newest of each that ``device.SUPPORTED`` allows


def wheel(version: str) -> Path:
    """Returns the wheel of a vLLM for CUDA on Linux, downloaded if it is not there."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    if not (there := sorted(WHEELS.glob(f"vllm-{version}-*.whl"))):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--dest",
            str(WHEELS),
        ]
        subprocess.run([*command, f"vllm=={version}"], check=True)
        there = sorted(WHEELS.glob(f"vllm-{version}-*.whl"))
    return there[0]


def problem(sources: Sources, patch: Patch) -> str | None:
    """Why ``patches.require_names`` would refuse this row; None if it would not."""
    module, _, path = patch.target.partition(":")
    function = sources.function(module, path)
    if function is None:
        is_value = not patch.takes and any(True for _ in sources.find(module, path))
        return None if is_value else "is missing"
    given = parameters(function)
    if patch.first and given[: len(patch.takes)] != patch.takes:
        return f"takes {', '.join(given)}"
    if absent := set(patch.takes) - set(given):
        return f"does not take {', '.join(sorted(absent))}"
    return None


def missing_names(sources: Sources) -> Iterator[str]:
    """Yields what the plugin needs of vLLM and these sources lack: patched names, and names that it imports."""
    for patch in patches.PATCHES:
        if (found := problem(sources, patch)) is not None:
            yield f"{patch.target} {found}"
    for module, name in sorted(imported()):
        whole = sources.module(f"{module}.{name}") is not None
        if not whole and not any(True for _ in sources.find(module, name)):
            yield f"{module}:{name} is missing"


def imported() -> set[tuple[str, str]]:
    """(module, name) of every import from vLLM in the plugin's sources."""
    found = set()
    for file in Path(patches.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm" and not node.level:
                found |= {(str(node.module), alias.name) for alias in node.names}
    return found


def changes(before: Sources, after: Sources) -> Iterator[str]:
    """Yields what became of the patched functions that both have: other parameters, or other code to read again."""
    for patch in patches.PATCHES:
        module, _, path = patch.target.partition(":")
        old, new = before.function(module, path), after.function(module, path)
        if old is None or new is None:
            continue
        if parameters(old) != parameters(new):
            yield f"{patch.target}: ({', '.join(parameters(old))}) became ({', '.join(parameters(new))})"
        elif ast.dump(old) != ast.dump(new):
            yield f"{patch.target}: the same parameters, other code"


def main(versions: Annotated[list[str] | None, typer.Argument(help="of vLLM")] = None) -> None:
    """Check the table of patches against the sources of vLLM's wheels."""
    asked = versions or list(VERSIONS)
    read = {version: Sources(wheel(version)) for version in asked}
    failed = False
    for version, sources in read.items():
        lacking = list(missing_names(sources))
        failed |= bool(lacking)
        print(
            f"vLLM {version}: {len(patches.PATCHES)} patched names, {len(imported())} imports, {len(lacking)} missing"
        )
        print(*(f"  {line}" for line in lacking), sep="\n", end="\n" if lacking else "")
        for line in changes(read[asked[0]], sources):
            print(f"  since {asked[0]}: {line}")
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    typer.run(main)
