"""Thread that computes experts on the CPU while the forward thread loads others and runs its kernels."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor
from torch._C import set_num_threads  # not torch's own name for it, which vLLM replaces on a CPU machine

from vllm_spac.cpu_kernels.base import CpuExperts
from vllm_spac.errors import SpacError
from vllm_spac.recording.timeline_recorder import Kind, Timeline, now
from vllm_spac.system.processors import asked, places, processors
from vllm_spac.system.threads import finish


class Computation:
    """A computation of rows in the executor's thread.

    Attributes:
        waited: seconds that the forward thread has waited for them.

    Args:
        job: returns the output.
        released: set when kernels of the layers may run concurrently; None if they always may.
    """

    def __init__(self, job: Future[Tensor], released: threading.Event | None, timeline: Timeline | None = None) -> None:
        self._job = job
        self._released = released
        self._timeline = timeline
        self.waited = 0.0

    @property
    def done(self) -> bool:
        """Whether the output is there, or an error."""
        return self._job.done()

    def wait_for_turn(self) -> None:
        """Called before the forward thread runs a kernel: waits if the two must not run concurrently."""
        if self._released is not None:
            start = now()
            self._released.wait()
            self._count(start)

    def result(self) -> Tensor:
        """Waits for the output and returns it, [m, hidden] as in ``CpuExperts.run``.

        Raises:
            SpacError: the rows could not be computed; the cause is attached.
        """
        start = now()
        try:
            return self._job.result()
        except CancelledError:
            raise SpacError("spac: no expert is computed on the CPU any more, the engine is shutting down") from None
        except Exception as error:
            raise SpacError(f"spac: experts could not be computed on the CPU: {error}") from error
        finally:
            self._count(start)

    def _count(self, start: int) -> None:
        self.waited += (now() - start) / 1e9
        if self._timeline is not None:
            self._timeline.add(Kind.WAIT_CPU, start)


class ExecutorThread:
    """Runs an executor in a thread of its own.

    OpenMP gives each computing thread its own team, whose size is a setting of that thread: it is set here for the
    executor's thread only.

    Args:
        executor: computes experts; owned.
        layers: the experts of each layer that will be computed, see ``CpuExperts.prepare``.
    """

    timeline: Timeline | None = None

    def __init__(self, executor: CpuExperts, layers: Iterable[Mapping[str, Tensor]] = ()) -> None:
        self.executor = executor
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="spac-cpu")
        mine = torch.get_num_threads()
        self._pool.submit(set_num_threads, executor.threads).result()
        set_num_threads(mine)  # the last value set is also torch's default for new threads
        try:
            for experts in layers:
                self._pool.submit(executor.prepare, experts).result()
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def computing(
        self, x: Tensor, weights: Tensor, ids: Tensor, experts: Mapping[str, Tensor]
    ) -> Iterator[Computation]:
        """Computes experts while the block runs; has finished when the block has been left, normally or not.

        Arguments as in ``CpuExperts.run``, but ``x`` and ``weights`` may be on another device.

        Raises:
            SpacError: the thread is closed.
        """
        executor, timeline = self.executor, self.timeline
        run = executor.run if timeline is None else partial(_recorded, timeline, executor.run)
        executor.released = released = threading.Event()
        try:
            job = self._pool.submit(run, x.cpu(), weights.cpu(), ids, experts)
        except RuntimeError as error:
            raise SpacError("spac: no expert is computed on the CPU any more, the engine is shutting down") from error
        job.add_done_callback(lambda _: released.set())  # also if it fails or is cancelled
        try:
            yield Computation(job, released if executor.exclusive else None, timeline)
        except Exception as error:
            finish([job])
            also = None if job.cancelled() else job.exception()
            if also is not None and error.__cause__ is not also:
                error.add_note(f"spac: in addition, experts could not be computed on the CPU: {also}")
            raise
        finally:
            finish([job])

    def describe(self) -> str:
        """Returns a few words for the start-up line."""
        return f"{self.executor.describe()} in {self.executor.threads} threads"

    def close(self) -> None:
        """Waits for the computation in progress, cancels queued ones and stops the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.executor.close()


def _recorded(
    timeline: Timeline,
    run: Callable[..., Tensor],
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    experts: Mapping[str, Tensor],
) -> Tensor:
    start = now()
    out = run(x, weights, ids, experts)
    timeline.add(Kind.CPU, start, len(x))
    return out


def threads_of(device: torch.device) -> int:
    """Returns the number of threads that compute experts, as ``processors.places`` has it.

    If fast memory is RAM it is half of those that compute layers, because the others copy meanwhile.

    Raises:
        ConfigError: OMP_NUM_THREADS is more than this process has.
    """
    facts = processors()
    return max(1, len(places(facts, asked(facts))) // 2) if device.type == "cpu" else len(places(facts, beside=True))
