"""An engine without a model: replays written tokens for matching prompts.

It answers to `engine.interface.Engine`, so that clients, agents and the front's tests meet exact
texts, delays, tool calls, refusals and failures. Knows nothing about HTTP.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import shutil
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tokenizers

from mlx_cb.core.outputs import FinishReason, RequestOutput, TokenLogprobs
from mlx_cb.engine.interface import ModelInfo, Order
from mlx_cb.engine.played import Orders, Played
from mlx_cb.engine.script import Reply, Script, ScriptToken
from mlx_cb.engine.scripted_model import (
    CONTROL_TOKENS,
    MARKER_TOKENS,
    byte_level,
    write_model_folder,
)
from mlx_cb.errors import ContextLengthExceeded, EngineDead, InvalidRequest, MlxCbError, Overloaded
from mlx_cb.sampling_params import SamplingParams
from mlx_cb.standing import EQUAL, Standing

_NEVER = -9999.0
_REMEMBERED = 1000
_TICK_S = 0.01  # how soon a paused reply notices that it may go on


class ScriptedEngine:
    """Plays a script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.played: dict[str, Played] = {}
        self._machine_seconds: dict[str, float] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="mlx-cb-scripted-"))
        tokens = {token.value for reply in script.replies for token in reply.script_tokens()}
        named = {text.encode() for text in (*CONTROL_TOKENS, *MARKER_TOKENS)}
        others = {
            text.encode() for r in script.replies for t in r.script_tokens() for text, _ in t.top
        }
        write_model_folder(self._folder, sorted((tokens | others) - named), script.chat_template)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        self._uses_left = {
            id(reply): reply.times for reply in script.replies if reply.times is not None
        }
        self._slots = asyncio.Semaphore(script.max_num_seqs or 10**6)
        self._started = time.time()
        self._is_ready = False
        self._loading: asyncio.Task[None] | None = None
        self._orders = Orders()

    async def start(self) -> None:
        """Return at once; ready after the script's `load_s`."""
        self._loading = asyncio.create_task(self._load())

    async def wait_ready(self) -> None:
        """Return when ready."""
        assert self._loading is not None
        await self._loading

    async def stop(self) -> None:
        """Take the model folder away."""
        if self._loading is not None:
            self._loading.cancel()
        self._is_ready = False
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _load(self) -> None:
        await asyncio.sleep(self.script.load_s)
        self._is_ready = True

    @property
    def is_ready(self) -> bool:
        """False while the script's `load_s` runs and after `stop`."""
        return self._is_ready

    @property
    def model_info(self) -> ModelInfo:
        """A description in which sizes are 0: there is no model."""
        if not self._is_ready:
            raise EngineDead("the model is still loading; try again shortly", retry_after=1.0)
        return ModelInfo(
            name=self.script.model,
            path=str(self._folder),
            architecture="scripted",
            max_model_len=self.script.max_model_len,
            vocab_size=self._tokenizer.get_vocab_size(),
            eos_token_ids=(self._id("<|im_end|>"), self._id("<|endoftext|>")),
            num_layers=0,
            num_parameters=0,
            dtype="none",
            quantization=None,
            weights_bytes=0,
            kv_bytes_per_token=0,
            block_size=16,
            attention="none",
            layout="none",
            blas="none",
            created=int(self._started),
            pooling=None if self.script.embedding_size is None else "last",
            hidden_size=self.script.embedding_size or 0,
        )

    def check_admission(self, user: str, standing: Standing = EQUAL) -> None:
        """A script refuses by its replies alone."""

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        user: str = "local",
        standing: Standing = EQUAL,
        timeout_s: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Play the first reply that fits."""
        if not self._is_ready:
            raise EngineDead("the engine is not ready", retry_after=1.0)
        if len(prompt_ids) > self.script.max_model_len:
            raise ContextLengthExceeded("the prompt is longer than the script's max_model_len")
        size = self.script.embedding_size
        reply = self._find(prompt_ids) if size is None else Reply()
        played = self._remember(
            Played(
                request_id,
                user,
                len(prompt_ids),
                params,
                queued_at=time.time(),
                standing=standing,
                ends_at=None if timeout_s is None else time.time() + timeout_s,
            )
        )
        try:
            async with self._slots:
                played.status, played.admitted_at = "running", time.time()
                if await self._is_over_after(played, reply.prefill_s):
                    yield self._end(played, self._over(played), {})
                    return
                played.first_token_at = time.time()
                if size is not None:
                    yield self._embedded(played, prompt_ids, size)
                    return
                async for output in self._outputs(reply, played, prompt_ids):
                    yield output
        finally:
            played.status, played.finished_at = "finished", time.time()
            played.finish_reason = played.finish_reason or FinishReason.ABORT.value
            if played.admitted_at is not None:  # a script's machine works as long as it plays
                taken = played.finished_at - played.admitted_at
                self._machine_seconds[user] = self._machine_seconds.get(user, 0.0) + taken

    async def _outputs(
        self, reply: Reply, played: Played, prompt_ids: Sequence[int]
    ) -> AsyncIterator[RequestOutput]:
        params = played.params
        room = self.script.max_model_len - len(prompt_ids)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        first: dict[str, Any] = {
            "num_prompt_tokens": len(prompt_ids),
            "num_cached_tokens": reply.cached_tokens,
        }
        if params.prompt_logprobs is not None:
            first["prompt_logprobs"] = [
                self._certain(token_id, params.prompt_logprobs) for token_id in prompt_ids[1:]
            ]
        for token in self._tokens(reply, endless=reply.repeat or params.ignore_eos):
            if played.num_tokens >= limit:
                yield self._end(played, FinishReason.LENGTH, first)
                return
            token_id = self._token_id(token)
            if token_id in params.stop_token_ids:
                yield self._end(played, FinishReason.STOP, first)
                return
            scores = None
            if params.logprobs is not None:
                scores = [self._score(token, token_id, params.logprobs)]
            played.num_tokens += 1
            yield RequestOutput(played.request_id, [token_id], scores, **first)
            first.pop("prompt_logprobs", None)
            if await self._is_over_after(played, reply.delay_s):
                yield self._end(played, self._over(played), first)
                return
        if reply.finish == "error":
            yield self._end(played, FinishReason.ERROR, first)
        elif played.num_tokens >= limit:
            yield self._end(played, FinishReason.LENGTH, first)
        else:
            yield self._end(played, FinishReason.STOP, first)

    def _embedded(self, played: Played, prompt_ids: Sequence[int], size: int) -> RequestOutput:
        """A vector of length 1 that only equal texts share."""
        rng = random.Random(repr(list(prompt_ids)))
        numbers = [rng.gauss(0.0, 1.0) for _ in range(size)]
        length = math.hypot(*numbers)
        made = self._end(played, FinishReason.LENGTH, {"num_prompt_tokens": len(prompt_ids)})
        made.embedding = array("f", [n / length for n in numbers]).tobytes()
        return made

    def _end(self, played: Played, reason: FinishReason, first: dict[str, Any]) -> RequestOutput:
        played.finish_reason = reason.value
        error = _END_ERRORS.get(reason)
        return RequestOutput(played.request_id, finish_reason=reason, error=error, **first)

    async def _is_over_after(self, played: Played, seconds: float) -> bool:
        """Pass the time, and what a pause adds; True when the reply is to end before its end."""
        if played.ends_at is not None:
            seconds = min(seconds, max(0.0, played.ends_at - time.time()))
        await asyncio.sleep(seconds)
        while self._orders.hold(played):
            if played.is_late or played.is_cancelled:
                break
            await asyncio.sleep(_TICK_S)
        return played.is_late or played.is_cancelled

    @staticmethod
    def _over(played: Played) -> FinishReason:
        return FinishReason.ABORT if played.is_cancelled else FinishReason.DEADLINE

    def _tokens(self, reply: Reply, *, endless: bool) -> Iterator[ScriptToken]:
        tokens = reply.script_tokens()
        while True:
            yield from tokens
            if not endless or not tokens:
                return

    def _find(self, prompt_ids: Sequence[int]) -> Reply:
        prompt = self._tokenizer.decode(list(prompt_ids), skip_special_tokens=False)
        turn = prompt.count("<tool_response>")
        for reply in self.script.replies:
            if reply.turn is not None and reply.turn != turn:
                continue
            if reply.match is not None and not re.search(reply.match, prompt, re.DOTALL):
                continue
            if self._uses_left.get(id(reply), 1) <= 0:
                continue
            if id(reply) in self._uses_left:
                self._uses_left[id(reply)] -= 1
            if reply.refuse is not None:
                raise _refusal(reply)
            return reply
        raise InvalidRequest("the script has no reply for this prompt", param="messages")

    def _id(self, text: str) -> int:
        token_id = self._tokenizer.token_to_id(text)
        assert token_id is not None
        return token_id

    def _token_id(self, token: ScriptToken) -> int:
        if token.text in MARKER_TOKENS or token.text in CONTROL_TOKENS:
            return self._id(token.text)
        return self._id(byte_level(token.value))

    def _score(self, token: ScriptToken, token_id: int, number: int) -> TokenLogprobs:
        if not token.top:
            return self._certain(token_id, number, token.logprob)
        best = sorted(token.top, key=lambda pair: -pair[1])[:number]
        ids = [self._id(byte_level(text.encode())) for text, _ in best]
        rank = 1 + sum(logprob > token.logprob for _, logprob in token.top)
        return TokenLogprobs(token_id, token.logprob, rank, ids, [value for _, value in best])

    def _certain(self, token_id: int, number: int, logprob: float = 0.0) -> TokenLogprobs:
        """A script has no doubts: its token is certain, every other one impossible."""
        others = [other for other in range(number + 1) if other != token_id]
        ids = [token_id, *others][:number]
        return TokenLogprobs(token_id, logprob, 1, ids, [logprob, *[_NEVER] * number][:number])

    def _remember(self, played: Played) -> Played:
        self.played[played.request_id] = played
        while len(self.played) > _REMEMBERED:
            del self.played[next(iter(self.played))]
        return played

    async def status(self) -> dict[str, Any]:
        """Counts of waiting and running replies, of all and by user."""
        states = [played.status for played in self.played.values()]
        users: dict[str, dict[str, int]] = {}
        for played in self.played.values():
            if played.status != "finished":
                counts = users.setdefault(played.user, {"waiting": 0, "running": 0})
                counts[played.status] += 1
        return {
            "ready": self._is_ready,
            "requests": {
                "waiting": states.count("waiting"),
                "prefilling": 0,
                "decoding": states.count("running"),
                "preemptions": 0,
            },
            "users": users,
            "control": self._orders.as_dict(),
            "machine_seconds": dict(self._machine_seconds),
        }

    async def order(self, order: Order) -> dict[str, Any]:
        """Freeze nothing, pause and cancel replies."""
        self._orders.take(order)
        if order.verb.is_cancel:
            for played in self.played.values():
                if order.means(played.request_id, played.user):
                    played.is_cancelled = True
        return self._orders.as_dict()

    async def steps(self, last: int) -> list[dict[str, Any]]:
        """A script has no steps."""
        return []

    async def overview(self, after: int) -> dict[str, Any] | None:
        """Who plays and who waits; there are no steps."""
        now = time.time()
        here = [played for played in self.played.values() if played.status != "finished"]
        users: dict[str, dict[str, Any]] = {}
        for played in here:
            own = users.setdefault(
                played.user, {"running": 0, "waiting": 0, "reasons": {}, "oldest_wait": 0.0}
            )
            own["waiting" if played.status == "waiting" else "running"] += 1
            if played.status == "waiting":
                own["reasons"]["slots"] = own["reasons"].get("slots", 0) + 1
                own["oldest_wait"] = max(own["oldest_wait"], now - played.queued_at)
        return {
            "now": now,
            "columns": [],
            "steps": [],
            "num_requests": len(here),
            "requests": [
                {
                    "id": played.request_id,
                    "user": played.user,
                    "status": played.status,
                    "waiting_for": "slots" if played.status == "waiting" else "",
                    "age": now - played.queued_at,
                    "prompt": played.num_prompt_tokens,
                    "cached": 0,
                    "computed": played.num_prompt_tokens + played.num_tokens,
                    "output": played.num_tokens,
                }
                for played in here
            ],
            "users": users,
        }

    async def explain(self, request_id: str) -> dict[str, Any] | None:
        """When a request waited, played and ended."""
        played = self.played.get(request_id)
        return None if played is None else asdict(played)


def _refusal(reply: Reply) -> MlxCbError:
    if reply.refuse == 429:
        return Overloaded("the script refuses: too much work", retry_after=reply.retry_after)
    if reply.refuse == 503:
        return EngineDead("the script refuses: engine down", retry_after=reply.retry_after)
    return InvalidRequest("the script refuses this prompt")


_END_ERRORS = {
    FinishReason.ERROR: "the script ends in an error",
    FinishReason.ABORT: "the operator of this server has cancelled the request",
}
