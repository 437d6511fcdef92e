"""Load the target model without ever holding all of its experts."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import torch
from tqdm import tqdm
from vllm.platforms import current_platform

from vllm_spac import admissions, components, staging, streamed
from vllm_spac.budgeting import BudgetControl
from vllm_spac.config import SpacConfig
from vllm_spac.core import MoEShape
from vllm_spac.errors import UnsupportedError
from vllm_spac.guard import Guard
from vllm_spac.integration import assembly, fast_memory, graphs, planning, routing, runners
from vllm_spac.integration.fingerprint import fingerprint
from vllm_spac.knobs import EngineKnobs
from vllm_spac.memory import release_file_pages, release_freed_memory
from vllm_spac.pool import ExpertPool
from vllm_spac.runtime import Runtime
from vllm_spac.tiers.base import ExpertStore, allocate

logger = logging.getLogger("vllm.spac")  # below "vllm", so that vLLM's handlers and levels apply

_CHUNK_BYTES = 16 << 20  # experts converted at once
_FILE_BYTES = 32 << 20  # read from a mapped checkpoint before its pages are let go
_loading: ModelExperts | None = None


def current() -> ModelExperts:
    """The model that is being built; managed layers add themselves to it."""
    assert _loading is not None, "a managed layer is built outside managed_load"
    return _loading


def experts_of(model_runner) -> ModelExperts | None:
    """The managed experts of a runner's target model, if it has any."""
    return next((m.spac for m in model_runner.get_model().modules() if hasattr(m, "spac_pool")), None)


@contextlib.contextmanager
def managed_load(config: SpacConfig, vllm_config) -> Iterator[ModelExperts]:
    """While active, MoE layers are built as ``ManagedExperts``; the drafts and other models never are."""
    global _loading
    from vllm.model_executor.custom_op import op_registry_oot

    classes = _managed_classes()
    if taken := set(classes) & set(op_registry_oot):
        raise UnsupportedError(
            f"spac: another plugin replaces vLLM's {', '.join(sorted(taken))}; load only one of them"
        )
    experts = _loading = ModelExperts(config, vllm_config)
    op_registry_oot.update(classes)
    try:
        yield experts
    except BaseException:
        experts.close()
        raise
    finally:
        _loading = None
        for name in classes:
            del op_registry_oot[name]


def _managed_classes() -> dict[str, type]:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

    from vllm_spac.integration.experts_layer import ManagedExperts

    return {
        cls.__name__: type(f"Managed{cls.__name__}", (ManagedExperts, cls), {})
        for cls in (RoutedExperts, GptOssRoutedExperts)
    }


