"""Mechanism under the model: where keys and values live and how queries attend to them."""

from mlx_cb import blas

blas.load()  # before any module of this room imports MLX
