"""The measurements of `benchmarks/gpu.py`: model sizes, rows, and FLOPs per token. Standard library only.

A row is one model trained by one contestant in one mode. All rows of a size train the same model from the same first
weights on the same tokens, with the same global batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

_LLAMA = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


@dataclass(frozen=True)
class Size:
    """A model and its batch.

    Attributes:
        name: first part of a row's name.
        model: Hugging Face config of a llama.
        samples: sequences per optimizer step.
        sequence: tokens per sequence.
    """

    name: str
    model: dict[str, Any]
    samples: int
    sequence: int

    @property
    def parameters(self) -> int:
        """Number of parameters; tied embedding and head count once."""
        return self._in_products + (0 if self.model["tie_word_embeddings"] else self._embedding)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step."""
        return self.samples * self.sequence

    def flops_per_token(self, *, causal: bool) -> float:
        """FLOPs per token of forward and backward pass: 6 N + 12 L h s, or 6 N + 6 L h s where causal.

        N are the parameters in matrix products (all but the input embedding), L layers, h width, s sequence length; the
        causal definition counts half of the attention matrix. Recomputation is not counted.
        """
        attention = self.model["num_hidden_layers"] * self.model["hidden_size"] * self.sequence
        return 6.0 * self._in_products + (6.0 if causal else 12.0) * attention

    def activation_bytes_per_sample(self) -> int:
        """A lower bound on a sample's bytes between forward and backward pass without recomputation: bf16 inputs of
        every layer's matrix products, and logits in bf16 and fp32."""
        model = self.model
        layer = 2 * (10 * model["hidden_size"] + 3 * model["intermediate_size"])
        return self.sequence * (layer * model["num_hidden_layers"] + 6 * model["vocab_size"])

    @property
    def _embedding(self) -> int:
        return int(self.model["vocab_size"] * self.model["hidden_size"])

    @property
    def _in_products(self) -> int:
        model = self.model
        width, head = model["hidden_size"], model["hidden_size"] // model["num_attention_heads"]
        attention = 2 * width * width + 2 * width * model["num_key_value_heads"] * head
        layer = attention + 3 * width * model["intermediate_size"] + 2 * width
        return int(layer * model["num_hidden_layers"] + width) + self._embedding


def sizes(sequence: int) -> dict[str, Size]:
    """Sizes like Llama-3.2-1B and Llama-3.1-8B, with 64k and 32k tokens per step."""
    one = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    eight = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    return {
        "1b": Size("1b", {**_LLAMA, **one, "tie_word_embeddings": True}, 65536 // sequence, sequence),
        "8b": Size("8b", {**_LLAMA, **eight, "tie_word_embeddings": False}, 32768 // sequence, sequence),
    }


def tiny_sizes() -> dict[str, Size]:
    """A model of four layers for a CPU: it shows that everything runs, but its speed means nothing."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = {**_LLAMA, **shape, "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": False}
    return {"tiny": Size("tiny", model, 4, 64)}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        size: name of a `Size`.
        contestant: torch or deepspeed, our engines; or trainer, the Hugging Face Trainer.
        mode: a key of `MODES`.
    """

    size: str
    contestant: str
    mode: str

    @property
    def name(self) -> str:
        """Name of the row, e.g. 1b-torch-compiled."""
        return f"{self.size}-{self.contestant}-{self.mode}"

    @property
    def on_all_gpus(self) -> bool:
        """Whether the row has a process on every GPU of the machine; the batch is multiplied by their number."""
        return self.mode == "gpus"

    @property
    def title(self) -> str:
        """Title of the row in the table."""
        return f"{self.size.upper()}, {TITLES[self.contestant]}, {MODES[self.mode]}"


TITLES = {"torch": "engine torch", "deepspeed": "engine deepspeed (ZeRO-1)", "trainer": "Hugging Face Trainer"}
MODES = {
    "eager": "bf16",
    "compiled": "bf16, compiled",
    "fp8": "fp8 tensorwise, compiled",
    "gpus": "FSDP2 at stage 3 on all GPUs, tokens/s of each, bf16, compiled",
    "bf16-weights": "bf16 weights without fp32 masters, compiled",
}
"""Modes. Ours have bf16 weights with fp32 masters. The Trainer's eager and compiled have fp32 weights under autocast,
and so also update in fp32. Its bf16-weights has no masters and updates in bf16: not the same training, but its
fastest."""

_ORDER = (
    ("torch", "compiled"),
    ("torch", "fp8"),
    ("trainer", "compiled"),
    ("torch", "eager"),
    ("deepspeed", "compiled"),
    ("trainer", "bf16-weights"),
    ("trainer", "eager"),
    ("deepspeed", "fp8"),
    ("deepspeed", "eager"),
    ("torch", "gpus"),
)
"""Row names, the most important first, since time may run out."""


def rows(names: list[str]) -> list[Row]:
    """The rows of these sizes, the most important first."""
    return [Row(size, *each) for each in _ORDER for size in names]


def selected(name: str, kind: str, only: str | None) -> bool:
    """Whether `--only` selects something.

    Args:
        name: name of a row or a part.
        kind: part to which it belongs: environment, tests or speed.
        only: shell patterns separated by commas; None selects all.
    """
    patterns = only.split(",") if only else ["*"]
    return any(pattern == kind or fnmatch(name, pattern) for pattern in patterns)
