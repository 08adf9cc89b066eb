"""Makes answers on the server, whoever looks or not, and stores them while they grow.

Owns the answers that are being made: one in a conversation, each stored about once a second and
told piece by piece to the user's open pages. Only the user's stop, a deletion or the server's end
cuts one short. Knows nothing about HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field

import msgspec

from mlx_cb.errors import InvalidRequest, MlxCbError
from mlx_cb.server.conversations.feed import Feed
from mlx_cb.server.conversations.shapes import (
    Conversation,
    Figures,
    Message,
    Settings,
    State,
    new_id,
    new_message,
)
from mlx_cb.server.conversations.store import Conversations
from mlx_cb.server.conversations.waiting import Waiting, waiting_for
from mlx_cb.server.front import Front
from mlx_cb.server.generate_input import GenerateInput
from mlx_cb.server.generation import Generation
from mlx_cb.server.terms import terms_for
from mlx_cb.server.users import User
from mlx_cb.text.chat_template import ChatInput
from mlx_cb.text.events import (
    EndReason,
    Finish,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)

STORE_EVERY_S = 1.0
LOOK_EVERY_S = 0.7  # how often a waiting answer's reason is looked up
_log = logging.getLogger("mlx_cb.server")


class Busy(InvalidRequest):
    """The conversation's answer is still being made."""

    status = 409
    code = "answer_running"


@dataclass(slots=True, eq=False)
class RunningAnswer:
    """An answer in the making."""

    user: User
    conversation_id: str
    message: Message
    prompt: GenerateInput
    task: asyncio.Task[None] | None = None
    is_stopped: bool = False
    generation: Generation | None = None
    first_token: float | None = None
    last_token: float | None = None
    reason: Waiting | None = None
    stored_at: float = field(default_factory=time.monotonic)


