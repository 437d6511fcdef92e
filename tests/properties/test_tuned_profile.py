"""A tuned profile is data: whatever is in the file, nothing is imported, no start ends, nothing rounds unasked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_spac import components
from vllm_spac.config import tuned_profile
from vllm_spac.config.config import SpacConfig, component_knobs
from vllm_spac.config.tuned_profile import MAY_SET, TunedProfile, rounds
from vllm_spac.integration import tuned_start
from vllm_spac.system.machine import Machine

TOY = Path(__file__).parents[2] / "benchmarks" / "toy" / "models" / "target"
HERE = Machine(cpu="c", cores=4, disk="d")
CODE = "spac_code_of_a_profile"  # a module that notes that it was imported

NAMES = sorted({name for kind in component_knobs().values() for name in (*kind.others, *components.names(kind.family))})
TEXTS = st.sampled_from(
    [
        f"{CODE}:Policy",
        f"{CODE}.Policy",
        f"lru@{CODE}=1",
        "25%",
        "2k",
        "auto",
        "on",
        "64MiB",
        "9" * 500,
        "",
        "\0",
        "\x1b[31m\n",
    ]
    + ["/none", str(TOY), "no/such-model", "~nobody/x", "host"]
) | st.text(max_size=6)
LEAVES = TEXTS | st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats() | st.sampled_from(NAMES)
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8
)
KNOBS = st.dictionaries(
    st.sampled_from(sorted(MAY_SET)) | st.sampled_from([*SpacConfig.model_fields]), LEAVES, max_size=4
)
SENSIBLE = st.fixed_dictionaries(
    {},
    optional={
        "slots": st.sampled_from(["25%", "2k", 8]),
        "policy": st.sampled_from(components.serving("policies")),
        "plane": st.sampled_from(["slots", "pointers"]),
        "cpu_experts": st.sampled_from(["off", "auto", 2, "threshold"]),
        "store": st.sampled_from(["host", "disk"]),
    },
)
METHODS = st.sampled_from(["ngram", "eagle3", "mtp", "custom_class", "suffix", "draft_model"])
DRAFTS = (
    st.none()
    | JSON
    | st.fixed_dictionaries({"method": METHODS}, optional={"model": TEXTS, "num_speculative_tokens": LEAVES})
)
FIELDS = {
    name: JSON for name in ("machine", "versions", "choice", "files", "engine", "ratio", "format", "allowed", "extra")
}
# Mostly one thing: of a profile with several, the first that is odd hides the others.
CHANGES = (
    st.fixed_dictionaries({"knobs": SENSIBLE | KNOBS})
    | st.fixed_dictionaries({"knobs": SENSIBLE, "speculative_config": DRAFTS})
    | st.fixed_dictionaries({}, optional=FIELDS | {"knobs": KNOBS | SENSIBLE | JSON, "speculative_config": DRAFTS})
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A profile that is used here, as JSON; and where one is looked for."""
    profile = TunedProfile(
        model="toy",
        identity=tuned_profile.identity(TOY),
        machine=HERE,
        versions=tuned_profile.relevant_versions(),
        choice="c",
        knobs={"policy": "lru"},
    )
    folder = tmp_path_factory.mktemp("packed")
    (code := tmp_path_factory.mktemp("path")).joinpath(f"{CODE}.py").write_text("class Policy: pass")
    sys.path.insert(0, str(code))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Machine, "here", lambda folder, gpus: HERE)
        patched.setattr(tuned_start.device, "names", list)
        yield {"path": folder / "p.json", "content": json.loads(profile.model_dump_json())}
    sys.path.remove(str(code))


def used(path: Path, level: str) -> tuple[SpacConfig, SpacConfig, Any]:
    """The configuration before and after the profile, and the drafts."""
    spac = {"tuned": f"{path}@allow={level}"}
    args = SimpleNamespace(
        model=str(TOY),
        additional_config={"spac": spac},
        speculative_config=None,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        max_num_seqs=8,
    )
    return (before := SpacConfig.parse(spac)), tuned_start.apply(args, before), args.speculative_config


def check(path: Path, level: str) -> None:
    loaded = set(sys.modules)
    before, after, drafts = used(path, level)
    outside = {name for name in set(sys.modules) - loaded if name.split(".")[0] == CODE}
    assert not outside, "what a profile names was imported"
    changed = {
        name: getattr(after, name) for name in type(after).model_fields if getattr(after, name) != getattr(before, name)
    }
    assert changed.keys() <= MAY_SET
    assert level == "rounding" or not rounds({name: str(value) for name, value in changed.items()})
    for name, kind in component_knobs().items():
        assert name not in changed or kind.is_ours(changed[name])
    assert drafts is None or drafts["method"] not in ("custom_class", "suffix")


@given(changes=CHANGES, level=st.sampled_from(["exact", "rounding"]))
@example(changes={"allowed": ["rounding"], "knobs": {"cpu_experts": "auto"}}, level="exact")
@example(changes={"knobs": {"policy": f"{CODE}:Policy"}}, level="rounding")
@example(changes={"speculative_config": {"method": "custom_class", "model": f"{CODE}.Policy"}}, level="rounding")
@example(changes={"engine": {"tensor_parallel_size": "8"}}, level="exact")
@example(changes={"knobs": {"budget": 8}}, level="rounding")
@example(changes={"knobs": {"cpu_experts": "auto", "store": "host"}}, level="exact")
@example(changes={"knobs": {"http": "control"}}, level="rounding")
@example(changes={"speculative_config": {"method": "custom_class", "model": str(TOY)}}, level="rounding")
@settings(max_examples=examples(300))
def test_any_profile_is_used_exactly_or_not_at_all(written: dict, changes: dict, level: str) -> None:
    written["path"].write_text(json.dumps(written["content"] | changes))
    check(written["path"], level)


@given(content=st.binary(max_size=64) | JSON.map(lambda value: json.dumps(value).encode()))
@example(content=b"[" * 100_000)
@example(content=b'{"knobs":' * 10_000)
@settings(max_examples=examples(100))
def test_any_file_is_no_profile(written: dict, content: bytes) -> None:
    written["path"].write_bytes(content)
    before, after, drafts = used(written["path"], "exact")
    assert after is before and drafts is None


def test_the_profile_that_is_changed_here_would_be_used(written: dict) -> None:
    written["path"].write_text(json.dumps(written["content"]))
    assert used(written["path"], "exact")[1].policy == "lru"
    written["path"].write_text(json.dumps(written["content"] | {"knobs": {"cpu_experts": "auto", "store": "host"}}))
    assert used(written["path"], "rounding")[1].cpu_experts == "auto"
