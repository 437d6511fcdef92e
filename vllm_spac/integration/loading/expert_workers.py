"""Expert workers of an engine: what they serve of a model, where they are, and what cannot be served by them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_spac import components
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.rules import WITHOUT_WORKERS, check_groups, with_workers
from vllm_spac.core import MoEShape
from vllm_spac.errors import ConfigError, UnsupportedError, use
from vllm_spac.execution.address_table import check_layer
from vllm_spac.execution.base import LayerFacts
from vllm_spac.integration.layers import cpu_kernel, quant_schemes
from vllm_spac.methods.od_moe import division
from vllm_spac.methods.od_moe.client import Connections, OwnCopy, WorkerClient
from vllm_spac.methods.od_moe.places import Places, Processes, RunningWorkers
from vllm_spac.methods.od_moe.wire import Service
from vllm_spac.methods.od_moe.workers_execution import WorkerStore
from vllm_spac.system import machine

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_spac.integration.layers.managed_experts import ManagedExperts


def check_places(config: SpacConfig) -> None:
    """Refuses a cluster that is not there before an engine starts; ``ConfigError`` says what to do."""
    if config.executor_name == "cluster":
        RunningWorkers(config.cluster, config.workers)


def check_shapes(config: SpacConfig, shapes: Sequence[MoEShape]) -> None:
    """Refuses layers of several shapes."""
    if len(shapes) != 1:
        raise ConfigError.refused(
            f"spac: executor={config.executor} (--spac-executor) needs MoE layers of one shape, this model has "
            f"{len(shapes)}",
            WITHOUT_WORKERS,
        )


def store(
    config: SpacConfig, vllm_config: VllmConfig, shape: MoEShape, layer: ManagedExperts, fingerprint: str, free: int
) -> WorkerStore:
    """Starts or reaches the workers, and opens the store that they are.

    Args:
        free: bytes that experts may take in this machine's memory.

    Raises:
        SpacError: a worker cannot be started, reached or used.
    """
    isa, activation = _isa(config, layer), layer.activation.value
    if isa == cpu_kernel.SIMD:
        activation = layer.spac_activation or activation
    kernel = cpu_kernel.of_worker(isa, activation, shape)
    places = _places(config, free)
    connections = None
    try:
        count = len(places.addresses()) if config.workers is None else config.workers
        _check_count(config, count, len(shape.layers))
        dtype = vllm_config.model_config.dtype
        shared = _settings(config) | {"activation": activation, "isa": isa, "dtype": dtype}
        shared["hidden"] = layer.moe_config.hidden_dim
        size = config.workers_per_layer
        mine = [division.layers_of(worker, len(shape.layers), count, size) for worker in range(count)]
        services = [Service.of(shape, fingerprint, layers, **shared) for layers in mine]
        connections = Connections(places, services, kernel, dtype, exact=isa != cpu_kernel.SIMD)
        opened = partial(components.build, "stores", "disk", shape=shape, fingerprint=fingerprint, folder=config.folder)
        client = WorkerClient(connections, OwnCopy(opened, services[0], kernel), size)
        return WorkerStore(shape, fingerprint, client)
    except BaseException:
        if connections is None:
            places.close()
        else:
            connections.end_sessions()
            connections.close()
        raise


def _settings(config: SpacConfig) -> dict[str, Any]:
    """Returns what of a service follows from the knobs."""
    found: dict[str, Any] = {"slots": config.slots, "policy": config.policy, "io_threads": config.io_threads}
    found["divides"] = config.workers_per_layer > 1
    if config.prefetch != "off":
        options = components.parse(config.prefetch)[1]
        found |= {"hints": True, "extra": config.prefetch_share}
        found |= {name: options[name] for name in ("depth", "background") if name in options}
    return found


def _isa(config: SpacConfig, layer: ManagedExperts) -> str:
    """Returns the kernel of the workers, as ``cpu_kernel.of_worker`` takes it.

    Raises:
        UnsupportedError: it does not compute ``layer``, or not what its slots would hold.
    """
    named = f"spac: executor={config.executor} (--spac-executor)"
    packed = layer.spac_packed is not None
    if packed or not layer.spac.on_cpu:
        if not packed and not quant_schemes.is_plain(layer):
            kernel = layer.quant_method.experts_cls.__name__
            problem = f"{named} needs experts as the checkpoint has them, and {kernel} converts {layer.layer_name}"
            raise UnsupportedError.refused(problem, use(vllm_moe_backend="triton"), WITHOUT_WORKERS)
        facts = LayerFacts(
            name=layer.layer_name,
            activation=layer.activation.value,
            limit=layer.swiglu_limit,
            alpha=layer.swiglu_alpha,
            beta=layer.swiglu_beta,
            weighs_input=layer.apply_router_weight_on_input,
            quantised=type(layer.quant_method).__name__ if packed else None,
            packed=packed,
        )
        try:
            check_layer(facts)
        except UnsupportedError as error:
            problem = f"{named} has no kernel for {layer.layer_name}"
            raise UnsupportedError.refused(problem, WITHOUT_WORKERS) from error
        return cpu_kernel.SIMD
    isa = cpu_kernel.isa_of(layer)
    if isa is None or layer.apply_router_weight_on_input:
        problem = f"{named} needs vLLM's fused CPU kernel, and {layer.layer_name} runs in another"
        raise UnsupportedError.refused(problem, WITHOUT_WORKERS)
    return isa


def _places(config: SpacConfig, free: int) -> Places:
    """Returns where the workers are; those of this machine share its CPUs with the engine, and ``free`` bytes."""
    if config.executor_name == "cluster":
        return RunningWorkers(config.cluster, config.workers)
    assert config.workers is not None
    memory, threads = max(0, free) // config.workers, max(1, len(machine.cpus()) // (config.workers + 1))
    arguments = {"--disk-dir": str(config.folder), "--memory": str(memory), "--threads": str(threads)}
    return Processes(config.workers, [text for pair in arguments.items() for text in pair])


def _check_count(config: SpacConfig, count: int, layers: int) -> None:
    if count > (most := layers * config.workers_per_layer):
        problem = f"spac: {count} workers (--spac-executor) for {layers} MoE layers, and a worker has at least one"
        raise ConfigError.refused(problem, with_workers(config, most))
    check_groups(config, count)
