"""Loads the BLAS before any test imports MLX."""

from mlx_cb import blas

blas.load()
