"""The table of MoE architectures: complete, of the installed vLLM, and as its JSON says."""

from __future__ import annotations

import families
import moe_architectures
import pytest
import tiny_models
import untried
import zoo
from moe_architectures import Architecture, builds_experts
from sources import Sources

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


def test_experts_are_found_through_imports_bases_and_branches(tmp_path) -> None:
    folder = tmp_path / "vllm" / "models" / "fast"
    folder.mkdir(parents=True)
    (folder / "layers.py").write_text(
        "from vllm.model_executor.layers.fused_moe import FusedMoEFactory\n"
        "class Experts:\n    def __init__(self):\n        self.run = FusedMoEFactory(8)\n"
        "class Dense:\n    pass\n"
    )
    (folder / "model.py").write_text(
        "from .layers import Dense, Experts as Sparse\n"
        "class Base:\n    layer = Sparse\n"
        "class Model(Base):\n    pass\n"
        "class Small:\n    layer = Dense\n"
    )
    (folder / "__init__.py").write_text(
        "import platform\nif platform.gpu:\n    from .model import Model\nelse:\n    from .other import Model\n"
        "from .model import Small\n"
    )
    sources = Sources(tmp_path)
    assert builds_experts(sources, "vllm.models.fast", "Model")
    assert not builds_experts(sources, "vllm.models.fast", "Small")


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
