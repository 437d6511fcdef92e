"""The MoE architectures of the installed vLLM: those in its registry whose code can build a layer of experts.

Also MTP heads without experts, of models that have some.

Found in vLLM's sources, without importing models: from the class that the registry names, along every name that it
mentions, to a call that builds experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from sources import Sources

# Calls that build experts: vLLM's fused layer, and the kernel that some models call with weights of their own.
BUILDERS = {"FusedMoEFactory", "fused_experts"}
# Where models are defined; names from elsewhere are not followed.
MODELS = ("vllm.model_executor.models.", "vllm.models.")
DENSE_HEADS = ("ErnieMTPModel", "MiMoV2MTPModel")
GROUPS = {
    "text": ("_TEXT_GENERATION_MODELS",),
    "multimodal": ("_MULTIMODAL_MODELS",),
    "transformers": ("_TRANSFORMERS_SUPPORTED_MODELS", "_TRANSFORMERS_BACKEND_MODELS"),
    "draft": ("_SPECULATIVE_DECODING_MODELS",),
    "pooling": (
        "_EMBEDDING_MODELS",
        "_LATE_INTERACTION_MODELS",
        "_REWARD_MODELS",
        "_TOKEN_CLASSIFICATION_MODELS",
        "_SEQUENCE_CLASSIFICATION_MODELS",
    ),
}


@dataclass(frozen=True, order=True)
class Architecture:
    """One name of the registry.

    Attributes:
        group: a key of ``GROUPS``.
        name: what ``architectures`` in a checkpoint's ``config.json`` says.
        module: of the class that vLLM builds.
        cls: its name.
    """

    group: str
    name: str
    module: str
    cls: str


def find() -> list[Architecture]:
    """Returns the MoE architectures of the installed vLLM, by group and name."""
    from vllm.model_executor.models import registry

    sources = Sources(Path(registry.__file__).parents[3])
    known = {name: (one.module_name, one.class_name) for name, one in registry.ModelRegistry.models.items()}
    found: dict[str, Architecture] = {}
    for group, tables in GROUPS.items():
        for name in (name for table in tables for name in getattr(registry, table)):
            if name not in found and (name in DENSE_HEADS or builds_experts(sources, *known[name], known)):
                found[name] = Architecture(group, name, *known[name])
    return sorted(found.values(), key=lambda one: (list(GROUPS).index(one.group), one.name.lower()))


def builds_experts(
    sources: Sources, module: str, name: str, registry: Mapping[str, tuple[str, str]] = MappingProxyType({})
) -> bool:
    """Whether ``name`` of ``module``, or what it mentions directly or indirectly, is or calls a builder.

    Args:
        registry: architecture -> (module, class); models name their language model by it.
    """
    todo, seen = [(module, name)], set()
    while todo:
        here = todo.pop()
        if here[1] in BUILDERS:
            return True
        if here not in seen and here[0].startswith(MODELS):
            seen.add(here)
            mentions = sources.mentions(*here)
            if mentions.attributes & BUILDERS:
                return True
            todo += [*mentions.names, *(registry[text] for text in mentions.texts if text in registry)]
    return False
