"""The hooks that ``register`` installs in every vLLM process. Inert unless a ``VllmConfig`` configures spac."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_spac.config import presets
from vllm_spac.config.config import SpacConfig, config_of
from vllm_spac.errors import SpacError
from vllm_spac.integration import arguments
from vllm_spac.integration.hooks import patches
from vllm_spac.integration.stepping import prompt_pacing
from vllm_spac.integration.stepping.v1 import draft_handover
from vllm_spac.recording import last_words
from vllm_spac.system import machine

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import ModelConfig, VllmConfig

    from vllm_spac.integration.loading.model_experts import ModelExperts


logger = logging.getLogger("vllm.spac")


def install() -> None:
    """Wraps the engine's arguments and the model loader; a second call does nothing."""
    machine.save_cpus()
    arguments.install()
    patches.install(f"{patches.ENGINE_ARGS}.create_engine_config", _checked)
    patches.install(f"{patches.LOADER}.load_model", _managed)
    draft_handover.install_in_engine_core()
    prompt_pacing.install()
    last_words.install_short_errors(fatal=patches.ENGINE_CORE.rpartition(".")[2])


def _checked(create_engine_config: Callable):
    """Refuses what cannot work before an engine starts, and adds the worker extension."""

    def create(self, *args: Any, **kwargs: Any):
        try:
            config = config_of(self.additional_config)
            if config is None:
                return create_engine_config(self, *args, **kwargs)
            with presets.or_without(config):
                return _create(self, config, *args, **kwargs)
        except SpacError as error:
            if not getattr(self, "spac_command", False):
                raise
            raise arguments.refused(error) from None

    def _create(self, config: SpacConfig, *args: Any, **kwargs: Any):
        from vllm_spac.integration import gpu_defaults, preflight, tuned_start
        from vllm_spac.integration.hooks import device, graphs
        from vllm_spac.integration.loading import fast_memory
        from vllm_spac.integration.stepping import tree_arguments as trees

        usage = args[0] if args else kwargs.get("usage_context")
        if config.preset is not None:
            presets.report(config.preset, self.additional_config["spac"], config.lossy)
        device.check_supported_vllm()
        for loses, targets in patches.switched_off().items():
            logger.warning("spac: %s switches off %s: %s", patches.WITHOUT, ", ".join(targets), loses)
        patches.check_names("frontend")
        preflight.check_model(self.model)
        preflight.check_drafter(self.speculative_config)
        with preflight.naming_model(self.model):
            config = tuned_start.apply(self, config)
            served = gpu_defaults.apply(self, config, usage)
            if served is None:
                return create_engine_config(self, *args, **kwargs)
        config = served
        preflight.check_knobs(config)
        self.worker_extension_cls = preflight.worker_extension(self.worker_extension_cls)
        if config.parsed_slots.share != 1:
            fast_memory.request(self)
        trees.request(self, config)
        graphs.request(self, config)
        chosen = self.max_num_seqs is not None
        with preflight.naming_model(self.model), preflight.naming_drafter(self.speculative_config):
            vllm_config = create_engine_config(self, *args, **kwargs)
        if not chosen:
            trees.limit_requests(config, vllm_config)
        graphs.add_splitting_op(vllm_config, config)
        fast_memory.limit_to_available(vllm_config)
        preflight.check_engine(config, vllm_config)
        prompt_pacing.request(vllm_config, config, usage)
        if getattr(self, "spac_command", False):
            last_words.install()
            patches.install(patches.ENGINE_CORE, _Ending)
        patches.install(patches.ENDPOINTS, _with_routes)
        return vllm_config

    return create


class _Ending:
    """``run_engine_core`` whose process ends without the traceback of an error that the command tells of.

    A process that is spawned begins with it, before any plugin is loaded, so it is wrapped there when it is unpickled.
    """

    def __init__(self, run_engine_core: Callable) -> None:
        self._run_engine_core = run_engine_core

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        with last_words.ending():
            self._run_engine_core(*args, **kwargs)

    def __reduce__(self):
        return _ending_here, ()


def _ending_here() -> _Ending:
    from vllm.v1.engine.core import EngineCoreProc

    return _Ending(EngineCoreProc.run_engine_core)


def _with_routes(load_endpoint_plugins: Callable):
    """Adds the routes of ``serving.endpoint`` to those of other plugins; a server loads them after its engine."""

    def load(*args: Any, **kwargs: Any):
        from vllm_spac.integration.serving.endpoint import SpacEndpoint

        return [*load_endpoint_plugins(*args, **kwargs), SpacEndpoint()]

    return load


def _managed(load_model: Callable):
    """Builds the target model, and an MTP head of it, with managed experts if spac is configured; drafts stay stock."""

    def load(self, vllm_config: VllmConfig, model_config: ModelConfig, *args: Any, **kwargs: Any):
        config = config_of(vllm_config.additional_config)
        if config is None:
            return load_model(self, vllm_config, model_config, *args, **kwargs)
        from vllm_spac.integration.hooks import device
        from vllm_spac.integration.loading import managed_load
        from vllm_spac.integration.loading.head_experts import HeadExperts, target_of
        from vllm_spac.integration.loading.model_experts import ModelExperts
        from vllm_spac.integration.loading.runner_choice import adapter_of

        build: Callable[[], ModelExperts] = partial(ModelExperts, config, vllm_config)
        draft = model_config.runner_type == "draft"
        if draft:
            if (target := target_of(model_config)) is None:
                return load_model(self, vllm_config, model_config, *args, **kwargs)
            build = partial(HeadExperts, target)
        else:
            device.request_amx()
            patches.check_names("worker", adapter_of(vllm_config).where)
        load_it = partial(load_model, self, vllm_config, model_config, *args, **kwargs)
        with last_words.reporting():
            model = _load(self, load_it, model_config, build)
        if not draft:
            managed_load.install(vllm_config, model)
        return model

    return load


def _load(loader: Any, load: Callable[[], nn.Module], config: ModelConfig, build: Callable[[], ModelExperts]):
    """Returns the model that ``load`` builds and loads with ``loader``; what ``build`` returns has its MoE layers."""
    from vllm.model_executor.model_loader.utils import get_model_architecture

    from vllm_spac.integration.loading.managed_load import managed_load

    get_model_architecture(config)  # imports the module of the model, as vLLM does next, with its layers
    load_weights = loader.load_weights

    def prepared(model: nn.Module, *rest: Any):
        experts.prepare(model)
        return load_weights(model, *rest)

    with managed_load(build) as experts:
        loader.load_weights = prepared  # on this loader object only, which loads this one model
        model = load()
        experts.finish()
    return model