class ModelExperts:
    """All managed layers of one model: packs them, then serves them from a pool of slots a shape."""

    def __init__(self, config: SpacConfig, vllm_config) -> None:
        self.config = config
        self.vllm_config = vllm_config
        self.device = torch.device(vllm_config.device_config.device)
        self.on_cpu = current_platform.is_cpu()
        self.store_name = config.store_on("cpu" if self.on_cpu else "cuda")
        self.runtime: Runtime | None = None
        self.guard: Guard | None = None
        self._layers: list = []
        self._stores: dict[str, ExpertStore] = {}  # by layer name; layers of one shape share one
        self._shapes: list[MoEShape] = []
        self._plan: list[tuple[int, bool]] = []  # of each shape: slots, whether prompts are staged
        self._bar: tqdm | None = None
        self._budget: BudgetControl | None = None
        self._file_bytes = 0
        self._open_files = contextlib.ExitStack()
        self._lock: TextIO | None = None

    # -- called by the layers ------------------------------------------------------------------------------

    def add(self, layer) -> None:
        layer.spac_number = len(self._layers)
        self._layers.append(layer)

    def prepare(self, model: torch.nn.Module) -> None:
        """All layers are built and no weight has come: decide, and refuse what cannot be, before the work starts."""
        if not self._layers:
            raise UnsupportedError("spac: this model builds no MoE layer that the plugin can manage")
        groups: dict[tuple, list] = {}
        for layer in self._layers:
            groups.setdefault(tuple(sorted((n, s.shape, s.dtype) for n, s in layer.probe().items())), []).append(layer)
        for layers in groups.values():
            self._shapes.append(self._shape_of(layers))
            if self.config.execution == "pointers":
                streamed.check(self._shapes[-1])
        routing.install(model, self._layers)
        self._budget = assembly.budget(self.config, self.vllm_config, self._layers, self.device)
        others = sum(p.nbytes for p in model.parameters()) - sum(layer.staged_bytes for layer in self._layers)
        free = fast_memory.budget(self.vllm_config, self.device, others)
        knob = self.config.staging if self.config.execution == "pointers" else "off"
        for shape in self._shapes:
            count, staged = staging.divide(self.config.parsed_slots, knob, shape, free)
            if staged:
                graphs.check_staging(self.vllm_config, shape)
            self._plan.append((count, staged))
            free -= count * shape.expert_bytes + (staging.staging_bytes(shape) if staged else 0)
            self._open_store(shape, count)
        missing = sum(1 for layer in self._layers for key in self._keys(layer) if not self._store(layer).holds(key))
        self._bar = tqdm(total=missing, desc="Packing experts", unit="expert", file=sys.stderr, disable=missing == 0)

    def arrived(self, count: int) -> None:
        """``count`` bytes were copied out of the checkpoint, whose pages now count as this process's memory."""
        self._file_bytes += count
        if self._file_bytes >= _FILE_BYTES:
            self._file_bytes = 0
            release_file_pages()

    def is_stored(self, layer) -> bool:
        """Whether all experts of the layer were packed, now or in an earlier run."""
        return all(map(self._store(layer).holds, self._keys(layer)))

    def pack(self, layer) -> None:
        """Move a layer whose weights have all arrived to the store; does nothing for a stored one."""
        store = self._store(layer)
        keys = self._keys(layer)
        if not self.is_stored(layer):
            chunk = max(1, _CHUNK_BYTES // store.shape.expert_bytes)
            for start in range(0, len(keys), chunk):
                part = {name: t.cpu() for name, t in layer.convert(start, min(start + chunk, len(keys))).items()}
                for offset, key in enumerate(keys[start : start + chunk]):
                    if not store.holds(key):
                        store.put(key, {name: tensor[offset] for name, tensor in part.items()})
                        self._bar.update()
        layer.forget()
        release_freed_memory()

    # -- called by the loader and the runner ---------------------------------------------------------------

    def finish(self) -> None:
        """The weights are loaded: fill the slots and hand them to the layers."""
        self._bar.close()
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        pools = []
        for shape, planned in zip(self._shapes, self._plan, strict=True):
            pool = self._fill(shape, *planned)
            pools.append(pool)
            for layer in self._layers:
                if self._store(layer) is pool.store:
                    layer.attach(pool)
        trace = assembly.trace(self.config, self.vllm_config, pools)
        self.guard = assembly.guard(self.config, self.vllm_config)
        plans = runners.plans_drafts(self.vllm_config)
        self.runtime = Runtime(pools, self._budget, trace, None if plans else self.guard)
        if plans and self.guard is not None:
            planning.offer(self.vllm_config, self.guard)
        for pool in pools:
            if isinstance(pool, ExpertPool):
                first = next(layer for layer in self._layers if layer.spac_pool is pool)
                assembly.balance(self.config, self.vllm_config, pool, first)
            mode = self._budget.settings.describe() if self._budget.active else assembly.mode(self._budget, pools)
            logger.info("spac: mode=%s, %s, %s", mode, assembly.describe(pool), assembly.choices(self.config, pool))
        if self.config.execution == "pointers" and self.device.type == "cpu":
            logger.warning(
                "spac: execution=pointers on a CPU runs the torch twins of the GPU's kernels: for comparison, and "
                "slow; to serve, use --spac-execution slots"
            )
        runners.install(self.vllm_config)

    def stats(self) -> dict:
        """Choices and counters of this worker, summed over pools, as plain data."""
        return assembly.stats(self.runtime, self.config, self.store_name, self.guard)

    def close(self) -> None:
        """Stop threads and give back stores."""
        self._open_files.close()
        if self.runtime is not None:
            self.runtime.close()

    # -- parts ---------------------------------------------------------------------------------------------

    def _shape_of(self, layers: list) -> MoEShape:
        for index, layer in enumerate(layers):
            layer.spac_index = index
        first = layers[0]
        return MoEShape(
            tuple(layer.layer_name for layer in layers), first.moe_config.num_experts, first.top_k, first.probe()
        )

    def _open_store(self, shape: MoEShape, count: int) -> None:
        folder = (self.config.disk_dir or Path("~/.cache/vllm_spac")).expanduser().absolute()
        name = fingerprint(self.vllm_config, shape, self._layers[0])
        if count == shape.total:
            store = components.build("tiers", "resident", shape=shape, fingerprint=name, device=self.device)
        else:
            if self.store_name == "disk":
                self._lock_folder(folder, name)
            store = components.build("tiers", self.store_name, shape=shape, fingerprint=name, folder=folder)
        missing = sum(not store.holds(key) for key in range(shape.total))
        self._claim(missing)
        store.reserve(missing)
        self._stores.update(dict.fromkeys(shape.layers, store))

    def _lock_folder(self, folder: Path, name: str) -> None:
        """Packing is for one process at a time, the others wait; then all share the files, and nobody deletes them."""
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = file = self._open_files.enter_context(open(folder / f"{name}.lock", "w"))  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("spac: another process packs or uses these experts in %s; sharing them with it", folder)
            fcntl.flock(file, fcntl.LOCK_SH)

    def _claim(self, missing: int) -> None:
        """Pack alone if that is possible; beside servers that use the rest otherwise: a file is replaced as a whole."""
        if missing and self._lock is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.warning("spac: %d packed experts are missing or damaged; packing them beside a server", missing)
                fcntl.flock(self._lock, fcntl.LOCK_SH)  # the failed attempt gave it up

    def _fill(self, shape: MoEShape, count: int, staged: bool) -> ExpertPool | streamed.StreamedPool:
        store = self._stores[shape.layers[0]]
        tensors = getattr(store, "tensors", None) or allocate(shape.tensors, count, self.device)
        policy = components.build("policies", self.config.policy)
        parts = shape, count, policy, store, tensors
        if self.config.execution == "pointers":
            rows = graphs.most_rows(self.vllm_config)
            options = {"rows": rows, "staged": staged, "admission": self.config.admission or admissions.DEFAULT}
            pool = streamed.StreamedPool(*parts, path=self.store_name, **options)
        else:
            knobs = EngineKnobs(prefetch=self.config.prefetch)
            pool = ExpertPool(*parts, io_threads=self.config.io_threads, path=self.store_name, engine=knobs)
        with tqdm(total=count, desc="Filling slots", unit="expert", file=sys.stderr, disable=pool.holds_all) as bar:
            for loaded in pool.fill():
                bar.update(loaded)
        pool.counters.reset()
        return pool

    def _store(self, layer) -> ExpertStore:
        return self._stores[layer.layer_name]

    def _keys(self, layer) -> range:
        experts = self._store(layer).shape.experts
        return range(layer.spac_index * experts, (layer.spac_index + 1) * experts)
