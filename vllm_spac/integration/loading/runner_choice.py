"""Which of vLLM's model runners an engine has: the only module that knows both adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_spac.integration.hooks.drafts import plans_drafts
from vllm_spac.integration.stepping.runner_adapter import RunnerAdapter
from vllm_spac.integration.stepping.v1.adapter_v1 import AdapterV1
from vllm_spac.integration.stepping.v2.adapter_v2 import AdapterV2

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def adapter_of(vllm_config: VllmConfig) -> RunnerAdapter:
    """The adapter of the model runner that an engine with this configuration uses."""
    return AdapterV2() if plans_drafts(vllm_config) else AdapterV1()
