"""LLM: the Python API. One engine in this process, on a thread of its own; no server, no socket.

    llm = LLM("demo")
    for answer in llm.generate(["Once upon a time", "The sky is"], SamplingParams(max_tokens=20)):
        print(answer.text)

`submit` returns at once; each generation gives its result, or its text piece by piece, as it ends,
whatever the others do.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_cb.config import EngineConfig, ModelConfig
from mlx_cb.core.outputs import FinishReason, RequestOutput, TokenLogprobs
from mlx_cb.engine.core import EngineCore
from mlx_cb.engine.interface import ModelInfo
from mlx_cb.errors import EngineDead, InvalidRequest
from mlx_cb.sampling_params import SamplingParams
from mlx_cb.text.chat_template import ChatInput
from mlx_cb.text.events import EndReason, Finish, OutputEvent, TextDelta
from mlx_cb.text.model_text import ModelText
from mlx_cb.text.output_parser import OutputParser, ParserOptions

#: A text, token ids, or chat messages.
PromptInput = str | Sequence[int] | Sequence[dict[str, Any]]


@dataclass(slots=True)
class GenerationOutput:
    """A finished generation. `stop` is the stop string that ended it, if one did."""

    request_id: str
    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | None = None


class Generation:
    """One generation on its way; behaves like a future."""

    def __init__(self, output: GenerationOutput, cancel: Callable[[], None]) -> None:
        self._output = output
        self._cancel = cancel
        self._future: Future[GenerationOutput] = Future()
        self._pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    @property
    def request_id(self) -> str:
        """Name under which the journal knows it."""
        return self._output.request_id

    def done(self) -> bool:
        """True when the result (or the error) is there."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> GenerationOutput:
        """Wait for the end. Raises TimeoutError after `timeout` seconds, or what went wrong."""
        return self._future.result(timeout)

    def stream(self) -> Iterator[str]:
        """Text as it comes, for one reader; raises at the end what went wrong."""
        while (piece := self._pieces.get()) is not None:
            yield piece
        self._future.result()

    def cancel(self) -> None:
        """Stop generating; the result is what was generated so far."""
        self._cancel()

    def add_done_callback(self, callback: Callable[[Generation], None]) -> None:
        """Call `callback(self)` on the engine's thread when done, or now when it already is."""
        self._future.add_done_callback(lambda _: callback(self))


@dataclass(slots=True)
class _Running:
    generation: Generation
    output: GenerationOutput
    parser: OutputParser

    def take(self, delta: RequestOutput) -> bool:
        """Add an engine output; True when a stop string has ended the text."""
        self.output.token_ids += delta.token_ids
        self.output.logprobs += delta.logprobs or []
        if delta.error is not None:
            self.end(EngineDead(delta.error))
            return False
        for event in self.parser.feed(delta):
            self._take_event(event)
        if delta.finish_reason is not None or self.parser.is_finished:
            self.output.finish_reason = delta.finish_reason or FinishReason.STOP
            self.end(None)
        return self.parser.is_finished and delta.finish_reason is None

    def _take_event(self, event: OutputEvent) -> None:
        if isinstance(event, TextDelta):
            self.output.text += event.text
            self.generation._pieces.put(event.text)
        elif isinstance(event, Finish) and event.reason is EndReason.STOP_STRING:
            self.output.stop = event.stop

    def end(self, error: Exception | None) -> None:
        """Settle the future, then wake the reader of the stream."""
        if error is not None:
            self.generation._future.set_exception(error)
        else:
            self.generation._future.set_result(self.output)
        self.generation._pieces.put(None)


