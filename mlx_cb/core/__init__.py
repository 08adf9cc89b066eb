"""Policy: who runs, when, and on which blocks. No MLX, no threads, no clock but an injected one."""
