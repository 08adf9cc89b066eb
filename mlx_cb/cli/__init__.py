"""The command line: finds commands, prints errors for people, turns them into exit codes.

Exit codes: 0 ok, 1 failure, 2 usage, 3 model not found or unsupported, 4 not enough memory,
5 port busy, 130 interrupted. To add a command: write `cli/<name>.py` with a click command named
`command`, and name it here. Commands are imported only when they run.
"""

from __future__ import annotations

import importlib
import sys

import click

from mlx_cb.errors import MlxCbError

COMMANDS = {
    "bench": "Measure a server, compare it with a peer, check goals.",
    "ctl": "Watch and override a running server's control: freeze, drain, pause, cancel.",
    "keys": "Give people keys, list them, take them away.",
    "launch": "Print the configuration that points a client at a running server.",
    "selftest": "Prove the Metal kernels on this machine.",
    "tls": "Trust this server's certificates on other devices.",
    "serve": "Serve a model over HTTP to many clients at once.",
}
INTERRUPTED = 130


class _LazyGroup(click.Group):
    """A group that imports a command's file when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = importlib.import_module(f"mlx_cb.cli.{cmd_name}").command
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mlx-cb", prog_name="mlx-cb")
def group() -> None:
    """One Mac, one model, many people: an LLM server with continuous batching."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    try:
        result = group.main(args=arguments, prog_name="mlx-cb", standalone_mode=False)
    except click.exceptions.Abort:
        return INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except MlxCbError as error:
        print(f"mlx-cb: {error.message}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    return result if isinstance(result, int) else 0
