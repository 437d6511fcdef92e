"""What a start counts on a GPU that is not there, and how the memory of before is judged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import one_pool
from benchmarks.one_pool import BLOCK, GIB, LONG, Start, as_before, judged, machine, start
from vllm_spac.storage.checkpoint.published import NamedModel
from vllm_spac.tools.planning.planned_machine import UTILIZATION
from vllm_spac.tools.planning.planned_model import ServedModel

QWEN, INT4 = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-GPTQ-Int4"
TOKEN = 48 * 2 * 4 * 128 * 2  # bytes of KV cache


@pytest.fixture(scope="module")
def named():
    with one_pool.models() as found:
        yield found


def test_slots_take_what_the_others_leave(named: dict[str, NamedModel]) -> None:
    begun, served = start(named[QWEN], 24), ServedModel.of(named[QWEN], "pointers")
    left = int(UTILIZATION * 24 * GIB) - served.checkpoint.other_bytes - begun.working - begun.kv
    assert begun.plane == "pointers" and begun.slots == left // served.expert_bytes and begun.reserved == 0
    assert begun.kv == begun.request == 40960 * TOKEN, "of the model's length"
    assert begun.rows > 8192, "chunks by the card's rates"
    long = start(named[QWEN], 24, LONG)
    assert long.kv == 4 * LONG * TOKEN and long.slots < begun.slots, "four requests of the length that is named"


def test_what_fits_is_left_to_stock(named: dict[str, NamedModel]) -> None:
    assert [start(named[INT4], gib).plane for gib in (16, 24)] == ["pointers", "stock"]


def test_prompts_are_read_as_they_were(named: dict[str, NamedModel]) -> None:
    """From buffers once; in place, from once to once for each block of an expert's rows."""
    on, old = machine(QWEN, 24), Start("pointers", 1228, 6144, 8192, 0, 0, 0)
    with as_before(old):
        fewest, most = judged(old, named[QWEN], on)["first_token"]
    staged = replace(old, reserved=1)
    with as_before(staged):
        once, behind = judged(staged, named[QWEN], on)["first_token"]
    now = judged(old, named[QWEN], on)["first_token"]
    assert on.link is not None
    loads = (6144 - 1228) * ServedModel.of(named[QWEN]).expert_bytes / on.link.bytes_per_second
    again = 8192 * 8 // 128 / BLOCK  # blocks of an expert, on top of a first one
    assert once == pytest.approx(fewest) == pytest.approx(loads)
    assert most - behind == pytest.approx(again * loads)
    assert now[0] > once, "slots that are borrowed are evicted first"
