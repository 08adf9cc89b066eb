"""The chat by its routes: answers made and kept on the server, branches, events, files."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from mlx_cb.errors import MlxCbError
from mlx_cb.server.conversations.feed import MOST_PAGES, MOST_WAITING, Feed, Subscription
from tests.web.conftest import Person, Serve, at_end

SLOW = {"match": at_end("slow"), "tokens": ["a ", "b ", "c "], "repeat": True, "delay_s": 0.02}
THINKS = {"match": at_end("think"), "reasoning": "Hm, hm.", "text": "So it is."}
PLAIN = {"text": "Hello **there**."}
REPLIES = (SLOW, THINKS, PLAIN)


def test_a_question_is_answered_and_kept(serve: Serve) -> None:
    me = Person(serve(*REPLIES))
    conversation = me.begin(temperature=0.5)
    asked = me.ask(conversation, "Say hello\nplease")
    answer = me.answer_to(asked, conversation)
    assert (answer["content"], answer.get("state", "done")) == ("Hello **there**.", "done")
    figures = answer["figures"]
    assert figures["completion_tokens"] == 2
    assert figures["finish"] == "stop"
    assert figures["first_token_s"] >= 0
    assert answer["parent"] == asked["question"]["id"]
    found = me.load(conversation)
    assert found["title"] == "Say hello"
    assert found["leaf"] == answer["id"]
    assert found["settings"] == {"temperature": 0.5}
    (row,) = me.call("GET", "/conversations")["conversations"]
    assert (row["id"], row["title"]) == (conversation, "Say hello")
    story = me.server.get(f"/status/requests/{answer['request_id']}").json()
    assert story["finish_reason"] == "stop"


def test_reasoning_is_kept_apart(serve: Serve) -> None:
    me = Person(serve(*REPLIES))
    conversation = me.begin()
    answer = me.answer_to(me.ask(conversation, "think"), conversation)
    assert answer["reasoning"].strip() == "Hm, hm."
    assert answer["content"].strip() == "So it is."


def test_the_model_is_given_the_branch_and_the_settings(serve: Serve) -> None:
    server = serve(*REPLIES)
    me = Person(server)
    conversation = me.begin(system="Be kind.", temperature=0.25, max_tokens=7, seed=3)
    first = me.ask(conversation, "one")
    me.answer_to(first, conversation)
    second = me.ask(conversation, "two", first["answer"]["id"])
    answer = me.answer_to(second, conversation)
    prompt = server.front.text.tokenizer.decode(
        server.prompts[answer["request_id"]], skip_special_tokens=False
    )
    places = [prompt.index(text) for text in ("Be kind.", "one", "Hello **there**.", "two")]
    assert places == sorted(places)
    params = server.engine.played[answer["request_id"]].params
    assert (params.temperature, params.max_tokens, params.seed) == (0.25, 7, 3)


def test_an_edit_is_a_branch_and_both_stay(serve: Serve) -> None:
    me = Person(serve({"match": at_end("red"), "text": "Red it is."}, {"text": "Blue."}))
    conversation = me.begin()
    first = me.ask(conversation, "red")
    me.answer_to(first, conversation)
    second = me.ask(conversation, "blue")  # beside the first one, not after it
    assert me.answer_to(second, conversation)["content"] == "Blue."
    again = me.call(
        "POST", f"/conversations/{conversation}/answers", {"parent": first["question"]["id"]}
    )
    assert me.answer_to(again, conversation)["content"] == "Red it is."
    found = me.load(conversation)
    assert [m.get("parent") for m in found["messages"]] == [
        None, first["question"]["id"], None, second["question"]["id"], first["question"]["id"],
    ]  # fmt: skip
    assert found["leaf"] == again["answer"]["id"]
    me.call("PATCH", f"/conversations/{conversation}", {"leaf": second["answer"]["id"]})
    text = me.server.get(f"/web/conversations/{conversation}/export?format=md").text
    assert "Blue." in text
    assert "Red it is." not in text


def test_a_stopped_answer_keeps_what_it_has(serve: Serve, file: Path) -> None:
    server = serve(*REPLIES, conversations_file=file)
    me = Person(server)
    conversation = me.begin()
    asked = me.ask(conversation, "slow")
    me.wait_for(conversation, asked["answer"]["id"], lambda m: len(m["content"]) > 6)
    assert me.call("POST", f"/conversations/{conversation}/stop")["stopped"] is True
    found = me.load(conversation)["messages"][1]
    assert found["state"] == "stopped"
    assert found["content"].startswith("a b c")
    assert found["figures"]["completion_tokens"] > 2
    assert me.call("POST", f"/conversations/{conversation}/stop")["stopped"] is False
    assert server.engine.played[found["request_id"]].finish_reason == "abort"
    server.wait_until_idle()
    # The next question follows, and the model is shown the half answer.
    me.answer_to(me.ask(conversation, "go on, please", found["id"]), conversation)


def test_an_answer_goes_on_without_anyone_looking(serve: Serve) -> None:
    """The request that asked is long over; a page that comes back finds more, then all of it."""
    words = [f"w{k} " for k in range(60)]
    me = Person(serve({"tokens": words, "delay_s": 0.01}))
    conversation = me.begin()
    asked = me.ask(conversation, "go")
    early = me.wait_for(conversation, asked["answer"]["id"], lambda m: "w1 " in m["content"])
    assert early["state"] == "running"
    assert "".join(words).startswith(early["content"])
    assert me.call("GET", "/conversations")["running"] == [conversation]
    assert me.answer_to(asked, conversation)["content"] == "".join(words).rstrip() + " "
    assert me.call("GET", "/conversations")["running"] == []


def test_two_pages_hear_the_same(serve: Serve) -> None:
    words = [f"w{k} " for k in range(20)]
    me = Person(serve({"tokens": words, "delay_s": 0.01}))
    with me.events() as one, me.events() as two:
        assert next(one) == next(two) == {"type": "hello"}
        conversation = me.begin()
        asked = me.ask(conversation, "go")
        heard = []
        for page in (one, two):
            events = []
            for event in page:
                events.append(event)
                if event["type"] == "message":
                    break
            heard.append(events)
    assert heard[0] == heard[1]
    deltas = [event for event in heard[0] if event["type"] == "delta"]
    assert "".join(event["text"] for event in deltas) == "".join(words)
    assert [event["seq"] for event in deltas] == list(range(1, len(deltas) + 1))
    last = heard[0][-1]["message"]
    assert (last["id"], last["content"]) == (asked["answer"]["id"], "".join(words))


def test_one_answer_at_a_time_in_a_conversation(serve: Serve) -> None:
    me = Person(serve(*REPLIES))
    conversation = me.begin()
    me.ask(conversation, "slow")
    body = {"content": "and?", "parent": None}
    told = me.call("POST", f"/conversations/{conversation}/messages", body, 409)
    assert told["error"]["code"] == "answer_running"
    assert len(me.load(conversation)["messages"]) == 2
    me.call("DELETE", f"/conversations/{conversation}")
    me.call("GET", f"/conversations/{conversation}", status=404)
    me.server.wait_until_idle()


def test_what_fails_says_why_and_can_be_asked_again(serve: Serve) -> None:
    me = Person(
        serve(
            {"refuse": 429, "times": 1}, {"tokens": ["half "], "finish": "error", "times": 1}, PLAIN
        )
    )
    conversation = me.begin()
    asked = me.ask(conversation, "hello")
    failed = me.answer_to(asked, conversation)
    assert (failed["state"], failed["content"]) == ("failed", "")
    assert "too much work" in failed["error"]
    again = {"parent": asked["question"]["id"]}
    half = me.answer_to(
        me.call("POST", f"/conversations/{conversation}/answers", again), conversation
    )
    assert (half["state"], half["content"]) == ("failed", "half ")
    assert "script ends in an error" in half["error"]
    # After a failed answer, a further question can follow.
    assert me.answer_to(me.ask(conversation, "hello?", half["id"]), conversation)["content"]


def test_a_closing_server_keeps_what_there_is(serve: Serve, file: Path) -> None:
    server = serve(*REPLIES, conversations_file=file)
    me = Person(server)
    conversation = me.begin()
    asked = me.ask(conversation, "slow")
    with me.events() as page:
        assert next(page)["type"] == "hello"
        me.wait_for(conversation, asked["answer"]["id"], lambda m: len(m["content"]) > 6)
        stopped = server.begin_stop()
    stopped.result(20)
    assert server.has_stopped()
    later = Person(serve(*REPLIES, conversations_file=file))
    found = later.load(conversation)["messages"][1]
    assert found["state"] == "interrupted"
    assert found["content"].startswith("a b c")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "", {"settings": {"temperature": "hot"}}, 400, "settings.temperature"),
        ("POST", "", {"settings": {"temperature": -1}}, 400, "temperature"),
        ("POST", "", {"settings": {"max_tokens": 0}}, 400, "max_tokens"),
        ("PATCH", "/{id}", {"settings": {"top_p": 3}}, 400, "top_p"),
        ("PATCH", "/{id}", {"leaf": "0" * 32}, 404, None),
        ("POST", "/{id}/messages", {"content": " \n"}, 400, "content"),
        ("POST", "/{id}/messages", {}, 400, "content"),
        ("POST", "/{id}/messages", {"content": "a", "parent": "0" * 32}, 404, None),
        ("POST", "/{id}/answers", {}, 400, "parent"),
        ("GET", "/{id}/export?format=pdf", None, 400, "format"),
    ],
)
def test_wrong_fields_are_named(
    serve: Serve, method: str, path: str, body: Any, status: int, param: str | None
) -> None:
    me = Person(serve(*REPLIES))
    path = path.replace("{id}", me.begin())
    error = me.call(method, "/conversations" + path, body, status)["error"]
    assert error["param"] == param
    assert error["message"]


def test_a_question_follows_an_answer_and_an_answer_a_question(serve: Serve) -> None:
    me = Person(serve(*REPLIES))
    conversation = me.begin()
    asked = me.ask(conversation, "hello")
    me.answer_to(asked, conversation)
    at = f"/conversations/{conversation}"
    for path, body in (
        ("/messages", {"content": "a", "parent": asked["question"]["id"]}),
        ("/answers", {"parent": asked["answer"]["id"]}),
    ):
        assert me.call("POST", at + path, body, 400)["error"]["param"] == "parent"


def test_search_finds_titles_and_messages_in_any_width(serve: Serve) -> None:
    me = Person(serve({"text": "The ÄNDERUNG is done; 東京タワー is tall."}))
    first, second = me.begin(), me.begin()
    me.answer_to(me.ask(first, "A question"), first)
    me.call("PATCH", f"/conversations/{second}", {"title": "Ｆｕｌｌ width 100%"})
    for wanted, found in {
        "änderung": [first], "東京": [first], "full": [second], "100%": [second],
        "question": [first], "nothing like it": [], "_": [], "%": [second],
    }.items():  # fmt: skip
        rows = me.server.get("/web/conversations", params={"q": wanted}).json()["conversations"]
        assert [row["id"] for row in rows] == found, wanted
    rows = me.server.get("/web/conversations", params={"q": "änderung"}).json()["conversations"]
    assert "ÄNDERUNG is done" in rows[0]["found"]


def test_what_a_waiting_answer_waits_for(people: Any) -> None:
    alice, bob = people(SLOW, PLAIN, script={"max_num_seqs": 1})
    long = alice.begin()
    running = alice.ask(long, "slow")
    alice.wait_for(long, running["answer"]["id"], lambda m: bool(m["content"]))
    waits = bob.begin()
    with bob.events() as page:
        asked = bob.ask(waits, "hello")
        event = next(event for event in page if event["type"] == "waiting")
        assert event["message"] == asked["answer"]["id"]
        assert event["reason"] == {"what": "turn", "people": 1}
    request_id = asked["answer"]["request_id"]
    assert bob.call("GET", f"/waiting/{request_id}")["reason"] == {"what": "turn", "people": 1}
    # What she who is served, or he who asks for another's request, hears of others: nothing.
    own = alice.call("GET", f"/waiting/{running['answer']['request_id']}")["reason"]
    assert own == {"what": "reading"}
    alice.call("GET", f"/waiting/{request_id}", status=404)
    alice.call("POST", f"/conversations/{long}/stop")
    bob.answer_to(asked, waits)
    assert "people" not in str(bob.call("GET", f"/waiting/{request_id}"))


def test_waiting_for_a_place_of_ones_own(serve: Serve, team: Any) -> None:
    carol = team.add("carol", max_running=1)
    server = serve(SLOW, PLAIN, keys_file=team.path)
    me = Person(server, {"authorization": f"Bearer {carol}"})
    one, two = me.begin(), me.begin()
    me.ask(one, "slow")
    with me.events() as page:
        asked = me.ask(two, "hello")
        event = next(event for event in page if event["type"] == "waiting")
        assert event["reason"] == {"what": "own"}
    me.call("POST", f"/conversations/{one}/stop")
    assert me.answer_to(asked, two)["content"]


def test_files_go_out_and_come_back(serve: Serve) -> None:
    me = Person(serve(*REPLIES))
    conversation = me.begin(system="Be kind.", temperature=0.5)
    first = me.ask(conversation, "think")
    me.answer_to(first, conversation)
    me.answer_to(me.ask(conversation, "hello"), conversation)
    me.call("PATCH", f"/conversations/{conversation}", {"title": "Über / die\r\nBrücke"})
    answer = me.server.get(f"/web/conversations/{conversation}/export?format=json")
    assert answer.headers["content-disposition"] == (
        "attachment; filename*=UTF-8''%C3%9Cber%20%20die%20Br%C3%BCcke.json"
    )
    (made,) = me.call("POST", "/import", {"json": answer.text})["conversations"]
    assert made["id"] != conversation
    before, after = me.load(conversation), me.load(made["id"])
    for kept in ("title", "settings", "created"):
        assert before[kept] == after[kept]
    shown = [(m["role"], m["content"], m.get("reasoning")) for m in before["messages"]]
    assert shown == [(m["role"], m["content"], m.get("reasoning")) for m in after["messages"]]
    ids = {m["id"] for m in before["messages"]}
    assert not ids & {m["id"] for m in after["messages"]}
    text = me.server.get(f"/web/conversations/{conversation}/export?format=md").text
    (read,) = me.call("POST", "/import", {"markdown": text})["conversations"]
    assert [m["content"] for m in me.load(read["id"])["messages"]] == ["hello", "Hello **there**."]
    whole = me.server.get("/web/export").text
    assert len(me.call("POST", "/import", {"json": whole})["conversations"]) == 3
    assert me.call("DELETE", "/conversations") == {"deleted": 6}
    assert me.call("GET", "/conversations")["conversations"] == []


def test_a_slow_page_reads_everything_again_and_a_user_has_so_many_pages() -> None:
    feed = Feed()
    page = feed.subscribe("alice")
    for k in range(MOST_WAITING + 1):
        feed.publish("alice", "delta", seq=k)
        feed.publish("bob", "delta", seq=k)
    waiting = list(page._waiting)
    assert waiting == [b'data: {"type":"again"}\n\n']
    pages = [feed.subscribe("alice") for _ in range(MOST_PAGES)]
    assert page._is_closed
    assert not any(other._is_closed for other in pages)
    for other in pages:
        feed.leave("alice", other)
    feed.leave("alice", page)
    assert not feed._pages


async def _read(page: Subscription) -> list[bytes]:
    return [frames async for frames in page.frames()]


def test_a_closed_feed_ends_after_what_waits() -> None:
    import asyncio

    async def run() -> list[bytes]:
        feed = Feed()
        page = feed.subscribe("alice")
        feed.publish("alice", "a")
        feed.publish("alice", "b")
        feed.close()
        assert await _read(feed.subscribe("alice")) == []
        return await _read(page)

    assert asyncio.run(run()) == [b'data: {"type":"a"}\n\ndata: {"type":"b"}\n\n']


def test_a_file_that_cannot_be_used_is_an_error_in_words(tmp_path: Path, serve: Serve) -> None:
    from mlx_cb.server.conversations.store import Conversations

    path = tmp_path / "conversations.sqlite"
    path.write_bytes(b"this is no database, but long enough to look like one" * 10)
    with pytest.raises(MlxCbError, match="cannot keep conversations in"):
        Conversations(path)


def test_titles_are_one_short_line(serve: Serve) -> None:
    me = Person(serve(*REPLIES))
    conversation = me.begin()
    me.answer_to(me.ask(conversation, "\n  " + "word " * 40 + "\nmore"), conversation)
    title = me.load(conversation)["title"]
    assert len(title) <= 60
    assert title.endswith("…")
    long = me.call("PATCH", f"/conversations/{conversation}", {"title": "a\tb\n" + "x" * 500})
    assert long["title"].startswith("a b xxx")
    assert len(long["title"]) == 120


def test_deltas_of_many_answers_reach_their_owner_only(people: Any) -> None:
    alice, bob = people(*REPLIES)
    with alice.events() as hers, bob.events() as his:
        next(hers), next(his)
        hers_id, his_id = alice.begin(), bob.begin()
        alice.answer_to(alice.ask(hers_id, "think"), hers_id)
        bob.answer_to(bob.ask(his_id, "hello"), his_id)
        for page, own, other in ((hers, hers_id, his_id), (his, his_id, hers_id)):
            heard = list(itertools.takewhile(lambda e: e["type"] != "message", page))
            assert own in str(heard)
            assert other not in str(heard)
