"""The attention calls of one forward of each model family, at sizes that people run.

Heads, layers and widths are those of the published configurations, which ``source`` names; tokens are chosen for a
heavy forward. ``tests/integrations/test_model_families.py`` records the calls of the libraries' own models and compares
them with this table.
"""

from __future__ import annotations

from dataclasses import dataclass

TRANSFORMERS, DENSE = "transformers", "dense"  # adapters: of transformers; of diffusers and of code that calls SDPA


@dataclass(frozen=True)
class Case:
    """Calls of one shape. ``count`` are those of a forward. ``window`` is (left, right) keys beside a row's own, -1 for
    all. ``padded``: the sequences of the batch have unequal lengths. ``sinks`` and ``softcap`` are features of the
    model. ``text``: so many of the keys are of a prompt, whose second half is padding. The model hides it by a mask for
    SDPA, a boolean one or, ``added``, one of 0 and -10,000. ``bias``: a tensor that is added to the scores."""

    family: str
    part: str
    source: str
    door: str
    count: int
    batch: int
    heads: int
    kv_heads: int
    rows: int
    keys: int
    head_dim: int
    value_dim: int = 0  # head_dim where 0
    window: tuple[int, int] = (-1, -1)
    padded: bool = False
    sinks: bool = False
    softcap: float | None = None
    text: int = 0
    added: bool = False
    bias: bool = False

    @property
    def values(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def causal(self) -> bool:
        return self.window == (-1, 0)

    @property
    def mask(self) -> str:
        """In a word, for tables."""
        left, right = self.window
        band = "causal" if self.causal else "full" if left == right == -1 else f"window {left}, {right}"
        return ", ".join(
            [
                band,
                *["padded"] * self.padded,
                *["mask"] * (self.text > 0),
                *["added"] * self.added,
                *["bias"] * self.bias,
            ]
        )

    @property
    def label(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        sizes = f"{self.batch} x {heads} x {self.rows} x {self.keys} x {self.head_dim}"
        return f"{self.family}, {self.part}: {sizes}, {self.mask}"


def _model(
    family: str, part: str, source: str, count: int, batch: int, heads: int, tokens: int, head_dim: int, *,
    keys: int = 0, kv_heads: int = 0, door: str = TRANSFORMERS, window: tuple[int, int] = (-1, -1), value_dim: int = 0,
    padded: bool = False, sinks: bool = False, softcap: float | None = None, text: int = 0, added: bool = False,
    bias: bool = False,
) -> Case:  # fmt: skip
    """Self-attention of as many heads, unless it is said otherwise."""
    sizes = (count, batch, heads, kv_heads or heads, tokens, keys or tokens, head_dim, value_dim)
    return Case(family, part, source, door, *sizes, window, padded, sinks, softcap, text, added, bias)


CAUSAL = (-1, 0)
LLAMA, MISTRAL = "Llama 3.1 8B", "Mistral 7B v0.1"
GEMMA2, GEMMA3, OSS = "Gemma 2 9B", "Gemma 3 12B", "gpt-oss 20B"
WHISPER, T5, QWEN = "Whisper large v3", "T5 large", "Qwen2-VL, vision tower"
FLUX, SD3, SDXL, WAN = "FLUX.1 dev", "Stable Diffusion 3 medium", "SDXL base", "Wan 2.1 14B"
COG, LTX, PIXART = "CogVideoX 5B", "LTX-Video 0.9", "PixArt-Sigma"
HUNYUAN, QWEN_IMAGE = "HunyuanVideo", "Qwen-Image"

CASES: tuple[Case, ...] = (
    _model("Llama", "prefill", LLAMA, 32, 1, 32, 8192, 128, kv_heads=8, window=CAUSAL),
    _model("Llama, padded", "prefill", LLAMA, 32, 4, 32, 4096, 128, kv_heads=8, window=CAUSAL, padded=True),
    _model("Llama, decoding", "bf16 cache", LLAMA, 32, 8, 32, 1, 128, keys=4096, kv_heads=8),
    _model("Mistral", "window", MISTRAL, 32, 1, 32, 16384, 128, kv_heads=8, window=(4095, 0)),
    _model("Gemma 2", "full", GEMMA2, 21, 1, 16, 8192, 256, kv_heads=8, window=CAUSAL, softcap=50.0),
    _model("Gemma 2", "window", GEMMA2, 21, 1, 16, 8192, 256, kv_heads=8, window=(4095, 0), softcap=50.0),
    _model("Gemma 3", "full", GEMMA3, 8, 1, 16, 8192, 256, kv_heads=8, window=CAUSAL),
    _model("Gemma 3", "window", GEMMA3, 40, 1, 16, 8192, 256, kv_heads=8, window=(1023, 0)),
    _model("gpt-oss", "full", OSS, 12, 1, 64, 8192, 64, kv_heads=8, window=CAUSAL, sinks=True),
    _model("gpt-oss", "window", OSS, 12, 1, 64, 8192, 64, kv_heads=8, window=(127, 0), sinks=True),
    _model("DeepSeek", "latent", "DeepSeek V3", 61, 1, 128, 4096, 192, value_dim=128, window=CAUSAL),
    _model("BERT", "encoder", "BERT base", 12, 32, 12, 512, 64),
    _model("BERT, padded", "encoder", "BERT base", 12, 32, 12, 512, 64, padded=True),
    _model("ViT", "encoder", "ViT large, 384 pixels", 24, 32, 16, 577, 64),
    _model("CLIP", "vision", "CLIP ViT-L/14", 24, 32, 16, 257, 64),
    _model("CLIP", "text", "CLIP ViT-L/14", 12, 32, 12, 77, 64, window=CAUSAL),
    _model("Whisper", "encoder", WHISPER, 32, 8, 20, 1500, 64),
    _model("Whisper", "decoder", WHISPER, 32, 8, 20, 448, 64, window=CAUSAL),
    _model("Whisper", "cross", WHISPER, 32, 8, 20, 448, 64, keys=1500),
    _model("T5", "encoder", T5, 24, 8, 16, 512, 64, bias=True),
    _model("Qwen2-VL", "vision", QWEN, 32, 1, 16, 4096, 80),
    _model("timm", "ViT", "ViT-B/16 of timm", 12, 64, 12, 197, 64, door=DENSE),
    _model("open_clip", "vision", "ViT-H/14 of open_clip", 32, 32, 16, 257, 80, door=DENSE),
    _model("Flux", "joint", FLUX, 57, 1, 24, 4608, 128, door=DENSE),
    _model("SD3", "joint", SD3, 24, 2, 24, 4250, 64, door=DENSE),
    _model("SDXL", "self, 64 x 64", SDXL, 10, 2, 10, 4096, 64, door=DENSE),
    _model("SDXL", "self, 32 x 32", SDXL, 60, 2, 20, 1024, 64, door=DENSE),
    _model("SDXL", "cross, 64 x 64", SDXL, 10, 2, 10, 4096, 64, keys=77, door=DENSE),
    _model("SDXL", "cross, 32 x 32", SDXL, 60, 2, 20, 1024, 64, keys=77, door=DENSE),
    _model("Wan", "self", WAN, 40, 1, 40, 32760, 128, door=DENSE),
    _model("Wan", "cross", WAN, 40, 1, 40, 32760, 128, keys=512, door=DENSE),
    _model("CogVideoX", "joint", COG, 42, 2, 48, 17776, 64, door=DENSE),
    _model("LTX", "self", LTX, 28, 2, 32, 6144, 64, door=DENSE),
    _model("LTX", "cross", LTX, 28, 2, 32, 6144, 64, keys=128, text=128, added=True, door=DENSE),
    _model("PixArt", "self", PIXART, 28, 2, 16, 4096, 72, door=DENSE),
    _model("PixArt", "cross", PIXART, 28, 2, 16, 4096, 72, keys=300, text=300, added=True, door=DENSE),
    _model("HunyuanVideo", "joint", HUNYUAN, 60, 1, 24, 14296, 128, text=256, door=DENSE),
    _model("HunyuanVideo", "prompt", HUNYUAN, 2, 1, 24, 256, 128, text=256, door=DENSE),
    _model("Qwen-Image", "joint", QWEN_IMAGE, 60, 1, 24, 7145, 128, text=256, door=DENSE),
)  # fmt: skip
FAMILIES = tuple(dict.fromkeys(case.family for case in CASES))
