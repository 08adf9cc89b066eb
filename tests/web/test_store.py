"""What is kept: apart for each user, whole after a kill, gone after a deletion."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_cb.errors import InvalidRequest
from mlx_cb.server.conversations.shapes import (
    Conversation,
    Message,
    NotHere,
    Settings,
    new_conversation,
    new_message,
)
from mlx_cb.server.conversations.store import Conversations
from mlx_cb.server.conversations.transfer import from_json, from_markdown, to_json, to_markdown


def conversation_of(*texts: str, title: str = "A title", system: str = "") -> Conversation:
    """Questions and answers in turn."""
    made = new_conversation(Settings(system=system), title)
    for n, text in enumerate(texts):
        message = new_message("assistant" if n % 2 else "user", text, made.leaf)
        made.messages.append(message)
        made.leaf = message.id
    return made


def test_the_file_is_its_owners_alone(file: Path) -> None:
    store = Conversations(file)
    asyncio.run(store.add("alice", [conversation_of("SECRET")]))
    for path in file.parent.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path
    store.close()


def test_another_users_conversation_is_not_there(file: Path) -> None:
    store = Conversations(file)
    hers = conversation_of("SECRET question", "SECRET answer")
    asyncio.run(store.add("alice", [hers]))

    async def bob_tries() -> None:
        assert await store.listed("bob") == []
        assert await store.listed("bob", "secret") == []
        assert await store.load_all("bob") == []
        assert await store.delete_all("bob") == 0
        await store.rewrite("bob", hers.id, msgspec.structs.replace(hers.messages[1], content="x"))
        for attempt in (
            store.load("bob", hers.id),
            store.change("bob", msgspec.structs.replace(hers, title="mine")),
            store.append("bob", hers.id, [new_message("user", "x", None)]),
            store.delete("bob", hers.id),
        ):
            with pytest.raises(NotHere, match="no such conversation"):
                await attempt
        assert await store.load("alice", hers.id) == hers

    asyncio.run(bob_tries())
    store.close()


def test_what_is_deleted_is_nowhere_on_the_disk(file: Path) -> None:
    store = Conversations(file)
    marker = "SECRET-MARKER-" * 700  # more than a page, so that it lies on pages of its own
    gone, kept = conversation_of(marker, marker, title=marker[:100]), conversation_of("KEPT-TEXT")

    async def run() -> None:
        await store.add("alice", [gone, kept])
        for n in range(20):
            grown = msgspec.structs.replace(gone.messages[1], content=marker + str(n))
            await store.rewrite("alice", gone.id, grown)
        assert b"SECRET-MARKER" in on_disk(file)
        await store.delete("alice", gone.id)
        assert b"SECRET-MARKER" not in on_disk(file)
        assert b"KEPT-TEXT" in on_disk(file)
        await store.delete_all("alice")
        assert b"KEPT-TEXT" not in on_disk(file)

    asyncio.run(run())
    store.close()


def on_disk(file: Path) -> bytes:
    return b"".join(path.read_bytes() for path in file.parent.iterdir())


WRITER = textwrap.dedent("""
    import asyncio, sys
    from pathlib import Path
    import msgspec
    from mlx_cb.server.conversations.shapes import Settings, new_conversation, new_message
    from mlx_cb.server.conversations.store import Conversations

    async def main():
        store = Conversations(Path(sys.argv[1]))
        made = new_conversation(Settings())
        await store.add("alice", [made])
        print(made.id, flush=True)
        parent = None
        while True:
            question = new_message("user", "x" * 3000, parent)
            answer = new_message("assistant", "", question.id, state="running")
            await store.append("alice", made.id, [question, answer])
            print("A", answer.id, flush=True)
            answer = msgspec.structs.replace(answer, content="y" * 3000, state="done")
            await store.rewrite("alice", made.id, answer)
            print("D", answer.id, flush=True)
            parent = answer.id

    asyncio.run(main())
