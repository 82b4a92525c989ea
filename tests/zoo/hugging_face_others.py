"""Models of transformers with several parts, several kinds of inputs, or a forward that does more than call layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.zoo.hugging_face import (
    BART,
    ROWS,
    SMALL,
    T5,
    TOKENS,
    VOCABULARY,
    Zoo,
    classifier,
    images,
    language,
    rows_of,
    sequences,
    tokens,
)

Made = tuple[nn.Module, list[dict[str, Any]]]
TEXT = {**SMALL, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0}


def noise(*sizes: int) -> torch.Tensor:
    return torch.randn(ROWS, *sizes, generator=torch.Generator().manual_seed(5))


def kinds() -> torch.Tensor:
    return torch.arange(ROWS) % 3


class WithLoss(nn.Module):
    """A model that has to be asked for its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs, return_loss=True)


def clip() -> Made:
    import transformers

    vision = {**SMALL, "image_size": 32, "patch_size": 8}
    settings = transformers.CLIPConfig(
        text_config={**TEXT, "bos_token_id": 1, "eos_token_id": 2}, vision_config=vision, projection_dim=16
    )
    batch = {
        "input_ids": tokens(2),
        "attention_mask": torch.ones(ROWS, TOKENS).long(),
        "pixel_values": noise(3, 32, 32),
    }
    return WithLoss(transformers.CLIPModel(settings)), rows_of(batch)


def llava() -> Made:
    import transformers

    settings = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT, num_key_value_heads=1),
        vision_config=transformers.CLIPVisionConfig(**SMALL, image_size=16, patch_size=8),
        image_token_id=VOCABULARY - 1,
    )
    ids = tokens(2).clamp(max=VOCABULARY - 2)
    ids[:, 1:5] = VOCABULARY - 1  # the four patches of an image
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": noise(3, 16, 16), "labels": ids}
    return transformers.LlavaForConditionalGeneration(settings), rows_of(batch)


def dense_segformer() -> Made:
    import transformers

    settings = transformers.SegformerConfig(
        num_labels=3, depths=[1, 1], num_encoder_blocks=2, sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3],
        strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16,
    )  # fmt: skip
    labels = (torch.arange(ROWS * 1024) % 3).view(ROWS, 32, 32)
    return transformers.SegformerForSemanticSegmentation(settings), rows_of(
        {"pixel_values": noise(3, 32, 32), "labels": labels}
    )


def perceiver() -> Made:
    import transformers

    settings = transformers.PerceiverConfig(
        num_latents=4, d_latents=16, d_model=16, num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=2,
        num_cross_attention_heads=2, vocab_size=VOCABULARY, max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    batch = {"inputs": tokens(2), "attention_mask": torch.ones(ROWS, TOKENS).long(), "labels": kinds()}
    return transformers.PerceiverForSequenceClassification(settings), rows_of(batch)


def conformer() -> Made:
    import transformers

    settings = transformers.Wav2Vec2ConformerConfig(
        **{**SMALL, "num_hidden_layers": 2}, vocab_size=VOCABULARY, conv_dim=[8, 8], conv_stride=[4, 4],
        conv_kernel=[8, 4], num_feat_extract_layers=2, num_labels=3, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, classifier_proj_size=8, mask_time_prob=0.2, mask_time_length=2,
        conv_depthwise_kernel_size=3, max_source_positions=200,
    )  # fmt: skip
    return transformers.Wav2Vec2ConformerForSequenceClassification(settings), rows_of(
        {"input_values": noise(400), "labels": kinds()}
    )


def time_series() -> Made:
    import transformers

    settings = transformers.TimeSeriesTransformerConfig(
        prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=1, input_size=1, scaling="std",
        d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24,
    )  # fmt: skip
    batch = {
        "past_values": noise(10), "past_time_features": noise(10, 1), "past_observed_mask": torch.ones(ROWS, 10),
        "future_values": noise(4), "future_time_features": noise(4, 1),
    }  # fmt: skip
    return transformers.TimeSeriesTransformerForPrediction(settings), rows_of(batch)


def video_mae() -> Made:
    import transformers

    settings = transformers.VideoMAEConfig(
        **SMALL, image_size=16, patch_size=8, num_frames=4, tubelet_size=2, num_labels=3
    )
    return transformers.VideoMAEForVideoClassification(settings), rows_of(
        {"pixel_values": noise(4, 3, 16, 16), "labels": kinds()}
    )


MORE: dict[str, Callable[[], Made]] = {
    "CLIP": clip,
    "LLaVA": llava,
    "SegFormer (dense)": dense_segformer,
    "Perceiver": perceiver,
    "wav2vec2-conformer": conformer,
    "time series transformer": time_series,
    "VideoMAE": video_mae,
}
HUGGING_FACE_OTHERS: Zoo = {
    **MORE,
    "Gemma 2": language(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=4,
        num_key_value_heads=1,
    ),
    "Mamba 2": language(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        state_size=4,
        conv_kernel=2,
        num_heads=4,
        head_dim=8,
        n_groups=1,
        chunk_size=4,
    ),
    "RWKV": language("RwkvForCausalLM", "RwkvConfig", attention_hidden_size=16, context_length=16),
    "ModernBERT": classifier(
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        local_attention=4,
        global_attn_every_n_layers=2,
        cls_token_id=1,
        sep_token_id=2,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "Longformer": classifier(
        "LongformerForSequenceClassification", "LongformerConfig", num_hidden_layers=2, attention_window=[4, 4]
    ),
    "Switch Transformers": sequences(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        **T5,
        num_experts=3,
        expert_capacity=20,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_decoder_layers=2,
    ),
    "ProphetNet": sequences(
        "ProphetNetForConditionalGeneration",
        "ProphetNetConfig",
        hidden_size=16,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=2,
        num_decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=32,
    ),
    "Pegasus-X": sequences(
        "PegasusXForConditionalGeneration", "PegasusXConfig", **BART, num_global_tokens=2, block_size=4
    ),
    "LeViT": images(
        "LevitForImageClassification",
        "LevitConfig",
        image_size=32,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[1, 2, 2],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
        stride=2,
    ),
    "MobileViT": images(
        "MobileViTForImageClassification",
        "MobileViTConfig",
        image_size=32,
        hidden_sizes=[8, 12, 16],
        neck_hidden_sizes=[4, 4, 8, 8, 12, 12, 16],
        num_attention_heads=2,
    ),
}
