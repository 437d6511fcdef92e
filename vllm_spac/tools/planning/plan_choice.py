"""One way to serve a model on a machine, and the command that does it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from vllm_spac.storage.checkpoint import quantisation
from vllm_spac.tools.planning.planned_machine import PlannedMachine, Store
from vllm_spac.tools.planning.planned_memory import Load, kv_bytes
from vllm_spac.tools.planning.planned_model import ServedModel

DRAFTS = 4  # of a chain
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 4}


@dataclass(frozen=True)
class Choice:
    """One way to serve.

    Attributes:
        percent: ``--spac-slots``, in percent of all experts.
        store: where the other experts are; ``none``: there are no others; ``tiers``: host memory before a disk.
        host_bytes: with ``tiers``, host memory between slots and disk.
        cpu: the CPU computes a share of the missing experts.
        tokens: instead of ``percent``, which is 0: slots for so many tokens, where not one percent fits.
    """

    percent: int
    store: Store
    host_bytes: int = 0
    cpu: bool = False
    drafts: int = 0
    tokens: int = 0

    @property
    def slots(self) -> str:
        """The value of ``--spac-slots``."""
        return f"{self.tokens}k" if self.tokens else f"{self.percent}%"


def command(choice: Choice, model: ServedModel, machine: PlannedMachine, load: Load) -> str:
    """Returns the command that serves so; the KV cache is given, so that memory is divided as planned."""
    options = ["--plugin", "spac", "--spac-slots", choice.slots]
    if choice.store in ("disk", "tiers"):
        options += ["--spac-store", "disk"]
    elif choice.store == "host":
        options += ["--spac-store", "host"]
    if machine.gpu and choice.store == "host" and model.execution == "slots":
        options += ["--spac-decisions", "host"]
    if choice.host_bytes:
        options += ["--spac-host-memory", f"{choice.host_bytes >> 20}MiB"]
    if choice.cpu:
        options += ["--spac-cpu-experts", "auto"]
    options += ["--max-model-len", str(load.context), "--max-num-seqs", str(load.concurrency)]
    options += ["--kv-cache-memory-bytes", str(kv_bytes(model, load))]
    if choice.drafts:
        options += ["--speculative-config", json.dumps(NGRAM)]
    options += " ".join(quantisation.flags(model.checkpoint.quantisation, model.kernels, machine.capability)).split()
    return shlex.join(["vllm", "serve", model.name, *options])
