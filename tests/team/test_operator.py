"""The operator's page without a browser: its data, its one document, and who is let in by it."""

from __future__ import annotations

import gzip
import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mlx_cb.core.control import RULES
from mlx_cb.engine.overview import MOST_STEPS, STEP_COLUMNS
from mlx_cb.server.links import Links, Waits
from mlx_cb.server.log_tail import LONGEST_LINE, MOST_LINES, LogTail
from mlx_cb.server.one_document import Bundle, OneDocument
from mlx_cb.server.operator_state import _newest
from mlx_cb.server.recent import Recent
from tests import tiny
from tests.server.conftest import LiveServer
from tests.team.conftest import Serve, Team

CHAT = {"messages": [{"role": "user", "content": "SECRET-MARKER"}]}


def state(server: LiveServer, team: Team, query: str = "") -> dict[str, Any]:
    answer = server.get("/admin/state" + query, headers=team.as_("boss"))
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def ask(server: LiveServer, who: dict[str, str]) -> httpx2.Response:
    return server.post("/v1/chat/completions", CHAT, headers=who)


def test_the_page_is_one_small_document_that_loads_nothing_else(serve: Serve, team: Team) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    answer = server.get("/admin", headers=team.as_("boss"))
    assert answer.headers["content-encoding"] == "gzip"
    assert len(gzip.compress(answer.content)) < 200_000
    assert not re.search(r'(src|href)="(?!data:|/"|/sign-in"|/usage)', answer.text)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    plain = server.get("/admin", headers=team.as_("boss") | {"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.text == answer.text


@pytest.mark.parametrize("page", ["admin/admin.html", "sign_in/sign-in.html"])
def test_a_document_carries_all_its_parts(page: str) -> None:
    document = OneDocument(page)
    assert '<link rel="stylesheet"' not in document.text
    assert '<script type="module" src' not in document.text
    assert document.policy.count("sha256-") == 2


def test_modules_become_one(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_text(
        'import one, { two as zwei, three } from "./b.js";\nimport{four}from"./c.js";\n'
        "export const all = [one, zwei, three, four];\n"
    )
    (tmp_path / "b.js").write_text(
        'import{four}from"./c.js";const t=2;export{t as two};'
        "export default function(){return four}\n"
        "export async function three() {}\nexport class Five {}\n// </script>\n"
    )
    (tmp_path / "c.js").write_text("const e=4;export{e as four,e as default};")
    text = Bundle(tmp_path / "a.js").text
    assert "import" not in text
    assert "export " not in text
    assert "</script" not in text
    order = [text.index(f"const $m{k} = ") for k in (0, 1, 2) if f"const $m{k} = " in text]
    assert order == sorted(order)
    assert text.count("const e=4") == 1  # a module that two ask for is there once
    assert "const { default: one, two: zwei, three } = " in text
    assert "return { four: e, default: e };" in text


def test_who_watches_sees_everyone_and_no_prompt(serve: Serve, team: Team) -> None:
    server = serve({"text": "a b c", "delay_s": 0.01}, keys_file=team.path, log_prompts=True)
    with_logs = logging.getLogger("mlx_cb")
    before = with_logs.level
    with_logs.setLevel(logging.INFO)
    try:
        for who in ("alice", "alice", "bob"):
            assert ask(server, team.as_(who)).status_code == 200
        server.wait_until_idle()
        seen = state(server, team, "?people=1")
    finally:
        with_logs.setLevel(before)
    assert seen["server"]["model"] == "scripted"
    assert seen["latency"]["first_token"]["alice"]["count"] == 2
    assert seen["latency"]["token_gap"][""]["p50"] > 0
    people = {one["name"]: one for one in seen["people"]}
    assert set(people) == {"alice", "bob", "boss", "monitor"}
    assert people["alice"]["today"]["requests"] == 2
    assert people["alice"]["today"]["machine_seconds"] > 0
    assert people["boss"]["today"] is None
    assert any("user=alice" in line["text"] for line in seen["log"])
    assert "SECRET-MARKER" not in json.dumps(seen)
    assert not any(key in json.dumps(seen) for key in team.keys.values())
    last = seen["log"][-1]["number"]
    assert all(line["number"] > last for line in state(server, team, f"?line={last}")["log"])
    assert "people" not in state(server, team)


@pytest.mark.parametrize("query", ["?after=x", "?line=-1", "?after=1e9", "?after=" + "9" * 99])
def test_bad_questions(serve: Serve, query: str) -> None:
    assert serve({"text": "a"}).get("/admin/state" + query).status_code == 400


def test_looking_every_second_writes_no_log(
    serve: Serve, team: Team, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = serve({"text": "a"}, keys_file=team.path)
    state(server, team)
    assert not any(record.name == "mlx_cb.access" for record in caplog.records)
    assert server.get("/admin/state", headers=team.as_("alice")).status_code == 403


def test_open_answers_are_listed_with_who_waits_for_what(serve: Serve, team: Team) -> None:
    team.add("kim", max_running=1)
    reply = {"tokens": ["x"], "repeat": True, "delay_s": 0.01}
    server = serve(reply, keys_file=team.path, script={"max_num_seqs": 1})
    opened = []
    try:
        for who in ("kim", "bob"):
            opened.append(
                httpx2.stream(
                    "POST", server.url + "/v1/chat/completions", json=CHAT | {"stream": True},
                    headers=team.as_(who),
                )
            )  # fmt: skip
            opened[-1].__enter__()
        users = state(server, team)["overview"]["users"]
        assert (users["kim"]["running"], users["kim"]["waiting"]) == (1, 0)
        assert users["bob"]["reasons"] == {"slots": 1}
        shown = state(server, team)["overview"]["requests"]
        assert {(one["user"], one["waiting_for"]) for one in shown} == {
            ("kim", ""),
            ("bob", "slots"),
        }
    finally:
        for one in opened:
            one.__exit__(None, None, None)
    server.wait_until_idle()
    assert state(server, team)["overview"]["num_requests"] == 0


def test_an_engines_steps_in_little() -> None:
    core = tiny.engine(tiny.llama_model(), max_num_batched_tokens=16, max_num_seqs=2)
    for k, user in enumerate(("alice", "bob", "bob")):
        core.add(f"r{k}", list(range(30)), tiny.greedy(5), user=user)
    for _ in range(2):
        core.step()
    seen = core.overview(0)
    assert seen["num_requests"] == 3
    assert {one["id"] for one in seen["requests"]} == {"r0", "r1", "r2"}
    waiting = [one for one in seen["requests"] if one["waiting_for"]]
    assert sum(user["waiting"] for user in seen["users"].values()) == len(waiting) > 0
    assert all(user["oldest_wait"] >= 0 for user in seen["users"].values())
    tiny.run(core)
    rows = core.overview(0)["steps"]
    records = list(core.scheduler.journal.records)
    assert [dict(zip(STEP_COLUMNS, row, strict=True))["step"] for row in rows] == [
        record.step for record in records
    ]
    assert [row[3] for row in rows] == [record.rows_prefill for record in records]
    newer = core.overview(rows[-3][0])["steps"]
    assert newer == rows[-2:]
    assert len(core.overview(0)["steps"]) <= MOST_STEPS
    json.dumps(seen)


def test_the_page_is_told_what_is_held_back(serve: Serve, team: Team) -> None:
    """Its buttons ask `control_routes`; what they did is in the state that it looks at next."""
    server = serve({"text": "a"}, keys_file=team.path)
    boss = team.as_("boss")
    assert server.post("/admin/users/bob/pause", {}, headers=boss).status_code == 200
    assert server.post("/admin/control/drain", {}, headers=boss).status_code == 200
    control = state(server, team)["engine"]["control"]
    assert control["draining"] is True
    assert control["restraint"]["paused_users"] == ["bob"]
    server.post("/admin/users/bob/resume", {}, headers=boss)
    server.post("/admin/control/resume", {}, headers=boss)
    control = state(server, team)["engine"]["control"]
    assert (control["draining"], control["restraint"]["paused_users"]) == (False, [])


def test_percentiles_are_values_that_were_measured() -> None:
    now = 0.0
    recent = Recent(lambda: now)
    assert recent.percentiles(10) == {}
    for k in range(100):
        recent.add(k / 1000, "alice" if k % 2 else "bob")
    found = recent.percentiles(10)
    assert found[""] == {"p50": 0.05, "p95": 0.095, "p99": 0.099, "count": 100}
    assert found["alice"]["count"] == 50
    now = 11.0
    recent.add(0.5, "carol")
    assert set(recent.percentiles(10)) == {"", "carol"}


def test_the_logs_tail_is_bounded_and_has_no_prompts() -> None:
    tail = LogTail()
    tail.install()
    log = logging.getLogger("mlx_cb.server")
    try:
        for k in range(MOST_LINES + 10):
            log.warning("line %d %s", k, "x" * LONGEST_LINE)
        logging.getLogger("mlx_cb.transcript").warning("SECRET")
    finally:
        tail.remove()
    log.warning("too late")
    lines = tail.since(0)
    assert len(lines) == MOST_LINES
    assert lines[-1]["text"].startswith(f"line {MOST_LINES + 9}")
    assert all(len(line["text"]) <= LONGEST_LINE for line in lines)
    assert tail.since(lines[-2]["number"]) == lines[-1:]


def test_an_admin_makes_links_and_lets_people_in(serve: Serve, team: Team) -> None:
    server = serve({"text": "a"}, keys_file=team.path)
    boss = team.as_("boss")
    made = server.post("/admin/links", {"name": "newbie"}, headers=boss).json()
    assert made["picture"].startswith("data:image/svg+xml")
    token = made["url"].removeprefix(server.url + "/sign-in#")
    entered = httpx2.post(server.url + "/sign-in", json={"link": token})
    assert entered.json() == {"user": "newbie"}
    assert server.post("/admin/links", {"name": "no/name"}, headers=boss).status_code == 400
    assert server.post("/admin/links", {"name": None}, headers=team.as_("bob")).status_code == 403
    links = Links(team.path)
    codes = []
    for name in ("carol", "dave", "alice"):
        waits = links.open(links.make(), name, "192.0.2.9")
        assert isinstance(waits, Waits)
        codes.append(waits.code)
    shown = state(server, team)["asking"]
    assert [one["name"] for one in shown] == ["carol", "dave", "alice"]
    path = "/admin/asking/{}/{}"
    answers = [
        server.post(path.format(code, verb), {}, headers=boss)
        for code, verb in zip(codes, ("confirm", "refuse", "confirm"), strict=True)
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 409]
    assert "has an account" in answers[2].text
    assert [one["name"] for one in state(server, team)["asking"]] == ["alice"]
    assert server.post(path.format("0000", "eat"), {}, headers=boss).status_code == 404


def test_each_sign_is_told_with_what_makes_it_an_alarm() -> None:
    core = tiny.engine(tiny.llama_model())
    core.add("r", list(range(30)), tiny.greedy(5), user="alice")
    tiny.run(core)
    shown = _newest(core.governor.as_dict())
    assert {"sign", "unit", "value", "begins_at"} == set(shown["signs"][0])
    assert [one["begins_at"] for one in shown["signs"]] == [rule.begins_at for rule in RULES]
    failed = next(one for one in shown["signs"] if one["sign"].startswith("failed steps"))
    assert failed["value"] == 0.0
    assert "rules" not in shown
