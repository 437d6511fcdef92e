"""The sizes of a model's weights from its ``config.json`` alone.

transformers builds the model without memory for weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_spac.errors import UnsupportedError, brief
from vllm_spac.storage.checkpoint import quant_config, quantisation
from vllm_spac.storage.checkpoint.headers import EXPERTS, LAYERS, Checkpoint, count, first_number

_MOST_LAYERS, _MOST_EXPERTS = 1024, 1 << 14  # of a model that is built
_INSTEAD = "name a folder with its *.safetensors, whose headers are enough"


def described(config: dict, folder: Path, kernels: quantisation.FormatKernels | None = None) -> Checkpoint:
    """Returns the sizes of the checkpoint that ``config`` describes; layers that only drafts use are left out.

    Exact for unquantised checkpoints. Of quantised ones, the sizes of scales are calculated, and every linear layer
    that the config does not exclude is taken to be quantised.

    Args:
        kernels: as in ``quantisation.stored_bytes``.

    Raises:
        UnsupportedError: a dense model, or one that transformers does not know or cannot build.
    """
    limits = {"layers": (LAYERS, _MOST_LAYERS), "experts": (EXPERTS, _MOST_EXPERTS)}
    for what, (names, most) in limits.items():
        if (found := first_number(config, names)) > most:
            raise UnsupportedError(f"{folder}/config.json says {found} {what}; at most {most} are calculated")
    if not first_number(config, EXPERTS):
        return count(config, folder, ())  # which refuses it
    return count(config, folder, _tensors(config, folder, kernels))


def _tensors(config: dict, folder: Path, kernels: quantisation.FormatKernels | None) -> Iterator[tuple[str, dict]]:
    """Yields name and header entry of each tensor."""
    quantised = quant_config.of(config)
    dtype, itemsize = _element(config)
    for name, shape in _shapes(config, folder):
        nbytes = itemsize
        for size in shape:
            nbytes *= size
        if quantised and len(shape) > 1 and not quant_config.excluded(quantised, name):
            nbytes = quantisation.stored_bytes(quant_config.narrowed(quantised, name), shape, kernels)
        elif quantised and name.endswith("_bias"):  # of GPT-OSS
            nbytes = quantisation.kept_bytes(quantised, name, shape, nbytes, kernels)
        yield name, {"dtype": dtype, "shape": list(shape), "data_offsets": [0, nbytes]}


def _element(config: dict) -> tuple[str, int]:
    """Returns the safetensors name and the bytes of an element; bfloat16 where the config does not say."""
    known = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}
    named = (part.get(key) for part in quant_config.parts(config) for key in ("dtype", "torch_dtype"))
    return known.get(str(next(filter(None, named), "bfloat16")).removeprefix("torch."), ("BF16", 2))


def _shapes(config: dict, folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    try:
        import torch
        from transformers.utils import logging
    except ImportError as error:
        raise UnsupportedError(
            f"{folder}/config.json alone needs transformers, a part of vLLM ({error}); install vLLM, or {_INSTEAD}"
        ) from error

    plain = {name: value for name, value in config.items() if name not in quant_config.QUANTISED}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with torch.device("meta"):
            model = build(plain, folder)
    except UnsupportedError:
        raise
    except Exception as error:  # whatever a model does with sizes that contradict each other
        problem = f"{type(error).__name__}: {brief(str(error))}"
        raise UnsupportedError(f"{folder}/config.json describes no model ({problem}); {_INSTEAD}") from error
    finally:
        logging.set_verbosity(verbosity)
    kept = set(model.state_dict())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):  # a tied matrix once
        if name in kept:
            yield name, tuple(tensor.shape)


def build(config: dict, folder: Path) -> Any:
    """Returns the model of the first architecture that transformers has, else that of the model type."""
    import transformers

    for name in config.get("architectures") or ():
        kind: Any = getattr(transformers, str(name), None)
        is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
        if is_model:
            return kind(kind.config_class.from_dict(config))
    known, family = transformers.CONFIG_MAPPING, config.get("model_type")
    for kinds in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        if family in known and known[family] in kinds._model_mapping:
            return kinds._model_mapping[known[family]](known[family].from_dict(config))
    raise UnsupportedError(
        f"{folder}: transformers {transformers.__version__} has no model of type {brief(family)}; {_INSTEAD}"
    )
