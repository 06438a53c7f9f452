"""Small models of diffusers with random weights, and what they are called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from where import drawn

BF16 = torch.bfloat16


def randn(*shape: int) -> torch.Tensor:
    """bf16, from torch's own generator: seed it first."""
    return torch.randn(*shape, dtype=BF16)


def flux(heads: int = 2) -> tuple[Any, dict[str, Any]]:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=32,
        num_attention_heads=heads, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    return model, {
        "hidden_states": randn(1, 16, 4),
        "encoder_hidden_states": randn(1, 8, 32),
        "pooled_projections": randn(1, 32),
        "timestep": torch.tensor([1.0], dtype=BF16),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(8, 3),
    }


def sd3() -> tuple[Any, dict[str, Any]]:
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=32, caption_projection_dim=64, pooled_projection_dim=64, out_channels=4,
        pos_embed_max_size=16,
    )  # fmt: skip
    return model, {
        "hidden_states": randn(1, 4, 8, 8),
        "encoder_hidden_states": randn(1, 8, 32),
        "pooled_projections": randn(1, 64),
        "timestep": torch.tensor([1]),
    }


def sdxl() -> tuple[Any, dict[str, Any]]:
    model = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=16, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4), use_linear_projection=True, addition_embed_type="text_time",
        addition_time_embed_dim=8, transformer_layers_per_block=(1, 1), projection_class_embeddings_input_dim=80,
        cross_attention_dim=64,
    )  # fmt: skip
    return model, {
        "sample": randn(1, 4, 16, 16),
        "timestep": torch.tensor(1),
        "encoder_hidden_states": randn(1, 8, 64),
        "added_cond_kwargs": {"text_embeds": randn(1, 32), "time_ids": randn(1, 6)},
    }


def wan(heads: int = 2) -> tuple[Any, dict[str, Any]]:
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=heads, attention_head_dim=12, in_channels=4, out_channels=4,
        text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2, cross_attn_norm=True, rope_max_seq_len=32,
    )  # fmt: skip
    return model, {
        "hidden_states": randn(1, 4, 2, 16, 16),
        "timestep": torch.tensor([1]),
        "encoder_hidden_states": randn(1, 12, 16),
    }


def cogvideox() -> tuple[Any, dict[str, Any]]:
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=2,
        text_embed_dim=8, num_layers=2, sample_width=8, sample_height=8, sample_frames=8, patch_size=2,
        temporal_compression_ratio=4, max_text_seq_length=8,
    )  # fmt: skip
    return model, {
        "hidden_states": randn(1, 2, 4, 8, 8),
        "encoder_hidden_states": randn(1, 8, 8),
        "timestep": torch.tensor([1]),
    }


def ltx() -> tuple[Any, dict[str, Any]]:
    """Its cross attention has a mask that is added to the scores."""
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        num_layers=1, caption_channels=32,
    )  # fmt: skip
    return model, {
        "hidden_states": randn(1, 32, 4),
        "encoder_hidden_states": randn(1, 8, 32),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]]),
        "timestep": torch.tensor([1.0], dtype=BF16),
        "num_frames": 2,
        "height": 4,
        "width": 4,
    }


def pixart() -> tuple[Any, dict[str, Any]]:
    """Its cross attention has a mask."""
    model = diffusers.PixArtTransformer2DModel(
        sample_size=8, num_layers=2, patch_size=2, attention_head_dim=32, num_attention_heads=2, caption_channels=32,
        in_channels=4, cross_attention_dim=64, out_channels=8, use_additional_conditions=False,
    )  # fmt: skip
    return model, {
        "hidden_states": randn(1, 4, 8, 8),
        "timestep": torch.tensor([1]),
        "encoder_hidden_states": randn(1, 8, 32),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def qwen_image(text: int = 7) -> tuple[Any, dict[str, Any]]:
    """Always has a mask; with ``text`` below 7 it hides something."""
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    return model, {
        "hidden_states": randn(1, 16, 16),
        "encoder_hidden_states": randn(1, 7, 16),
        "encoder_hidden_states_mask": (torch.arange(7) < text).long()[None],
        "timestep": torch.tensor([1.0], dtype=BF16),
        "img_shapes": [(1, 4, 4)],
    }


def hunyuan_video(text: int = 12) -> tuple[Any, dict[str, Any]]:
    """Always has a mask; with ``text`` below 12 it hides something."""
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=1, patch_size_t=1, guidance_embeds=True,
        text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(2, 4, 4),
    )  # fmt: skip
    return model, {
        "hidden_states": randn(1, 4, 1, 8, 8),
        "timestep": torch.tensor([1]),
        "encoder_hidden_states": randn(1, 12, 16),
        "pooled_projections": randn(1, 8),
        "encoder_attention_mask": (torch.arange(12) < text).float()[None],
        "guidance": torch.tensor([1000.0], dtype=BF16),
    }


def autoencoder() -> tuple[Any, dict[str, Any]]:
    model = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(32, 64), layers_per_block=1, latent_channels=4,
    )  # fmt: skip
    return model, {"sample": randn(1, 3, 32, 32)}


def wan_autoencoder() -> tuple[Any, dict[str, Any]]:
    """Has attention without a processor."""
    model = diffusers.AutoencoderKLWan(
        base_dim=8, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False]
    )
    return model, {"sample": randn(1, 3, 1, 16, 16)}


def sana() -> tuple[Any, dict[str, Any]]:
    """Self attention is linear attention of its own; cross attention calls torch's."""
    model = diffusers.SanaTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=1, attention_head_dim=16, num_attention_heads=2,
        num_cross_attention_heads=2, cross_attention_head_dim=16, cross_attention_dim=32, caption_channels=32,
        sample_size=8,
    )  # fmt: skip
    return model, {
        "hidden_states": randn(1, 4, 8, 8),
        "encoder_hidden_states": randn(1, 8, 32),
        "timestep": torch.tensor([1]),
    }


def dit_pipeline() -> Any:
    """A pipeline that needs no text: noise and the number of a class."""
    torch.manual_seed(0)

    def parts() -> tuple[Any, Any]:
        transformer = diffusers.DiTTransformer2DModel(
            num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
            num_embeds_ada_norm=1000,
        )  # fmt: skip
        return transformer.to(BF16).eval(), autoencoder()[0].to(BF16)

    pipeline = diffusers.DiTPipeline(*drawn(parts), diffusers.DDIMScheduler())
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def built(make: Callable[[], tuple[Any, dict[str, Any]]]) -> tuple[Any, dict[str, Any]]:
    """The model in bf16 and its inputs, the same in each call."""
    torch.manual_seed(0)

    def both() -> tuple[Any, dict[str, Any]]:
        model, given = make()
        return model.to(BF16).eval(), given

    return drawn(both)


@torch.no_grad()
def run(model: Any, given: dict[str, Any]) -> torch.Tensor:
    """The first output. Noise that is made inside is the same in each call."""
    torch.manual_seed(1)
    out = model(**given, return_dict=False)[0]
    return out[0] if isinstance(out, (list, tuple)) else out
