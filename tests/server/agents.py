"""Released coding agents: where their binaries are, and the task that each has to do.

The task: read `in.txt`, write it in capitals to `out.txt`. The binaries come from npm, into a
folder that later runs use again.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.server.npm import npm_package

TOOLS_SHOWN = "<tools>"


@dataclass(frozen=True, slots=True)
class Workplace:
    """A home and a git repository of one run."""

    home: Path

    @property
    def repository(self) -> Path:
        return self.home / "work"

    def make(self) -> None:
        self.repository.mkdir(parents=True)
        (self.repository / "in.txt").write_text("hello\n")
        for command in (
            ["git", "init", "-q"],
            ["git", "add", "-A"],
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "start"],
        ):
            subprocess.run(command, cwd=self.repository, check=True)

    def run(self, command: list[str], environment: dict[str, str]) -> str:
        """Run an agent; returns what it wrote to `out.txt`."""
        temporary = self.home / "tmp"
        temporary.mkdir(exist_ok=True)
        done = subprocess.run(
            command,
            cwd=self.repository,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.home),
                "PWD": str(self.repository),
                "TMPDIR": str(temporary),
                **environment,
            },
            capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        report = done.stdout[-2000:] + done.stderr[-2000:]
        assert done.returncode == 0, report
        assert (self.repository / "out.txt").exists(), report
        return (self.repository / "out.txt").read_text()


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent: how it is started, and the calls that make it read and write."""

    name: str
    run: Callable[[Workplace, str], str]
    reads: Callable[[Workplace], dict[str, Any]]
    writes: Callable[[Workplace], dict[str, Any]]

    def replies(self, place: Workplace) -> list[dict[str, Any]]:
        """The script: read, write, a last word; side requests without tools get a title."""
        first = {"reasoning": "I look.", "text": "I read it.", "tool_calls": [self.reads(place)]}
        return [
            {"match": TOOLS_SHOWN, "turn": 0, **first},
            {"match": TOOLS_SHOWN, "turn": 1, "tool_calls": [self.writes(place)]},
            {"match": TOOLS_SHOWN, "text": "Done."},
            {"text": "A title"},
        ]


PROMPT = "Write the text of in.txt in capitals to out.txt."


def _opencode(provider: str) -> Agent:
    def run(place: Workplace, url: str) -> str:
        binary = npm_package("opencode-linux-x64", "1.18.33") / "bin" / "opencode"
        model = {"name": "s", "limit": {"context": 131072, "output": 8192}}
        options = {"baseURL": f"{url}/v1", "apiKey": "x"}
        config = {
            "model": "mlx/scripted",
            "provider": {
                "mlx": {"npm": provider, "options": options, "models": {"scripted": model}}
            },
        }
        folder = place.home / ".config" / "opencode"
        folder.mkdir(parents=True)
        (folder / "opencode.json").write_text(json.dumps(config))
        environment = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
        return place.run([str(binary), "run", "-m", "mlx/scripted", PROMPT], environment)

    return Agent(
        f"opencode {provider.split('/')[1]}",
        run,
        lambda p: {"name": "read", "arguments": {"filePath": str(p.repository / "in.txt")}},
        lambda p: {
            "name": "write",
            "arguments": {"filePath": str(p.repository / "out.txt"), "content": "HELLO\n"},
        },
    )


def _run_codex(place: Workplace, url: str) -> str:
    binary = npm_package("@openai/codex", "0.171.0") / "bin" / "codex.js"
    home = place.home / "codex"
    home.mkdir()
    (home / "config.toml").write_text(
        'model = "scripted"\nmodel_provider = "mlx"\nweb_search = "disabled"\n'
        f'[model_providers.mlx]\nname = "mlx"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
        'env_key = "KEY"\n'
    )
    command = [
        "node",
        str(binary),
        "exec",
        "--skip-git-repo-check",
        "-s",
        "workspace-write",
        PROMPT,
    ]
    return place.run(command, {"CODEX_HOME": str(home), "KEY": "x"})


def _run_claude(place: Workplace, url: str) -> str:
    binary = npm_package("@anthropic-ai/claude-code-linux-x64", "2.1.332") / "claude"
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "x",
        "ANTHROPIC_MODEL": "scripted",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "scripted",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "262144",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return place.run([str(binary), "-p", PROMPT, "--permission-mode", "acceptEdits"], environment)


def _run_continue(place: Workplace, url: str) -> str:
    binary = npm_package("@continuedev/cli", "1.5.47") / "dist" / "cn.js"
    (place.home / "c.yaml").write_text(
        "name: x\nversion: 0.0.1\nschema: v1\nmodels:\n  - name: s\n    provider: openai\n"
        f"    model: scripted\n    apiBase: {url}/v1\n    apiKey: x\n    roles: [chat]\n"
        "    capabilities: [tool_use]\n"
    )
    config = str(place.home / "c.yaml")
    return place.run(["node", str(binary), "-p", "--auto", "--config", config, PROMPT], {})


def _shell(command: str) -> Callable[[Workplace], dict[str, Any]]:
    return lambda place: {"name": "exec_command", "arguments": {"cmd": command}}


OPENCODE = [
    _opencode(f"@ai-sdk/{provider}") for provider in ("openai-compatible", "anthropic", "openai")
]
LARGE = [
    Agent(
        "codex", _run_codex, _shell("cat in.txt"), _shell("tr a-z A-Z < in.txt > out.txt")
    ),
    Agent(
        "claude",
        _run_claude,
        lambda p: {"name": "Read", "arguments": {"file_path": str(p.repository / "in.txt")}},
        lambda p: {
            "name": "Write",
            "arguments": {"file_path": str(p.repository / "out.txt"), "content": "HELLO\n"},
        },
    ),
    Agent(
        "continue",
        _run_continue,
        lambda p: {"name": "Read", "arguments": {"filepath": "in.txt"}},
        lambda p: {"name": "Write", "arguments": {"filepath": "out.txt", "content": "HELLO\n"}},
    ),
]  # fmt: skip
