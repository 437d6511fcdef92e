"""One way to serve a model: its command, and what weights, KV cache, buffers and slots take of fast memory. Pure."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace

from vllm_spac.cache.sizing import Batch, MoEWidths, Widths, Working, settling
from vllm_spac.decisions import prompt_chunks
from vllm_spac.errors import ConfigError
from vllm_spac.storage.checkpoint import quantisation
from vllm_spac.storage.checkpoint.kv_layers import Blocks, Steps
from vllm_spac.system.host_memory import gib
from vllm_spac.tools.planning.planned_machine import UTILIZATION, PlannedMachine, Store
from vllm_spac.tools.planning.planned_model import ServedModel
from vllm_spac.tools.planning.planned_stages import Stage, StagedModel, even, stages

_ROWS, _ROWS_LARGE = 2048, 8192  # vLLM's --max-num-batched-tokens when it serves
_REQUESTS, _REQUESTS_LARGE, _REQUESTS_CPU = 256, 1024, 128  # its --max-num-seqs
_LARGE = 70 << 30  # bytes of GPU memory from which they are more
_GRAPHS_EACH = 8  # vLLM captures graphs of 1, 2, 4 and multiples of 8 rows
_MOST_CAPTURED = 512


@dataclass(frozen=True)
class Load:
    """What is asked of an engine: ``concurrency`` requests of up to ``context`` tokens, with ``drafts`` drafts each."""

    context: int
    concurrency: int
    drafts: int = 0


@dataclass(frozen=True)
class Split:
    """Bytes of fast memory."""

    fast: int  # that vLLM may use
    weights: int  # everything but experts
    kv: int  # KV cache of the load
    working: int  # run-time buffers

    @property
    def room(self) -> int:
        """Bytes left for slots; negative if the others do not fit."""
        return self.fast - self.weights - self.kv - self.working


def rows(model: ServedModel, machine: PlannedMachine, load: Load) -> int:
    """Returns the most rows of a forward, which an engine chooses where nothing is named (``chunk_size``)."""
    if not machine.gpu:
        return _ROWS
    usual = _ROWS_LARGE if machine.smallest >= _LARGE else _ROWS
    widths = _widths(model)
    found = prompt_chunks.rows(
        machine.costs,
        missing=prompt_chunks.missing(model.experts_bytes, machine.fast),
        layer_bytes=max(model.checkpoint.layer_bytes.values()),
        layer_values=widths.multiplied,
        row_bytes=widths.row,
        memory=machine.smallest,
    )
    return max(usual, min(found, load.context * load.concurrency))


def split(model: ServedModel, machine: PlannedMachine, load: Load) -> Split:
    """Divides the fast memory of ``machine``; of several GPUs, what is of use of all of them together."""
    working = _working(model, machine, load)
    if machine.cards:
        found = staged(model, machine, load)
        weights, kv, beside = (sum(getattr(each, name) for each in found) for name in ("weights", "kv", "working"))
        return Split(weights + kv + beside + sum(each.room for each in found), weights, kv, beside)
    return Split(machine.fast, model.checkpoint.other_bytes, kv_bytes(model, machine, load), working)


def staged(model: ServedModel, machine: PlannedMachine, load: Load) -> tuple[Stage, ...]:
    """Returns the pipeline stages of a machine with several GPUs."""
    shape, checkpoint = model.architecture, model.checkpoint
    count = max(len(shape.windows) + shape.recurrent, 1 + max(checkpoint.layer_bytes))
    end = 2 * shape.vocabulary * shape.hidden
    beside = max(0, checkpoint.other_bytes - end * (1 if shape.tied else 2))
    layers = tuple(checkpoint.layer_bytes.get(layer, 0) for layer in range(count))
    cards = [(card, int(UTILIZATION * card)) for card in machine.cards]
    divided = StagedModel(layers, checkpoint.experts, beside // count, end)
    return stages(divided, cards, kv_bytes(model, machine, load), _working(model, machine, load))


def _working(model: ServedModel, machine: PlannedMachine, load: Load, requests: int | None = None) -> int:
    """Returns the bytes of run-time buffers; ``requests``: that are sampled at once, if not those of the load."""
    sampled = (requests or load.concurrency) * (1 + load.drafts)
    captured = min(2 * sampled, _MOST_CAPTURED) if machine.gpu else 0
    graphs = 3 + captured // _GRAPHS_EACH if captured else 0
    most = max(rows(model, machine, load), sampled)
    return Working.of(_widths(model), model.architecture.vocabulary, Batch(most, sampled, captured, graphs)).total


def _widths(model: ServedModel) -> Widths:
    shape = model.architecture
    moe = MoEWidths(model.checkpoint.top_k, shape.hidden, shape.inner)
    return Widths(shape.hidden, shape.heads, shape.kv_heads, shape.head, shape.dense, (moe,), itemsize=2)


def kv_bytes(model: ServedModel, machine: PlannedMachine, load: Load) -> int:
    """Returns the bytes of KV cache of all requests, as vLLM counts them, with the block that it holds back."""
    return kv_blocks(model, machine, load).pool_bytes(load.concurrency)


def kv_blocks(model: ServedModel, machine: PlannedMachine, load: Load) -> Blocks:
    """Returns the blocks of KV cache of one request; on a GPU, vLLM schedules a step ahead of the one that runs."""
    in_flight = rows(model, machine, load) * (2 if machine.gpu else 1)
    return model.architecture.blocks(Steps(load.context, in_flight, load.drafts, on_cpu=not machine.gpu))


def slot_shapes(model: ServedModel, percent: int, tokens: int = 0) -> list[tuple[int, int]]:
    """Returns (number, bytes of each) of slots at ``--spac-slots percent%``, or with ``tokens`` at ``{tokens}k``."""
    return model.checkpoint.slots_of_tokens(tokens) if tokens else model.checkpoint.slots(percent)


def slot_bytes(model: ServedModel, percent: int, tokens: int = 0) -> int:
    """Returns the bytes of ``slot_shapes``."""
    return sum(count * size for count, size in slot_shapes(model, percent, tokens))


def settled(model: ServedModel, machine: PlannedMachine, percent: int, tokens: int = 0) -> int:
    """Returns how many experts have slots for good, because host memory has no room for all of them."""
    if model.execution != "pointers" or not machine.gpu:
        return 0
    count, checkpoint = sum(count for count, _ in slot_shapes(model, percent, tokens)), model.checkpoint
    return settling(checkpoint.total, model.expert_bytes, machine.spare, count, checkpoint.experts)


def largest_slots(model: ServedModel, room: Split) -> tuple[int, int]:
    """Returns the most slots that fit: (percent, 0), or (0, tokens) in multiples of top-k where no percent fits.

    Raises:
        ConfigError: not even the slots of one token fit.
    """
    shares = range(model.checkpoint.smallest_percent(), 101)
    if fitting := [percent for percent in shares if slot_bytes(model, percent) <= room.room]:
        return max(fitting), 0
    fewest = slot_bytes(model, 0, tokens=1)
    if tokens := max(0, room.room) // fewest:
        return 0, tokens
    needed = room.weights + room.kv + room.working + fewest
    smaller = "" if model.quantised else "use a quantised checkpoint, "
    raise ConfigError(
        f"nothing fits: {gib(room.weights)} of weights that are no experts, {gib(room.kv)} of KV cache, "
        f"{gib(room.working)} of run-time buffers and {gib(fewest)} of the fewest slots "
        f"(1k) need {gib(needed)} of fast memory, and {gib(room.fast)} may be used; lower --context or "
        f"--concurrency, {smaller}or name a machine with more memory"
    )


DRAFTS = 4  # of a chain
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 4}


@dataclass(frozen=True)
class Choice:
    """One way to serve."""

    percent: int  # ``--spac-slots``, in percent of all experts
    store: Store  # where the other experts are; ``none``: there are no others; ``tiers``: host memory before a disk
    host_bytes: int = 0  # with ``tiers``, host memory between slots and disk
    cpu: bool = False  # the CPU computes a share of the missing experts
    drafts: int = 0
    settled: int = 0  # with ``host``, experts that have slots for good, and no copy there
    tokens: int = 0  # instead of ``percent``, which is 0: slots for so many tokens, where not one percent fits

    @property
    def slots(self) -> str:
        """The value of ``--spac-slots``."""
        return f"{self.tokens}k" if self.tokens else f"{self.percent}%"


def command(choice: Choice, model: ServedModel, machine: PlannedMachine, load: Load) -> str:
    """Returns the command that serves so; the KV cache is given, so that memory is divided as planned.

    Where all experts fit, it is stock vLLM's, which chooses its kernels and the size of the KV cache by itself; unless
    it has no kernel for them on this machine.
    """
    stock = choice.store == "none" and model.stock
    if stock:
        options = _stock(choice, model, machine, load)
    else:
        options = ["--plugin", "spac", "--spac-slots", _slots(choice, model, machine, load)]
        options += _knobs(choice, model, machine)
        options += ["--max-model-len", str(load.context), "--max-num-seqs", str(load.concurrency)]
        if machine.gpu:
            options += ["--max-num-batched-tokens", str(rows(model, machine, load))]
        if not model.architecture.recurrent or model.architecture.state is not None:
            options += ["--kv-cache-memory-bytes", str(_kv_of_one(model, machine, load))]
    divided: list[str] = []
    if machine.cards:
        counts = [stage.stop - stage.start for stage in staged(model, machine, load)]
        options += ["--pipeline-parallel-size", str(len(counts))]
        if tuple(counts) != even(sum(counts), len(counts)):
            divided = [f"VLLM_PP_LAYER_PARTITION={','.join(map(str, counts))}"]
    if model.revision is not None:
        options = ["--revision", model.revision, *options]
    if choice.drafts:
        options += ["--speculative-config", json.dumps(NGRAM)]
    if not model.stock:
        options += ["--spac-plane", model.execution]
    elif not stock:
        entry = model.checkpoint.quantisation
        options += " ".join(quantisation.flags(entry, model.kernels, machine.capability, model.execution)).split()
    return shlex.join([*divided, "vllm", "serve", model.name, *options])


def _slots(choice: Choice, model: ServedModel, machine: PlannedMachine, load: Load) -> str:
    """Returns the value of ``--spac-slots``: of several GPUs, each has as many as it has room for."""
    if machine.cards and (choice.percent, choice.tokens) == largest_slots(model, split(model, machine, load)):
        return "auto"
    return choice.slots


def _kv_of_one(model: ServedModel, machine: PlannedMachine, load: Load) -> int:
    """Returns the bytes of KV cache of a GPU, of several the most that one has: the option is of each."""
    if machine.cards:
        return max(stage.kv for stage in staged(model, machine, load))
    return kv_bytes(model, machine, load)


def _knobs(choice: Choice, model: ServedModel, machine: PlannedMachine) -> list[str]:
    options = []
    if choice.store in ("disk", "tiers"):
        options += ["--spac-store", "disk"]
    elif choice.store == "host":
        options += ["--spac-store", "host"]
    if machine.gpu and choice.store == "host" and model.execution == "slots":
        options += ["--spac-plane", "slots"]
    if choice.host_bytes:
        options += ["--spac-host-memory", f"{choice.host_bytes >> 20}MiB"]
    if choice.cpu:
        options += ["--spac-cpu-experts", "auto"]
    return options


def _stock(choice: Choice, model: ServedModel, machine: PlannedMachine, load: Load) -> list[str]:
    """Returns what stock vLLM must be told: a shorter context, or fewer requests, where its defaults do not fit."""
    requests = _REQUESTS_LARGE if machine.gpu >= _LARGE else _REQUESTS if machine.gpu else _REQUESTS_CPU
    longest = replace(load, context=model.architecture.longest or load.context, drafts=choice.drafts)

    def fits(context: int, sampled: int) -> bool:
        one = replace(longest, context=context, concurrency=1)
        taken = kv_bytes(model, machine, one) + _working(model, machine, one, sampled)
        return model.checkpoint.other_bytes + model.experts_bytes + taken <= machine.fast

    options, context = [], longest.context
    if not fits(context, load.concurrency):
        context = load.context
        options += ["--max-model-len", str(context)]
    return options if fits(context, requests) else [*options, "--max-num-seqs", str(load.concurrency)]
