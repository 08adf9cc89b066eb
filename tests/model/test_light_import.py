"""mlx-lm's models without mlx-lm's front; in processes of their own, since imports stay."""

from __future__ import annotations

import subprocess
import sys


def _run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.strip()


def test_models_load_without_transformers() -> None:
    code = """
from mlx_cb.model.light_import import skip_mlx_lm_init
skip_mlx_lm_init()
import sys
from mlx_lm.models import llama, qwen3_next, gemma3_text
from mlx_lm.utils import dequantize_model, load_model
print(llama.Model.__module__, [name for name in ("transformers", "jinja2") if name in sys.modules])
"""
    assert _run(code) == "mlx_lm.models.llama []"


def test_a_whole_mlx_lm_that_is_there_stays_whole() -> None:
    code = """
import mlx_cb.model
import mlx_lm
from mlx_cb.model.light_import import skip_mlx_lm_init
skip_mlx_lm_init()
print(mlx_lm.load.__module__)
"""
    assert _run(code) == "mlx_lm.utils"


def test_the_tokenizers_that_are_left_out_say_so() -> None:
    code = """
from mlx_cb.model.light_import import skip_mlx_lm_init
skip_mlx_lm_init()
from mlx_lm.utils import _load_tokenizer
try:
    _load_tokenizer(".")
except RuntimeError as error:
    print(error)
"""
    assert "not imported" in _run(code)
