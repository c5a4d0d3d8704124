"""Small random models of the architectures of Hugging Face's transformers, and batches for them.

Each is built from its own configuration class, so that none is downloaded, and is given as a user
has it: the class itself, with a dict of keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, TOKENS, PIXELS = 99, 12, 32
Batch = dict[str, Any]


def _draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def text(count: int, seed: int, dtype: torch.dtype) -> Batch:
    """Token numbers, and a mask that leaves none out; no dtype, as there are no floats."""
    tokens = torch.randint(3, VOCABULARY, (count, TOKENS), generator=_draw(seed))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def tokens(count: int, seed: int, dtype: torch.dtype) -> Batch:
    return {"input_ids": text(count, seed, dtype)["input_ids"]}


def translation(count: int, seed: int, dtype: torch.dtype) -> Batch:
    return {
        **text(count, seed, dtype),
        "decoder_input_ids": tokens(count, seed + 1, dtype)["input_ids"][:, :7],
    }


def images(*shape: int) -> Callable[[int, int, torch.dtype], Batch]:
    def make(count: int, seed: int, dtype: torch.dtype) -> Batch:
        size = shape or (3, PIXELS, PIXELS)
        return {"pixel_values": torch.randn(count, *size, generator=_draw(seed)).to(dtype)}

    return make


def values(name: str, *shape: int) -> Callable[[int, int, torch.dtype], Batch]:
    def make(count: int, seed: int, dtype: torch.dtype) -> Batch:
        return {name: torch.randn(count, *shape, generator=_draw(seed)).to(dtype)}

    return make


def speech(count: int, seed: int, dtype: torch.dtype) -> Batch:
    sound = torch.randn(count, 16, 60, generator=_draw(seed)).to(dtype)
    return {"input_features": sound, "decoder_input_ids": tokens(count, seed, dtype)["input_ids"]}


def both(count: int, seed: int, dtype: torch.dtype) -> Batch:
    return {**text(count, seed, dtype), **images()(count, seed, dtype)}


@dataclass(frozen=True)
class Architecture:
    """model: the class; settings: of its configuration; batch: (count, seed, dtype) -> inputs."""

    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    batch: Callable[[int, int, torch.dtype], Batch] = text
    config: str = ""

    def build(self, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
        """A random model in eval mode, on the CPU."""
        import transformers

        config = self.config or _config_of(self.model)
        made = getattr(transformers, config)(**self.settings)
        torch.manual_seed(seed)
        model: nn.Module = getattr(transformers, self.model)(made)
        _scramble(model, seed)
        return model.to(dtype).eval()

    def batches(self, number: int, count: int, dtype: torch.dtype = torch.float32) -> list[Batch]:
        return [self.batch(count, 10 * seed, dtype) for seed in range(number)]


def _config_of(model: str) -> str:
    for end in ("ForSequenceClassification", "ForCausalLM", "LMHeadModel", "ForMaskedLM",
                "ForConditionalGeneration", "ForImageClassification", "ForSemanticSegmentation",
                "ForAudioClassification", "ForVideoClassification", "ForPrediction", "ForCTC",
                "ForDepthEstimation", "MTModel", "Model"):  # fmt: skip
        if model.endswith(end):
            return model.removesuffix(end) + "Config"
    raise ValueError(f"no configuration is known for {model}")


@torch.no_grad()
def _scramble(model: nn.Module, seed: int) -> None:
    """What is constant after initialisation is random: norms, biases, layer scales; matrices that
    are tiny get the spread of a trained model, so that no layer is one of noise."""
    generator = _draw(seed)
    constants = {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    named: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    for name, t in named:
        if not t.is_floating_point() or name in constants:
            continue
        noise = torch.randn(t.shape, generator=generator)
        if t.ndim > 1:
            t.copy_(noise / max(1, t[0].numel()) ** 0.5 if "embed" not in name else noise / 2)
        elif "bias" in name or "running_mean" in name:
            t.copy_(0.3 * noise)
        elif "running_var" in name or "weight" in name or "scale" in name or "lambda" in name:
            t.copy_(0.5 + torch.rand(t.shape, generator=generator))


_BODY = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
}  # fmt: skip
_TEXT = {**_BODY, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
_ROBERTA = {**_TEXT, "max_position_embeddings": 66, "pad_token_id": 1}
_LLAMA = {**_TEXT, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1,
          "eos_token_id": 2}  # fmt: skip
_VIT = {**_BODY, "image_size": PIXELS, "patch_size": 8, "num_channels": 3}
_BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}  # fmt: skip
_SPEECH = {
    **_BODY, "vocab_size": VOCABULARY, "conv_dim": (16, 16, 16), "conv_stride": (4, 2, 2),
    "conv_kernel": (8, 3, 3), "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 3,
}  # fmt: skip
_SOUND = values("input_values", 800)

#: the 43 that were measured first, as given: almost none could be traced
FIRST: tuple[Architecture, ...] = (
    Architecture("BertForSequenceClassification", _TEXT),
    Architecture("RobertaForSequenceClassification", _ROBERTA),
    Architecture("AlbertForSequenceClassification", {**_TEXT, "embedding_size": 16}),
    Architecture("ElectraForSequenceClassification", {**_TEXT, "embedding_size": 16}),
    Architecture("DistilBertForSequenceClassification", {
        "vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48,
        "max_position_embeddings": 64}),
    Architecture("DebertaV2ForSequenceClassification", {
        **_TEXT, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"],
        "pooler_hidden_size": 32}),
    Architecture("MPNetForSequenceClassification", _ROBERTA),
    Architecture("GPT2LMHeadModel", {
        "vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    Architecture("GPTNeoXForCausalLM", _TEXT),
    Architecture("OPTForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 48,
        "num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 32}),
    Architecture("BloomForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    Architecture("FalconForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "ffn_hidden_size": 48}),
    Architecture("LlamaForCausalLM", _LLAMA),
    Architecture("MistralForCausalLM", _LLAMA),
    Architecture("Qwen2ForCausalLM", _LLAMA),
    Architecture("Qwen3ForCausalLM", _LLAMA),
    Architecture("GemmaForCausalLM", _LLAMA),
    Architecture("PhiForCausalLM", {**_TEXT, "pad_token_id": 0, "bos_token_id": 1,
                                    "eos_token_id": 2}),
    Architecture("MixtralForCausalLM", {**_LLAMA, "num_local_experts": 4}),
    Architecture("MambaForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4,
        "pad_token_id": 0}, tokens),
    Architecture("T5ForConditionalGeneration", {
        "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
        "num_heads": 4, "decoder_start_token_id": 0}, translation),
    Architecture("BartForConditionalGeneration", _BART, translation),
    Architecture("ViTForImageClassification", _VIT, images()),
    Architecture("DeiTForImageClassification", _VIT, images()),
    Architecture("BeitForImageClassification", _VIT, images()),
    Architecture("Dinov2ForImageClassification", _VIT, images()),
    Architecture("SwinForImageClassification", {
        "image_size": PIXELS, "patch_size": 2, "embed_dim": 16, "depths": [2, 2],
        "num_heads": [2, 4], "window_size": 4}, images()),
    Architecture("ConvNextForImageClassification", {
        "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}, images()),
    Architecture("ConvNextV2ForImageClassification", {
        "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}, images()),
    Architecture("ResNetForImageClassification", {
        "embedding_size": 8, "hidden_sizes": [16, 24, 32, 40], "depths": [1, 1, 2, 1]}, images()),
    Architecture("RegNetForImageClassification", {
        "embedding_size": 8, "hidden_sizes": [16, 24, 32, 40], "depths": [1, 1, 2, 1],
        "groups_width": 8}, images()),
    Architecture("MobileNetV2ForImageClassification", {"image_size": PIXELS}, images()),
    Architecture("SegformerForSemanticSegmentation", {
        "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 16}, images(3, 64, 64)),
    Architecture("MobileViTForImageClassification", {
        "image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 24, 32, 40,
        64], "num_attention_heads": 4}, images(3, 64, 64)),
    Architecture("CLIPVisionModel", _VIT, images()),
    Architecture("SiglipVisionModel", _VIT, images()),
    Architecture("ViTMSNForImageClassification", _VIT, images()),
    Architecture("Wav2Vec2ForCTC", _SPEECH, _SOUND),
    Architecture("HubertForCTC", _SPEECH, _SOUND),
    Architecture("WhisperForConditionalGeneration", {
        **_BART, "num_mel_bins": 16, "max_source_positions": 30, "max_target_positions": 40,
        "begin_suppress_tokens": None}, speech),
    Architecture("ASTForAudioClassification", {
        **_BODY, "patch_size": 4, "max_length": 24, "num_mel_bins": 16, "frequency_stride": 4,
        "time_stride": 4}, values("input_values", 24, 16)),
    Architecture("PatchTSTForPrediction", {
        "num_input_channels": 3, "context_length": 32, "patch_length": 4, "patch_stride": 4,
        "d_model": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "ffn_dim": 48,
        "prediction_length": 6}, values("past_values", 32, 3)),
    Architecture("TimesformerForVideoClassification", {**_VIT, "num_frames": 2},
                 images(2, 3, PIXELS, PIXELS)),
)  # fmt: skip

#: others, of other families
MORE: tuple[Architecture, ...] = (
    Architecture("DebertaForSequenceClassification", {
        **_TEXT, "relative_attention": True, "max_relative_positions": 16,
        "pos_att_type": ["p2c", "c2p"], "pooler_hidden_size": 32}),
    Architecture("ModernBertForSequenceClassification", {
        **_TEXT, "global_attn_every_n_layers": 2, "local_attention": 8, "pad_token_id": 0,
        "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}),
    Architecture("ConvBertForSequenceClassification", {**_TEXT, "embedding_size": 16}),
    Architecture("SqueezeBertForSequenceClassification", {
        **_TEXT, "embedding_size": 32}),
    Architecture("MobileBertForSequenceClassification", {
        **_TEXT, "embedding_size": 16, "intra_bottleneck_size": 16, "hidden_size": 32}),
    Architecture("FNetForSequenceClassification", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
        "intermediate_size": 48, "max_position_embeddings": 64}, tokens),
    Architecture("GPTJForCausalLM", {
        "vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4,
        "rotary_dim": 4}),
    Architecture("GPTBigCodeForCausalLM", {
        "vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    Architecture("StableLmForCausalLM", _LLAMA),
    Architecture("OlmoForCausalLM", _LLAMA),
    Architecture("CohereForCausalLM", _LLAMA),
    Architecture("Starcoder2ForCausalLM", _LLAMA),
    Architecture("Gemma2ForCausalLM", {**_LLAMA, "query_pre_attn_scalar": 8, "sliding_window": 8}),
    Architecture("Phi3ForCausalLM", _LLAMA),
    Architecture("GraniteForCausalLM", _LLAMA),
    Architecture("MptForCausalLM", {
        "vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    Architecture("MBartForConditionalGeneration", _BART, translation),
    Architecture("PegasusForConditionalGeneration", _BART, translation),
    Architecture("BlenderbotForConditionalGeneration", _BART, translation),
    Architecture("LevitForImageClassification", {
        "image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 3, 4],
        "depths": [1, 1, 1], "key_dim": [8, 8, 8]}, images(3, 64, 64)),
    Architecture("PoolFormerForImageClassification", {
        "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}, images(3, 64, 64)),
    Architecture("CvtForImageClassification", {
        "embed_dim": [8, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3],
        "cls_token": [False, False, True]}, images(3, 64, 64)),
    Architecture("EfficientNetForImageClassification", {
        "image_size": 64, "hidden_dim": 320, "width_coefficient": 0.25, "depth_coefficient": 0.5},
        images(3, 64, 64)),
    Architecture("PvtForImageClassification", {
        "image_size": 64, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 2, 4]}, images(3, 64, 64)),
    Architecture("VideoMAEForVideoClassification", {**_VIT, "num_frames": 4},
                 images(4, 3, PIXELS, PIXELS)),
    Architecture("WavLMForCTC", _SPEECH, _SOUND),
    Architecture("CLIPModel", {
        "text_config": {**_TEXT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        "vision_config": _VIT, "projection_dim": 24}, both),
)  # fmt: skip
ALL = {a.model: a for a in (*FIRST, *MORE)}
