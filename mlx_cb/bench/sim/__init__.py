"""A discrete-event simulator: the real scheduler under virtual time, on machines that are not here.

What is real: `core.scheduler` with its policies, KV manager, token budget and cost model, the
front's admission control, the workloads and the figures made of their records. What is a model: how
long a forward pass takes (`cost`, `machines`) and what mlx_lm.server does (`peer`). `validate`
holds both against real runs; nothing from here may be shown without the word "simulated".
"""
