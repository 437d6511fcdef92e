"""Names a checkpoint in a kernel's layout, so that packed experts are never used for another one."""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from vllm_spac import quantisation
from vllm_spac.core import MoEShape

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.npz")
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16


def fingerprint(vllm_config, shape: MoEShape, layer) -> str:
    """32 hexadecimal digits that change with the weights, the layout, the kernel and vLLM's version."""
    import vllm

    model, method = vllm_config.model_config, layer.quant_method
    facts = {
        "vllm": vllm.__version__,
        "experts_class": _name(method.experts_cls),
        "quant_method": _name(type(method)),
        "quantisation": quantisation.of(model.hf_config.to_dict()),  # also what shows in no shape: signs, orders
        "load_format": str(vllm_config.load_config.load_format),
        "layers": shape.layers,
        "experts": shape.experts,
        "tensors": {name: [spec.shape, str(spec.dtype)] for name, spec in shape.tensors.items()},
        "weights": _weights(model),
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True, default=str).encode())


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def model_fingerprint(vllm_config) -> str:
    """32 hexadecimal digits that change with the weights, whatever runs them; for calibrations and budgets."""
    return xxhash.xxh3_128_hexdigest(json.dumps(_weights(vllm_config.model_config)).encode())


def _weights(model_config) -> list:
    folder = Path(model_config.model)
    if not folder.is_dir():  # a hub name: its revision is its content
        commit = getattr(model_config.hf_config, "_commit_hash", None)
        return [model_config.model, str(model_config.revision), str(commit)]
    files = sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern)})
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns, _sample(path)] for path in files]


def _sample(path: Path) -> str:
    """Checksum of blocks spread over the file: a whole checkpoint would take minutes to read."""
    size, digest = path.stat().st_size, xxhash.xxh3_128()
    with open(path, "rb") as file:
        for index in range(_SAMPLES):
            file.seek(index * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
