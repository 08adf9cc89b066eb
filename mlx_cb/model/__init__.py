"""Where mlx-lm's models meet the engine: loading, cache layout, one forward per step, sampling."""
