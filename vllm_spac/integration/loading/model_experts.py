"""The experts of the target model, from the first layer that is built to the executions that serve them."""

from __future__ import annotations

import functools
import logging
import sys
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm
from vllm.platforms import current_platform

from vllm_spac import components
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.types import AUTO, SlotCount
from vllm_spac.core import MoEShape
from vllm_spac.decisions.guard.draft_probabilities import DraftProbabilities
from vllm_spac.decisions.guard.draft_states import DraftStates
from vllm_spac.decisions.guard.guard import Guard
from vllm_spac.decisions.predictor_file import PredictorFile
from vllm_spac.decisions.predictors.base import Predictor, Signal
from vllm_spac.errors import StoreError, UnsupportedError
from vllm_spac.execution.base import Execution, ExecutionContext, Room
from vllm_spac.execution.exchange import Exchange
from vllm_spac.integration.hooks import drafts, graphs, runner_hooks
from vllm_spac.integration.hooks.ranks import Ranks
from vllm_spac.integration.layers import routers, triton_tiles
from vllm_spac.integration.layers.managed_experts import ManagedExperts
from vllm_spac.integration.loading import ahead, assembly, description, expert_workers, fast_memory
from vllm_spac.integration.loading.fingerprint import content_of, drafter_fingerprint, fingerprint, model_fingerprint
from vllm_spac.integration.loading.store_lock import StoreLock
from vllm_spac.integration.stepping import draft_handover, draft_planning, runner_v1, runner_v2
from vllm_spac.integration.stepping import tree_install as trees
from vllm_spac.methods.moe_spec.control import BudgetControl
from vllm_spac.recording.timeline_file import TimelineFacts
from vllm_spac.runtime import Runtime
from vllm_spac.storage.base import ExpertStore, allocate
from vllm_spac.storage.checkpoint.contents import CheckpointContents
from vllm_spac.storage.checkpoint.packed_folder import note_model
from vllm_spac.system import machine
from vllm_spac.system.host_memory import gib, release_file_pages, release_freed_memory

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_spac.integration.stepping.draft_routing import DraftRouting
    from vllm_spac.integration.stepping.tree_decoding_v1 import TreeDecoding
    from vllm_spac.integration.stepping.tree_decoding_v2 import TreeDecodingV2

logger = logging.getLogger("vllm.spac")  # below "vllm", so that vLLM's handlers and levels apply

# Bytes of experts converted at a time: on a CPU they take memory in addition to the layer; on a GPU each chunk costs a
# kernel object and two copies.
_CHUNK_BYTES = {"cpu": 16 << 20, "gpu": 256 << 20}
_FILE_BYTES = 32 << 20  # read from a mapped checkpoint before its pages are released


