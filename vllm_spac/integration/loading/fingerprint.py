"""Fingerprints of a checkpoint and the kernel's layout, so that packed experts are never used for another one."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from vllm_spac.core import MoEShape
from vllm_spac.errors import StoreError
from vllm_spac.storage.checkpoint import contents, quant_config
from vllm_spac.storage.checkpoint.contents import CheckpointContents
from vllm_spac.system.machine import DISK_DIR
from vllm_spac.system.untrusted import path_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

logger = logging.getLogger("vllm.spac")

_COMMIT = re.compile(r"[0-9a-f]{40}")
_INSTEAD = "download it to a folder and serve that, or use --spac-store host, which keeps nothing"


def fingerprint(
    vllm_config: VllmConfig, shape: MoEShape, layer: RoutedExperts, content: CheckpointContents, layout: str
) -> str:
    """32 hexadecimal digits that change with the weights, this rank's share of them, the layout, the kernel and vLLM.

    Args:
        layout: of the execution; ``plain`` experts are not converted for vLLM's kernel.
    """
    import vllm

    model, method, ranks = vllm_config.model_config, layer.quant_method, layer.moe_config.moe_parallel_config
    facts = {
        "vllm": vllm.__version__,
        "experts_class": _name(method.experts_cls),
        "quant_method": _name(type(method)),
        "quantisation": quant_config.of(model.hf_config.to_dict()),  # includes what no shape shows: signs, orders
        "load_format": str(vllm_config.load_config.load_format),
        "layers": shape.layers,
        "experts": shape.experts,
        "tensors": {name: [spec.shape, str(spec.dtype)] for name, spec in shape.tensors.items()},
        **({} if shape.packed is None else {"packed": asdict(shape.packed)}),
        **({"layout": layout} if layout == "plain" and shape.packed is None else {}),
        "tensor_parallel": [ranks.tp_rank, ranks.tp_size],
        "expert_parallel": [ranks.use_ep, ranks.ep_rank, ranks.ep_size],
        "weights": content.facts,
    }
    if ranks.use_ep:
        facts["held"] = layer.expert_map_manager.get_local_expert_ids()
    return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True, default=str).encode())


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def model_fingerprint(content: CheckpointContents) -> str:
    """32 hexadecimal digits that change with the weights alone, not with kernels; for trained predictors."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content.facts).encode())


def content_of(vllm_config: VllmConfig, folder: Path) -> CheckpointContents:
    """Identifies the content of the model's weight files.

    The files of a folder are read, unless an earlier start read them and they have not changed since. A model from the
    hub is identified by its commit, and its files are not read; dummy weights are identified by their shapes.

    Args:
        folder: of packed experts; the result of reading is cached there.

    Raises:
        StoreError: the weights cannot be identified, or cannot be read.
    """
    return _content(vllm_config.model_config, str(vllm_config.load_config.load_format), folder)


def _content(model: ModelConfig, load_format: str, folder: Path) -> CheckpointContents:
    if load_format == "dummy":
        return CheckpointContents(["dummy"])
    if source := getattr(model, "model_weights", None):
        raise StoreError(f"spac: the content of {source} cannot be identified; {_INSTEAD}")
    if Path(model.model).is_dir():
        files = contents.weight_files(Path(model.model).absolute(), load_format)
        if not files:
            raise StoreError(contents.no_weights(model.model, load_format))
        folders = [folder]
        with contextlib.suppress(ValueError):  # without a home folder, nothing is in it
            folders.append(path_of(DISK_DIR))
        return contents.read(files, folders)
    revision = str(model.revision)
    if not _COMMIT.fullmatch(revision) and getattr(model, "hf_config_path", None) is None:
        revision = str(getattr(model.hf_config, "_commit_hash", None))
    if not _COMMIT.fullmatch(revision):
        raise StoreError(
            f"spac: which commit of {model.model} is served is unknown; add --revision COMMIT, or {_INSTEAD}"
        )
    logger.info("spac: the weights of %s are trusted to be those of commit %s and were not read", model.model, revision)
    return CheckpointContents([model.model, revision])
