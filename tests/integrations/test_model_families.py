"""The shapes of ``benchmarks/families/cases.py``, recorded from the libraries' own models: real layers, heads and
tokens, on tensors without memory.

Regressions these catch: a family that is timed at a shape, or as often, as no model asks for; a window, a sink or a
softcap that a model passes on and the table does not have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from benchmarks.families.cases import CASES
from fp8cutlass.integrations.sdpa import _multi_head_attention

# batch, heads, kv_heads, rows, keys, head_dim, value_dim
Shape = tuple[int, ...]
META = torch.device("meta")


def table(family: str) -> Counter[Any]:
    """Calls of a family: how many of each shape and feature."""
    found: Counter[Any] = Counter()
    for case in CASES:
        if case.family == family:
            shape = (case.batch, case.heads, case.kv_heads, case.rows, case.keys, case.head_dim, case.values)
            left = case.window[0] + 1 if case.window[0] >= 0 else None
            found[shape, left, case.softcap, case.sinks, case.bias] += case.count
    return found


def by_transformers(build: Callable[[Any], Any], run: Callable[[Any], object]) -> Counter[Any]:
    """The calls of a model of transformers."""
    transformers = pytest.importorskip("transformers")
    from transformers.masking_utils import sdpa_mask

    found: Counter[Any] = Counter()

    def record(module: Any, q: Any, k: Any, v: Any, attention_mask: Any = None, **given: Any) -> tuple[Any, None]:
        shape = (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
        sinks, bias = given.get("s_aux") is not None, given.get("position_bias") is not None
        found[shape, given.get("sliding_window"), given.get("softcap"), sinks, bias] += 1
        return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3])), None

    transformers.AttentionInterface.register("record_shapes", record)
    transformers.AttentionMaskInterface.register("record_shapes", sdpa_mask)
    with META, torch.no_grad():
        model = build(transformers).to(torch.bfloat16).eval()
        model.set_attn_implementation("record_shapes")
        run(model)
    return found


class Recorder(TorchFunctionMode):
    """Records the calls of torch's attention and computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Any] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.multi_head_attention_forward:
            with self:  # torch calls it outside the mode; what it calls is to be seen
                return _multi_head_attention(*args, **kwargs)
        if func is not torch._C._nn.scaled_dot_product_attention:
            return func(*args, **kwargs)
        names = ("query", "key", "value")
        q, k, v = (kwargs.get(name, args[i] if i < len(args) else None) for i, name in enumerate(names))
        shape = (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
        self.found[shape, None, None, False, False] += 1
        return q.new_empty((*q.shape[:3], v.shape[3]))


def ids(batch: int, tokens: int) -> torch.Tensor:
    return torch.zeros(batch, tokens, dtype=torch.long, device=META)


def noise(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=META)


SMALL = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def causal(config: str, batch: int, tokens: int, **sizes: Any) -> tuple[Callable[[Any], Any], Callable[[Any], object]]:
    def build(transformers: Any) -> Any:
        made = getattr(transformers, config)(**SMALL, **sizes)
        return transformers.AutoModelForCausalLM.from_config(made)

    return build, lambda model: model(ids(batch, tokens), use_cache=True)


LLAMA = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
GEMMA = {
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "hidden_size": 256, "intermediate_size": 64,
}  # fmt: skip
DEEPSEEK = {"first_k_dense_replace": 61, "intermediate_size": 64}  # no experts: which ones, only numbers would tell


class NoExperts(torch.nn.Module):
    """In the place of experts: which ones a token takes, only numbers would tell."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x, None


def _gpt_oss(transformers: Any) -> Any:
    made = transformers.GptOssConfig(**SMALL, num_hidden_layers=24, num_local_experts=4, hidden_size=64)
    model = transformers.AutoModelForCausalLM.from_config(made)
    for layer in model.model.layers:
        layer.mlp = NoExperts()
    return model


def _clip(transformers: Any) -> Any:
    sizes = {"image_size": 224, "patch_size": 14} | LARGE
    text = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "intermediate_size": 64}
    parts = torch.nn.ModuleList(
        [
            transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**sizes)),
            transformers.CLIPTextModel(transformers.CLIPTextConfig(**SMALL, **text)),
        ]
    )
    parts.set_attn_implementation = lambda name: [part.set_attn_implementation(name) for part in parts]
    return parts


WHISPER = {
    "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20,
    "decoder_attention_heads": 20, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 128,
    "decoder_start_token_id": 1,
}  # fmt: skip
T5 = {"d_model": 1024, "d_kv": 64, "d_ff": 64, "num_layers": 24, "num_heads": 16, "decoder_start_token_id": 0}


def vision(config: str, model: str, batch: int, pixels: int, **sizes: Any) -> Any:
    return (
        lambda t: getattr(t, model)(getattr(t, config)(image_size=pixels, **sizes)),
        lambda m: m(noise(batch, 3, pixels, pixels)),
    )


LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 64}
FROM_TRANSFORMERS: dict[str, Any] = {
    "Llama": causal("LlamaConfig", 1, 8192, intermediate_size=64, **LLAMA),
    "Mistral": causal("MistralConfig", 1, 16384, intermediate_size=64, sliding_window=4096, **LLAMA),
    "Gemma 2": causal("Gemma2Config", 1, 8192, num_hidden_layers=42, **GEMMA),
    "Gemma 3": causal("Gemma3TextConfig", 1, 8192, num_hidden_layers=48, sliding_window=1024, **GEMMA),
    "gpt-oss": (_gpt_oss, lambda m: m(ids(1, 8192), use_cache=True)),
    "DeepSeek": causal("DeepseekV3Config", 1, 4096, num_hidden_layers=61, hidden_size=64, **DEEPSEEK),
    "BERT": (lambda t: t.BertModel(t.BertConfig()), lambda m: m(ids(32, 512))),
    "ViT": vision("ViTConfig", "ViTModel", 32, 384, patch_size=16, **LARGE),
    "CLIP": (_clip, lambda m: [m[0](noise(32, 3, 224, 224)), m[1](ids(32, 77))]),
    "Whisper encoder": (
        lambda t: t.WhisperForConditionalGeneration(t.WhisperConfig(**SMALL, **WHISPER)).get_encoder(),
        lambda m: m(noise(8, 128, 3000)),
    ),
    "T5 encoder": (
        lambda t: t.T5EncoderModel(t.T5Config(vocab_size=100, **T5)),
        lambda m: m(input_ids=ids(8, 512)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FROM_TRANSFORMERS)
def test_models_of_transformers(family: str) -> None:
    build, run = FROM_TRANSFORMERS[family]
    name, _, part = family.partition(" encoder")
    wanted = table(name)
    found = by_transformers(build, run)
    assert found, "nothing was recorded"
    if family != name:  # of a family with a decoder, the encoder alone
        wanted = Counter({key: count for key, count in wanted.items() if key in found})
    assert found == wanted


def library(name: str) -> Any:
    """The library, or a skip where it is not installed or does not fit the installed torch."""
    try:
        return import_module(name)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"needs {name} ({error})")


@pytest.mark.parametrize("family", ["timm", "open_clip"])
def test_vision_towers(family: str) -> None:
    made = library(family)
    with META, torch.no_grad():
        if family == "timm":
            model, batch = made.create_model("vit_base_patch16_224"), 64
        else:
            model, batch = made.create_model("ViT-H-14", load_weights=False, device="meta").visual, 32
        with Recorder() as recorder:
            model.to(torch.bfloat16).eval()(noise(batch, 3, 224, 224))
    assert recorder.found == table(family)


def _flux(d: Any) -> Any:
    model = d.FluxTransformer2DModel(guidance_embeds=True)
    given = {
        "hidden_states": noise(1, 4096, 64), "encoder_hidden_states": noise(1, 512, 4096),
        "pooled_projections": noise(1, 768), "timestep": noise(1), "guidance": noise(1), "img_ids": noise(4096, 3),
        "txt_ids": noise(512, 3),
    }  # fmt: skip
    return model, given


def _sd3(d: Any) -> Any:
    model = d.SD3Transformer2DModel(num_layers=24, num_attention_heads=24, caption_projection_dim=1536)
    given = {
        "hidden_states": noise(2, 16, 128, 128), "encoder_hidden_states": noise(2, 154, 4096),
        "pooled_projections": noise(2, 2048), "timestep": noise(2),
    }  # fmt: skip
    return model, given


def _sdxl(d: Any) -> Any:
    model = d.UNet2DConditionModel(
        block_out_channels=(320, 640, 1280), down_block_types=("DownBlock2D", *["CrossAttnDownBlock2D"] * 2),
        up_block_types=(*["CrossAttnUpBlock2D"] * 2, "UpBlock2D"), attention_head_dim=(5, 10, 20),
        transformer_layers_per_block=(1, 2, 10), cross_attention_dim=2048, use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816,
    )  # fmt: skip
    given = {
        "sample": noise(2, 4, 128, 128), "timestep": noise(2), "encoder_hidden_states": noise(2, 77, 2048),
        "added_cond_kwargs": {"text_embeds": noise(2, 1280), "time_ids": noise(2, 6)},
    }  # fmt: skip
    return model, given


def _wan(d: Any) -> Any:
    given = {
        "hidden_states": noise(1, 16, 21, 60, 104), "timestep": noise(1), "encoder_hidden_states": noise(1, 512, 4096)
    }  # fmt: skip
    return d.WanTransformer3DModel(), given


def _cogvideox(d: Any) -> Any:
    model = d.CogVideoXTransformer3DModel(num_attention_heads=48, num_layers=42, use_rotary_positional_embeddings=True)
    given = {
        "hidden_states": noise(2, 13, 16, 60, 90), "encoder_hidden_states": noise(2, 226, 4096), "timestep": noise(2),
        "image_rotary_emb": (noise(17550, 64), noise(17550, 64)),
    }  # fmt: skip
    return model, given


def _ltx(d: Any) -> Any:
    given = {
        "hidden_states": noise(2, 6144, 128), "encoder_hidden_states": noise(2, 128, 4096), "timestep": noise(2),
        "encoder_attention_mask": noise(2, 128), "num_frames": 16, "height": 16, "width": 24,
    }  # fmt: skip
    return d.LTXVideoTransformer3DModel(), given


def _pixart(d: Any) -> Any:
    model = d.PixArtTransformer2DModel(sample_size=128, caption_channels=4096, use_additional_conditions=False)
    given = {
        "hidden_states": noise(2, 4, 128, 128), "timestep": noise(2), "encoder_hidden_states": noise(2, 300, 4096),
        "encoder_attention_mask": noise(2, 300), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }  # fmt: skip
    return model, given


def _hunyuan_video(d: Any) -> Any:
    given = {
        "hidden_states": noise(1, 16, 9, 60, 104), "timestep": noise(1), "encoder_hidden_states": noise(1, 256, 4096),
        "encoder_attention_mask": noise(1, 256), "pooled_projections": noise(1, 768), "guidance": noise(1),
    }  # fmt: skip
    return d.HunyuanVideoTransformer3DModel(), given


def _qwen_image(d: Any) -> Any:
    given = {
        "hidden_states": noise(1, 6889, 64), "encoder_hidden_states": noise(1, 256, 3584),
        "encoder_hidden_states_mask": noise(1, 256), "timestep": noise(1), "img_shapes": [(1, 83, 83)],
    }  # fmt: skip
    return d.QwenImageTransformer2DModel(), given


FROM_DIFFUSERS = {
    "Flux": _flux, "SD3": _sd3, "SDXL": _sdxl, "Wan": _wan, "CogVideoX": _cogvideox, "LTX": _ltx, "PixArt": _pixart,
    "HunyuanVideo": _hunyuan_video, "Qwen-Image": _qwen_image,
}  # fmt: skip


@pytest.mark.parametrize("family", FROM_DIFFUSERS)
def test_models_of_diffusers(family: str) -> None:
    diffusers = pytest.importorskip("diffusers")
    with META, torch.no_grad():
        model, given = FROM_DIFFUSERS[family](diffusers)
        with Recorder() as recorder:
            model.to(torch.bfloat16).eval()(**given, return_dict=False)
    assert recorder.found == table(family)
