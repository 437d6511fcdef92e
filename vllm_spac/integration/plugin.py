"""What ``register`` installs in every vLLM process. Inert until a ``VllmConfig`` asks for spac."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_spac.config import SpacConfig, config_of
from vllm_spac.errors import SpacError
from vllm_spac.integration import arguments, patches
from vllm_spac.system import cpu_affinity

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import ModelConfig, VllmConfig


def install() -> None:
    """Wrap the engine's arguments and the model loader; a second call does nothing."""
    cpu_affinity.note()
    arguments.install()
    patches.wrap(f"{patches.ENGINE_ARGS}.create_engine_config", _checked)
    patches.wrap(f"{patches.LOADER}.load_model", _managed)


def _checked(create_engine_config: Callable):
    """Refuse what cannot work before an engine starts, and let workers answer for their counters."""

    def create(self, *args: Any, **kwargs: Any):
        try:
            config = config_of(self.additional_config)
            if config is None:
                return create_engine_config(self, *args, **kwargs)
            return _create(self, config, *args, **kwargs)
        except SpacError as error:
            if not getattr(self, "spac_command", False):
                raise
            raise arguments.refused(error) from None

    def _create(self, config: SpacConfig, *args: Any, **kwargs: Any):
        from vllm_spac.integration import compat, graphs, preflight

        compat.require_supported_vllm()
        patches.check("frontend")
        preflight.check_knobs(config)
        self.worker_extension_cls = preflight.worker_extension(self.worker_extension_cls)
        graphs.request(self, config)
        vllm_config = create_engine_config(self, *args, **kwargs)
        graphs.split(vllm_config, config)
        preflight.check(config, vllm_config)
        return vllm_config

    return create


def _managed(load_model: Callable):
    """Build the target model of an engine that asks for spac with its experts outside; drafts stay stock."""

    def load(self, vllm_config: VllmConfig, model_config: ModelConfig, *args: Any, **kwargs: Any):
        config = config_of(vllm_config.additional_config)
        if config is None or model_config.runner_type == "draft":
            return load_model(self, vllm_config, model_config, *args, **kwargs)
        from vllm_spac.integration import compat
        from vllm_spac.integration.loading import updates
        from vllm_spac.integration.loading.managed_load import managed_load
        from vllm_spac.integration.stepping import drafts

        compat.request_amx()
        patches.check("worker", "v2" if drafts.plans_drafts(vllm_config) else "v1")
        load_weights = self.load_weights

        def prepared(model: nn.Module, *rest: Any):
            experts.prepare(model)
            return load_weights(model, *rest)

        with managed_load(config, vllm_config) as experts:
            self.load_weights = prepared  # of this loader object, which loads this one model
            model = load_model(self, vllm_config, model_config, *args, **kwargs)
            experts.finish()
        updates.install(vllm_config, model)
        return model

    return load
