"""`mlx-cb launch CLIENT`: the configuration that points a client at a running server.

Prints it, ready to paste; writes nothing and starts nothing. Every form here is the one that the
released client was seen to need.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass

import click

from mlx_cb.cli.options import setting

NO_KEY = "no-key"


@dataclass(frozen=True, slots=True)
class Target:
    """The server a client is pointed at: its URL without path, model name, context in tokens."""

    url: str
    model: str
    context: int


def claude(target: Target) -> str:
    """Claude Code: an unknown model is taken to have a million tokens unless told otherwise."""
    settings = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": NO_KEY,
        "ANTHROPIC_API_KEY": "",
        "ANTHROPIC_MODEL": target.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": target.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": target.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": target.model,
        "CLAUDE_CODE_SUBAGENT_MODEL": target.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.context),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    exports = "\n".join(f"export {name}={json.dumps(value)}" for name, value in settings.items())
    return f"{exports}\n# then, for a short prompt: claude --bare\nclaude"


def codex(target: Target) -> str:
    """Codex: without a catalogue it warns and guesses the context."""
    entry = {
        "slug": target.model,
        "display_name": target.model,
        "supported_reasoning_levels": [],
        "shell_type": "unified_exec",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 1,
        "support_verbosity": False,
        "truncation_policy": {"mode": "bytes", "limit": 10000},
        "experimental_supported_tools": [],
        "base_instructions": "You are a coding agent. Use the tools to do what the user asks.",
        "context_window": target.context,
        "apply_patch_tool_type": "freeform",
        "input_modalities": ["text"],
        "supports_parallel_tool_calls": True,
    }
    return f"""mkdir -p ~/.codex-mlx && cat > ~/.codex-mlx/models.json <<'END'
{json.dumps({"models": [entry]}, indent=2)}
END
cat > ~/.codex-mlx/config.toml <<END
model = {json.dumps(target.model)}
model_provider = "mlx"
web_search = "disabled"
model_catalog_json = "$HOME/.codex-mlx/models.json"
[model_providers.mlx]
name = "mlx-cb"
base_url = "{target.url}/v1"
wire_api = "responses"
env_key = "MLX_CB_KEY"
END
export CODEX_HOME=~/.codex-mlx MLX_CB_KEY={NO_KEY}
codex --disable goals --disable multi_agent"""


def opencode(target: Target) -> str:
    """opencode: it compacts by the limits written here."""
    model = {
        "name": target.model,
        "limit": {"context": target.context, "output": max(1, target.context // 4)},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": NO_KEY},
        "models": {target.model: model},
    }
    config = {"model": f"mlx/{target.model}", "provider": {"mlx": provider}}
    return json.dumps(config, indent=2)


def zed(target: Target) -> str:
    """Zed: a provider of its settings.json."""
    model = {"name": target.model, "max_tokens": target.context, "capabilities": {"tools": True}}
    provider = {"api_url": f"{target.url}/v1", "available_models": [model]}
    config = {"language_models": {"openai_compatible": {"mlx-cb": provider}}}
    return json.dumps(config, indent=2)


def xcode(target: Target) -> str:
    """Xcode: three clicks."""
    port = target.url.rsplit(":", 1)[1]
    return (
        f"Xcode > Settings > Intelligence > Add a Model Provider > Locally Hosted\n"
        f"Port: {port}\nDescription: mlx-cb"
    )


def continue_(target: Target) -> str:
    """Continue: its config.yaml; JSON is YAML."""
    model = {
        "name": target.model,
        "provider": "openai",
        "model": target.model,
        "apiBase": f"{target.url}/v1",
        "apiKey": NO_KEY,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
        "contextLength": target.context,
    }
    config = {"name": "mlx-cb", "version": "0.0.1", "schema": "v1", "models": [model]}
    return json.dumps(config, indent=2)


def cline(target: Target) -> str:
    """Cline: a provider of its own configuration, written by its own command."""
    return (
        f"cline auth -p openai-compatible -k {NO_KEY} -m {shlex.quote(target.model)} "
        f"-b {target.url}/v1"
    )


def aider(target: Target) -> str:
    """aider: through litellm's OpenAI provider."""
    return (
        f"export OPENAI_API_BASE={target.url}/v1 OPENAI_API_KEY={NO_KEY}\n"
        f"aider --model openai/{target.model}"
    )


CLIENTS: dict[str, Callable[[Target], str]] = {
    "claude": claude,
    "codex": codex,
    "opencode": opencode,
    "zed": zed,
    "xcode": xcode,
    "continue": continue_,
    "cline": cline,
    "aider": aider,
}


def ask_server(url: str) -> Target:
    """Model and context of a running server. Raises ClickException when none answers."""
    import httpx2

    try:
        answer = httpx2.get(f"{url}/v1/models", timeout=5)
        model = answer.raise_for_status().json()["data"][0]
    except (httpx2.HTTPError, KeyError, IndexError, ValueError) as error:
        raise click.ClickException(
            f"no server answers at {url} ({error}); start one with: mlx-cb serve MODEL"
        ) from error
    if not model["max_model_len"]:
        raise click.ClickException(f"the model at {url} is still loading; try again in a moment")
    return Target(url, model["id"], model["max_model_len"])


@click.command("launch")
@click.argument("client", type=click.Choice(sorted(CLIENTS)))
@setting("--url", default="http://127.0.0.1:8080", help="The running server.")
@click.option("--print", "only_print", is_flag=True, help="Print the configuration (the default).")
def command(client: str, url: str, only_print: bool) -> None:
    """Print the configuration that points CLIENT at a running server."""
    click.echo(CLIENTS[client](ask_server(url.rstrip("/"))))
