"""Small models of the transformers library with random weights, and the ways in which they are run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from where import CPU, drawn, moved

TOKENS, VOCABULARY, WINDOW = 40, 100, 8
COMMON = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
}
DECODER = {**COMMON, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}


def _causal(config: str, **more: Any) -> Any:
    import transformers

    made = getattr(transformers, config)(**{**DECODER, **more})
    return transformers.AutoModelForCausalLM.from_config(made)


def _gpt_oss(head_dim: int = 32) -> Any:
    sizes = {"head_dim": head_dim, "num_local_experts": 2, "num_experts_per_tok": 2}
    model = _causal("GptOssConfig", sliding_window=WINDOW, **ALTERNATING, **sizes)
    for layer in model.model.layers:  # a random start leaves them near 0
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def _deepseek() -> Any:
    sizes = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
    experts = {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1}
    return _causal(
        "DeepseekV3Config", num_key_value_heads=4, moe_intermediate_size=64, first_k_dense_replace=1, **sizes, **experts
    )


CAUSAL: dict[str, Callable[..., Any]] = {  # all but the last take another head_dim
    "llama": partial(_causal, "LlamaConfig"),
    "mistral_8": partial(_causal, "MistralConfig", sliding_window=WINDOW),
    "mistral_64": partial(_causal, "MistralConfig", sliding_window=64),
    "gemma2": partial(_causal, "Gemma2Config", head_dim=32, sliding_window=WINDOW, **ALTERNATING),
    "gemma3": partial(_causal, "Gemma3TextConfig", head_dim=32, sliding_window=WINDOW, **ALTERNATING),
    "gpt_oss": _gpt_oss,
    "deepseek": _deepseek,
}
BY_EAGER = ("gemma2", "gpt_oss")  # models that refuse sdpa


def make(build: Callable[[], Any], dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model, always with the same weights."""
    torch.manual_seed(0)
    return drawn(lambda: build().to(dtype).eval())


def tokens(batch: int = 2) -> torch.Tensor:
    """(batch, TOKENS) int64, none of them a special one."""
    draw = torch.Generator().manual_seed(1)
    return moved(torch.randint(3, VOCABULARY, (batch, TOKENS), generator=draw, device=CPU))


def _plain(model: Any) -> torch.Tensor:
    return model(tokens()).logits.flatten(0, 1)


def padding(left: bool) -> torch.Tensor:
    """(2, TOKENS): the first row has 7 tokens of padding."""
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, slice(0, 7) if left else slice(-7, None)] = 0
    return mask


def _padded(model: Any, left: bool) -> torch.Tensor:
    mask = padding(left)
    return model(tokens(), attention_mask=mask).logits[mask.bool()]


def cached(model: Any, cache: Any) -> dict[str, Any]:
    """The keyword for a cache, whose name has changed."""
    names = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    return {"cache" if "cache" in names else "past_key_values": cache, "use_cache": True}


def chunks(model: Any, first: int, cache: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The logits of the first tokens and of the others, which come in a second call."""
    found = []
    for ids in tokens().split((first, TOKENS - first), 1):
        seen = sum(x.shape[1] for x in found) + ids.shape[1]
        more = {} if mask is None else {"attention_mask": mask[:, :seen]}
        found.append(model(ids, **cached(model, cache), **more).logits)
    whole = torch.cat(found, 1)
    return whole.flatten(0, 1) if mask is None else whole[mask.bool()]


def dynamic(model: Any) -> Any:
    """The cache of ``generate``."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def static(model: Any) -> Any:
    """A cache that is longer than what is written."""
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=64)


PLACES = torch.cat([torch.arange(n) for n in (9, 20, 11)])[None]  # of three sequences in one row


def _packed(model: Any) -> torch.Tensor:
    return model(tokens(1), position_ids=PLACES, use_cache=False).logits[0]


