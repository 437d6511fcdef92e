"""The table of MoE architectures: complete, of the installed vLLM, and as its JSON says."""

from __future__ import annotations

import families
import moe_architectures
import pytest
import tiny_models
import untried
import zoo
from moe_architectures import Architecture

BUGS = ("differs", "fails")


@pytest.fixture(scope="module")
def found() -> list[Architecture]:
    return moe_architectures.find()


def test_the_table_is_of_the_installed_vllm() -> None:
    """Otherwise: `python tests/upstream/families.py`."""
    import vllm

    assert families.read()["vllm"] == vllm.__version__


def test_the_table_names_every_moe_architecture(found: list[Architecture]) -> None:
    text = families.TABLE.read_text(encoding="utf-8")
    assert [one.name for one in found if f"`{one.name}`" not in text] == []
    assert text == families.document(found, families.read())


def test_known_architectures_are_found_and_dense_ones_are_not(found: list[Architecture]) -> None:
    names = {one.name for one in found}
    assert {"Qwen3MoeForCausalLM", "DeepseekV4ForCausalLM", "TransformersMoEForCausalLM", "DeepSeekMTPModel"} <= names
    assert not {"LlamaForCausalLM", "Qwen3ForCausalLM", "BertModel", "MedusaModel"} & names


def test_each_tiny_checkpoint_is_of_an_architecture_of_this_vllm(found: list[Architecture]) -> None:
    assert set(tiny_models.TINY) <= {one.name for one in found}
    assert {tiny.family for tiny in tiny_models.TINY.values() if tiny.family} == set(zoo.FAMILIES)


def test_reasons_are_of_architectures_without_a_tiny_checkpoint(found: list[Architecture]) -> None:
    assert set(untried.REASONS) <= {one.name for one in found}
    assert not set(untried.REASONS) & set(tiny_models.TINY)


def test_no_row_is_a_bug(found: list[Architecture]) -> None:
    bugs = {one.name: detail for one, verdict, detail in families.rows(found, families.read()) if verdict in BUGS}
    assert bugs == {}


def test_families_with_parity_tests_are_served(found: list[Architecture]) -> None:
    tested = {name for name, tiny in tiny_models.TINY.items() if tiny.family}
    verdicts = {one.name: verdict for one, verdict, _ in families.rows(found, families.read()) if one.name in tested}
    assert set(verdicts) == tested and set(verdicts.values()) <= {"served", "pending"}


@pytest.mark.parametrize(
    ("out", "err", "verdict"),
    [
        ('{"stage": "checkpoint"}\n', "ValueError: no\n", ("checkpoint", "ValueError: no")),
        (
            '{"stage": "stock"}\n',
            "ImportError: no CPU\nValueError: X failed to be inspected\n",
            ("stock", "ImportError: no CPU"),
        ),
        (
            '{"stage": "stock"}\n',
            '[rank0]:     assert scoring == "softmax"\n[rank0]:            ^^^^\n[rank0]: AssertionError\n',
            ("stock", 'AssertionError: assert scoring == "softmax"'),
        ),
        (
            '{"stage": "stock"}\n',
            "(MainProcess pid=7) ERROR 11-24 07:09:41 [registry.py:1120] ImportError: no CPU\n"
            "[rank0]: [rank0]: ValueError: X failed to be inspected\n",
            ("stock", "ImportError: no CPU"),
        ),
        ('{"stage": "stock"}\n', "KeyError: 'gate'\n", ("checkpoint", "KeyError: 'gate'")),
        (
            '{"stage": "plugin"}\n',
            "vllm_spac.errors.UnsupportedError: spac: not this\n",
            ("refused", "not this"),
        ),
        ('{"stage": "stock"}\n{"stage": "plugin"}\n', "", ("fails", "exit status -11")),
        (
            '{"stage": "plugin"}\n{"verdict": "refused", "detail": "at /tmp/x/a"}\n',
            "",
            ("refused", "at CHECKPOINT/a"),
        ),
    ],
)
def test_a_process_is_judged_by_its_last_stage(out: str, err: str, verdict: tuple[str, str]) -> None:
    assert families.judge(out, err, -11, "/tmp/x") == verdict


@pytest.mark.full
@pytest.mark.parametrize("name", ["FlexOlmoForCausalLM", "BailingMoeV2ForCausalLM", "DeepSeekMTPModel", "HYV3MTPModel"])
def test_an_architecture_that_has_no_other_test_is_served(name: str, found: list[Architecture]) -> None:
    """One of the Transformers backend, one that vLLM wrote, and MTP heads: each in a process of its own."""
    [architecture] = [one for one in found if one.name == name]
    assert families.try_one(architecture)[0] == "served"