class ModelExperts:
    """All managed layers of one model: packs them, then serves them with one execution per shape."""

    def __init__(self, config: SpacConfig, vllm_config: VllmConfig) -> None:
        self.config = config
        self.vllm_config = vllm_config
        self.device = torch.device(vllm_config.device_config.device)
        self.on_cpu = current_platform.is_cpu()
        self.ranks = Ranks.of(vllm_config)
        machine.share(self.ranks.rank, self.ranks.size)
        self.execution = config.execution_class
        self.store_name = config.store_on("cpu" if self.on_cpu else "cuda")
        self._exchange = None if self.on_cpu else Exchange(self.device)
        self.runtime: Runtime | None = None
        self.guard: Guard | None = None
        self.timeline_facts: TimelineFacts  # from ``finish`` on
        self.trees: TreeDecoding | TreeDecodingV2 | None = None  # once the KV cache exists
        self.drafted = DraftProbabilities()
        self.draft_states: DraftStates  # from ``prepare`` on
        self.draft_routing: DraftRouting | None = None  # once a draft model is loaded, if a predictor looks at it
        self.head: ModelExperts | None = None  # once an MTP head is loaded whose experts have slots
        self.other_weights: int  # bytes of the model's weights that are not experts; from ``prepare`` on
        self._layers: list = []
        self._stores: dict[str, ExpertStore] = {}  # by layer name; layers of one shape share a store
        self._shapes: list[MoEShape] = []
        self._plan: list[Room] = []  # per shape
        self._filled: dict[MoEShape, Execution] = {}  # for shapes that an earlier start packed completely
        self._bar: tqdm  # from ``prepare`` on
        self._budget: BudgetControl
        self._predictors: PredictorFile | None
        self._predictor: Predictor | None
        self._file_bytes = 0
        self._locks: list[StoreLock] = []
        self._put: list[tuple[ExpertStore, int]] = []  # (store, key) of the experts that this start packed

    @functools.cached_property
    def checkpoint(self) -> CheckpointContents:
        """Content of the weight files; reading them may take long."""
        return content_of(self.vllm_config, self.config.folder)

    def model_name(self) -> str:
        """Fingerprint of the weights; for calibrations and budgets."""
        return model_fingerprint(self.checkpoint)

    def _drafter(self) -> str:
        """Fingerprint of the draft model; "" without one."""
        return drafter_fingerprint(self.vllm_config, self.config.folder)

    # -- called by the layers ------------------------------------------------------------------------------

    def add(self, layer: ManagedExperts) -> None:
        layer.spac_number = len(self._layers)
        self._layers.append(layer)

    def prepare(self, model: torch.nn.Module) -> None:
        """Plans the slots and opens the stores; called when all layers are built, before any weight is loaded.

        Raises:
            SpacError: this model cannot be served with this configuration.
        """
        if not self._layers:
            raise UnsupportedError("spac: this model builds no MoE layer that the plugin can manage")
        self._group()
        routers.install(model, self._layers)
        self._predictors = ahead.predictors(self.config, self._shapes, self.model_name)
        self._predictor = ahead.predictor(self.config, self._predictors, self._drafter, self.device)
        self.draft_states = ahead.draft_states(self.config, self._predictors, self._shapes)
        args = self.config, self.vllm_config, self._layers, self.device, self.model_name, self._predictor
        self._budget = assembly.budget(*args)
        others = sum(p.nbytes for p in model.parameters()) - sum(layer.staged_bytes for layer in self._layers)
        self.other_weights = others
        working = fast_memory.working(self.vllm_config, self.device, {layer.spac_widths for layer in self._layers})
        if self.config.parsed_slots == SlotCount():
            kv = gib(fast_memory.beside_slots(self.vllm_config))
            logger.info("spac: slots=auto leaves %s of KV cache and %s", kv, working.describe())
        total = sum(shape.total * shape.expert_bytes for shape in self._shapes)
        ranks = self.ranks.size
        assembly.check_host_memory(self.config, total, ranks)
        beside = min(total, (self.config.host_memory or 0) // ranks)
        free = fast_memory.budget(self.vllm_config, self.device, others, working.total, beside, ranks)
        free = self.ranks.least(free)  # no rank allocates before all have seen what is free
        for shape in self._shapes:
            room = self.execution.divide(self.config.parsed_slots, self.config.staging, shape, free)
            if room.staged:
                graphs.check_staging(self.vllm_config, shape)
            if self.execution.layout == "kernel" and room.slots < shape.total and not self.on_cpu:
                triton_tiles.install()
            self._plan.append(room)
            free -= room.nbytes
            self._open_store(shape, room, free)
        if not self._store_kind.persistent:
            self.ranks.wait()  # until all have seen that there is room; no lock is held that another engine waits for
        self._begin_packing()

    def arrived(self, count: int) -> None:
        """Counts ``count`` bytes copied from the checkpoint, whose mapped pages now count as this process's memory."""
        self._file_bytes += count
        if self._file_bytes >= _FILE_BYTES:
            self._file_bytes = 0
            release_file_pages()

    def is_stored(self, layer: ManagedExperts) -> bool:
        """Whether all experts of the layer were packed, now or in an earlier run."""
        return all(map(self._store(layer).holds, self._keys(layer)))

    def pack(self, layer: ManagedExperts) -> None:
        """Moves a layer whose weights have all arrived to the store; does nothing for a stored one."""
        store = self._store(layer)
        keys = self._keys(layer)
        if not self.is_stored(layer):
            chunk = max(1, _CHUNK_BYTES["cpu" if self.on_cpu else "gpu"] // store.shape.expert_bytes)
            for start in range(0, len(keys), chunk):
                part = {name: t.cpu() for name, t in layer.convert(start, min(start + chunk, len(keys))).items()}
                for offset, key in enumerate(keys[start : start + chunk]):
                    if not store.holds(key):
                        store.put(key, {name: tensor[offset] for name, tensor in part.items()})
                        self._put.append((store, key))
                        self._bar.update()
        layer.forget()
        release_freed_memory()

    # -- called by the loader and the runner ---------------------------------------------------------------

    def finish(self) -> None:
        """Fills the slots and attaches the layers to them; called once the weights are loaded."""
        executions = self._attach()
        trace = assembly.trace(self.config, self.vllm_config, executions) if self.ranks.rank == 0 else None
        self.timeline_facts = assembly.timeline_facts(self.vllm_config, executions, self.store_name)
        saved = assembly.timeline(self.config, self.timeline_facts) if self.ranks.rank == 0 else None
        self.guard = assembly.guard(self.config, self.vllm_config)
        plans = drafts.plans_drafts(self.vllm_config)
        guard = None if plans else self.guard
        self.runtime = Runtime(executions, self._budget, trace, guard, saved, failed=self.ranks.failed)
        if plans and self.guard is not None:
            draft_planning.offer(self.vllm_config, self.guard)
        for execution in executions:
            first, prefetch = self._layer_of(execution.shape), self.config.prefetch
            if self.config.uses_cpu_experts:
                assembly.balance(self.config, self.vllm_config, execution, first)
            if prefetch == AUTO and self._predictors is not None:
                read = not self.config.tree and drafts.unread(self.vllm_config) is None
                drafter = self._drafter() if read and self._predictors.drafter else ""
                args = self.config, execution, first, self._predictors, self.store_name, drafter
                prefetch = ahead.choose_for(*args, drafts.most(self.vllm_config)).describe()
            mode = self._budget.describe() if self._budget.active else description.mode(self._budget, executions)
            choices = description.choices(self.config, execution, prefetch)
            described = description.describe(execution)
            logger.info("spac: mode=%s, %s, %s%s", mode, described, choices, self.ranks.describe())
        self._predictors = None  # its tensors are only needed by what was built
        if saved is not None:
            self.runtime.watch(saved.timeline)
        for caveat in dict.fromkeys(execution.caveat() for execution in executions):
            if caveat is not None:
                logger.warning("spac: %s", caveat)
        (runner_v2 if plans else runner_v1).install()
        if self.config.tree:
            trees.install(self.vllm_config)
        runner_hooks.install()
        if self.on_cpu:
            fast_memory.install()
        draft_handover.install_in_worker()

    @property
    def reads_draft_routing(self) -> bool:
        """Whether a predictor looks at what the routers of the draft model choose; once the weights are loaded."""
        assert self.runtime is not None
        return any(Signal.DRAFT_ROUTING in execution.looks_at for execution in self.runtime.executions)

    @property
    def fast_bytes(self) -> int:
        """Bytes of experts in RAM: slots, and what is between them and the disk; once the weights are loaded."""
        assert self.runtime is not None
        slots = sum(e.residency.slots * e.shape.expert_bytes for e in self.runtime.executions)
        head = 0 if self.head is None else self.head.fast_bytes
        return head + slots + sum(e.host.block.nbytes for e in self.runtime.executions if e.host is not None)

    def stats(self) -> dict:
        """Settings and counters of this worker, summed over executions, as plain data; once the weights are loaded."""
        assert self.runtime is not None
        counts = {} if self.trees is None else self.trees.counters.snapshot()
        counts |= {} if self.head is None else {"mtp_head": self.head.stats()}
        return self.ranks.facts() | description.stats(self.runtime, self.config, self.store_name, self.guard) | counts

    def close(self) -> None:
        """Stops threads and closes stores."""
        if self.head is not None:
            self.head.close()
        for lock in self._locks:
            lock.close()
        if self.runtime is not None:
            self.runtime.close()
            return
        filled = {id(execution.store) for execution in self._filled.values()}  # loading failed
        for execution in self._filled.values():
            execution.close()
        for store in {id(store): store for store in self._stores.values()}.values():
            if id(store) not in filled:
                store.close()

    # -- parts ---------------------------------------------------------------------------------------------

    def _group(self) -> None:
        """Groups the layers by the layout of their experts: into shapes."""
        groups: dict[tuple, list] = {}
        for layer in self._layers:
            specs = sorted((n, s.shape, str(s.dtype)) for n, s in layer.probe().items())
            groups.setdefault((layer.spac_packed, *specs), []).append(layer)
        for layers in groups.values():
            self._shapes.append(self._shape_of(layers))
            self.execution.check_shape(self._shapes[-1])

    def _begin_packing(self) -> None:
        missing = sum(1 for layer in self._layers for key in self._keys(layer) if not self._store(layer).holds(key))
        self._bar = self._progress(missing, "Packing experts", hidden=missing == 0)

    def _attach(self) -> list[Execution]:
        """Fills the slots and attaches the layers to them; returns the execution of each shape."""
        self._bar.close()
        if "checkpoint" in vars(self):
            self._check_unchanged()
        for lock in self._locks:
            lock.share()
        executions = []
        for shape, room in zip(self._shapes, self._plan, strict=True):
            execution = self._filled.pop(shape, None) or self._fill(shape, room)
            executions.append(execution)
            for layer in self._layers:
                if self._store(layer) is execution.store:
                    layer.attach(execution)
        return executions

    def _shape_of(self, layers: list) -> MoEShape:
        for index, layer in enumerate(layers):
            layer.spac_index = index
        first = layers[0]
        names, specs = tuple(layer.layer_name for layer in layers), first.probe()
        return MoEShape(names, first.local_num_experts, first.top_k, specs, first.spac_packed)

    def _open_store(self, shape: MoEShape, room: Room, free: int) -> None:
        kind, lock, layer = self._store_kind, None, self._layer_of(shape)
        store: ExpertStore
        if self.config.executor != "local":
            expert_workers.check_shapes(self.config, self._shapes)
            name = fingerprint(self.vllm_config, shape, layer, self.checkpoint)
            store = expert_workers.store(self.config, self.vllm_config, shape, layer, name, free)
        elif room.slots == shape.total:
            store = components.build("stores", "resident", shape=shape, fingerprint="", device=self.device)
        elif kind.persistent:
            name = fingerprint(self.vllm_config, shape, layer, self.checkpoint)
            self._locks.append(lock := StoreLock(self.config.folder, name))
            store = kind(shape=shape, fingerprint=name, folder=self.config.folder)
            note_model(self.config.folder / name, self.vllm_config.model_config.model)
        else:
            store = kind(shape=shape, fingerprint="", folder=None)
        self._stores.update(dict.fromkeys(shape.layers, store))
        if store.suspect:
            self._verify(store)
        if all(map(store.holds, range(shape.total))):
            try:  # now, so that this start packs what turns out to be damaged
                self._filled[shape] = self._fill(shape, room)
            except StoreError as error:
                logger.warning("%s", error)
                self._verify(store)
        missing = sum(not store.holds(key) for key in range(shape.total))
        if lock is not None and lock.claim(missing):
            store.sweep()
        # Files: each rank checks the room for its own, since to meet while locks are held could end in a deadlock.
        store.reserve(missing if kind.persistent else missing * self.ranks.size)

    def _verify(self, store: ExpertStore) -> None:
        held = sum(map(store.holds, range(store.shape.total)))
        logger.info("spac: checking all %d packed experts, since some are missing or damaged", held)
        with self._progress(held, "Checking packed experts") as bar:
            damaged = 0
            for problem in store.verify(self.config.io_threads):
                damaged += problem is not None
                bar.update()
        if damaged:
            logger.warning("spac: %d of %d packed experts are damaged and are packed again", damaged, held)

    def _check_unchanged(self) -> None:
        """Raises ``StoreError`` if the checkpoint changed since it was read, and drops what was packed from it."""
        try:
            self.checkpoint.check_unchanged()
        except StoreError:
            for store, key in self._put:
                store.drop(key)
            raise

    def _fill(self, shape: MoEShape, room: Room) -> Execution:
        store = self._stores[shape.layers[0]]
        share = shape.total * shape.expert_bytes / sum(each.total * each.expert_bytes for each in self._shapes)
        most = drafts.most(self.vllm_config)
        host = assembly.host_rows(self.config, shape, room.slots, most, share / self.ranks.size, self.device)
        local_of = self._layer_of(shape).local_of
        filled = room.slots + (0 if host is None else min(host.tier.rows, shape.total - room.slots))
        execution = self.execution.of(
            ExecutionContext(
                shape=shape,
                room=room,
                policy=assembly.policy(self.config, shape, room.slots, most, local_of),
                store=store,
                tensors=store.tensors or allocate(shape.tensors, room.slots, self.device),
                path=self.store_name,
                rows=graphs.most_rows(self.vllm_config),
                config=self.config,
                host=host,
                exchange=self._exchange,
                local_of=local_of,
                predictor=self._predictor,
                drafts=most,
            )
        )
        try:
            with self._progress(filled, "Filling slots", hidden=execution.holds_all or filled == 0) as bar:
                for loaded in execution.fill():
                    bar.update(loaded)
        except BaseException:
            execution.close()
            raise
        execution.counters.reset()
        return execution

    @property
    def _store_kind(self) -> type[ExpertStore]:
        return components.find("stores", self.store_name)

    def _progress(self, total: int, what: str, hidden: bool = False) -> tqdm:
        """A bar on standard error, of the first rank only."""
        return tqdm(total=total, desc=what, unit="expert", file=sys.stderr, disable=hidden or self.ranks.rank > 0)

    def _layer_of(self, shape: MoEShape) -> ManagedExperts:
        return next(layer for layer in self._layers if layer.layer_name == shape.layers[0])

    def _store(self, layer: ManagedExperts) -> ExpertStore:
        return self._stores[layer.layer_name]

    def _keys(self, layer: ManagedExperts) -> range:
        experts = self._store(layer).shape.experts
        return range(layer.spac_index * experts, (layer.spac_index + 1) * experts)
