"""Quantised experts as our kernels read them: which of vLLM's methods can be repacked, and how; see ``repacking``."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_spac.errors import UnsupportedError
from vllm_spac.kernels.formats import Format
from vllm_spac.storage.checkpoint import repacking

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    Repack = Callable[..., repacking.Repacked]

_INSTEAD = "use a checkpoint in MXFP4 (GPT-OSS), NVFP4, FP8 by block or channel, INT8 by channel, or INT4 by group"


def _compressed(method: Any) -> Repack:
    return partial(repacking.compressed, bits=method.num_bits, group=max(0, method.group_size))


def _gptq(method: Any) -> Repack:
    config = method.quant_config
    if not config.is_sym or config.desc_act:
        raise UnsupportedError("GPTQ with zero points (sym=false) or activation ordering (desc_act)")
    return partial(repacking.gptq, bits=config.weight_bits, group=max(0, config.group_size))


def _awq(method: Any) -> Repack:
    if not method.quant_config.zero_point:
        raise UnsupportedError("AWQ without zero points, except with --quantization moe_wna16,")
    return partial(repacking.awq, group=method.quant_config.group_size)


def _fp8(method: Any) -> Repack:
    if method.moe_block_shape is None:
        raise UnsupportedError("FP8 with one scale per tensor")
    block = tuple(method.moe_block_shape)
    return partial(repacking.scaled, block=block, activations=_rounded_columns(method, block))


def _compressed_fp8(method: Any) -> Repack:
    block = method.weight_block_size
    if block is None and method.weight_quant.strategy != "channel":
        raise UnsupportedError("FP8 with one scale per tensor")
    block = None if block is None else tuple(block)
    return partial(repacking.scaled, block=block, activations=_rounded_columns(method, block))


_WITHOUT_ROUNDING = ("MARLIN", "CPU", "EMULATION")  # backends that leave rows as they are


def _rounded_columns(method: Any, block: tuple[int, int] | None) -> int | None:
    """Returns the columns of a row that share a scale where vLLM's kernel rounds rows to FP8; as ``activations``."""
    if method.fp8_backend.name in _WITHOUT_ROUNDING:
        return None
    return 0 if block is None else block[1]


def _nvfp4(method: Any) -> Repack:
    """Where vLLM's kernel quantises activations, too, it computes something else than ours; Marlin does not."""
    if not method.use_a16 and method.nvfp4_backend.name != "MARLIN":
        raise UnsupportedError(
            f"NVFP4 whose activations {method.nvfp4_backend.name} quantises, unless --moe-backend marlin selects "
            "16-bit activations in vLLM, too,"
        )
    return repacking.nvfp4


_METHODS: dict[str, Callable[[Any], Repack]] = {
    "CompressedTensorsWNA16MoEMethod": _compressed,
    "AutoGPTQMoEMethod": _gptq,
    "AutoAWQMoEMethod": _awq,
    "GptOssMxfp4MoEMethod": lambda _: repacking.mxfp4,
    "ModelOptNvFp4FusedMoE": _nvfp4,
    "CompressedTensorsW4A4Nvfp4MoEMethod": _nvfp4,
    "Fp8MoEMethod": _fp8,
    "CompressedTensorsW8A8Fp8MoEMethod": _compressed_fp8,
    "CompressedTensorsW8A8Int8MoEMethod": lambda _: partial(repacking.scaled, block=None),
}


class WeightPacking:
    """Repacks the experts of one layer.

    Args:
        repack: one of ``repacking``, to which the tensors of a projection are given.

    Attributes:
        kind: how they are stored, once something was repacked.
    """

    def __init__(self, repack: Repack) -> None:
        self._repack = repack
        self.kind: Format | None = None

    @classmethod
    def of(cls, layer: RoutedExperts) -> WeightPacking | None:
        """Returns the packing of a quantised layer; None if its method is none of those that can be repacked.

        Raises:
            UnsupportedError: it could but for a setting, which is named.
        """
        name, method = type(layer.quant_method).__name__, layer.quant_method
        if name == "MoeWNA16Method":  # which may halve the groups
            bits = method.quant_config.weight_bits
            return cls(partial(repacking.wna16, bits=bits, group=layer.group_size))
        if name not in _METHODS:
            return None
        try:
            return cls(_METHODS[name](method))
        except UnsupportedError as error:
            raise UnsupportedError(
                f"spac: our kernels cannot read {error} of {layer.layer_name}; {_INSTEAD}"
            ) from error

    def __call__(self, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Repacks E experts.

        Args:
            raw: vLLM's parameters by name, [E, ...].

        Returns:
            ``w13_weight``, ``w13_scale``, ``w2_weight``, ``w2_scale`` and the biases, [E, ...] on the CPU.
        """
        found: dict[str, Tensor] = {}
        kinds = set()
        for prefix, parts in (("w13", 2), ("w2", 1)):
            own = {name.removeprefix(f"{prefix}_"): t for name, t in raw.items() if name.startswith(f"{prefix}_")}
            blocks = {"parts": parts} if getattr(self._repack, "func", None) is repacking.scaled else {}
            kind, codes, scales = self._repack(own, **blocks)
            found |= {f"{prefix}_weight": codes, f"{prefix}_scale": scales}
            if "bias" in own:
                found[f"{prefix}_bias"] = own["bias"]
            kinds.add(kind)
        (self.kind,) = kinds
        return found


def remove_scales(method: Any) -> None:
    """Makes ``method`` of a layer with packed experts say that vLLM's kernel reads no scales.

    vLLM would make settings of what its own kernel needs, which such a layer does not have: in its forward, and on
    GPUs with DeepGEMM in the warm-up, which asks every MoE layer for them.
    """
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG

    method.moe_quant_config = FUSED_MOE_UNQUANTIZED_CONFIG
    method.get_fused_moe_quant_config = lambda layer: FUSED_MOE_UNQUANTIZED_CONFIG


def blank(param: Tensor) -> Tensor:
    """Returns zeros like ``param`` that take no physical memory until they are written to.

    Where a backend rounds sizes up, the loader fills only the real part, and vLLM has zeros in the rest.
    """
    memory = mmap.mmap(-1, max(1, param.nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8, count=param.nbytes).view(param.dtype).view(param.shape)
