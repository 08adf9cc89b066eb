"""The HTTP process's state: its engine, the model's text side, names, metrics, open answers.

Owns what routes share. Knows nothing about any dialect.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from mlx_cb.config import ServerConfig
from mlx_cb.engine.interface import Engine, ModelInfo
from mlx_cb.errors import (
    ContextLengthExceeded,
    Draining,
    EngineDead,
    InvalidRequest,
    ModelNotFound,
)
from mlx_cb.server.accounts import Accounts, Limits
from mlx_cb.server.conversations.feed import Feed
from mlx_cb.server.conversations.store import Conversations
from mlx_cb.server.doors import Doors
from mlx_cb.server.generate_input import GenerateInput, PromptInput
from mlx_cb.server.generation import Choice, Generation
from mlx_cb.server.log_tail import LogTail
from mlx_cb.server.machine_time import MachineTime
from mlx_cb.server.metrics import Metrics
from mlx_cb.server.structured import beside_calls, forced_call_grammar, with_grammar
from mlx_cb.server.terms import Terms
from mlx_cb.server.tool_choice import ToolChoice
from mlx_cb.server.transcript import Transcript
from mlx_cb.server.usage import Usage
from mlx_cb.server.users import User
from mlx_cb.server.views import Owners
from mlx_cb.text.call_forms import CALL_FORMS, CallForm
from mlx_cb.text.chat_template import ChatInput, Prompt
from mlx_cb.text.fill_in_middle import FillInMiddle, find_fill_in_middle
from mlx_cb.text.harmony import HarmonyFormat
from mlx_cb.text.model_text import ModelText
from mlx_cb.text.output_parser import OutputParser, ParserOptions
from mlx_cb.text.sections import OutputFormat

# Encoding fewer characters than this takes less time than moving it to a thread.
_SHORT_PROMPT = 4000
# A drained server is as a rule started anew, which nobody here can know the time of.
DRAINING_RETRY_S = 30.0


class PromptTooLong(ContextLengthExceeded):
    """The prompt leaves no room for an answer; dialects have wordings of their own for it."""

    def __init__(self, num_tokens: int, limit: int, param: str) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens, but the prompt has "
            f"{num_tokens} tokens and leaves no room for an answer; shorten it.",
            param=param,
        )
        self.num_tokens = num_tokens
        self.limit = limit


class Front:
    """One server. Make it, `await load()` once the engine is ready, then serve."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.metrics = Metrics()
        usage = Usage(config.usage_file)
        limits = Limits(config.engine.scheduler.max_queue_wait_s, config.max_queued_per_user)
        self.accounts = Accounts(usage, limits)
        self.log_tail = LogTail()
        self.log_tail.install()
        self.machine_time = MachineTime(engine, usage)
        self.owners = Owners()
        self.conversations = Conversations(config.conversations_file)
        self.feed = Feed()
        self.doors = None if config.keys_file is None else Doors.at(config.keys_file)
        self.open_answers: set[asyncio.Task[None]] = set()
        self.is_closing = False
        self.is_draining = False
        self._text: ModelText | None = None
        self._encoders = ThreadPoolExecutor(2, thread_name_prefix="encode")

    async def load(self) -> None:
        """Read the model's tokenizer and template. Raises UnsupportedModel."""
        folder = Path(self.engine.model_info.path)
        loop = asyncio.get_running_loop()
        self._text = await loop.run_in_executor(self._encoders, ModelText.load, folder)

    def close(self) -> None:
        """Write down what is left to write; nothing may be served afterwards."""
        self.log_tail.remove()
        self.accounts.usage.close()
        self.conversations.close()
        self._encoders.shutdown()

    @property
    def is_ready(self) -> bool:
        """True while requests can be served."""
        is_open = not (self.is_closing or self.is_draining)
        return self.engine.is_ready and self._text is not None and is_open

    def check_open(self, user: User, terms: Terms) -> None:
        """Refuse what would be refused anyway, before any work is done for it.

        Raises Draining, Overloaded.
        """
        if self.is_draining:
            raise Draining(
                "the operator is draining this server: it finishes what it has and takes nothing "
                "new",
                retry_after=DRAINING_RETRY_S,
            )
        self.engine.check_admission(user.name, terms.standing)

    @property
    def text(self) -> ModelText:
        """Tokenizer and template. Raises EngineDead while the model loads."""
        if self._text is None:
            raise EngineDead("the model is still loading; try again shortly", retry_after=2.0)
        return self._text

    @property
    def model_info(self) -> ModelInfo:
        """What is loaded. Raises EngineDead while the model loads."""
        return self.engine.model_info

    @property
    def served_name(self) -> str:
        """The name the model goes by: the operator's, else that of the model."""
        return self.config.served_model_name or self.config.engine.model.model

    def names(self) -> list[str]:
        """Every name that means the loaded model, the served one first."""
        own = self.config.engine.model.model
        names = [self.served_name, own, PurePosixPath(own).name]
        names += [alias for alias, _ in self.config.aliases]
        return list(dict.fromkeys(names))

    def resolve_name(self, asked: str | None) -> str:
        """The name to answer with. Raises ModelNotFound for strangers if names are strict."""
        if asked in self.names():
            return asked or self.served_name
        if asked and self.config.strict_model:
            raise ModelNotFound(
                f"the model {asked!r} is not here; this server has {', '.join(self.names())}",
                param="model",
            )
        return self.served_name

    async def prepare(
        self, given: GenerateInput, request_id: str, user: User, terms: Terms
    ) -> Generation:
        """Encode and check all that can be checked; nothing runs yet.

        Raises InvalidRequest, ContextLengthExceeded, LimitExceeded, EngineDead.
        """
        text = self.text
        if self.model_info.pooling is not None and not given.is_embedding:
            raise InvalidRequest(
                f"{self.served_name} is an embedding model and generates no text; use "
                f"/v1/embeddings",
                param="model",
            )
        self._check_ids(given)
        prompts = [await self.encode(prompt) for prompt in given.prompts]
        prompts = [_with_start(text, given, prompt) for prompt in prompts]
        for prompt in prompts:
            terms.check_input(len(prompt.ids))
        room = terms.output_room(given.params.max_tokens)
        params = dataclasses.replace(given.params, max_tokens=room)
        given = dataclasses.replace(given, params=with_grammar(params, _grammar(text, given)))
        choices = [
            self._choice(given, prompt, number * given.n + k, request_id)
            for number, prompt in enumerate(prompts)
            for k in range(given.n)
        ]
        self.owners.note((choice.request_id for choice in choices), user.name)
        places = 1 if given.is_embedding else len(choices)
        return Generation(self.engine, self.metrics, choices, user.name, terms, places)

    async def encode(self, prompt: PromptInput) -> Prompt:
        """One prompt's token ids; what may take long is done off the event loop."""
        template = self.text.chat_template
        is_slow = template is not None and template.is_slow
        if _size(prompt) < _SHORT_PROMPT and not is_slow:
            return _encode(self.text, prompt)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._encoders, _encode, self.text, prompt)

    def fill_in_middle(self) -> FillInMiddle:
        """How this model fills the gap before a suffix. Raises InvalidRequest if it cannot."""
        found = find_fill_in_middle(self.text.tokenizer)
        if found is None:
            raise InvalidRequest(
                f"suffix: {self.served_name} has no fill-in-the-middle tokens", param="suffix"
            )
        return found

    def _choice(self, given: GenerateInput, prompt: Prompt, index: int, request_id: str) -> Choice:
        text, params = self.text, given.params
        limit = self._room(len(prompt.ids), given)
        seed = params.seed
        if seed is not None and given.n > 1:
            seed = (seed + index % given.n) % 2**64
        is_first = index % given.n == 0
        is_chat = isinstance(given.prompts[0], ChatInput)
        choice = given.tool_choice
        options = ParserOptions(
            stops=params.stop,
            output_format=_output_format(text, given) if is_chat else None,
            written=_forced_start(text, choice),
            most_calls=choice.most_calls,
            in_reasoning=is_chat and text.opens_reasoning(prompt),
            follows_text=prompt.continues or not is_chat,
            top_logprobs=params.logprobs,
        )
        params = dataclasses.replace(
            params,
            max_tokens=limit,
            seed=seed,
            prompt_logprobs=params.prompt_logprobs if is_first else None,
        )
        own_id = request_id if index == 0 else f"{request_id}-{index}"
        return Choice(
            index=index,
            request_id=own_id,
            prompt_ids=prompt.ids,
            params=params,
            parser=OutputParser(text.tokenizer, options),
            prompt_text=prompt.text,
            transcript=Transcript(own_id, prompt.text) if self.config.log_prompts else None,
        )

    def _room(self, num_prompt_tokens: int, given: GenerateInput) -> int:
        """Tokens that may be generated. Raises ContextLengthExceeded when there is no room."""
        longest, wanted = self.model_info.max_model_len, given.params.max_tokens
        room = longest - num_prompt_tokens
        if num_prompt_tokens == 0:
            raise InvalidRequest(f"{given.prompt_field} is empty", param=given.prompt_field)
        if room < 0 or (room == 0 and wanted != 0):
            raise PromptTooLong(num_prompt_tokens, longest, given.prompt_field)
        return room if wanted is None else min(room, wanted)

    def _check_ids(self, given: GenerateInput) -> None:
        for prompt in given.prompts:
            if isinstance(prompt, list):
                self.check_token_ids(prompt, given.prompt_field)
        self.check_token_ids([token_id for token_id, _ in given.params.logit_bias], "logit_bias")
        self.check_token_ids(given.params.stop_token_ids, "stop_token_ids")

    def check_token_ids(self, ids: Sequence[int], param: str) -> None:
        """Raises InvalidRequest when an id is not in the model's vocabulary."""
        size = self.model_info.vocab_size
        if not all(0 <= token_id < size for token_id in ids):
            raise InvalidRequest(
                f"{param}: token ids must be between 0 and {size - 1}", param=param
            )