class Answers:
    """All answers that are being made."""

    def __init__(self, front: Front, store: Conversations, feed: Feed) -> None:
        self._front = front
        self._store = store
        self._feed = feed
        self._running: dict[str, RunningAnswer] = {}

    def running(self, conversation_id: str) -> Message | None:
        """The conversation's answer as far as it has come."""
        answer = self._running.get(conversation_id)
        return None if answer is None else answer.message

    def check_free(self, conversation_id: str) -> None:
        """Raise Busy while the conversation's answer is being made."""
        if conversation_id in self._running:
            raise Busy("this conversation's answer is still being made; stop it or wait")

    async def begin(
        self, user: User, conversation: Conversation, question: Message | None, parent: str
    ) -> Message:
        """Store what was asked, if it is new, and begin the answer to `parent`.

        Raises Busy, InvalidRequest, NotHere.
        """
        messages = [*conversation.messages, *([question] if question is not None else [])]
        branch = msgspec.structs.replace(conversation, messages=messages).branch(parent)
        prompt = _prompt(conversation.settings, branch)
        model = self._front.resolve_name(conversation.settings.model)
        message = new_message(
            "assistant", "", parent, state="running", model=model, request_id=new_id(), seq=0
        )
        self.check_free(conversation.id)
        answer = RunningAnswer(user, conversation.id, message, prompt)
        self._running[conversation.id] = answer
        new = [question, message] if question is not None else [message]
        try:
            await self._store.append(user.name, conversation.id, new)
        except BaseException:
            del self._running[conversation.id]
            raise
        self._feed.publish(
            user.name, "messages", conversation=conversation.id, messages=new, leaf=message.id
        )
        answer.task = asyncio.create_task(self._make(answer), name=f"answer {message.id}")
        self._front.open_answers.add(answer.task)
        answer.task.add_done_callback(self._front.open_answers.discard)
        return message

    async def stop(self, conversation_id: str) -> bool:
        """End the conversation's answer and wait until what it has is stored."""
        answer = self._running.get(conversation_id)
        if answer is None or answer.task is None:
            return False
        answer.is_stopped = True
        answer.task.cancel()
        await asyncio.wait([answer.task])
        return True

    async def stop_all(self, user: str) -> None:
        """End all of a user's answers."""
        mine = [a.conversation_id for a in self._running.values() if a.user.name == user]
        for conversation_id in mine:
            await self.stop(conversation_id)

    async def _make(self, answer: RunningAnswer) -> None:
        message = answer.message
        looking = asyncio.create_task(self._tell_why_it_waits(answer))
        try:
            message.state = await self._generate(answer)
        except MlxCbError as error:
            message.state, message.error = "failed", error.message
        except asyncio.CancelledError:
            message.state = "stopped" if answer.is_stopped else "interrupted"
        except Exception:
            _log.exception("answer %s failed", message.request_id)
            message.state = "failed"
            message.error = f"the server failed; its log names {message.request_id}"
        looking.cancel()
        # A second cancellation (a stop while the server closes) must not lose what was made.
        await _to_its_end(self._finish(answer))

    async def _generate(self, answer: RunningAnswer) -> State:
        """Make the whole answer; returns its state. Raises MlxCbError."""
        front, message = self._front, answer.message
        assert message.request_id is not None
        try:
            terms = terms_for((), answer.user, front.config)
            front.check_open(answer.user, terms)
            generation = await front.prepare(answer.prompt, message.request_id, answer.user, terms)
            answer.generation = generation
            async with front.accounts.place_for(answer.user, generation):
                await generation.start()
                async for _, events in generation.events():
                    self._take(answer, events)
                    if time.monotonic() - answer.stored_at > STORE_EVERY_S:
                        answer.stored_at = time.monotonic()
                        await self._store.rewrite(answer.user.name, answer.conversation_id, message)
        except MlxCbError as error:
            front.metrics.refused.labels(error.code).inc()
            raise
        finally:
            if answer.generation is not None:
                message.figures = _figures(answer, answer.generation)
                await answer.generation.close()
        return "done"

    async def _finish(self, answer: RunningAnswer) -> None:
        """Store the answer as it will stay, then tell the pages."""
        message, name = answer.message, answer.user.name
        message.seq = None
        try:
            await self._store.rewrite(name, answer.conversation_id, message)
        except Exception:
            _log.exception("answer %s was not stored", message.request_id)
        finally:
            del self._running[answer.conversation_id]
        self._feed.publish(name, "message", conversation=answer.conversation_id, message=message)

    def _take(self, answer: RunningAnswer, events: list[OutputEvent]) -> None:
        message = answer.message
        now = time.monotonic()
        answer.first_token = answer.first_token or now
        answer.last_token = now
        text, reasoning = [], []
        for event in events:
            match event:
                case TextDelta(piece):
                    text.append(piece)
                case ReasoningDelta(piece):
                    reasoning.append(piece)
                case ToolCallStart(_, _, name):  # a call that nobody offered is shown as it is
                    text.append(f"\n{name} ")
                case ToolCallDelta(_, piece):
                    text.append(piece)
                case Finish(reason):
                    is_cut = reason is EndReason.LENGTH
                    message.figures = Figures(finish="length" if is_cut else "stop")
        if not text and not reasoning:
            return
        more, thought = "".join(text), "".join(reasoning)
        message.content += more
        message.reasoning += thought
        assert message.seq is not None
        message.seq += 1
        self._feed.publish(
            answer.user.name,
            "delta",
            conversation=answer.conversation_id,
            message=message.id,
            seq=message.seq,
            text=more,
            reasoning=thought,
        )

    async def _tell_why_it_waits(self, answer: RunningAnswer) -> None:
        """Until the first token, tell the pages what the answer waits for."""
        while answer.first_token is None:
            await asyncio.sleep(LOOK_EVERY_S)
            reason = await self._reason(answer)
            if answer.first_token is None:
                answer.reason = reason
                self._feed.publish(
                    answer.user.name,
                    "waiting",
                    conversation=answer.conversation_id,
                    message=answer.message.id,
                    reason=reason,
                )

    async def _reason(self, answer: RunningAnswer) -> Waiting:
        if answer.generation is None:
            return Waiting("preparing")
        if not answer.generation.was_started:
            return Waiting("own")
        return await waiting_for(self._front, answer.user, answer.message.request_id or "")


def _prompt(settings: Settings, branch: list[Message]) -> GenerateInput:
    """What the model is given. Raises InvalidRequest for settings that cannot be."""
    messages = [{"role": "system", "content": settings.system}] if settings.system.strip() else []
    for message in branch:
        if message.role == "assistant" and not message.content:
            continue  # it failed, or was stopped before it said anything
        if messages and messages[-1]["role"] == message.role:
            messages[-1]["content"] += "\n\n" + message.content
        else:
            messages.append({"role": message.role, "content": message.content})
    variables = {} if settings.thinking is None else {"enable_thinking": settings.thinking}
    chat = ChatInput(messages, None, variables, continue_last=False)
    return GenerateInput((chat,), settings.params(), model=settings.model, stream=True)


def _figures(answer: RunningAnswer, generation: Generation) -> Figures:
    usage, found = generation.usage, answer.message.figures
    seconds = None
    if answer.first_token is not None and answer.last_token is not None:
        seconds = answer.last_token - answer.first_token
    return Figures(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        first_token_s=generation.first_token_s,
        seconds=seconds,
        finish=None if found is None else found.finish,
    )


async def _to_its_end(work: object) -> None:
    """Wait for it whatever happens to the one who waits."""
    running = asyncio.ensure_future(work)  # type: ignore[call-overload]
    while not running.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([running])
    running.result()
