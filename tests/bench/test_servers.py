"""Starting, waiting for, telling apart and stopping servers."""

import asyncio
import json
import sys

import psutil
import pytest

from mlx_cb.bench.servers import Cores, Kind, RunningServer, ServerSpec, never_end
from mlx_cb.errors import MlxCbError
from mlx_cb.model.checkpoint import eos_token_ids

SERVE = """
import http.server, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(STATUS); self.end_headers(); self.wfile.write(b"data: [DONE]\\n\\n")
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


class Scripted(ServerSpec):
    """A program of the test instead of a real server."""

    def command(self, port):
        return [sys.executable, "-c", self.flags[0], str(port)]


def start(code):
    return RunningServer(Scripted("ours", Kind.MLX_CB, "m", (code,)), Cores())


def test_a_server_is_waited_for_and_stopped_with_its_children():
    server = start(SERVE.replace("STATUS", "200"))
    try:
        startup = asyncio.run(server.ready(20))
        assert 0 < startup.healthy_s <= startup.first_token_s
        family = [psutil.Process(server.process.pid)]
        family += family[0].children()
        assert len(family) == 2
        assert server.cpu_seconds() > 0
    finally:
        server.stop()
    assert psutil.wait_procs(family, timeout=5)[1] == []


def test_a_program_that_ends_is_reported_with_its_last_words():
    server = start("print('no such model'); raise SystemExit(3)")
    with pytest.raises(MlxCbError, match=r"ours ended at once: no such model"):
        asyncio.run(server.ready(20))
    server.stop()


def test_a_server_that_refuses_the_first_completion_is_reported():
    server = start(SERVE.replace("STATUS", "404"))
    try:
        with pytest.raises(MlxCbError, match="refuses a completion with 404"):
            asyncio.run(server.ready(20))
    finally:
        server.stop()


def test_commands_of_ours_and_of_the_peer():
    ours = ServerSpec("ours", Kind.MLX_CB, "/m", ("--scheduler", "static")).command(81)
    assert ours[1:5] == ["-m", "mlx_cb", "serve", "/m"]
    assert ours[-2:] == ["--scheduler", "static"]
    peer = ServerSpec("P", Kind.MLX_LM, "/m").command(82)
    assert peer[1:5] == ["-m", "mlx_cb.bench.peer_launcher", "--model", "/m"]
    assert "82" in peer


def test_the_process_behind_a_local_url_is_found(stub):
    server = RunningServer(ServerSpec("server", Kind.URL, None, url=stub.url), Cores())
    assert server.cpu_seconds() > 0
    elsewhere = ServerSpec("server", Kind.URL, None, url="http://192.0.2.1:80")
    assert RunningServer(elsewhere, Cores()).cpu_seconds() is None


@pytest.mark.parametrize(
    ("cores", "policy", "client", "server"),
    [
        ({0, 1, 2, 3}, "auto", {3}, {0, 1, 2}),
        ({0, 1}, "auto", {1}, {0, 1}),
        ({0, 1}, "split", {1}, {0}),
        ({0}, "split", set(), set()),
        ({0, 1, 2}, "off", set(), set()),
    ],
)
def test_cores(monkeypatch, cores, policy, client, server):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: cores, raising=False)
    chosen = Cores.choose(policy)
    assert (chosen.client, chosen.server) == (client, server)


def test_a_measuring_copy_never_ends_its_turn(tmp_path):
    added = [{"id": n, "content": f"<{n}>", "special": True} for n in range(5)]
    added.append({"id": 9, "content": "word", "special": False})
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2, "bos_token_id": 1}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<2>"}))
    (tmp_path / "chat_template.jinja").write_text("{{ '<|im_end|>' }}")
    never_end(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {"eos_token_id": 4, "bos_token_id": 1}
    assert eos_token_ids(tmp_path, config) == {4}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [2, 4], "bos_token_id": 1}))
    never_end(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 3
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added[1:3]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2, "bos_token_id": 1}))
    never_end(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 2


@pytest.mark.slow
def test_the_peer_runs_under_our_blas_on_the_tiny_model(tmp_path):
    from mlx_cb.bench.tiny import tiny_model
    from mlx_cb.config import ModelConfig
    from mlx_cb.model.resolve import resolve

    folder = tiny_model(resolve(ModelConfig(model="demo")), tmp_path)
    server = RunningServer(ServerSpec("P", Kind.MLX_LM, str(folder)), Cores())
    try:
        asyncio.run(server.ready(60))
        if sys.platform.startswith("linux"):
            assert "BLAS: openblas" in server.log_tail()
    finally:
        server.stop()
