"""Runs one engine in emulated full CUDA graphs: `graph_runs.py JSON` prints what it said as JSON.

See ``full_graphs``. A guard goes by the clock, and chooses no drafts where Triton's kernels are interpreted. So on
request drafts are planned by turns, and cut after their first ones by turns.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import engines
import forked
import full_graphs

TOY = Path(__file__).parents[2] / "benchmarks" / "toy" / "models"
EAGLE3 = {"method": "eagle3", "model": str(TOY / "eagle3")}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SETTINGS = {"dtype": "float32", "max_num_batched_tokens": 256, "max_num_seqs": 4, "block_size": 32}
SETTINGS |= {"num_gpu_blocks_override": None, "enable_prefix_caching": False}
LENGTHS = (1, 5, 31, 33, 64)


def prompts() -> list[list[int]]:
    """Pieces of text like what the toy was trained on."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(TOY / "target" / "tokenizer.json")).encode(Path(json.__file__).read_text()).ids
    return [ids[61 * i : 61 * i + length] for i, length in enumerate(LENGTHS)]


def plan_by_turns() -> None:
    """Each length that the guard may choose is chosen for some steps."""
    from vllm_spac.decisions.guard.lengths import LengthChooser

    count = itertools.count()
    LengthChooser.choose = lambda self, requests=None: (self.lengths * 2)[-1 - next(count) // 3 % len(self.lengths)]


def cut_by_turns() -> None:
    """Of each request the first drafts are kept: none, one, ..., or the step is as planned."""
    import numpy as np

    from vllm_spac.decisions.guard.cut_rule import pack
    from vllm_spac.decisions.guard.device_chooser import DeviceChooser

    count, init = itertools.count(), DeviceChooser.__init__

    def made(self: Any, most: int) -> None:
        init(self, most)
        self.depth = most

    def numbers(self: Any, requests: Any, drafts: Any) -> Any:
        kept = next(count) % 5
        if kept == 4:
            return None
        most = np.minimum(np.array(drafts, dtype=np.float64), kept + np.arange(len(drafts)) % 2)
        return pack(self._odds.terms(requests, self.depth), 1.0, 0.0, most)

    DeviceChooser.__init__, DeviceChooser.numbers = made, numbers


class FirstLaunches:
    """Operations before forwards that cut drafts, by name and types: those of served steps that no warm-up launched."""

    def __init__(self) -> None:
        self.warm, self.served = set[tuple](), set[tuple]()

    def install(self) -> None:
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        from vllm_spac.integration.hooks.draft_cutting import DraftCutter

        launches, begin = self, DraftCutter.begin

        class Noted(TorchDispatchMode):
            def __init__(self, keys: set[tuple]) -> None:
                super().__init__()
                self.keys = keys

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                found = func(*args, **(kwargs or {}))
                self.keys.add((str(func), *(str(each.dtype) for each in (*args, found) if hasattr(each, "dtype"))))
                return found

        def begun(cutter: Any, scheduled: Any, batch: Any) -> None:
            with Noted(launches.warm if cutter._runtime.warms_up else launches.served), torch.inference_mode():
                begin(cutter, scheduled, batch)

        DraftCutter.begin = begun

    @property
    def cold(self) -> list[str]:
        return sorted(map(str, self.served - self.warm))


def unpin() -> None:
    """Of every other layer, nothing has an address."""
    from vllm_spac.storage.base import allocate
    from vllm_spac.storage.host import HostStore

    view = HostStore.view

    def viewed(self: Any, key: int) -> Any:
        assert self.in_reach(key) or sys._getframe(1).f_code.co_name in ("put", "read"), "nobody may address it"
        return view(self, key)

    def staging(self: Any) -> Any:
        self._test_staging = vars(self).get("_test_staging") or allocate(self.shape.tensors, self.shape.experts, "cpu")
        return self._test_staging

    HostStore.in_reach = lambda self, key: key // self.shape.experts % 2 == 0
    HostStore.view, HostStore.staging = viewed, staging


def tamper(bug: str) -> None:
    """Plants a bug that the emulation must show."""
    import torch

    from vllm_spac.config.config import SpacConfig
    from vllm_spac.integration.hooks.draft_cutting import DraftCutter
    from vllm_spac.methods.trees.captured_trees import CapturedTrees
    from vllm_spac.methods.trees.tensors import Scratch

    if bug == "not warmed up":
        DraftCutter._warm_up = lambda *args: None
    elif bug == "new memory":  # in place of what a graph refers to
        batch, write = CapturedTrees.batch, CapturedTrees.write

        def written(self: Any, *args: Any) -> None:
            self._all = self._all._replace(lengths=torch.ones_like(self._all.lengths))
            write(self, *args)

        CapturedTrees.batch, CapturedTrees.write = batch, written
    elif bug == "padding writes":  # to the first slots of the requests' blocks
        reset = CapturedTrees.reset
        size, first = (
            SETTINGS["block_size"],
            Scratch(SpacConfig(tree="16").draft_tree, 4, SETTINGS["block_size"]).count + 1,
        )

        def padded(self: Any) -> None:
            reset(self)
            slots = self._all.scattered.slots
            slots.copy_((first + torch.arange(len(slots)).flip(0)) * size)

        CapturedTrees.reset = padded
    else:
        raise ValueError(bug)


def main(asked: dict) -> dict:
    import vllm_spac

    launches = FirstLaunches()
    if asked["graphs"]:
        full_graphs.install()
        launches.install()
        asked["options"] |= full_graphs.options()
    for trick in asked["tricks"]:
        {"plan": plan_by_turns, "cut": cut_by_turns, "unpin": unpin}.get(trick, lambda trick=trick: tamper(trick))()
    with engines.engine(str(TOY / "target"), asked["spac"], **SETTINGS | asked["options"]) as llm:
        texts = prompts()
        alone = engines.say(llm, texts[-1:], asked["tokens"])
        together = engines.say(llm, texts, asked["tokens"])  # more than run at once
        stats = vllm_spac.stats(llm)["workers"][0] if asked["spac"] is not None else {}
    counts = {"captures": full_graphs.CudaGraph.captures, "replays": full_graphs.CudaGraph.replays}
    return {"said": [*alone, *together], "stats": stats, "cold": launches.cold, **counts}


def run(spac: dict | None, tricks: tuple[str, ...] = (), graphs: bool = True, tokens: int = 24, **options: Any) -> dict:
    """What an engine of its own says, and counts of what it did."""
    asked = {"spac": spac, "tricks": tricks, "graphs": graphs, "tokens": tokens, "options": options}
    return forked.answer(forked.run([__file__, json.dumps(asked)], timeout=1500))


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
