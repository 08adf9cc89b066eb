"""`mlx-cb bench kv-dtype`: what storing keys and values in fewer bits costs in quality."""

from __future__ import annotations

import click

FORMS = ("float16", "bfloat16", "int8", "int4")


@click.command("kv-dtype")
@click.option("--model", default="demo", show_default=True)
@click.option("--kv-dtype", "forms", multiple=True, type=click.Choice(FORMS), help="Only these.")
@click.option("--kv-memory", default=512, show_default=True, help="MiB for keys and values.")
def command(model: str, forms: tuple[str, ...], kv_memory: int) -> None:
    """Compare forms of storing keys and values by token agreement and log-probability drift."""
    from mlx_cb.bench.kv_quality import measure_kv_quality
    from mlx_cb.config import CacheConfig, EngineConfig, ModelConfig

    config = EngineConfig(ModelConfig(model), CacheConfig(kv_memory=kv_memory * 2**20))
    click.echo("kv-dtype   bytes/token   same token   drift mean     p99   needle drop   tokens")
    for found in measure_kv_quality(config, forms or FORMS):
        click.echo(
            f"{found.kv_dtype:<9} {found.bytes_per_token:>12,} {found.agreement:>11.1%}"
            f" {found.drift_mean:>12.4f} {found.drift_p99:>7.3f} {found.needle_drop:>13.3f}"
            f" {found.tokens:>8}"
        )