def _output_format(text: ModelText, given: GenerateInput) -> OutputFormat | HarmonyFormat | None:
    return text.output_format(given.tool_choice.tools, streams_calls=given.streams_calls)


def _call_form(text: ModelText) -> CallForm:
    return CALL_FORMS[text.tool_syntax_name]


def _forced_start(text: ModelText, choice: ToolChoice) -> str:
    """How the answer has to begin; "" unless it must be a call."""
    return _call_form(text).start(choice.name) if choice.must_call else ""


def _with_start(text: ModelText, given: GenerateInput, prompt: Prompt) -> Prompt:
    """The prompt with what the answer must begin with: a call, or at least no reasoning.

    A grammar holds from the first token on, so reasoning that a template opened is closed.
    """
    start = _forced_start(text, given.tool_choice)
    is_bound = start or given.params.grammar is not None
    if is_bound and isinstance(given.prompts[0], ChatInput) and text.opens_reasoning(prompt):
        assert text.reasoning is not None
        start = f"\n{text.reasoning.end}\n\n{start}"
    if not start:
        return prompt
    ids = text.tokenizer.encode(start, add_special_tokens=False)
    return Prompt([*prompt.ids, *ids], prompt.text + start, continues=True)


def _grammar(text: ModelText, given: GenerateInput) -> str | None:
    """The grammar of the answer, with the calls that it may or must make."""
    choice, grammar = given.tool_choice, given.params.grammar
    specials = text.tokenizer.special_tokens
    if choice.must_call:
        return forced_call_grammar(_call_form(text), choice, specials)
    if grammar is not None and choice.tools:
        return beside_calls(grammar, _call_form(text), choice, specials)
    return grammar


def _size(prompt: PromptInput) -> int:
    if not isinstance(prompt, ChatInput):
        return len(prompt)
    return sum(len(message.get("content") or "") for message in prompt.messages) + (
        _SHORT_PROMPT if prompt.tools else 0
    )


def _encode(text: ModelText, prompt: PromptInput) -> Prompt:
    if isinstance(prompt, ChatInput):
        return text.encode_chat(prompt)
    if isinstance(prompt, str):
        return Prompt(text.tokenizer.encode(prompt), prompt, continues=True)
    decoded = text.tokenizer.decode(prompt, skip_special_tokens=False)
    return Prompt(prompt, decoded, continues=True)
