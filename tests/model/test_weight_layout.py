"""Weights laid out for the BLAS give the same bits as before."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_cb.model.weight_layout import lay_out_for_blas


class Tied(nn.Module):
    """An embedding that is also the head, and a layer between, with and without a bias."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(515, 96)
        self.layer = nn.Linear(96, 160, bias=bias)
        self.back = nn.Linear(160, 96, bias=bias)

    def __call__(self, token_ids: mx.array) -> mx.array:
        return self.embed.as_linear(self.back(self.layer(self.embed(token_ids))))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_every_bit_stays(rows, bias):
    model = Tied(bias)
    token_ids = mx.arange(rows)[:, None] * 13
    before, weight = np.array(model(token_ids)), np.array(model.layer.weight)
    assert lay_out_for_blas(model) == 3
    assert np.array_equal(np.array(model(token_ids)), before)
    assert np.array_equal(np.array(model.layer.weight), weight)


def test_the_inputs_come_first_in_memory():
    layer = nn.Linear(8, 4, bias=False)
    lay_out_for_blas(layer)
    mx.eval(layer.weight)
    assert np.array(layer.weight, copy=False).strides == (4, 16)  # bytes, of (outputs, inputs)


def test_what_no_blas_computes_stays_as_it_is():
    model = Tied(bias=False)
    model.set_dtype(mx.float16)
    assert lay_out_for_blas(model) == 0
    quantized = Tied(bias=False)
    nn.quantize(quantized, group_size=32, bits=4)
    assert lay_out_for_blas(quantized) == 0
