"""`/web/...`: what the chat page asks for and sends; all of it the caller's own.

Owns the shapes of bodies and answers. Errors are JSON objects in OpenAI's form.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from mlx_cb.errors import InvalidRequest
from mlx_cb.server.body import ClientGone, decode_json, read_body
from mlx_cb.server.conversations.answers import Answers
from mlx_cb.server.conversations.shapes import (
    LONGEST_TITLE,
    Conversation,
    NotHere,
    Settings,
    new_conversation,
    new_message,
    title_of,
)
from mlx_cb.server.conversations.transfer import from_json, from_markdown, to_json, to_markdown
from mlx_cb.server.conversations.waiting import waiting_for
from mlx_cb.server.dialects import models
from mlx_cb.server.front import Front
from mlx_cb.server.streaming import (
    COMMENT,
    EVENT_STREAM,
    Stream,
    run_until_disconnect,
    send_frames,
    start_stream,
)
from mlx_cb.server.users import User

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]
#: A stream of events ends after this long, so that a key that was taken back is noticed.
STREAM_S = 900.0
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class NewConversation(msgspec.Struct):
    """A conversation to begin."""

    title: str = ""
    settings: Settings = msgspec.field(default_factory=Settings)


class ConversationChange(msgspec.Struct):
    """What is to be different; what is left out stays."""

    title: str | None = None
    settings: Settings | None = None
    leaf: str | None = None


class NewQuestion(msgspec.Struct):
    """A question after the message `parent`; without one it begins the conversation anew."""

    content: str
    parent: str | None = None


class Import(msgspec.Struct):
    """The text of a file, as it was exported."""

    json: str | None = None
    markdown: str | None = None


class NewAnswer(msgspec.Struct):
    """A further answer to the question `parent`."""

    parent: str


def routes(front: Front) -> list[BaseRoute]:
    """All of them."""
    web = _Web(front)
    one = "/web/conversations/{conversation}"
    table: list[tuple[str, str, Endpoint]] = [
        ("GET", "/web/me", web.me),
        ("GET", "/web/conversations", web.listed),
        ("POST", "/web/conversations", web.begin),
        ("DELETE", "/web/conversations", web.delete_all),
        ("GET", one, web.shown),
        ("PATCH", one, web.change),
        ("DELETE", one, web.delete),
        ("POST", one + "/messages", web.ask),
        ("POST", one + "/answers", web.answer),
        ("POST", one + "/stop", web.stop),
        ("GET", one + "/export", web.export),
        ("GET", "/web/export", web.export_all),
        ("POST", "/web/import", web.bring_in),
        ("GET", "/web/waiting/{request_id}", web.waiting),
    ]
    found: list[BaseRoute] = [
        Route(path, _answering(endpoint), methods=[method]) for method, path, endpoint in table
    ]
    return [*found, Route("/web/events", EventStream(front), methods=["GET"])]


class _Web:
    """The endpoints of one server."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._store = front.conversations
        self._feed = front.feed
        self._answers = Answers(front, front.conversations, front.feed)

    async def me(self, request: Request) -> Response:
        """Who the caller is, and which models there are."""
        user = _user(request)
        listed = models.listing(self._front)["data"]
        thinks = self._front.is_ready and self._front.text.reasoning is not None
        return _json(
            {
                "user": user.name,
                "is_admin": user.is_admin,
                "models": [
                    {"id": model["id"], "max_model_len": model["max_model_len"]} for model in listed
                ],
                "is_ready": self._front.is_ready,
                "has_reasoning": thinks,
            }
        )

    async def listed(self, request: Request) -> Response:
        """The caller's conversations; `?q=` searches titles and messages."""
        found = await self._store.listed(_user(request).name, request.query_params.get("q", ""))
        ids = [summary.id for summary in found]
        running = [found for found in ids if self._answers.running(found) is not None]
        return _json({"conversations": found, "running": running})

    async def begin(self, request: Request) -> Response:
        """Begin a conversation."""
        asked = await self._body(request, NewConversation)
        asked.settings.params()
        made = new_conversation(asked.settings, _title(asked.title))
        user = _user(request).name
        await self._store.add(user, [made])
        self._feed.publish(user, "conversation", conversation=made.summary())
        return _json(made, 201)

    async def shown(self, request: Request) -> Response:
        """A whole conversation, with the answer that is being made as far as it has come."""
        user, conversation_id = _user(request).name, _id(request)
        found = await self._store.load(user, conversation_id)
        if self._answers.running(conversation_id) is None and _is_running(found):
            # It ended while the file was read: what was stored last is what it is.
            found = await self._store.load(user, conversation_id)
        running = self._answers.running(conversation_id)
        if running is not None:
            found.messages = [running if m.id == running.id else m for m in found.messages]
        return _json(found)

    async def change(self, request: Request) -> Response:
        """Change title, settings, or which branch is shown."""
        asked = await self._body(request, ConversationChange)
        user = _user(request).name
        found = await self._store.load(user, _id(request))
        if asked.title is not None:
            found.title = _title(asked.title)
        if asked.settings is not None:
            asked.settings.params()
            found.settings = asked.settings
        if asked.leaf is not None:
            found.leaf = found.find(asked.leaf).id
        await self._store.change(user, found)
        self._publish(user, found)
        return _json(found.summary())

    async def delete(self, request: Request) -> Response:
        """Delete a conversation for good."""
        user, conversation_id = _user(request).name, _id(request)
        await self._store.load(user, conversation_id)  # whose it is comes before what is done
        await self._answers.stop(conversation_id)
        await self._store.delete(user, conversation_id)
        self._feed.publish(user, "deleted", conversation=conversation_id)
        return _json({"deleted": 1})

    async def delete_all(self, request: Request) -> Response:
        """Delete all of the caller's conversations for good."""
        user = _user(request).name
        await self._answers.stop_all(user)
        count = await self._store.delete_all(user)
        self._feed.publish(user, "again")
        return _json({"deleted": count})

    async def ask(self, request: Request) -> Response:
        """Add a question and begin its answer."""
        asked = await self._body(request, NewQuestion)
        if not asked.content.strip():
            raise InvalidRequest("content must hold a question", param="content")
        user = _user(request)
        found = await self._store.load(user.name, _id(request))
        if asked.parent is not None and found.find(asked.parent).role != "assistant":
            raise InvalidRequest("parent must be an answer", param="parent")
        question = new_message("user", asked.content, asked.parent)
        answer = await self._answers.begin(user, found, question, question.id)
        if not found.title:
            found.title = title_of(asked.content)
            found.leaf = answer.id
            await self._store.change(user.name, found)
        found.updated = time.time()
        self._feed.publish(user.name, "conversation", conversation=found.summary())
        return _json({"question": question, "answer": answer})

    async def answer(self, request: Request) -> Response:
        """Begin a further answer to a question."""
        asked = await self._body(request, NewAnswer)
        user = _user(request)
        found = await self._store.load(user.name, _id(request))
        if found.find(asked.parent).role != "user":
            raise InvalidRequest("parent must be a question", param="parent")
        answer = await self._answers.begin(user, found, None, asked.parent)
        return _json({"answer": answer})

    async def stop(self, request: Request) -> Response:
        """End the conversation's answer; what it has stays."""
        await self._store.load(_user(request).name, _id(request))
        return _json({"stopped": await self._answers.stop(_id(request))})

    async def export(self, request: Request) -> Response:
        """A conversation as a file; `?format=json` or `md`."""
        found = await self._store.load(_user(request).name, _id(request))
        form = request.query_params.get("format", "json")
        if form == "md":
            text = to_markdown(found).encode()
            return _file(text, f"{found.title or 'conversation'}.md", "text/markdown")
        if form != "json":
            raise InvalidRequest(f"format: {form!r} is neither json nor md", param="format")
        name = f"{found.title or 'conversation'}.json"
        return _file(to_json([found]), name, "application/json")

    async def export_all(self, request: Request) -> Response:
        """All of the caller's conversations as one JSON file."""
        found = await self._store.load_all(_user(request).name)
        return _file(to_json(found), "conversations.json", "application/json")

    async def bring_in(self, request: Request) -> Response:
        """Add the conversations of a file that was exported, under ids of their own."""
        given = await self._body(request, Import)
        if given.markdown is not None:
            made = [from_markdown(given.markdown)]
        elif given.json is not None:
            made = from_json(given.json.encode())
        else:
            raise InvalidRequest("give the text of a file as json or as markdown", param="json")
        user = _user(request).name
        await self._store.add(user, made)
        self._feed.publish(user, "again")
        return _json({"conversations": [found.summary() for found in made]})

    async def waiting(self, request: Request) -> Response:
        """What one of the caller's requests waits for."""
        user, request_id = _user(request), request.path_params["request_id"]
        if self._front.owners.of(request_id) != user.name:
            raise NotHere("no request of this id is known, or it was forgotten")
        return _json({"reason": await waiting_for(self._front, user, request_id)})

    def _publish(self, user: str, found: Conversation) -> None:
        self._feed.publish(
            user,
            "conversation",
            conversation=found.summary(),
            settings=found.settings,
            leaf=found.leaf,
        )

    async def _body(self, request: Request, kind: type[T]) -> T:
        limit = self._front.config.max_body_bytes
        return decode_json(await read_body(request.scope, request.receive, limit), kind)


