"""Where mlx-lm's models meet the engine: loading, cache layout, one forward per step, sampling."""

from mlx_cb import blas

blas.load()  # before any module of this room imports MLX
