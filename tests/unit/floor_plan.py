"""The order of the folders: ``test_architecture`` checks imports by it, and the README's map is rendered from it.

``python tests/unit/floor_plan.py`` renders the map again.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vllm_spac"
KERNELS = ROOT / "triton_kernels"
README = PACKAGE / "README.md"
MOST_FILES = 12  # in a folder

# Between two places, imports go to a lower one. A place is a folder, or a file of the package itself.
ORDER = (
    "cli",
    "tools",
    "tools.selftest",
    "tools.tuning",
    "tools.planning",
    "tools.traces",
    "tools.evaluation",
    "tools.machine",
    "integration",
    "integration.serving",
    "integration.loading",
    "integration.stepping.v1",
    "integration.stepping.v2",
    "integration.stepping",
    "integration.layers",
    "integration.hooks",
    "methods",
    "methods.od_moe",
    "methods.trees",
    "methods.speculating_experts",
    "methods.sp_moe",
    "methods.moe_spac",
    "methods.moe_spec",
    "runtime",
    "execution.device",
    "execution.host",
    "execution",
    "cache",
    "cpu_kernels",
    "config",
    "decisions",
    "decisions.guard",
    "decisions.balancers",
    "decisions.policies",
    "decisions.predictors",
    "storage",
    "storage.checkpoint",
    "components",
    "recording",
    "system",
    "errors",
    "core",
    "kernels",
)


def _path(place: str) -> Path:
    return KERNELS if place == "kernels" else PACKAGE / place.replace(".", "/")


def description(place: str) -> str:
    """The first paragraph of the place's docstring, in one line."""
    path = _path(place)
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ").replace("``", "`")


def files(place: str) -> list[str]:
    """Names of the place's modules, sorted; [] for a file."""
    return sorted(path.stem for path in _path(place).glob("*.py") if path.stem != "__init__")


def lines() -> list[str]:
    """The map, as a table in Markdown: the highest place first."""
    rows = ["| place | what it is | modules |", "|---|---|---|"]
    for place in ORDER:
        name = place.replace(".", "/")
        shown = f"`../triton_kernels/`, imported as `vllm_spac.{name}`" if place == "kernels" else f"`{name}/`"
        if not (modules := files(place)) and not _path(place).is_dir():
            shown = f"`{name}.py`"
        rows.append(f"| {shown} | {description(place)} | {' '.join(f'`{each}`' for each in modules)} |")
    return rows


def split(text: str) -> tuple[str, str, str]:
    """The README before its map, the map, and after it."""
    first, last = lines()[:2], "\n\n"
    start = text.index("\n".join(first))
    end = text.index(last, start)
    return text[:start], text[start:end], text[end:]


if __name__ == "__main__":
    before, _, after = split(README.read_text(encoding="utf-8"))
    README.write_text(before + "\n".join(lines()) + after, encoding="utf-8")