""")


@pytest.mark.parametrize("wait", [3, 41, 100])
def test_a_killed_server_loses_nothing_that_was_committed(file: Path, wait: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(file)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(wait)]
    os.kill(process.pid, signal.SIGKILL)
    rest, _ = process.communicate()
    lines += rest.splitlines()
    conversation, told = lines[0].strip(), [line.split() for line in lines[1:]]
    with sqlite3.connect(file) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert database.execute("PRAGMA foreign_key_check").fetchall() == []
    store = Conversations(file)
    found = asyncio.run(store.load("alice", conversation))
    store.close()
    states = {message.id: message for message in found.messages}
    for kind, answer in told:
        expected = {"done"} if kind == "D" else {"done", "interrupted"}
        assert states[answer].state in expected
    assert {len(m.content) for m in found.messages if m.state == "done"} == {3000}
    assert found.leaf == found.messages[-1].id
    assert len(found.messages) % 2 == 0  # a question and its answer come together


text = st.text(st.characters(codec="utf-8"), max_size=60)
lines = st.lists(
    st.one_of(
        text,
        st.sampled_from(
            [
                "<!-- mlx-cb: user -->",
                "\\<!-- mlx-cb: assistant -->",
                "## Answer",
                "",
                "# x",
                "\\\\",
            ]
        ),
    ),
    max_size=5,
).map("\n".join)


@given(st.lists(lines, min_size=1, max_size=5), text, lines)
def test_markdown_comes_back_as_it_was(texts: list[str], title: str, system: str) -> None:
    made = conversation_of(*texts, title=title, system=system)
    for message in made.messages[1::2]:
        message.reasoning = system
    read = from_markdown(to_markdown(made))
    assert [(m.role, m.content, m.reasoning) for m in read.messages] == [
        (m.role, m.content, m.reasoning) for m in made.messages
    ]
    assert read.settings.system == system


@given(st.lists(text, max_size=6), text)
def test_json_comes_back_as_it_was(texts: list[str], title: str) -> None:
    made = conversation_of(*texts, title=title)
    (read,) = from_json(to_json([made]))
    assert (read.title, read.created, read.settings) == (made.title, made.created, made.settings)
    assert [(m.role, m.content) for m in read.branch(read.leaf)] == [
        (m.role, m.content) for m in made.branch(made.leaf)
    ]
    assert read.id != made.id
    assert not {m.id for m in read.messages} & {m.id for m in made.messages}


def changed(**fields: object) -> bytes:
    made = conversation_of("a", "b")
    made.messages[1] = msgspec.structs.replace(made.messages[1], **fields)
    return to_json([made])


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"{}", "format"),
        (b"[]", "body"),
        (b"no json", "JSON"),
        (b'{"format": "other", "version": 1, "conversations": []}', "format"),
        (b'{"format": "mlx-cb conversations", "version": 2, "conversations": []}', "version"),
        (changed(parent="0" * 32), "parent"),
        (changed(role="system"), "role"),
        (changed(state="odd"), "state"),
        (to_json([Conversation("i", "t", 0, 0, Settings(top_p=7), [])]), "top_p"),
        (
            to_json([Conversation("i", "t", 0, 0, Settings(), [Message("a", "user", "x", 0)] * 2)]),
            "twice",
        ),
    ],
)
def test_a_wrong_file_says_what_is_wrong(content: bytes, word: str) -> None:
    with pytest.raises(InvalidRequest, match=word):
        from_json(content)
    with pytest.raises(InvalidRequest, match="not exported here"):
        from_markdown(content.decode())


def test_what_is_imported_neither_runs_nor_names_another() -> None:
    made = conversation_of("a", "b")
    made.messages[1] = msgspec.structs.replace(
        made.messages[1], state="running", request_id="f" * 32, seq=4
    )
    (read,) = from_json(to_json([made]))
    assert (read.messages[1].state, read.messages[1].request_id, read.messages[1].seq) == (
        "interrupted", None, None,
    )  # fmt: skip
