"""Tiny models of transformers, with random weights from a config, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY = 40
TOKENS = 9
ROWS = 12
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

Zoo = dict[str, Callable[[], tuple[nn.Module, list[dict[str, Any]]]]]


def tokens(seed: int, rows: int = ROWS, low: int = 3) -> torch.Tensor:
    return torch.randint(low, VOCABULARY, (rows, TOKENS), generator=torch.Generator().manual_seed(seed))


def rows_of(batch: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    return [{name: tensor[row] for name, tensor in batch.items()} for row in range(ROWS)]


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """The settings of a config; None takes one out."""
    return {name: value for name, value in fields.items() if value is not None}


def language(kind: str, config: str, **fields: Any) -> Any:
    """A causal language model, or any that takes `input_ids` and `labels` of the same shape."""

    def made() -> tuple[nn.Module, list[dict[str, Any]]]:
        import transformers

        settings = getattr(transformers, config)(**_given({**COMMON, **fields}))
        ids = tokens(1)
        return getattr(transformers, kind)(settings), rows_of({"input_ids": ids, "labels": ids})

    return made


def classifier(kind: str, config: str, **fields: Any) -> Any:
    def made() -> tuple[nn.Module, list[dict[str, Any]]]:
        import transformers

        settings = getattr(transformers, config)(**_given({**COMMON, "num_labels": 3, **fields}))
        batch = {
            "input_ids": tokens(2),
            "labels": torch.arange(ROWS) % 3,
            "attention_mask": torch.ones(ROWS, TOKENS).long(),
        }
        batch["attention_mask"][:, -2:] = 0
        return getattr(transformers, kind)(settings), rows_of(batch)

    return made


def sequences(kind: str, config: str, **fields: Any) -> Any:
    """An encoder and a decoder."""

    def made() -> tuple[nn.Module, list[dict[str, Any]]]:
        import transformers

        settings = getattr(transformers, config)(
            **{"vocab_size": VOCABULARY, "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1, **fields}
        )
        return getattr(transformers, kind)(settings), rows_of({"input_ids": tokens(3), "labels": tokens(4)[:, :7]})

    return made


def images(kind: str, config: str, size: int = 32, channels: int = 3, **fields: Any) -> Any:
    def made() -> tuple[nn.Module, list[dict[str, Any]]]:
        import transformers

        settings = getattr(transformers, config)(**{"num_labels": 3, **fields})
        pixels = torch.randn(ROWS, channels, size, size, generator=torch.Generator().manual_seed(5))
        return getattr(transformers, kind)(settings), rows_of(
            {"pixel_values": pixels, "labels": torch.arange(ROWS) % 3}
        )

    return made


SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
_VIT = {**SMALL, "image_size": 32, "patch_size": 8}
BART = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "bos_token_id": 2,
}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}

HUGGING_FACE: Zoo = {
    "GPT-2": language("GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=3, n_head=2, n_positions=32),
    "GPT-Neo": language(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        num_hidden_layers=2,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
    ),
    "GPT-NeoX": language("GPTNeoXForCausalLM", "GPTNeoXConfig"),
    "GPT-J": language("GPTJForCausalLM", "GPTJConfig", n_embd=16, n_layer=2, n_head=2, n_positions=32, rotary_dim=4),
    "Llama": language("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=1),
    "Mistral": language("MistralForCausalLM", "MistralConfig", num_key_value_heads=1),
    "Mixtral": language(
        "MixtralForCausalLM",
        "MixtralConfig",
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="eager",
    ),
    "Qwen2": language("Qwen2ForCausalLM", "Qwen2Config", num_key_value_heads=1),
    "Gemma": language("GemmaForCausalLM", "GemmaConfig", num_key_value_heads=1, head_dim=8),
    "Phi": language("PhiForCausalLM", "PhiConfig"),
    "OPT": language("OPTForCausalLM", "OPTConfig", ffn_dim=24, word_embed_proj_dim=16),
    "Bloom": language("BloomForCausalLM", "BloomConfig", n_layer=2, n_head=2),
    "Falcon": language("FalconForCausalLM", "FalconConfig"),
    "Mamba": language("MambaForCausalLM", "MambaConfig", state_size=4, conv_kernel=2),
    "BERT": classifier("BertForSequenceClassification", "BertConfig"),
    "BERT (masked)": language("BertForMaskedLM", "BertConfig"),
    "RoBERTa": classifier("RobertaForSequenceClassification", "RobertaConfig"),
    "DistilBERT": classifier(
        "DistilBertForSequenceClassification", "DistilBertConfig", dim=16, n_layers=2, n_heads=2, hidden_dim=24
    ),
    "ALBERT": classifier("AlbertForSequenceClassification", "AlbertConfig", embedding_size=8),
    "ELECTRA": classifier("ElectraForSequenceClassification", "ElectraConfig", embedding_size=8),
    "DeBERTa": classifier(
        "DebertaForSequenceClassification", "DebertaConfig", relative_attention=True, pos_att_type=["c2p", "p2c"]
    ),
    "DeBERTa-v2": classifier(
        "DebertaV2ForSequenceClassification", "DebertaV2Config", relative_attention=True, pos_att_type=["c2p", "p2c"]
    ),
    "MPNet": classifier("MPNetForSequenceClassification", "MPNetConfig"),
    "XLNet": classifier(
        "XLNetForSequenceClassification",
        "XLNetConfig",
        max_position_embeddings=None,
        d_model=16,
        n_layer=2,
        n_head=2,
        d_inner=24,
    ),
    "Funnel": classifier(
        "FunnelForSequenceClassification",
        "FunnelConfig",
        num_hidden_layers=None,
        block_sizes=[1, 1],
        d_model=16,
        n_head=2,
        d_head=8,
        d_inner=24,
    ),
    "SqueezeBERT": classifier("SqueezeBertForSequenceClassification", "SqueezeBertConfig", embedding_size=16),
    "FNet": classifier("FNetForSequenceClassification", "FNetConfig"),
    "T5": sequences("T5ForConditionalGeneration", "T5Config", **T5),
    "mT5": sequences("MT5ForConditionalGeneration", "MT5Config", **T5),
    "BART": sequences("BartForConditionalGeneration", "BartConfig", **BART),
    "Pegasus": sequences("PegasusForConditionalGeneration", "PegasusConfig", **BART),
    "Marian": sequences("MarianMTModel", "MarianConfig", **BART),
    "M2M-100": sequences("M2M100ForConditionalGeneration", "M2M100Config", **BART),
    "ViT": images("ViTForImageClassification", "ViTConfig", **_VIT),
    "DeiT": images("DeiTForImageClassification", "DeiTConfig", **_VIT),
    "BEiT": images("BeitForImageClassification", "BeitConfig", **_VIT),
    "DINOv2": images(
        "Dinov2ForImageClassification",
        "Dinov2Config",
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
    ),
    "Swin": images(
        "SwinForImageClassification",
        "SwinConfig",
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[1, 2],
        window_size=2,
    ),
    "ConvNeXt": images(
        "ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1]
    ),
    "ResNet": images(
        "ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1]
    ),
    "RegNet": images(
        "RegNetForImageClassification",
        "RegNetConfig",
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        groups_width=8,
    ),
    "MobileNet-v2": images("MobileNetV2ForImageClassification", "MobileNetV2Config", depth_multiplier=0.25),
    "SegFormer": images(
        "SegformerForImageClassification",
        "SegformerConfig",
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
    ),
    "PoolFormer": images(
        "PoolFormerForImageClassification", "PoolFormerConfig", hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1]
    ),
    "Whisper": None,
    "wav2vec2": None,
}


def _speech(kind: str) -> Any:
    def made() -> tuple[nn.Module, list[dict[str, Any]]]:
        import transformers

        noise = torch.Generator().manual_seed(6)
        if kind == "Whisper":
            settings = transformers.WhisperConfig(
                vocab_size=VOCABULARY,
                d_model=16,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=24,
                decoder_ffn_dim=24,
                max_source_positions=16,
                max_target_positions=16,
                num_mel_bins=8,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=1,
                suppress_tokens=[],
                begin_suppress_tokens=[],
            )
            sound = torch.randn(ROWS, 8, 32, generator=noise)
            return transformers.WhisperForConditionalGeneration(settings), rows_of(
                {"input_features": sound, "labels": tokens(4)[:, :7]}
            )
        settings = transformers.Wav2Vec2Config(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            conv_dim=[8, 8],
            conv_stride=[4, 4],
            conv_kernel=[8, 4],
            num_feat_extract_layers=2,
            num_labels=3,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            classifier_proj_size=8,
            layerdrop=0.0,
            mask_time_prob=0.0,
        )
        sound = torch.randn(ROWS, 400, generator=noise)
        return transformers.Wav2Vec2ForSequenceClassification(settings), rows_of(
            {"input_values": sound, "labels": torch.arange(ROWS) % 3}
        )

    return made


HUGGING_FACE["Whisper"] = _speech("Whisper")
HUGGING_FACE["wav2vec2"] = _speech("wav2vec2")
