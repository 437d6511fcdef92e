"""Documents that would otherwise drift from the code."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from vllm_spac.cli import knobs
from vllm_spac.config import SpacConfig

ROOT = Path(__file__).parents[2]


def test_knobs_are_as_the_configuration_has_them() -> None:
    """Otherwise: `vllm-spac knobs --markdown > vllm_spac/KNOBS.md`."""
    text = (ROOT / "vllm_spac" / "KNOBS.md").read_text(encoding="utf-8")
    assert text == knobs.document()
    assert all(f"| `{name}` |" in text for name in SpacConfig.model_fields)


def test_public_names_can_be_imported() -> None:
    """Each `package.module:name` of the section *Public names*."""
    text = (ROOT / "vllm_spac" / "README.md").read_text(encoding="utf-8")
    section = text.partition("## Public names")[2].partition("\n## ")[0]
    names = re.findall(r"`(vllm_spac[\w.]*):(\w+)`", section)
    assert len(names) > 10
    for module, name in names:
        assert hasattr(importlib.import_module(module), name), f"{module}:{name}"


def test_links_lead_somewhere() -> None:
    for path in (*ROOT.glob("*.md"), *(ROOT / "vllm_spac").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")):
        for target, heading in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", path.read_text(encoding="utf-8")):
            there = path.parent / target if target else path
            assert there.exists(), f"{path.name} links to {target}"
            if heading:
                assert heading in _headings(there), f"{path.name} links to {target}#{heading}"


def _headings(path: Path) -> list[str]:
    """Returns the names by which links refer to the headings of a Markdown file."""
    found = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in found]
