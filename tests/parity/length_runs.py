"""Runs one engine over prompts of given lengths: `length_runs.py JSON` prints what they said as JSON.

Each prompt comes alone, then all of them at once, then as many short ones as decode together. On request the kernels of
``plane=pointers`` are those of a GPU, by Triton's interpreter, in place of their twins; and the layers of steps without
prompts are emulated CUDA graphs. In a process of its own, see ``compare``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "properties"))
from replay import Graph

import vllm_spac
from vllm_spac.execution import address_table
from vllm_spac.execution.device import cpu_share, pointers_execution
from vllm_spac.execution.device.cpu_share import MailKernels
from vllm_spac.execution.device.pointers_execution import PointerExecution
from vllm_spac.execution.exchange import CallerStream


def prompt(length: int, seed: int) -> list[int]:
    return [(7 * seed + at * (seed + 3) + at * at) % 500 + 5 for at in range(length)]


def interpret() -> None:
    """Has executions launch the kernels of a GPU."""
    from vllm_spac.kernels import combine, grouped_gemm, mailbox

    assert grouped_gemm._INTERPRETED, "TRITON_INTERPRET=1 must be set when Triton is imported"
    mail = MailKernels(mailbox.wait_for_answer, combine.combine)
    pointers_execution.kernels_for = lambda device: address_table._launches()
    cpu_share.mail_kernels_for = lambda device: mail
    one_thread()  # which Triton's interpreter is for


def one_thread() -> None:
    """Has what runs beside the layers run in their thread."""
    pointers_execution.streams = lambda device: (CallerStream(), CallerStream())


class Graphs:
    """Layers of steps without prompts are captured once for each size, and replayed on memory that stays where it is.

    Attributes:
        replays: layers that were replayed.
    """

    def __init__(self) -> None:
        self.replays = 0
        self._capture: Graph | None = None
        self._held: dict[tuple, tuple[Graph, list[torch.Tensor]]] = {}
        self._run = PointerExecution.run

    def install(self) -> None:
        begin, balance = PointerExecution.begin_step, PointerExecution.attach_balancer
        pointers_execution.capturing = lambda tensor: self._capture is not None
        one_thread()  # a capture sees its own

        def began(execution: PointerExecution, step: Any) -> None:
            begin(execution, step)
            execution.decodes = not step.prompts

        def ran(execution: PointerExecution, *args: Any) -> torch.Tensor:
            if not getattr(execution, "decodes", False) or self._capture is not None:
                return self._run(execution, *args)
            return self._replay(execution, *args)

        def balanced(execution: PointerExecution, *args: Any, **kwargs: Any) -> None:
            balance(execution, *args, **kwargs)
            cpu = execution.launches.cpu
            cpu._kernels = type(cpu._kernels)(*map(self._kernel, cpu._kernels))

        made = PointerExecution.__init__

        def init(execution: PointerExecution, context: Any) -> None:
            made(execution, context)
            kernels = execution.launches.kernels
            held = {name: self._kernel(getattr(kernels, name)) for name in ("grouped_gemm", "admit", "read_early")}
            execution.launches.kernels = execution.admission._kernels = kernels._replace(**held)
            if execution.ahead.layers is not None:
                ahead = execution.ahead.layers
                ahead.parts._kernels, ahead._name = execution.launches.kernels, self._kernel(ahead._name)

        for name, method in {"__init__": init, "begin_step": began, "run": ran, "attach_balancer": balanced}.items():
            setattr(PointerExecution, name, method)

    def _kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            graph = self._capture
            return function(*args, **kwargs) if graph is None else graph.kernel(function)(*args, **kwargs)

        return launch

    def _replay(
        self,
        execution: PointerExecution,
        layer: int,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        activation: str,
        out: torch.Tensor,
        guess: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = len(x)
        size, given = 1 << (rows - 1).bit_length(), [x, weights, ids, out] + ([] if guess is None else [guess])
        key = id(execution), layer, size, activation, guess is None
        if key not in self._held:
            memory = [each.new_zeros(size, *each.shape[1:]) for each in given]
            graph = self._capture = Graph()
            try:
                with graph:
                    fixed = memory[4] if guess is not None else None
                    self._run(execution, layer, *memory[:3], activation, memory[3], fixed)
            finally:
                self._capture = None
            self._held[key] = graph, memory
        graph, memory = self._held[key]
        for fixed, each in zip(memory, given, strict=True):
            fixed[:rows].copy_(each)  # behind them is what an earlier step left
        graph.replay()
        self.replays += 1
        return out.copy_(memory[3][:rows])


def served(llm: Any, lengths: list[int], wide: list[int], tokens: int) -> dict[str, list[list[int]]]:
    prompts = [prompt(length, seed=length) for length in lengths]
    said = {f"alone {len(each)}": engines.say(llm, [each], tokens) for each in prompts}
    said["together"] = engines.say(llm, prompts, tokens)
    for count in wide:
        said[f"wide {count}"] = engines.say(llm, [prompt(1 + seed % 3, seed) for seed in range(count)], tokens)
    return said


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    graphs = Graphs()
    if asked["interpreted"]:
        interpret()
    if asked["graphs"]:
        graphs.install()
    with engines.engine(asked["model"], asked["spac"], **asked["options"]) as llm:
        said = served(llm, asked["lengths"], asked["wide"], asked["tokens"])
        workers = vllm_spac.stats(llm)["workers"] if asked["spac"] else []
    print(json.dumps({"said": said, "workers": workers, "replays": graphs.replays}))
