"""MoE architectures without a tiny checkpoint, and why."""

_DENSE = "its published models are dense; its class shares code with MoE models"
_OWN = "its experts are code of its own, not vLLM's fused layer, which is what the plugin replaces"
_NEMOTRON = "its language model is NemotronHForCausalLM"
_V4 = "its language model is DeepseekV4ForCausalLM"
_TARGET = "drafts for {}, which stock vLLM cannot serve on a CPU"
_EAGLE = "a separate draft model for {}: stays in fast memory, as every draft model"

# What importing the class on a machine without a GPU says.
_DOTS = (
    "stock vLLM cannot import it on a CPU: ImportError: cannot import name 'compile_flash_attn_varlen_func_from_specs'"
)
_VISION = "its module imports torchvision, which vLLM's CPU build does not bring"

REASONS = {
    "MiniMaxM3MTP": _VISION,
    "Glm5NextMTPModel": _VISION,
    "Dots3NoteForCausalLM": _DOTS,
    "Dots3NoteMTPModel": _DOTS,
    "Cosmos3EdgeForConditionalGeneration": _DENSE,
    "Exaone4_5_MTP": _DENSE,
    "Gemma4UnifiedForConditionalGeneration": _DENSE,
    "Glm4vForConditionalGeneration": _DENSE,
    "GlmOcrForConditionalGeneration": _DENSE,
    "GlmOcrMTPModel": _DENSE,
    "MiniCPM3ForCausalLM": _DENSE,
    "MiniCPMV": _DENSE,
    "MiniCPMV4_6ForConditionalGeneration": _DENSE,
    "MiniCPMV4_7ForConditionalGeneration": _DENSE,
    "OpenPanguVLForConditionalGeneration": _DENSE,
    "PanguEmbeddedForCausalLM": _DENSE,
    "Qwen3_5ForCausalLM": _DENSE,
    "Qwen3_5ForConditionalGeneration": _DENSE,
    "Qwen3_5MTP": _DENSE,
    "DeepseekV4ForConditionalGeneration": _V4,
    "DeepseekV41ForCausalLM": _V4,
    "NemotronHPuzzleForCausalLM": "the class of NemotronHForCausalLM",
    "NemotronH_Nano_Omni_Reasoning_V3": _NEMOTRON,
    "NemotronH_Nano_VL_V2": _NEMOTRON,
    "NemotronH_Omni_Reasoning_V3": _NEMOTRON,
    "NemotronH_Super_Omni_Reasoning_V3": _NEMOTRON,
    "InklingForConditionalGeneration": "as InklingForCausalLM, vLLM needs its published tokenizer",
    "InklingMTPModel": "drafts for InklingForConditionalGeneration, which is not tried",
    "InternS2MobiusMTP": "the head of Qwen3_5MoeMTP",
    "KimiK3ForConditionalGeneration": "its language model is KimiLinearForCausalLM",
    "KimiK3MTPModel": "drafts for KimiK3ForConditionalGeneration, which is not tried",
    "LongcatFlashNgramForCausalLM": "its n-gram embeddings need vLLM's V2 runner, which needs a GPU",
    "HfMoondream": _OWN,
    "Moondream3ForCausalLM": _OWN,
    "TransformersMoEEmbeddingModel": "emits no tokens",
    "TransformersMoEForSequenceClassification": "emits no tokens",
    "DeepseekV32MTPModel": _TARGET.format("DeepseekV32ForCausalLM"),
    "DeepSeekV4MTPModel": _TARGET.format("DeepseekV4ForCausalLM"),
    "DSparkDraftModel": _TARGET.format("DeepseekV4ForCausalLM"),
    "DSparkV41DraftModel": _TARGET.format("DeepseekV41ForCausalLM"),
    "HYV4MTPModel": _TARGET.format("HYV4ForCausalLM"),
    "MiMoV2OmniForCausalLM": "its language model is MiMoV2FlashForCausalLM",
    "BailingMoeV25MTPModel": _TARGET.format("BailingMoeV2_5ForCausalLM"),
    "BailingMoeV3MTPModel": _TARGET.format("BailingMoeV3ForCausalLM"),
    "BailingMoeV3VLForConditionalGeneration": "its language model is BailingMoeV3ForCausalLM",
    "LongCatFlashMTPModel": _TARGET.format("LongcatFlashForCausalLM"),
    "Step3p5MTP": _TARGET.format("Step3p5ForCausalLM"),
    "Qwen4ExpMTP": _TARGET.format("Qwen4ExpForCausalLM"),
    "NemotronHMTPModel": _TARGET.format("NemotronHForCausalLM"),
    "Eagle3DeepseekV2ForCausalLM": _EAGLE.format("DeepSeek-V2"),
    "Eagle3DeepseekV3ForCausalLM": _EAGLE.format("DeepSeek-V3"),
    "EagleDeepSeekMTPModel": _EAGLE.format("DeepSeek-V3"),
    "EagleLlama4ForCausalLM": _EAGLE.format("Llama 4"),
    "EagleMiniCPMForCausalLM": _EAGLE.format("MiniCPM"),
    "EagleMistralLarge3ForCausalLM": _EAGLE.format("Mistral Large 3"),
    "DFlashLagunaForCausalLM": _EAGLE.format("Laguna"),
}
