"""Layers that call mlx-lm's SwiGLU get ours, which gives the same; mlx-lm stays as it is."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import activations, llama
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU

from mlx_cb.model.fast_swiglu import bind_swiglu, swiglu


def a_llama() -> llama.MLP:
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=1,
        intermediate_size=512,
        num_attention_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=8,
    )
    return llama.MLP(args)


@pytest.mark.parametrize("rows", [1, 16, 200])
def test_a_layer_gives_what_it_gave(rows):
    layer, x = a_llama(), mx.random.normal((rows, 1, 64)) * 5
    before = np.array(layer(x))
    assert bind_swiglu(layer) == 1
    np.testing.assert_allclose(np.array(layer(x)), before, rtol=1e-4, atol=1e-4)


def test_it_is_ours_that_is_called():
    layer = a_llama()
    bind_swiglu(layer)
    assert type(layer).__call__.__globals__["swiglu"] is swiglu
    assert llama.MLP.__call__.__globals__["swiglu"] is activations.swiglu
    assert isinstance(layer, llama.MLP)


def test_experts_are_bound_too_but_no_other_model_s():
    layer, other = SwitchGLU(64, 128, 4), SwitchGLU(64, 128, 4)
    assert layer.activation is other.activation
    x, experts = mx.random.normal((300, 64)), mx.zeros((300, 2), dtype=mx.int32)
    before = np.array(layer(x, experts))
    assert bind_swiglu(layer) == 1
    assert type(layer.activation) is not SwiGLU
    assert type(other.activation) is SwiGLU
    np.testing.assert_allclose(np.array(layer(x, experts)), before, rtol=1e-4, atol=1e-4)


def test_far_values_and_no_numbers():
    gate = mx.array(np.resize([-1e4, -200.0, -88.0, 200.0, 1e30, np.nan], 60_000))
    ours, theirs = np.array(swiglu(gate, gate))[:6], np.array(activations.swiglu(gate, gate))[:6]
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-36)
