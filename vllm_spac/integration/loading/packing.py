"""The stores of a model's experts while it is loaded: opened, filled from the checkpoint, and made into executions."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from vllm_spac import components
from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.cache.sizing import settling
from vllm_spac.config.config import SpacConfig
from vllm_spac.core import MoEShape
from vllm_spac.decisions.predictors.base import Predictor
from vllm_spac.errors import PinError, StoreError
from vllm_spac.execution.base import Execution, ExecutionContext, Room
from vllm_spac.execution.exchange import Exchange
from vllm_spac.integration.hooks import drafts, graphs
from vllm_spac.integration.hooks.ranks import Ranks
from vllm_spac.integration.layers.managed_experts import ManagedExperts
from vllm_spac.integration.loading import assembly, expert_workers
from vllm_spac.integration.loading.fingerprint import content_of, fingerprint
from vllm_spac.integration.loading.store_lock import StoreLock
from vllm_spac.storage.base import ExpertStore, allocate
from vllm_spac.storage.checkpoint.contents import CheckpointContents
from vllm_spac.storage.checkpoint.packed_folder import write_model
from vllm_spac.system.host_memory import available_host_bytes, gib, release_file_pages, release_freed_memory

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.spac")

# Bytes of experts converted at a time: on a CPU they take memory in addition to the layer; on a GPU each chunk costs a
# kernel object and two copies.
_CHUNK_BYTES = {"cpu": 16 << 20, "gpu": 256 << 20}
_FILE_BYTES = 32 << 20  # read from a mapped checkpoint before its pages are released


class Packing:
    """Opens a store for each shape, packs what it lacks, and makes its execution.

    Call order: ``open`` for each shape, ``begin``, ``pack`` for each layer, ``finish``.
    """

    def __init__(
        self, config: SpacConfig, vllm_config: VllmConfig, device: torch.device, on_cpu: bool, ranks: Ranks
    ) -> None:
        self._config, self._vllm_config, self._device, self._ranks = config, vllm_config, device, ranks
        self.on_cpu = on_cpu
        self.store_name = config.store_on("cpu" if self.on_cpu else "cuda")
        self._exchange = None if self.on_cpu else Exchange(device)
        self._layers: list[ManagedExperts] = []
        self._shapes: list[MoEShape] = []
        self._failed = ranks.share_word() if config.execution_class.reads_in_place else None
        self._predictor: Predictor | None = None
        self._rooms: dict[MoEShape, Room] = {}
        self._stores: dict[str, ExpertStore] = {}  # by layer name; layers of one shape share a store
        self._filled: dict[MoEShape, Execution] = {}  # for shapes that an earlier start packed completely
        self._locks: list[StoreLock] = []
        self._put: list[tuple[ExpertStore, int]] = []  # (store, key) of the experts that this start packed
        self._bar: tqdm  # from ``begin`` on
        self._file_bytes = 0

    @functools.cached_property
    def checkpoint(self) -> CheckpointContents:
        """Content of the weight files; reading them may take long."""
        return content_of(self._vllm_config, self._config.folder)

    @property
    def store_kind(self) -> type[ExpertStore]:
        return components.find("stores", self.store_name)

    def plan(
        self, layers: Sequence[ManagedExperts], shapes: Sequence[MoEShape], predictor: Predictor | None = None
    ) -> None:
        """Takes up all managed layers, their shapes, and the predictor that their executions ask, if any."""
        self._layers, self._shapes, self._predictor = list(layers), list(shapes), predictor

    def layer_of(self, shape: MoEShape) -> ManagedExperts:
        """The first layer of ``shape``."""
        return next(layer for layer in self._layers if layer.layer_name == shape.layers[0])

    def open(self, shape: MoEShape, room: Room, free: int) -> None:
        """Opens the store of ``shape``; fills its slots already if an earlier start packed all of its experts.

        Args:
            free: bytes of fast memory that are left; expert workers of an engine on a CPU share them.
        """
        self._rooms[shape] = room
        kind, lock, layer = self.store_kind, None, self.layer_of(shape)
        store: ExpertStore
        if self._config.has_workers:
            expert_workers.check_shapes(self._config, self._shapes)
            name = fingerprint(self._vllm_config, shape, layer, self.checkpoint, self._config.execution_class.layout)
            self._locks.append(StoreLock(self._config.folder, name))
            self._locks[-1].open()  # with workers of this machine, which pack there
            memory = free if self.on_cpu else max(0, available_host_bytes() - assembly.HOST_RESERVE)
            store = expert_workers.store(self._config, self._vllm_config, shape, layer, name, memory)
        elif room.slots == shape.total:
            store = components.build("stores", "resident", shape=shape, fingerprint="", device=self._device)
        elif kind.persistent:
            name = fingerprint(self._vllm_config, shape, layer, self.checkpoint, self._config.execution_class.layout)
            self._locks.append(lock := StoreLock(self._config.folder, name))
            store = kind(shape=shape, fingerprint=name, folder=self._config.folder)
            write_model(self._config.folder / name, self._vllm_config.model_config.model)
        else:
            store = kind(shape=shape, fingerprint="", folder=None)
        store.in_place = self._config.execution_class.reads_in_place
        _settle(store, room.slots, set(self._stores.values()), self._ranks.share, self._device)
        self._stores.update(dict.fromkeys(shape.layers, store))
        if store.suspect:
            _verify(store, self._config.io_threads, self._ranks.rank)
        if all(map(store.holds, range(shape.total))):
            try:  # now, so that this start packs what turns out to be damaged
                self._filled[shape] = self._fill(shape)
            except PinError:
                raise
            except StoreError as error:
                logger.warning("%s", error)
                _verify(store, self._config.io_threads, self._ranks.rank)
        missing = sum(not store.holds(key) for key in range(shape.total))
        if lock is not None and lock.claim(missing):
            store.remove_partial()
        # Files: each rank checks the room for its own, since to meet while locks are held could end in a deadlock.
        store.reserve(missing if kind.persistent else int(missing / self._ranks.share))

    def pin(self) -> None:
        """Pins experts that the GPU reads in place, once all ranks have room; ``PinError`` if next to none can be."""
        for store in {id(store): store for store in self._stores.values()}.values():
            store.pin()

    def begin(self) -> None:
        """Called once all stores are open, before any weight is loaded."""
        of_layers = ((self._store(layer), key) for layer in self._layers for key in self._keys(layer))
        missing = [store for store, key in of_layers if not store.holds(key)]
        packs = any(store.persistent for store in missing)
        doing = "Packing experts" if packs else "Loading experts"
        self._bar = _progress(self._ranks.rank, len(missing), doing, not missing)

    def add_bytes(self, count: int) -> None:
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
        layer.drop()
        release_freed_memory()

    def finish(self) -> list[Execution]:
        """Fills the slots and attaches the layers to them; returns the execution of each shape."""
        self._bar.close()
        if "checkpoint" in vars(self):
            _check_unchanged(self.checkpoint, self._put)
        for lock in self._locks:
            lock.open()
        executions = []
        for shape in self._rooms:
            execution = self._filled.pop(shape, None) or self._fill(shape)
            executions.append(execution)
            for layer in self._layers:
                if self._store(layer) is execution.store:
                    layer.attach(execution)
        return executions

    def release_locks(self) -> None:
        """Gives back the locks on packed folders."""
        for lock in self._locks:
            lock.close()

    def close(self) -> None:
        """Closes what a load that failed has opened."""
        filled = {id(execution.store) for execution in self._filled.values()}
        for execution in self._filled.values():
            execution.close()
        for store in {id(store): store for store in self._stores.values()}.values():
            if id(store) not in filled:
                store.close()

    def _fill(self, shape: MoEShape) -> Execution:
        config, store, room = self._config, self._stores[shape.layers[0]], self._rooms[shape]
        share = shape.total * shape.expert_bytes / sum(each.total * each.expert_bytes for each in self._shapes)
        most = drafts.most(self._vllm_config)
        host = assembly.host_rows(config, shape, room.slots, most, share * self._ranks.share, self._device)
        local_of = self.layer_of(shape).local_of
        filled = room.slots + (0 if host is None else min(host.tier.rows, shape.total - room.slots))
        execution = config.execution_class.of(
            ExecutionContext(
                shape,
                room.slots,
                assembly.policy(config, shape, room.slots, most),
                store,
                store.tensors or allocate(shape.tensors, room.slots, self._device),
                path="host" if store.in_place else self.store_name,
                rows=graphs.most_rows(self._vllm_config),
                io_threads=config.io_threads,
                ahead=PrefetchSettings.configured(config, config.prefetch, self._predictor, drafts=most),
                host=host,
                exchange=self._exchange,
                local_of=local_of,
                failed=self._failed,
            )
        )
        try:
            hidden = execution.holds_all or filled == 0
            with _progress(self._ranks.rank, filled, "Filling slots", hidden) as bar:
                for loaded in execution.fill():
                    bar.update(loaded)
        except BaseException:
            execution.close()
            raise
        execution.counters.reset()
        return execution

    def _store(self, layer: ManagedExperts) -> ExpertStore:
        return self._stores[layer.layer_name]

    def _keys(self, layer: ManagedExperts) -> range:
        experts = self._store(layer).shape.experts
        return range(layer.spac_index * experts, (layer.spac_index + 1) * experts)


def _settle(store: ExpertStore, slots: int, before: set[ExpertStore], share: float, device: torch.device) -> None:
    """Gives experts slots for good that host memory has no room for, if kernels read the others in place there.

    Args:
        share: of host memory, that this rank may take.
        before: the stores that were opened before this one, of which none has its memory yet.
    """
    shape = store.shape
    if slots == shape.total or store.persistent or not (store.in_place and store.addressable):
        return
    taken = sum((each.shape.total - len(each.settled)) * each.shape.expert_bytes for each in before)
    room = int(available_host_bytes() * share) - assembly.HOST_RESERVE - taken
    if count := settling(shape.total, shape.expert_bytes, room, slots, shape.experts):
        store.reserve_slots(count, allocate(shape.tensors, slots, device))
        logger.info(
            "spac: %s of %s experts have slots for good, since host memory has room for %s; the other %s slots are for "
            "those that steps select",
            *(count, shape.total, gib(room), slots - count),
        )


def _check_unchanged(checkpoint: CheckpointContents, put: Sequence[tuple[ExpertStore, int]]) -> None:
    """Raises ``StoreError`` if the checkpoint changed since it was read, and drops what was ``put`` from it."""
    try:
        checkpoint.check_unchanged()
    except StoreError:
        for store, key in put:
            store.drop(key)
        raise


def _verify(store: ExpertStore, threads: int, rank: int) -> None:
    """Checks all experts that are packed, and drops the damaged ones."""
    held = sum(map(store.holds, range(store.shape.total)))
    logger.info("spac: checking all %d packed experts, since some are missing or damaged", held)
    with _progress(rank, held, "Checking packed experts") as bar:
        damaged = 0
        for problem in store.verify(threads):
            damaged += problem is not None
            bar.update()
    if damaged:
        logger.warning("spac: %d of %d packed experts are damaged and are packed again", damaged, held)


def _progress(rank: int, total: int, what: str, hidden: bool = False) -> tqdm:
    """A bar on standard error, of the first rank only."""
    return tqdm(total=total, desc=what, unit="expert", file=sys.stderr, disable=hidden or rank > 0)
