"""Small models of the transformers library with random weights, and the ways in which they are run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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


def _gpt_oss() -> Any:
    sizes = {"head_dim": 32, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = _causal("GptOssConfig", sliding_window=WINDOW, **ALTERNATING, **sizes)
    for layer in model.model.layers:  # a random start leaves them near 0
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def _deepseek() -> Any:
    sizes = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1}
    return _causal(
        "DeepseekV3Config", num_key_value_heads=4, moe_intermediate_size=64, first_k_dense_replace=1, **sizes, **experts
    )


CAUSAL: dict[str, Callable[[], Any]] = {
    "llama": lambda: _causal("LlamaConfig"),
    "mistral_8": lambda: _causal("MistralConfig", sliding_window=WINDOW),
    "mistral_64": lambda: _causal("MistralConfig", sliding_window=64),
    "gemma2": lambda: _causal("Gemma2Config", head_dim=32, sliding_window=WINDOW, **ALTERNATING),
    "gemma3": lambda: _causal("Gemma3TextConfig", head_dim=32, sliding_window=WINDOW, **ALTERNATING),
    "gpt_oss": _gpt_oss,
    "deepseek": _deepseek,
}
BY_EAGER = ("gemma2", "gpt_oss")  # models that refuse sdpa


def make(build: Callable[[], Any], dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model, always with the same weights."""
    torch.manual_seed(0)
    return build().to(dtype).eval()


def tokens(batch: int = 2) -> torch.Tensor:
    """(batch, TOKENS) int64, none of them a special one."""
    return torch.randint(3, VOCABULARY, (batch, TOKENS), generator=torch.Generator().manual_seed(1))


def _plain(model: Any) -> torch.Tensor:
    return model(tokens()).logits.flatten(0, 1)


def _padded(model: Any, left: bool) -> torch.Tensor:
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, slice(0, 7) if left else slice(-7, None)] = 0
    return model(tokens(), attention_mask=mask).logits[mask.bool()]


def _chunks(model: Any, first: int, cache: Any) -> torch.Tensor:
    parts = [model(part, past_key_values=cache, use_cache=True).logits for part in tokens().split((first, TOKENS - first), 1)]
    return torch.cat(parts, 1).flatten(0, 1)


def _dynamic(model: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _static(model: Any) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=64)


def _packed(model: Any, **more: Any) -> torch.Tensor:
    place = torch.cat([torch.arange(n) for n in (9, 20, 11)])[None]
    return model(tokens(1), position_ids=place, use_cache=False, **more).logits[0]


WAYS: dict[str, Callable[[Any], torch.Tensor]] = {
    "prefill": _plain,
    "left": lambda model: _padded(model, True),
    "right": lambda model: _padded(model, False),
    "chunked": lambda model: _chunks(model, 24, _dynamic(model)),
    "static": lambda model: _chunks(model, TOKENS - 1, _static(model)),
    "decode": lambda model: _chunks(model, TOKENS - 1, _dynamic(model)),
    "packed": _packed,
}


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2."""
    return float((got.float() - want.float()).norm() / want.float().norm())
