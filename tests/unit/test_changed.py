"""``make test-changed`` runs what a change reaches, and little else."""

from __future__ import annotations

import re

import changed
import pytest
from changed import ROOT


def names(*files: str, far: int = 3) -> list[str]:
    return [
        path.relative_to(ROOT / "tests").as_posix() for path in changed.chosen({ROOT / file for file in files}, far)
    ]


def test_the_nearest_tests_come_first():
    found = names("vllm_spac/execution/waves.py")
    assert found.index("properties/test_waves.py") < found.index("properties/test_divided_experts.py")
    assert "unit/test_architecture.py" in found and "unit/test_chooser.py" not in found


def test_farther_imports_reach_more():
    assert set(names("vllm_spac/execution/waves.py", far=1)) < set(names("vllm_spac/execution/waves.py", far=3))


def test_a_component_reaches_the_contract_tests_which_find_it_by_name():
    assert "contracts/test_policies.py" in names("vllm_spac/decisions/policies/lfu.py")
    assert "contracts/test_policies.py" not in names("vllm_spac/cli/plan.py")


@pytest.mark.parametrize("file", ["vllm_spac/KNOBS.md", "vllm_spac/USAGE.md"])
def test_a_page_reaches_the_tests_that_name_it_and_those_of_documents(file: str):
    assert "unit/test_documents.py" in names(file)


def test_a_test_reaches_itself_and_a_helper_its_tests():
    assert names("tests/unit/test_changed.py") == ["unit/test_changed.py"]
    assert "properties/test_simulated_slots.py" in names("tests/properties/driven.py")


def test_what_all_tests_share_reaches_all():
    assert len(names("tests/conftest.py")) == len(list(changed.tests()))


@pytest.mark.parametrize("layers", ["host/slots_execution", "device/pointers_execution"])
def test_the_map_says_how_much_serves(layers: str):
    serves = changed.closure(*(ROOT / "vllm_spac" / f"{name}.py" for name in ("runtime", f"execution/{layers}")))
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in serves)
    stated = re.findall(
        rf"{len(serves)} files of ([\d,]+) lines", (ROOT / "vllm_spac" / "README.md").read_text("utf-8")
    )
    assert any(abs(int(number.replace(",", "")) - lines) <= 250 for number in stated), (len(serves), lines)
