"""Makes one document of a page: its styles and modules are put into it, so one request loads all.

A small bundler for our own modules and the vendored ones: relative imports, named and default
exports. Runs when the server starts; there is no build step. What may run is named by hash.
"""

from __future__ import annotations

import gzip
import re
from functools import cached_property
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from mlx_cb.server.safe_headers import inline_policy

WEB_FOLDER = Path(__file__).parents[1] / "web"

_STYLE = re.compile(r'<link rel="stylesheet" href="([^"]+)">')
_SCRIPT = re.compile(r'<script type="module" src="([^"]+)"></script>')
_IMPORT = re.compile(r"""import\s*([\w${][^;'"]*?)\s*from\s*["'](\.[^"']+)["'];?""")
_EXPORTED_LIST = re.compile(r"export\s*\{([^}]*)\};?")
_EXPORTED = re.compile(r"export\s+((?:async\s+)?(?:function\*?|class|const|let))\s+([\w$]+)")
_DEFAULT = re.compile(r"export\s+default\s+")


class OneDocument:
    """A page with all its parts in `text`."""

    def __init__(self, name: str) -> None:
        """`name`: a path in the package's web folder."""
        page = WEB_FOLDER / name
        folder = page.parent
        text = _STYLE.sub(
            lambda m: f"<style>{(folder / m[1]).read_text('utf-8')}</style>",
            page.read_text("utf-8"),
        )
        self.text = _SCRIPT.sub(
            lambda m: f'<script type="module">{Bundle(folder / m[1]).text}</script>', text
        )

    @cached_property
    def policy(self) -> str:
        """The content security policy that lets this document be what it is, and no more."""
        return inline_policy(self.text)

    @cached_property
    def packed(self) -> bytes:
        """The document, gzipped."""
        return gzip.compress(self.text.encode(), 9, mtime=0)

    def answer(self, request: Request) -> Response:
        """The whole page."""
        headers = {"content-security-policy": self.policy, "vary": "Accept-Encoding"}
        kind = "text/html; charset=utf-8"
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(self.text, headers=headers, media_type=kind)
        headers["content-encoding"] = "gzip"
        return Response(self.packed, headers=headers, media_type=kind)


class Bundle:
    """Modules as one: each is a function that returns what it exports, dependencies first."""

    def __init__(self, entry: Path) -> None:
        self._names: dict[Path, str] = {}
        self._parts: list[str] = []
        self._add(entry.resolve())
        self.text = "\n".join(self._parts).replace("</script", "<\\/script")

    def _add(self, path: Path) -> str:
        """The name of a module's exports."""
        if path not in self._names:
            code = path.read_text("utf-8")
            imports = [
                _binding(m[1], self._add((path.parent / m[2]).resolve()))
                for m in _IMPORT.finditer(code)
            ]
            code, exports = _without_exports(_IMPORT.sub("", code))
            name = self._names[path] = f"$m{len(self._names)}"
            body = f"{''.join(imports)}{code}\nreturn {{ {exports} }};"
            self._parts.append(f"const {name} = (() => {{\n{body}\n}})();")
        return self._names[path]


def _binding(clause: str, module: str) -> str:
    """What an import's clause binds, as a declaration."""
    default, _, rest = clause.partition("{")
    default = default.strip().rstrip(",").strip()
    found = [f"default: {default}"] if default else []
    names = rest.partition("}")[0]
    found += [_renamed(one, ": ") for one in names.split(",") if one.strip()]
    return f"const {{ {', '.join(found)} }} = {module};\n"


def _renamed(name: str, sign: str) -> str:
    old, _, new = name.strip().partition(" as ")
    return f"{old.strip()}{sign}{new.strip()}" if new else old.strip()


def _without_exports(code: str) -> tuple[str, str]:
    """The code with plain declarations, and the fields of the object of what it exports."""
    found: list[str] = []
    for names in _EXPORTED_LIST.findall(code):
        for one in filter(str.strip, names.split(",")):
            old, _, new = one.strip().partition(" as ")
            found.append(f"{(new or old).strip()}: {old.strip()}")
    code = _EXPORTED_LIST.sub("", code)
    found += [name for _, name in _EXPORTED.findall(code)]
    code = _EXPORTED.sub(r"\1 \2", code)
    if _DEFAULT.search(code):
        code = _DEFAULT.sub("const $default = ", code, count=1)
        found.append("default: $default")
    return code, ", ".join(found)
