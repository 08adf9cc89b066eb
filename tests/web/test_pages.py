"""The pages' files: nothing but them is served, and what a browser may do with them."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_cb.server.pages import CONTENT_SECURITY_POLICY, PAGE_HEADERS, WEB_FOLDER
from tests.server.conftest import LiveServer, serve, stopping

__all__ = ["serve", "stopping"]

Serve = Callable[..., LiveServer]
HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
FILES = sorted(p.relative_to(WEB_FOLDER).as_posix() for p in WEB_FOLDER.rglob("*") if p.is_file())
VENDOR = WEB_FOLDER / "vendor"


def test_a_browser_gets_the_page_and_a_program_ollamas_words(serve: Serve) -> None:
    server = serve({"text": "a"})
    page = server.get("/", headers=HTML)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text == (WEB_FOLDER / "chat.html").read_text()
    for headers in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        other = server.get("/", headers=headers)
        assert other.text == "Ollama is running"
        assert "Accept" in other.headers["vary"]


def test_every_file_has_its_type_and_the_headers(serve: Serve) -> None:
    server = serve({"text": "a"})
    for name in FILES:
        answer = server.get(f"/static/{name}", headers={"accept-encoding": "identity"})
        assert answer.status_code == 200, name
        assert answer.content == (WEB_FOLDER / name).read_bytes()
        assert {k: answer.headers[k] for k in PAGE_HEADERS} == PAGE_HEADERS
        kind = answer.headers["content-type"]
        assert kind.startswith("text/javascript") == name.endswith(".js")
        assert kind.startswith("text/css") == name.endswith(".css")


def test_the_policy_lets_only_our_own_files_run() -> None:
    rules = dict(rule.split(" ", 1) for rule in CONTENT_SECURITY_POLICY.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    for page in WEB_FOLDER.glob("*.html"):
        text = page.read_text()
        assert not re.search(r"<script(?![^>]*\ssrc=)|\son\w+=|<style|\sstyle=", text), page


def test_files_are_sent_compressed_and_only_when_they_changed(serve: Serve) -> None:
    server = serve({"text": "a"})
    path = "/static/vendor/markdown-it.js"
    with server.stream("GET", path, headers={"accept-encoding": "br, gzip"}) as answer:
        packed = b"".join(answer.iter_raw())
        tag = answer.headers["etag"]
        assert answer.headers["content-encoding"] == "gzip"
        assert "Accept-Encoding" in answer.headers["vary"]
    whole = (WEB_FOLDER / "vendor" / "markdown-it.js").read_bytes()
    assert gzip.decompress(packed) == whole
    assert len(packed) < len(whole) / 2
    known = server.get(path, headers={"if-none-match": f'"x", W/{tag}', "accept-encoding": "gzip"})
    assert (known.status_code, known.content) == (304, b"")
    assert known.headers["etag"] == tag
    plain = server.get(path, headers={"if-none-match": tag, "accept-encoding": "gzip;q=0"})
    assert plain.status_code == 200  # another form of it
    assert plain.headers["etag"] != tag


@pytest.mark.parametrize(
    "path",
    [
        "../config.py", "..%2fconfig.py", "%2e%2e/config.py", "vendor/../../config.py",
        "/etc/passwd", "%2fetc%2fpasswd", "..\\config.py", "....//config.py", "chat.html%00.js",
        "vendor", "vendor/", "", "../server/pages.py", "chat.html/", "%252e%252e/config.py",
        "C:/x.js", "file:///etc/passwd",
    ],
)  # fmt: skip
def test_no_path_leads_out_of_the_folder(serve: Serve, path: str) -> None:
    import http.client

    server = serve({"text": "a"})
    host = server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=20)
    connection.request("GET", f"/static/{path}")  # as it is: clients would tidy it up
    answer = connection.getresponse()
    assert answer.status == 404
    assert json.loads(answer.read())["error"]["code"] == "not_found"
    connection.close()


def test_vendored_files_are_what_was_recorded() -> None:
    record = json.loads((VENDOR / "VENDOR.json").read_text())
    named = {"VENDOR.json"}
    for package in record:
        assert package["licence"]
        assert re.fullmatch(r"\d+\.\d+\.\d+", package["version"])
        assert package["integrity"].startswith("sha512-")
        assert any(name.startswith("LICENSE") for name in package["files"])
        for name, told in package["files"].items():
            content = (VENDOR / name).read_bytes()
            assert hashlib.sha256(content).hexdigest() == told["sha256"], name
            assert len(content) == told["bytes"] < 2**20
            named.add(name)
    assert {path.name for path in VENDOR.iterdir()} == named


def test_every_import_of_a_page_is_there() -> None:
    for script in WEB_FOLDER.rglob("*.js"):
        if script.parent == VENDOR and "preact" not in script.name:
            continue
        for target in re.findall(r'(?:from\s*|import\()"([^"]+)"', script.read_text()):
            assert target.startswith("."), f"{script.name} imports {target} by name"
            assert (script.parent / target).is_file(), f"{script.name} imports {target}"


def test_every_string_is_there_in_both_languages() -> None:
    text = (WEB_FOLDER / "chat" / "strings.js").read_text()
    english, japanese = text.split("const JA = {")
    names = [
        set(re.findall(r"(?:^|[,{\s])(\w+): (?=[\"(`])", part)) for part in (english, japanese)
    ]
    assert names[0] == names[1]
    used = set()
    for script in (WEB_FOLDER / "chat").glob("*.js"):
        used |= set(re.findall(r'\bt\("(\w+)"', script.read_text()))
    assert used <= names[0]


@pytest.mark.slow
def test_the_wheel_holds_every_file(tmp_path: Path) -> None:
    root = WEB_FOLDER.parents[1]
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"mlx_cb/web/{name}" for name in FILES} <= names