class EventStream:
    """Server-sent events of all that changes in the caller's conversations."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._run(scope["state"]["account"], send)
        await run_until_disconnect(receive, work, set())

    async def _run(self, user: User, send: Send) -> None:
        front = self._front
        page = front.feed.subscribe(user.name)
        closing = asyncio.get_running_loop().call_later(STREAM_S, page.close)
        try:
            await start_stream(send, EVENT_STREAM)
            page.put(b'data: {"type":"hello"}\n\n')
            await send_frames(send, Stream(page.frames(), COMMENT), front.config.keep_alive_s)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            closing.cancel()
            front.feed.leave(user.name, page)


def _answering(endpoint: Endpoint) -> Endpoint:
    """Nobody is answered who has gone."""

    @functools.wraps(endpoint)
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientGone:
            return Response(status_code=499)

    return answer


def _json(content: Any, status: int = 200) -> Response:
    body = msgspec.json.encode(content)
    return Response(body, status, headers=_HEADERS, media_type="application/json")


def _file(content: bytes, name: str, media_type: str) -> Response:
    """A download; the name is the person's own text, so it is encoded (RFC 6266, RFC 8187)."""
    plain = "".join(c for c in name if c.isalnum() or c in " ._-").strip() or "conversation"
    disposition = f"attachment; filename*=UTF-8''{quote(plain)}"
    headers = {**_HEADERS, "content-disposition": disposition}
    return Response(content, headers=headers, media_type=media_type)


def _user(request: Request) -> User:
    user: User = request.state.account
    return user


def _id(request: Request) -> str:
    found: str = request.path_params["conversation"]
    return found


def _title(text: str) -> str:
    return " ".join(text.split())[:LONGEST_TITLE]


def _is_running(found: Conversation) -> bool:
    return any(message.state == "running" for message in found.messages)
