"""The CPU's share of layers whose loads the device chooses (``cpu_experts`` with ``plane=pointers``).

Between steps the host says whether the CPU takes part, and which experts are cold: the worths of slots that it offers
(``slot_offers``). How many of a layer's missing experts the CPU takes is a table by their number, filled once by asking
the balancer. In the layer the admission divides the pairs and makes a request (``mailbox``). The device computes its
own, waits for the answer no longer than ``PATIENCE``, and computes in place what did not arrive. So a thread that is
dead, stopped or slow costs time, never a token.

With a disk the CPU computes what has a row of host memory, and no other: it begins while the rest of the layer's
experts are read. A row is written anew when all layers that may ask for it have run, so when they wait for the CPU no
more. A late computation may then read it, and nobody its results.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_spac.core import MoEShape, Step
from vllm_spac.cpu_kernels._thread import ExecutorThread
from vllm_spac.decisions.balancers.base import Balancer, LayerState
from vllm_spac.errors import UnsupportedError
from vllm_spac.execution.address_table import MANY_ROWS
from vllm_spac.execution.cpu_check import CpuCheck
from vllm_spac.execution.device.mailbox import Mailbox
from vllm_spac.execution.exchange import Stream
from vllm_spac.kernels.types import Division, Kept, Pieces, Request

MOST_ROWS = 32  # of a forward in which the CPU takes part: decode steps; rows cross the bus one layer after another
PATIENCE = 50_000_000  # nanoseconds that a layer waits for an answer: once a step, whose requests a late one ends
MUCH = 64  # late experts, from which on a quarter of all is worth a warning
LONGEST = 64  # steps without the CPU, after late answers in several steps one after another
AWAY = 8  # loads of which half take as long as one from a disk: PCIe has 16 lanes there, and 4 here
_IDLE = 1.0  # seconds between two steps, from which on the engine had nothing to do

logger = logging.getLogger("vllm.spac")


class MailKernels(NamedTuple):
    """The launches that wait for an answer and add it, of ``vllm_spac.kernels``, or their torch twins."""

    wait_for_answer: Callable[..., None]
    combine: Callable[..., None]


def mail_kernels_for(device: torch.device) -> MailKernels:
    """Returns the launches for ``device``."""
    if device.type == "cpu":
        from vllm_spac.kernels.reference import combine as sums
        from vllm_spac.kernels.reference import mailbox as twins

        return MailKernels(twins.wait_for_answer, sums.combine)
    from vllm_spac.kernels import combine, mailbox

    return MailKernels(mailbox.wait_for_answer, combine.combine)


def shares_of(balancer: Balancer, experts: int, reading: int = 0) -> list[int]:
    """Returns how many experts the CPU takes of 0 ... ``experts`` that are missing in a layer, one row each.

    ``reading``: as of ``LayerState``.

    Raises:
        UnsupportedError: the balancer goes by more than their number.
    """
    if not balancer.by_number:
        raise UnsupportedError(
            f"spac: {type(balancer).__name__} divides a layer on the host; use --spac-cpu-experts auto, or "
            "--spac-plane slots"
        )
    nobody, scores = np.zeros(experts, dtype=bool), np.zeros(experts, dtype=np.int64)
    missing = ((np.arange(experts) < m).astype(np.int64) for m in range(experts + 1))
    states = (LayerState(0, rows, nobody, scores, 0, reading=reading) for rows in missing)
    return [len(balancer.plan(state).cpu) for state in states]


class CpuShare:
    """Called by the thread that launches.

    Args:
        shape: the layers and experts.
        balancer: says how many missing experts of a layer the CPU computes.
        thread: computes them; owned.
        layers: the experts that it computes, as of ``Execution.cpu_layers``.
        device: that computes the others; ``compute``: the stream that runs the model.
        check: stops the CPU while steps are not shorter with it; None: it is not checked.
        place_of: as of ``Kept``, where ``layers`` are rows of host memory before a disk.

    Attributes:
        rows: the most rows of a forward in which the CPU takes part.
        division: how a layer's pairs are divided, on the device.
    """

    def __init__(
        self,
        shape: MoEShape,
        balancer: Balancer,
        thread: ExecutorThread,
        layers: Sequence[Mapping[str, Tensor]],
        device: torch.device,
        compute: Stream,
        check: CpuCheck | None = None,
        place_of: Tensor | None = None,
    ) -> None:
        if thread.executor.exclusive:
            raise UnsupportedError(
                f"spac: {thread.executor.describe()} computes while no layer does, and with plane=pointers layers do "
                "not stop; use --spac-cpu-kernel simd, or --spac-plane slots"
            )
        self._shape, self._thread, self._layers, self._device = shape, thread, layers, device
        self._compute, self._check, self._kernels = compute, check, mail_kernels_for(device)
        # A forward that borrows slots has more rows.
        self.rows = rows = min(MOST_ROWS, (MANY_ROWS * shape.experts - 1) // shape.top_k)

        def made(dtype: torch.dtype, *size: int) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        kept, left = (made(torch.float32, rows, shape.top_k) for _ in range(2))
        table = shares_of(balancer, shape.experts)
        # missing experts of a layer, of which the CPU takes one
        self._fewest = next((missing for missing, share in enumerate(table) if share), shape.experts + 1)
        shares = torch.tensor(table, dtype=torch.int32, device=device)
        number, state, late = made(torch.int64, 1), made(torch.int32, 2), made(torch.int32, 1)
        self.division = Division(number, made(torch.int32, 1), state, shares, kept, left, late)
        self._kept: Kept | None = None
        if place_of is not None:
            beside = torch.tensor(shares_of(balancer, shape.experts, AWAY), dtype=torch.int32, device=device)
            self._kept = Kept(place_of, beside)
        self._unread = made(torch.int32, shape.experts)  # counts that nobody reads
        self._box: Mailbox | None = None  # made when the dtype of rows is known
        self._ended = False
        self._pause, self._left = 0, 0  # steps without the CPU after the next late answer; until it takes part again
        self._asked = self._late = 0  # experts
        self._warned = False
        self._began: float | None = None

    def prepare(self, x: Tensor) -> None:
        """Called by the first forward, before anything is captured; ``x``: rows as all forwards have them."""
        if self._box is None:
            box = Mailbox(self.rows, self._shape.top_k, x.shape[1], x.dtype, self._device)
            box.start(self._thread.executor, self._layers)
            self._box = box

    # -- between steps -------------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Called before a step is launched: lets the CPU take part in it, or not.

        It does not where no layer can miss as many experts as it would take one of: its thread then stays asleep, which
        shares the interpreter with the one that launches.
        """
        pairs = step.rows * self._shape.top_k
        may = not step.prompts and 0 < step.rows <= self.rows and min(pairs, self._shape.experts) >= self._fewest
        compared = step.rows if may else 0
        if self._check is not None:
            self._compare(self._check, compared)
        self._left, waits = max(0, self._left - 1), self._left > 0
        stopped = self._check is not None and self._check.stopped
        takes_part = compared and self._works() and not waits and not stopped
        self._compute.submit(self.division.pairs.fill_, pairs if takes_part else 0)
        if takes_part and self._box is not None:
            self._box.wake()

    def _compare(self, check: CpuCheck, rows: int) -> None:
        """Steps last until the next one begins: layers have been launched then, not run."""
        now = time.monotonic()
        if self._began is not None and now - self._began < _IDLE:
            check.end_step()
        check.begin_step(rows)
        self._began = now

    def _works(self) -> bool:
        if self._box is None or self._ended:
            return False
        if (why := self._box.ended()) is None:
            return True
        self._ended = True
        logger.error("spac: the CPU computes no experts any more, the device all of them: %s", why, exc_info=why)
        return False

    def observe_step(self, computed: int, late: int) -> None:
        """A step has finished, in which the CPU computed so many experts, and answered too late for so many."""
        self._asked, self._late = self._asked + computed + late, self._late + late
        if late:
            self._pause = min(LONGEST, max(1, 2 * self._pause))
            self._left = self._pause
        elif computed:
            self._pause = 0
        if not self._warned and (self._pause == LONGEST or (self._late >= MUCH and 4 * self._late > self._asked)):
            self._warned = True
            logger.warning(
                "spac: the CPU was more than %.0f ms late with %s of %s experts (--spac-cpu-experts), which the device "
                "computed after this wait; after late answers the CPU is left out of 1 to %s steps. Use a smaller "
                "number, or off",
                PATIENCE / 1e6,
                self._late,
                self._asked,
                LONGEST,
            )

    # -- in a layer ----------------------------------------------------------------------------------------

    def request(self, x: Tensor, live: Tensor, counts: Tensor) -> Request:
        """Returns what the admission of a layer needs to divide it and to ask the CPU.

        Args:
            x: as of ``PointerExecution.run``; at most ``rows`` rows.
            live: int32 [1], pairs from this one on are padding.
            counts: int32 [keys], those of the layer are overwritten with the rows that selected each expert.
        """
        assert self._box is not None, "a forward must run before"
        return Request(x, live, counts, self.division, self._box.mail, self._kept)

    def finish(
        self,
        layer: int,
        ids: Tensor,
        weights: Tensor,
        live: Tensor,
        sources: Tensor,
        gemm: Callable[[Tensor, Tensor, Tensor, Pieces], Any],
        out: Tensor,
        wait: Callable[[Tensor, Tensor], Any] = lambda weights, live: None,
    ) -> Tensor:
        """Launches a layer's kernels after its admission; returns ``out``.

        Args:
            layer, ids, weights: as of ``PointerExecution.run``.
            live: as before.
            sources: int32 [keys], as the admission wrote it.
            gemm: launches the grouped GEMM over the pairs of these weights that are live, counts them, and writes
                their results into these pieces; called twice.
            wait: launches what waits for the experts of the same weights and live pairs, before it.
        """
        assert self._box is not None
        division, (rows, top_k) = self.division, ids.shape
        pieces = Pieces(out.new_empty(rows * top_k, out.shape[1]), None)
        wait(division.kept[:rows], live)
        gemm(division.kept[:rows], live, self._unread, pieces)
        self._kernels.wait_for_answer(ids, layer, sources, division, self._box.mail, PATIENCE)
        wait(division.left[:rows], division.late)
        gemm(division.left[:rows], division.late, self._unread, pieces)
        y = pieces.y.view(rows, top_k, -1)
        self._kernels.combine(y, weights, ids, self._shape.experts, out, live, division, self._box.mail)
        return out

    def close(self) -> None:
        if self._box is not None:
            self._box.close()
        self._thread.close()