class LLM:
    """A model and everything that is being generated with it, in this process.

    All MLX calls happen on the engine's own thread; the methods here may be called from any.
    """

    def __init__(self, model: str | EngineConfig = "demo") -> None:
        """Load a model (hub id, folder, `.gguf` file, `demo`) or what an EngineConfig says.

        Raises ModelNotFound, UnsupportedModel or OutOfMemory.
        """
        config = model if isinstance(model, EngineConfig) else EngineConfig(ModelConfig(model))
        self._calls: queue.SimpleQueue[Callable[[EngineCore], None] | None] = queue.SimpleQueue()
        self._running: dict[str, _Running] = {}
        self._names = itertools.count()
        self._closed = False
        loaded: Future[EngineCore] = Future()
        self._thread = threading.Thread(
            target=self._main, args=(config, loaded), name="mlx-cb engine", daemon=True
        )
        self._thread.start()
        self._core = loaded.result()
        self.model_info: ModelInfo = self._core.info()
        self._text = ModelText.load(Path(self.model_info.path))

    def submit(self, prompt: PromptInput, params: SamplingParams | None = None) -> Generation:
        """Start one generation and return at once.

        Raises InvalidRequest for a prompt that cannot be served.
        """
        if self._closed:
            raise EngineDead("this LLM is closed")
        params = params or SamplingParams.asked({})
        prompt_ids, follows_text = self._encode(prompt)
        name = f"generation-{next(self._names)}"
        options = ParserOptions(stops=params.stop, follows_text=follows_text)
        output = GenerationOutput(name, prompt_ids)
        generation = Generation(output, lambda: self._calls.put(lambda core: core.abort(name)))
        running = _Running(generation, output, OutputParser(self._text.tokenizer, options))

        def add(core: EngineCore) -> None:
            try:
                core.add(name, prompt_ids, params)
            except InvalidRequest as error:
                running.end(error)
            else:
                self._running[name] = running

        self._calls.put(add)
        return generation

    def generate(
        self,
        prompts: Sequence[PromptInput],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[GenerationOutput]:
        """Generate for all prompts at once and wait for all; results in the prompts' order."""
        if isinstance(prompts, str):
            raise InvalidRequest("generate takes a list of prompts; submit takes one")
        each = params if isinstance(params, Sequence) else [params] * len(prompts)
        generations = [self.submit(p, s) for p, s in zip(prompts, each, strict=True)]
        return [generation.result() for generation in generations]

    def steps(self, last: int = 100) -> list[dict[str, Any]]:
        """Newest records of the step journal, oldest first."""
        answer: Future[list[dict[str, Any]]] = Future()
        self._calls.put(lambda core: answer.set_result(core.scheduler.journal.last(last)))
        return answer.result()

    def close(self) -> None:
        """Abort what runs and end the engine's thread."""
        if not self._closed:
            self._closed = True
            self._calls.put(None)
            self._thread.join()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode(self, prompt: PromptInput) -> tuple[list[int], bool]:
        """Token ids, and whether the output goes on the prompt's text."""
        if isinstance(prompt, str):
            return self._text.tokenizer.encode(prompt), True
        if prompt and isinstance(prompt[0], dict):
            rendered = self._text.encode_chat(ChatInput(messages=list(prompt)))  # type: ignore[arg-type]
            return rendered.ids, rendered.continues
        return list(prompt), True  # type: ignore[arg-type]

    def _main(self, config: EngineConfig, loaded: Future[EngineCore]) -> None:
        try:
            core = EngineCore.load(config)
        except BaseException as error:
            loaded.set_exception(error)
            return
        loaded.set_result(core)
        while self._take_calls(core):
            for delta in core.step():
                running = self._running.get(delta.request_id)
                if running is None:
                    continue
                stopped = running.take(delta)
                if running.generation.done():
                    del self._running[delta.request_id]
                if stopped:
                    core.abort(delta.request_id)
        for running in self._running.values():
            running.end(EngineDead("the LLM was closed"))
        core.close()

    def _take_calls(self, core: EngineCore) -> bool:
        """Run what other threads ask for; waits for it when there is nothing else to do."""
        while True:
            try:
                call = self._calls.get(block=not core.has_work and not core.idle())
            except queue.Empty:
                return True
            if call is None:
                return False
            call(core)
