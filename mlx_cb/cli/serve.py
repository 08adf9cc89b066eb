"""`mlx-cb serve MODEL`: builds the configs, binds the port, loads the model, serves, stops.

The port is bound before anything is loaded, so that a busy port is known at once.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_cb.cli import access
from mlx_cb.cli.options import (
    AUTO,
    Alias,
    ConfiguredCommand,
    CountOrAuto,
    Ports,
    Size,
    TlsFiles,
    config_path,
    setting,
    told_settings,
)
from mlx_cb.cli.printing import say, show
from mlx_cb.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from mlx_cb.errors import MlxCbError

if TYPE_CHECKING:
    from mlx_cb.server.tls import Certificates

PORT_BUSY = 5
INTERRUPTED = 130
_DTYPES = click.Choice(["auto", "float32", "float16", "bfloat16"])
_KV_DTYPES = click.Choice([*_DTYPES.choices, "int8", "int4"])


@click.command("serve", cls=ConfiguredCommand)
@click.argument("model", default="demo", envvar="MLX_CB_MODEL")
@setting("--host", default="127.0.0.1", help="Address to listen on.")
@setting("--port", default=8080, type=click.IntRange(0, 65535), help="Port; 0 takes a free one.")
@setting("--also-port", default=(), type=Ports(), help="Further ports, like 11434,1234.")
@setting("--served-model-name", help="Name that clients see instead of MODEL.")
@setting("--alias", type=Alias(), multiple=True, help="Further name for the model.")
@setting("--strict-model", is_flag=True, help="Refuse requests that name another model.")
@setting("--revision", help="Hub revision of MODEL.")
@setting("--adapter", help="Folder of a LoRA or DoRA adapter to put into MODEL.")
@setting(
    "--embeddings",
    default="auto",
    type=click.Choice(["auto", "mean", "last"]),
    help="Serve embeddings: when the checkpoint says so, or pooled like this.",
)
@setting("--max-num-seqs", default=64, type=click.IntRange(1), help="Most requests at once.")
@setting("--max-running-per-user", type=click.IntRange(1), help="Most of one user's at once.")
@setting("--max-queued-per-user", type=click.IntRange(1), help="Most that wait; then 429.")
@setting("--max-input-tokens", type=click.IntRange(1), help="Longest prompt, tokens.")
@setting("--max-output-tokens", type=click.IntRange(1), help="Longest answer, tokens.")
@setting("--request-timeout-s", type=click.FloatRange(0, min_open=True), help="Longest answer.")
@setting(
    "--control",
    default="auto",
    type=click.Choice(["auto", "frozen"]),
    help="Let the control loop act on early signs, or only watch.",
)
@setting("--max-num-batched-tokens", default="auto", type=CountOrAuto(), help="Rows of a step.")
@setting("--max-model-len", type=click.IntRange(1), help="Longest prompt plus answer, tokens.")
@setting("--kv-memory", default="auto", type=Size(), help="Memory for keys and values.")
@setting("--block-size", default=16, type=click.IntRange(1), help="Tokens per KV block.")
@setting("--dtype", default="auto", type=_DTYPES, help="Type that weights are expanded to.")
@setting("--kv-dtype", default="auto", type=_KV_DTYPES, help="How keys and values are stored.")
@setting(
    "--attention",
    default="auto",
    type=click.Choice(["auto", "metal", "reference", "emulator"]),
    help="Attention backend.",
)
@setting(
    "--scheduler",
    default="continuous",
    type=click.Choice(["continuous", "fair", "priority", "fcfs", "static"]),
    help="Who goes first; static: a batch is fixed until it has ended. continuous is fair.",
)
@setting("--itl-target-ms", default=100.0, type=click.FloatRange(1), help="Gap between tokens.")
@setting("--max-queue-wait-s", default=60.0, type=click.FloatRange(0), help="Longest wait.")
@setting("--no-prefix-cache", is_flag=True, help="Do not share blocks of equal prefixes.")
@setting(
    "--shared-prompt",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    help="File of a prompt whose blocks all users share.",
)
@setting("--ssd-cache", default="off", help="Folder that keeps blocks of prefixes: DIR or off.")
@setting("--ssd-cache-size", default="auto", type=Size(), help="Most bytes in that folder.")
@setting("--ssd-daily-writes", default="auto", type=Size(), help="Most bytes written a day.")
@click.option("--explain-memory", is_flag=True, help="Print where the memory would go, and end.")
@setting("--log-format", default="text", type=click.Choice(["text", "json"]), help="Log lines.")
@setting("--log-prompts", is_flag=True, help="Write prompts and answers to the log.")
@setting("--lan", is_flag=True, help="Serve the local network: all addresses, TLS, Bonjour.")
@setting("--tls", type=TlsFiles(), help="TLS: auto makes certificates, CERT,KEY names your own.")
@setting("--keys", type=click.Path(path_type=Path, dir_okay=False), help="File of who has a key.")
@setting("--allow-host", multiple=True, help="Further Host name that is this server's.")
@setting("--allow-origin", multiple=True, help="Web site whose pages may use this server.")
@setting(
    "--reasoning-key",
    default="reasoning_content",
    type=click.Choice(["reasoning_content", "reasoning", "both", "inline"]),
    help="Where chat completions put reasoning.",
)
@setting("--max-body-bytes", default=2**25, type=click.IntRange(1), help="Largest request body.")
@setting(
    "--keep-alive-s", default=10.0, type=click.FloatRange(1), help="A stream's longest silence."
)
def command(**given: Any) -> int:
    """Serve MODEL over HTTP: a hub id, a folder, a .gguf file, demo, or scripted:FILE."""
    if given["lan"] and given["host"] != "127.0.0.1":
        raise click.UsageError("--lan listens on every address; leave --host away")
    if given["ssd_cache"] != "off" and given["no_prefix_cache"]:
        raise click.UsageError("--ssd-cache keeps prefixes, and --no-prefix-cache finds none again")
    config = build_config(given)
    if given["explain_memory"]:
        return _explain_memory(config)
    access.check(config, is_named=given["keys"] is not None)
    return run(config, given["also_port"], told_settings(click.get_current_context()))


def build_config(given: dict[str, Any]) -> ServerConfig:
    """The frozen configuration from the command line's values."""
    engine = EngineConfig(
        model=ModelConfig(
            model=given["model"],
            revision=given["revision"],
            dtype=given["dtype"],
            max_model_len=given["max_model_len"],
            adapter=given["adapter"],
            embeddings=given["embeddings"],
        ),
        cache=CacheConfig(
            block_size=given["block_size"],
            kv_memory=given["kv_memory"],
            kv_dtype=given["kv_dtype"],
            prefix_cache=not given["no_prefix_cache"],
            shared_prompts=tuple(given["shared_prompt"]),
            ssd_cache=None if given["ssd_cache"] == "off" else given["ssd_cache"],
            ssd_cache_size=given["ssd_cache_size"],
            ssd_daily_writes=given["ssd_daily_writes"],
        ),
        scheduler=SchedulerConfig(
            policy=given["scheduler"],
            max_num_seqs=given["max_num_seqs"],
            max_running_per_user=given["max_running_per_user"],
            control=given["control"],
            max_num_batched_tokens=given["max_num_batched_tokens"],
            itl_target_ms=given["itl_target_ms"],
            max_queue_wait_s=given["max_queue_wait_s"],
        ),
        attention=given["attention"],
    )
    folder = config_path().parent
    names = (
        *("lan", "port", "strict_model", "log_format", "log_prompts", "reasoning_key"),
        *("request_timeout_s", "max_input_tokens", "max_output_tokens", "max_queued_per_user"),
        *("max_body_bytes", "keep_alive_s"),
    )
    return ServerConfig(
        served_model_name=given["served_model_name"] or _shown_name(given["model"]),
        aliases=tuple(given["alias"]),
        keys_file=given["keys"] or folder / "keys.json",
        usage_file=folder / "usage.sqlite",
        conversations_file=folder / "conversations.sqlite",
        host="0.0.0.0" if given["lan"] else given["host"],
        tls=given["tls"] or (AUTO if given["lan"] else None),
        allowed_hosts=tuple(given["allow_host"]),
        allowed_origins=tuple(given["allow_origin"]),
        engine=engine,
        **{name: given[name] for name in names},
    )


