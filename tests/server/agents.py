"""Released coding agents: where their binaries are, and the task that each has to do.

The task: read `in.txt`, write it in capitals to `out.txt`. The binaries come from npm, into a
folder that later runs use again.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

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
        report = self.start(command, environment)
        assert (self.repository / "out.txt").exists(), report
        return (self.repository / "out.txt").read_text()

    def start(self, command: list[str], environment: dict[str, str]) -> str:
        """Run a command to its end; returns the last of what it printed."""
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
        return report

    def end_daemons(self) -> None:
        """End what an agent left running: processes whose home this is."""
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get("HOME") == str(self.home)
                if is_ours and process.pid != os.getpid():
                    process.kill()
            except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
                continue


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent: its command, how it is started, and the calls that make it read and write."""

    name: str
    command: str
    binary: Callable[[], list[str]]
    start: Callable[[Workplace, str], list[str]]
    reads: Callable[[Workplace], dict[str, Any]]
    writes: Callable[[Workplace], dict[str, Any]]
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, place: Workplace, url: str) -> str:
        """Do the task with the server at `url`; returns what was written."""
        arguments = self.start(place, url)
        try:
            return place.run([*self.binary(), *arguments], {**self.environment, **_url(url)})
        finally:
            place.end_daemons()

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


def _url(url: str) -> dict[str, str]:
    """Where Claude Code finds the server; the others have it in a file and look at no variable."""
    return {"ANTHROPIC_BASE_URL": url}


def _call(name: str, **arguments: str) -> Callable[[Workplace], dict[str, Any]]:
    """A call; FOLDER in an argument is the repository."""

    def made(place: Workplace) -> dict[str, Any]:
        folder = str(place.repository)
        named = {key: value.replace("FOLDER", folder) for key, value in arguments.items()}
        return {"name": name, "arguments": named}

    return made


def _opencode(provider: str) -> Agent:
    def start(place: Workplace, url: str) -> list[str]:
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
        return ["run", "-m", "mlx/scripted", PROMPT]

    return Agent(
        f"opencode {provider.split('/')[1]}",
        "opencode",
        lambda: [str(npm_package("opencode-linux-x64", "1.18.33") / "bin" / "opencode")],
        start,
        _call("read", filePath="FOLDER/in.txt"),
        _call("write", filePath="FOLDER/out.txt", content="HELLO\n"),
        {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
    )


def _start_codex(place: Workplace, url: str) -> list[str]:
    home = place.home / ".codex"
    home.mkdir()
    (home / "config.toml").write_text(
        'model = "scripted"\nmodel_provider = "mlx"\nweb_search = "disabled"\n'
        f'[model_providers.mlx]\nname = "mlx"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
        'env_key = "MLX_CB_KEY"\n'
    )
    return ["exec", "--skip-git-repo-check", "-s", "workspace-write", PROMPT]


def _start_continue(place: Workplace, url: str) -> list[str]:
    config = place.home / "c.yaml"
    config.write_text(
        "name: x\nversion: 0.0.1\nschema: v1\nmodels:\n  - name: s\n    provider: openai\n"
        f"    model: scripted\n    apiBase: {url}/v1\n    apiKey: x\n    roles: [chat]\n"
        "    capabilities: [tool_use]\n"
    )
    return ["-p", "--auto", "--config", str(config), PROMPT]


def _cline() -> list[str]:
    package = npm_package("cline", "3.0.65")
    named = json.loads((package / "package.json").read_text())["bin"]
    return ["node", str(package / (named if isinstance(named, str) else named["cline"]))]


def _start_cline(place: Workplace, url: str) -> list[str]:
    provider = ["-p", "openai-compatible", "-k", "x", "-m", "scripted", "-b", f"{url}/v1"]
    place.start([*_cline(), "auth", *provider], {})
    return ["-P", "openai-compatible", "-m", "scripted", PROMPT]


OPENCODE = [
    _opencode(f"@ai-sdk/{provider}") for provider in ("openai-compatible", "anthropic", "openai")
]
LARGE = [
    Agent(
        "codex",
        "codex",
        lambda: ["node", str(npm_package("@openai/codex", "0.171.0") / "bin" / "codex.js")],
        _start_codex,
        _call("exec_command", cmd="cat in.txt"),
        _call("exec_command", cmd="tr a-z A-Z < in.txt > out.txt"),
        {"MLX_CB_KEY": "x"},
    ),
    Agent(
        "claude",
        "claude",
        lambda: [str(npm_package("@anthropic-ai/claude-code-linux-x64", "2.1.332") / "claude")],
        lambda place, url: ["-p", PROMPT, "--permission-mode", "acceptEdits"],
        _call("Read", file_path="FOLDER/in.txt"),
        _call("Write", file_path="FOLDER/out.txt", content="HELLO\n"),
        {
            "ANTHROPIC_AUTH_TOKEN": "x",
            "ANTHROPIC_MODEL": "scripted",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "scripted",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "262144",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    Agent(
        "continue",
        "cn",
        lambda: ["node", str(npm_package("@continuedev/cli", "1.5.47") / "dist" / "cn.js")],
        _start_continue,
        _call("Read", filepath="in.txt"),
        _call("Write", filepath="out.txt", content="HELLO\n"),
    ),
    Agent(
        "cline",
        "cline",
        _cline,
        _start_cline,
        lambda p: {
            "name": "read_files",
            "arguments": {"files": [{"path": str(p.repository / "in.txt")}]},
        },
        _call("editor", path="FOLDER/out.txt", new_text="HELLO\n"),
    ),
]