WAYS: dict[str, Callable[[Any], torch.Tensor]] = {
    "prefill": _plain,
    "left": lambda model: _padded(model, True),
    "right": lambda model: _padded(model, False),
    "chunked": lambda model: chunks(model, 24, dynamic(model)),
    "chunked_left": lambda model: chunks(model, 24, dynamic(model), padding(True)),
    "static": lambda model: chunks(model, TOKENS - 1, static(model)),
    "static_left": lambda model: chunks(model, TOKENS - 1, static(model), padding(True)),
    "decode": lambda model: chunks(model, TOKENS - 1, dynamic(model)),
    "packed": _packed,
}


def _bert(**more: Any) -> Any:
    import transformers

    return transformers.BertModel(transformers.BertConfig(**COMMON, **more))


VISION = {name: size for name, size in COMMON.items() if name not in ("vocab_size", "pad_token_id")}


def _vit() -> Any:
    import transformers

    return transformers.ViTModel(transformers.ViTConfig(**VISION, image_size=32, patch_size=8))


def _clip_text() -> Any:
    import transformers

    return transformers.CLIPTextModel(transformers.CLIPTextConfig(**COMMON, bos_token_id=1, eos_token_id=2))


def _clip_vision() -> Any:
    import transformers

    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**VISION, image_size=32, patch_size=8))


def whisper() -> Any:
    """Two layers each way; 100 frames of 16 mel bins."""
    import transformers

    sizes = {
        f"{part}_{what}": value
        for part in ("encoder", "decoder")
        for what, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))
    }
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    lengths = {"max_source_positions": 50, "max_target_positions": 64, "num_mel_bins": 16}
    config = transformers.WhisperConfig(vocab_size=VOCABULARY, d_model=128, **sizes, **lengths, **special)
    return transformers.WhisperForConditionalGeneration(config)


def _t5() -> Any:
    import transformers

    sizes = {"d_model": 128, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config)


def _modernbert() -> Any:
    import transformers

    special = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    local = {"num_hidden_layers": 3, "local_attention": 8, "global_attn_every_n_layers": 3}
    return transformers.ModernBertModel(transformers.ModernBertConfig(**{**COMMON, **local}, **special))


def _qwen2_vision() -> Any:
    from transformers.models.qwen2_vl import configuration_qwen2_vl, modeling_qwen2_vl

    sizes = {"depth": 2, "embed_dim": 128, "hidden_size": 64, "num_heads": 4, "patch_size": 4, "mlp_ratio": 1}
    config = configuration_qwen2_vl.Qwen2VLVisionConfig(**sizes)
    return modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel(config)


def noise(*shape: int) -> torch.Tensor:
    """bf16, always the same."""
    return moved(torch.randn(*shape, generator=torch.Generator().manual_seed(3), device=CPU).bfloat16())


def _masked(model: Any) -> torch.Tensor:
    return model(tokens(), attention_mask=padding(False)).last_hidden_state[padding(False).bool()]


def _whole(model: Any) -> torch.Tensor:
    return model(tokens()).last_hidden_state


def mel() -> torch.Tensor:
    """What Whisper hears, (2, 16, 100)."""
    return noise(2, 16, 100)


OTHERS: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.Tensor]]] = {
    "bert": (_bert, _whole),
    "bert_padded": (_bert, _masked),
    "bert_decoder": (
        lambda: _bert(is_decoder=True, add_cross_attention=True),
        lambda model: model(tokens(), encoder_hidden_states=noise(2, 12, 128)).last_hidden_state,
    ),
    "vit": (_vit, lambda model: model(noise(2, 3, 32, 32)).last_hidden_state),
    "clip_text": (_clip_text, _whole),
    "clip_text_padded": (_clip_text, _masked),
    "clip_vision": (_clip_vision, lambda model: model(noise(2, 3, 32, 32)).last_hidden_state),
    "whisper": (whisper, lambda model: model(mel(), decoder_input_ids=tokens()).logits),
    "t5": (_t5, lambda model: model(input_ids=tokens(), decoder_input_ids=tokens()).logits),
    "modernbert": (_modernbert, _whole),
    "modernbert_padded": (_modernbert, _masked),
    "qwen2_vision": (
        _qwen2_vision,
        lambda model: model(noise(52, 96), grid_thw=torch.tensor([[1, 4, 4], [1, 6, 6]])).last_hidden_state,
    ),
}


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2."""
    return float((got.float() - want.float()).norm() / want.float().norm())
