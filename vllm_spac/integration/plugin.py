"""What ``register`` installs in every vLLM process. Inert until a ``VllmConfig`` asks for spac."""

from __future__ import annotations

import functools
from typing import Any

from vllm_spac import affinity
from vllm_spac.config import SpacConfig

WORKER_EXTENSION = "vllm_spac.integration.worker.SpacWorker"


def config_of(additional_config: Any) -> SpacConfig | None:
    """The plugin's configuration, or None when the user did not ask for the plugin."""
    if not isinstance(additional_config, dict) or "spac" not in additional_config:
        return None
    return SpacConfig.parse(additional_config["spac"])


def install() -> None:
    """Hook the engine's arguments and the model loader; a second call does nothing."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    from vllm_spac.integration import cli

    affinity.note()
    if getattr(EngineArgs.create_engine_config, "_spac", False):
        return
    cli.install(EngineArgs)
    EngineArgs.create_engine_config = _checked(EngineArgs.create_engine_config)
    BaseModelLoader.load_model = _managed(BaseModelLoader.load_model)


def _checked(create_engine_config):
    """Refuse what cannot work before an engine starts, and let workers answer for their counters."""

    @functools.wraps(create_engine_config)
    def create(self, *args, **kwargs):
        config = config_of(self.additional_config)
        if config is None:
            return create_engine_config(self, *args, **kwargs)
        from vllm_spac.integration import compat, graphs, preflight

        compat.require_supported_vllm()
        self.worker_extension_cls = preflight.worker_extension(self.worker_extension_cls)
        graphs.request(self, config)
        vllm_config = create_engine_config(self, *args, **kwargs)
        graphs.split(vllm_config, config)
        preflight.check(config, vllm_config)
        return vllm_config

    create._spac = True
    return create


def _managed(load_model):
    """Build the target model of an engine that asks for spac with its experts outside; drafts stay stock."""

    @functools.wraps(load_model)
    def load(self, vllm_config, model_config, *args, **kwargs):
        config = config_of(vllm_config.additional_config)
        if config is None or model_config.runner_type == "draft":
            return load_model(self, vllm_config, model_config, *args, **kwargs)
        from vllm_spac.integration import compat
        from vllm_spac.integration.loading import managed_load

        compat.request_amx()
        load_weights = self.load_weights

        def prepared(model, *rest):
            experts.prepare(model)
            return load_weights(model, *rest)

        with managed_load(config, vllm_config) as experts:
            self.load_weights = prepared  # of this loader object, which loads this one model
            model = load_model(self, vllm_config, model_config, *args, **kwargs)
            experts.finish()
        return model

    return load
