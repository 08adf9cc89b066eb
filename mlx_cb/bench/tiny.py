"""Writes a random two-layer llama with a real vocabulary, so that the model's time does not hide
the server's.

Only the embeddings of plain words are random, all others are zero: a greedy answer is then words
to the end, one piece of text per token and never an end-of-sequence token. The sizes computed with
are the same as ever. Knows nothing about servers.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import save_file

from mlx_cb.bench.prompts import TokenizerWords

LAYERS, HIDDEN, HEADS, KV_HEADS, INTERMEDIATE = 2, 64, 4, 2, 128
_SPREAD = 0.5  # of the embeddings: logits then spread by 4, so that sampling prefers words too


def tiny_model(source: Path, cache: Path) -> Path:
    """Folder with the tiny model for this model's tokenizer, written on first use."""
    folder = cache / f"{source.resolve().name}-tiny"
    if not (folder / "config.json").is_file():
        write_tiny_model(source, folder)
    return folder


def write_tiny_model(source: Path, folder: Path, seed: int = 0) -> None:
    """Write config, weights (fp32) and the source model's tokenizer files into the folder.

    Raises MlxCbError when the source has no tokenizer.json.
    """
    words = TokenizerWords(source)
    original = msgspec.json.decode((source / "config.json").read_bytes())
    vocabulary = original["vocab_size"]
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        is_weight = file.suffix in (".safetensors", ".gguf") or file.name.endswith("index.json")
        if file.is_file() and not is_weight and file.name != "config.json":
            shutil.copy(file, folder / file.name)
    word_ids = [words.encode(word)[-1] for word in words.words]
    weights = _weights(vocabulary, word_ids, np.random.default_rng(seed))
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})
    # Last, and in one go: its presence says that the folder is complete.
    partial = folder / f"config.json.{os.getpid()}"
    partial.write_bytes(msgspec.json.encode(_config(original, vocabulary)))
    partial.rename(folder / "config.json")


def _config(original: dict[str, object], vocabulary: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocabulary,
        "max_position_embeddings": 131072,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": original.get("bos_token_id"),
        "eos_token_id": original.get("eos_token_id"),
    }


def _weights(
    vocabulary: int, word_ids: list[int], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Arrays under mlx-lm's names, all fp32."""

    def random(*shape: int) -> np.ndarray:
        scaled: np.ndarray = rng.standard_normal(shape) / np.sqrt(shape[-1])
        return scaled.astype(np.float32)

    embedding = np.zeros((vocabulary, HIDDEN), dtype=np.float32)
    embedding[word_ids] = _SPREAD * rng.standard_normal((len(word_ids), HIDDEN))
    kv_width = HIDDEN // HEADS * KV_HEADS
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(HIDDEN, dtype=np.float32),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": np.ones(HIDDEN, dtype=np.float32),
            f"{prefix}.post_attention_layernorm.weight": np.ones(HIDDEN, dtype=np.float32),
            f"{prefix}.self_attn.q_proj.weight": random(HIDDEN, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": random(kv_width, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": random(kv_width, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": random(HIDDEN, HIDDEN),
            f"{prefix}.mlp.gate_proj.weight": random(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": random(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": random(HIDDEN, INTERMEDIATE),
        }
    return weights
