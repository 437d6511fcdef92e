"""The number of slots decides whether a model starts; every refusal must lead to a setting that works."""

from __future__ import annotations

import re

import pytest
import torch
from effort import examples
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from vllm_spac.cache.sizing import check_per_layer, resolve
from vllm_spac.config.types import SlotCount
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.errors import ConfigError

BUSY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # the machine may be, and that is no failure
MIB = 2**20


def shape(layers: int = 4, experts: int = 16, top_k: int = 2, expert_bytes: int = MIB) -> MoEShape:
    tensors = {"w": TensorSpec((expert_bytes,), torch.uint8)}
    return MoEShape(tuple(f"layer.{i}" for i in range(layers)), experts, top_k, tensors)


def suggestions(error: ConfigError) -> list[str]:
    """Every value that the message tells the user to give to --spac-slots."""
    return re.findall(r"--spac-slots (auto|[\d.]+%?)", str(error))


@given(st.integers(1, 100), st.integers(1, 100), st.integers(1, 512))
@settings(max_examples=examples(200), **BUSY)
def test_whole_percentages_are_exact(percent: int, layers: int, experts: int) -> None:
    """7% of 100 experts are 7 slots: the smallest number that is not below the percentage."""
    wanted = shape(layers, experts, top_k=1, expert_bytes=1)
    assert resolve(SlotCount.parse(f"{percent}%"), wanted, wanted.total) == -(-percent * wanted.total // 100)


@pytest.mark.parametrize("slots", [SlotCount(), SlotCount(share=0.25), SlotCount(share=0.01), SlotCount(per_layer=2)])
def test_when_not_even_one_token_fits_the_remedy_is_memory(slots: SlotCount) -> None:
    """No value of the knob helps here, so none may be suggested."""
    with pytest.raises(ConfigError, match="--gpu-memory-utilization") as error:
        resolve(slots, shape(), MIB)
    assert not suggestions(error.value)


@pytest.mark.parametrize("slots", [SlotCount(share=0.25), SlotCount(per_layer=4)])
def test_one_slot_more_than_fits_is_refused(slots: SlotCount) -> None:
    assert resolve(slots, shape(), 16 * MIB) == 16
    with pytest.raises(ConfigError, match="16 slots"):
        resolve(slots, shape(), 16 * MIB - 1)


def test_too_many_for_the_memory_says_how_much() -> None:
    with pytest.raises(ConfigError, match=r"32 slots.*32\.0 MiB.*20\.0 MiB") as error:
        resolve(SlotCount(share=0.5), shape(), 20 * MIB)
    assert suggestions(error.value)


@given(st.integers(1, 40), st.integers(1, 20), st.data())
@settings(max_examples=examples(200), **BUSY)
def test_check_per_layer_suggests_a_number_that_works(per_layer: int, experts: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, experts))
    try:
        check_per_layer(SlotCount(per_layer=per_layer), experts, top_k)
        assert top_k <= per_layer <= experts
    except ConfigError as error:
        assert not top_k <= per_layer <= experts
        assert f"slots={per_layer} (--spac-slots)" in str(error)
        assert suggestions(error)
        for text in suggestions(error):
            check_per_layer(SlotCount.parse(text), experts, top_k)


SLOTS = st.one_of(
    st.just("auto"), st.integers(1, 40).map(str), st.integers(1, 400).map(lambda quarters: f"{quarters / 4:g}%")
)


@given(SLOTS, st.integers(1, 60), st.integers(1, 256), st.data())
@settings(max_examples=examples(300), **BUSY)
def test_resolve_suggests_a_number_that_works(text: str, layers: int, experts: int, data: st.DataObject) -> None:
    """Whenever one token's experts fit, some setting works; then each one that the message names must."""
    wanted = shape(layers, experts, data.draw(st.integers(1, min(experts, 16))), expert_bytes=1)
    slots = SlotCount.parse(text)
    assume(slots.per_layer is None or wanted.top_k <= slots.per_layer <= experts)  # else refused, see above
    free = data.draw(st.one_of(st.integers(wanted.top_k, 2 * wanted.total), st.just(wanted.total)))
    try:
        count = resolve(slots, wanted, free)
        assert wanted.top_k <= count <= min(wanted.total, free)
    except ConfigError as error:
        assert "--spac-slots" in str(error)
        assert suggestions(error), str(error)
        for suggestion in suggestions(error):
            resolve(SlotCount.parse(suggestion), wanted, free)
