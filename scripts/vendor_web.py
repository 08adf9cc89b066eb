"""Bring the web pages' libraries into `mlx_cb/web/vendor`: run by hand, the result is committed.

    python scripts/vendor_web.py

Takes the versions named below from the npm registry with `npm pack`, which checks their integrity,
and writes the few files that the pages load, as ES modules, with their licences. `VENDOR.json`
records package, version, licence, npm's integrity and the SHA-256 of each file as it is served; a
test holds the files to it.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

VENDOR = Path(__file__).parents[1] / "mlx_cb" / "web" / "vendor"
LARGEST = 2**20


def _as_it_is(text: str) -> str:
    return text


def _module_of(name: str) -> Callable[[str], str]:
    """A script that leaves its result in a global variable, as a module with a default export."""
    return lambda text: f"{text}\nexport default globalThis.{name};\n"


def _beside(text: str) -> str:
    """Browsers resolve no bare package names; ours lie in one folder."""
    made = text.replace('from"preact"', 'from"./preact.js"')
    assert made != text, "preact is no longer imported by name"
    return made


@dataclass(frozen=True)
class Taken:
    """One file of a package: where it is there, its name here, what has to be changed."""

    source: str
    name: str
    change: Callable[[str], str] = field(default=_as_it_is)


@dataclass(frozen=True)
class Package:
    """A package, pinned."""

    name: str
    version: str
    files: tuple[Taken, ...]
    licence: str = "LICENSE"


PACKAGES = (
    Package(
        "preact",
        "11.2.0",
        (
            Taken("dist/preact.mjs", "preact.js"),
            Taken("hooks/dist/hooks.mjs", "preact-hooks.js", _beside),
        ),
    ),
    Package("htm", "3.1.1", (Taken("dist/htm.module.js", "htm.js"),)),
    Package(
        "markdown-it",
        "15.0.3",
        (Taken("dist/browser/markdown-it.esm.min.mjs", "markdown-it.js"),),
    ),
    Package("dompurify", "3.4.18", (Taken("dist/purify.es.mjs", "purify.js"),)),
    Package("@highlightjs/cdn-assets", "11.12.0", (Taken("es/highlight.min.js", "highlight.js"),)),
    Package("katex", "0.19.1", (Taken("dist/katex.min.js", "katex.js", _module_of("katex")),)),
)


def _pack(package: Package, folder: Path) -> tuple[tarfile.TarFile, str]:
    """The package's archive and npm's integrity of it."""
    command = ["npm", "pack", "--json", f"{package.name}@{package.version}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    (told,) = json.loads(done.stdout)
    return tarfile.open(folder / told["filename"]), told["integrity"]


def _text(archive: tarfile.TarFile, path: str) -> str:
    found = archive.extractfile(f"package/{path}")
    assert found is not None, path
    return found.read().decode("utf-8")


def _without_source_map(text: str) -> str:
    """Source maps are not shipped; naming them makes browsers' tools look for them."""
    lines = [line for line in text.splitlines() if not line.startswith("//# sourceMappingURL=")]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the folder anew."""
    VENDOR.mkdir(parents=True, exist_ok=True)
    for old in VENDOR.iterdir():
        old.unlink()
    record = []
    with tempfile.TemporaryDirectory() as name:
        for package in PACKAGES:
            archive, integrity = _pack(package, Path(name))
            licence = f"LICENSE.{package.name.split('/')[-1]}.txt"
            files = [Taken(package.licence, licence), *package.files]
            written = {}
            for taken in files:
                text = taken.change(_without_source_map(_text(archive, taken.source)))
                content = text.encode("utf-8")
                assert len(content) < LARGEST, f"{taken.name} is too large"
                (VENDOR / taken.name).write_bytes(content)
                written[taken.name] = {
                    "source": taken.source,
                    "sha256": hashlib.sha256(content).hexdigest(),
                    "bytes": len(content),
                }
            manifest = json.loads(_text(archive, "package.json"))
            record.append(
                {
                    "package": package.name,
                    "version": package.version,
                    "licence": manifest["license"],
                    "integrity": integrity,
                    "files": written,
                }
            )
            print(f"{package.name} {package.version} ({manifest['license']}): {', '.join(written)}")
    (VENDOR / "VENDOR.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
