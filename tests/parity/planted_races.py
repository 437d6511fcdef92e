"""Races planted into one engine: `planted_races.py BUG` prints what it then said, and which invariant broke, as JSON.

The engine has all that moves experts where the device decides: admission, reads one layer ahead, a CPU share, prompts
that borrow slots, experts that have settled, EAGLE drafts whose number changes, in emulated full CUDA graphs. There
streams run in order, so a race is planted as the order, or the memory, that it would come to.
"""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from types import FunctionType
from typing import Any

import drawn_device
import engines
import forked

SPAC = {"plane": "pointers", "slots": "40%", "prefetch": "gate", "cpu_experts": "1", "guard": "on"}
SPAC |= {"budget": "64"}
SETTING = drawn_device.Setting("bf16", SPAC, "chain", True, 2, 256, (1, 6, 3, 5), 16)
SETTLED = 48  # of 384 experts


def rewritten(function: FunctionType, old: str, new: str) -> Callable[..., Any]:
    """A function with other lines, which its module's callers get."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{function.__qualname__} has changed: plant another bug"
    made: dict[str, Any] = {}
    exec(compile(source.replace(old, new), f"<{function.__qualname__}>", "exec"), function.__globals__, made)
    return made[function.__name__]


def publish_before_the_fill() -> None:
    """An admitted expert's slot is read before its copy has arrived."""
    from vllm_spac.kernels.reference import grouped_gemm as twin

    fill, compute, waiting = twin._fill, twin.grouped_gemm, []
    twin._fill = lambda *args: waiting.append(args)

    def computed(*args: Any, **named: Any) -> Any:
        out = compute(*args, **named)
        while waiting:
            fill(*waiting.pop(0))
        return out

    twin.grouped_gemm = computed


def take_the_answer_before() -> None:
    """The results of the CPU's last request are added, before those of this one have come."""
    from vllm_spac.kernels.reference import combine as twin

    combine, before = twin.combine, []

    def combined(*args: Any) -> None:
        if len(args) > 7:
            before.append(args[7].results.clone())
            args = *args[:7], args[7]._replace(results=before[max(0, len(before) - 2)])
        combine(*args)

    twin.combine = combined


def combine_before_the_late_rows() -> None:
    """What the CPU was late with is computed after its layer was summed."""
    from vllm_spac.execution.device.cpu_share import CpuShare

    late = "    gemm(division.left[:rows], division.late, self._unread, pieces)\n"
    CpuShare.finish = rewritten(CpuShare.finish, late, "    pieces.y.nan_to_num_()\n")  # memory may hold anything


def leave_the_victim_s_address() -> None:
    """Who has lost a slot is read from it."""
    from vllm_spac.kernels.reference import admit

    admit.admit_alone = rewritten(admit.admit_alone, "    experts.table[:, victim] = experts.hosts[:, victim]\n", "")


def take_another_s_early_parts() -> None:
    """What was read ahead for another expert of the layer is taken, too."""
    from vllm_spac.kernels.reference import fetch, grouped_gemm

    fetch.with_early = rewritten(fetch.with_early, "(early.keys == key)", "(early.keys >= 0)")
    grouped_gemm.with_early = fetch.with_early


def take_parts_that_were_not_read() -> None:
    """A part that is read ahead counts before its bytes have come."""
    from vllm_spac.kernels.reference import fetch

    copied = "ctypes.memmove(int(memory[entry]) + start, int(host[key]) + start, size)"
    fetch.read_early = rewritten(fetch.read_early, copied, "pass")


def read_the_expert_beside() -> None:
    """What is read ahead is of another expert: the plan changes while it is read."""
    from vllm_spac.kernels.reference import fetch

    fetch.read_early = rewritten(fetch.read_early, "int(host[key])", "int(host[key - 1])")


def leave_the_last_step_s_rows() -> None:
    """Where padding begins is that of the step before, if that had fewer rows."""
    from vllm_spac.execution.device.pointers_execution import PointerExecution

    PointerExecution.begin_step = rewritten(
        PointerExecution.begin_step,
        "if step.rows != self._rows:",
        "if self._rows is None or step.rows < self._rows:",
    )


def offer_settled_slots() -> None:
    """Slots of experts that have settled, whose only copy is there, are given away."""
    from vllm_spac.execution.device import slot_offers

    init = slot_offers.SlotOffers.__init__
    slot_offers.SlotOffers.__init__ = lambda self, formula, slots, settled=0: init(self, formula, slots, 0)


def read_reports_early() -> None:
    """A report is read before it has been written."""
    from vllm_spac.execution.device.admission_reports import AdmissionReports

    send = AdmissionReports.send

    def sent(self: Any, *args: Any) -> None:
        send(self, *args)
        self._under_way[-1].written[-1:].zero_()  # what the copy had not reached

    AdmissionReports.send = sent


RACES = {
    each.__name__: each
    for each in (
        publish_before_the_fill,
        take_the_answer_before,
        combine_before_the_late_rows,
        leave_the_victim_s_address,
        take_another_s_early_parts,
        take_parts_that_were_not_read,
        read_the_expert_beside,
        leave_the_last_step_s_rows,
        offer_settled_slots,
        read_reports_early,
    )
}
LATE = ("combine_before_the_late_rows",)  # here the CPU is always late


def late() -> None:
    """The CPU is late in each step, and with four experts."""
    from vllm_spac.execution.device import cpu_share

    cpu_share.PATIENCE = 0
    cpu_share.CpuShare.observe_step = lambda self, computed, late: None
    SPAC["cpu_experts"] = "4"


def settle() -> None:
    """Host memory has room for all but the experts that settle."""
    from vllm_spac.integration.loading import assembly, packing
    from vllm_spac.storage import host

    nbytes = 3 * 256 * 32 * 4
    room = (384 - SETTLED) * nbytes + assembly.HOST_RESERVE + nbytes // 2
    for module in (packing, host):
        module.available_host_bytes = lambda: room


def checked(worker: Any) -> str:
    """What is wrong with who has which slot; empty if nothing is."""
    try:
        for execution in worker._spac_experts().runtime.executions:
            execution.admission.check_integrity()
    except AssertionError as error:
        return str(error) or "who has which slot"
    return ""


def main(bug: str) -> dict[str, Any]:
    settle()
    if bug in LATE or bug == "late":
        late()
    if bug in RACES:
        RACES[bug]()
    asked = {"model": str(drawn_device.TOY / "target"), "setting": asdict(SETTING), "spac": SPAC}
    try:
        return drawn_device.main(asked, lambda llm: llm.collective_rpc(checked)[0])
    except Exception as error:
        return {"ended": str(error)[:300]}


def run(bug: str) -> dict[str, Any]:
    """What an engine with this bug said, or what ``ended`` it; ``none``: without."""
    return forked.answer(forked.run([__file__, bug], timeout=600))


if __name__ == "__main__":
    assert engines.V2
    print(json.dumps(main(sys.argv[1])))