def _shown_name(model: str) -> str:
    """The name that clients see: no path of this machine in it."""
    if model.startswith("scripted:"):
        return "scripted"
    return Path(model).resolve().name if Path(model).exists() else model


def run(config: ServerConfig, also_ports: tuple[int, ...] = (), told: str = "") -> int:
    """Serve until a signal or a failure; returns the exit code.

    `told` are the settings to be shown at the start. `also_ports` are for clients that know only
    the port of Ollama (11434) or LM Studio (1234).
    """
    import uvloop

    from mlx_cb.server.serving import PortBusy, bind_all, bind_host

    _set_up_logging(config.log_format)
    _allow_many_connections()
    certificates = access.certificates(config)
    listeners: list[socket.socket] = []
    for port in (config.port, *also_ports):
        try:
            listeners += bind_all(port) if config.lan else bind_host(config.host, port)
        except PortBusy:
            say(
                f"port {port} on {config.host} is in use{_by_whom(port)}; "
                f"stop that program or choose another port"
            )
            return PORT_BUSY
        except OSError as error:
            say(f"cannot listen on {config.host}:{port}: {error.strerror or error}")
            return 1
    if told:
        say(f"set: {told}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, listeners, certificates))


def _explain_memory(config: ServerConfig) -> int:
    """Print the plan of memory; the exit code says whether it can be carried out."""
    from mlx_cb.engine.memory_report import explain_memory

    report = explain_memory(config.engine)
    for line in report.lines:
        print(line)
    if report.refusal is None:
        return 0
    say(report.refusal.message)
    return report.refusal.exit_code


def _make_engine(config: ServerConfig) -> Any:
    kind, colon, path = config.engine.model.model.partition(":")
    if colon and kind == "scripted":
        from mlx_cb.engine.script import read_script
        from mlx_cb.engine.scripted import ScriptedEngine

        return ScriptedEngine(read_script(Path(path)))
    from mlx_cb.engine.client import AsyncEngine

    return AsyncEngine(config.engine, step_timeout_s=config.step_timeout_s)


async def _serve(
    config: ServerConfig, listeners: list[socket.socket], certificates: Certificates | None
) -> int:
    started = time.monotonic()
    signals = _Signals()
    engine = _make_engine(config)
    await engine.start()
    await asyncio.sleep(0)  # the engine's process begins to load while this one imports the rest
    from mlx_cb.server.front import Front
    from mlx_cb.server.serving import Serving

    front = Front(engine, config)
    serving = Serving(front, certificates)
    running = asyncio.create_task(serving.run(listeners))
    port = listeners[0].getsockname()[1]
    url = access.url(config, port)
    say(f"listening on {url}, loading {config.engine.model.model}")
    for other in access.further_urls(config, port):
        say(f"  also {other}")
    access.open_doors(front, url)
    loading = asyncio.create_task(_load(front, engine, url, started))
    announcing = asyncio.create_task(access.announce(front, port))
    stopping = asyncio.create_task(signals.first())
    try:
        await asyncio.wait((loading, stopping, running), return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and not loading.exception():
            await asyncio.wait((stopping, running), return_when=asyncio.FIRST_COMPLETED)
        return _exit_code(loading, stopping)
    finally:
        loading.cancel()
        stopping.cancel()
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)
        await serving.stop()
        await running
        await engine.stop()


async def _load(front: Any, engine: Any, url: str, started: float) -> None:
    await engine.wait_ready()
    await front.load()
    say(f"ready after {time.monotonic() - started:.1f} s; try:")
    path, body = "chat/completions", '{"messages": [{"role": "user", "content": "Say hello."}]}'
    if front.model_info.pooling is not None:
        path, body = "embeddings", '{"input": ["Hello."]}'
    header = shlex.quote("content-type: application/json")
    more = access.curl_options(front.config)
    show(f"  curl{more} {url}/v1/{path} -H {header} -d {shlex.quote(body)}")


def _exit_code(loading: asyncio.Task[None], stopping: asyncio.Task[int]) -> int:
    error = loading.exception() if loading.done() else None
    if isinstance(error, MlxCbError):
        say(error.message)
        return error.exit_code
    if error is not None:
        raise error
    if stopping.done():
        return INTERRUPTED if stopping.result() == signal.SIGINT else 0
    say("the server stopped by itself")
    return 1


class _Signals:
    """SIGINT and SIGTERM; a second one, while closing, ends the process at once."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._first: asyncio.Future[int] = self._loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._got, number)

    async def first(self) -> int:
        """Wait for a signal; returns its number."""
        return await self._first

    def _got(self, number: int) -> None:
        if not self._first.done():
            self._first.set_result(number)
            return
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _by_whom(port: int) -> str:
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == "LISTEN" and connection.laddr.port == port and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (process {connection.pid})"
    except psutil.Error:
        return ""  # other users' processes are hidden from us on macOS
    return ""


def _allow_many_connections() -> None:
    """macOS lets a program have 256 files unless it asks, and each connection is one."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 10_240 if hard == resource.RLIM_INFINITY else min(10_240, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            logging.getLogger("mlx_cb").warning("at most %d connections: %s", soft, error)


def _set_up_logging(log_format: str) -> None:
    form = "%(message)s" if log_format == "json" else "%(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format=form)
    logging.getLogger("mlx_cb").setLevel(logging.INFO)
