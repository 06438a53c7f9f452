"""A ComfyUI node: attention of a model in FP8. Copy this file into ComfyUI's folder `custom_nodes`.

The package fp8cutlass must be installed in the Python that runs ComfyUI.
"""

from __future__ import annotations

from typing import Any


class FP8CutlassAttention:
    """MODEL in, MODEL out: a clone whose attention runs in FP8 where it can. The model that came in is not changed."""

    CATEGORY = "advanced/attention"
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """The model, and what attention does against the loss of accuracy."""
        return {
            "required": {
                "model": ("MODEL",),
                "smooth_k": ("BOOLEAN", {"default": True, "tooltip": "Subtract the mean of the keys"}),
                "hadamard": ("BOOLEAN", {"default": True, "tooltip": "Rotate queries and keys: for outliers"}),
            }
        }

    def patch(self, model: Any, smooth_k: bool, hadamard: bool) -> tuple[Any]:
        """One clone."""
        from fp8cutlass.integrations.comfy import patched

        return (patched(model, smooth_k=smooth_k, hadamard=hadamard),)


NODE_CLASS_MAPPINGS = {"FP8CutlassAttention": FP8CutlassAttention}
NODE_DISPLAY_NAME_MAPPINGS = {"FP8CutlassAttention": "FP8 attention (fp8cutlass)"}
