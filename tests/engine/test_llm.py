"""The Python API on the demo model: all at once, one by one, stream, stop, cancel, close."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlx_cb import LLM, EngineConfig, SamplingParams
from mlx_cb.core.outputs import FinishReason
from mlx_cb.errors import ContextLengthExceeded, EngineDead, InvalidRequest, ModelNotFound

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(EngineConfig()) as engine:
        yield engine


def test_generate_waits_for_all_in_order(llm: LLM) -> None:
    prompts = ["The capital of France is", "The sky is", [1, 2, 3]]
    answers = llm.generate(prompts, GREEDY)
    assert answers[0].text.startswith(" Paris")
    assert [len(answer.token_ids) for answer in answers] == [8, 8, 8]
    assert answers[2].prompt_ids == [1, 2, 3]
    alone = llm.generate(["The sky is"], GREEDY)
    assert alone[0].text == answers[1].text


def test_submit_returns_at_once_and_results_come_as_they_end(llm: LLM) -> None:
    ended: list[str] = []
    long = llm.submit("Once upon a time", SamplingParams(temperature=0.0, max_tokens=30))
    short = llm.submit("One, two,", SamplingParams(temperature=0.0, max_tokens=3))
    for generation in (long, short):
        generation.add_done_callback(lambda g: ended.append(g.request_id))
    pieces = list(long.stream())
    assert "".join(pieces) == long.result().text
    assert len(pieces) > 5
    assert ended == [short.request_id, long.request_id]
    assert any(len(step["decodes"]) == 2 for step in llm.steps())


def test_chat_and_stop_strings(llm: LLM) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    whole = llm.submit(chat, SamplingParams(temperature=0.0, max_tokens=20)).result()
    assert "Paris" in whole.text
    assert whole.finish_reason is FinishReason.STOP
    cut = llm.submit(chat, SamplingParams(temperature=0.0, max_tokens=20, stop=(" Par",))).result()
    assert cut.text == whole.text[: whole.text.index(" Par")]
    assert cut.stop == " Par"


def test_cancel_keeps_what_was_generated(llm: LLM) -> None:
    generation = llm.submit("Once upon a time", SamplingParams(max_tokens=500, ignore_eos=True))
    stream = generation.stream()
    next(stream)
    generation.cancel()
    output = generation.result(timeout=20)
    assert output.finish_reason is FinishReason.ABORT
    assert 0 < len(output.token_ids) < 500


def test_bad_requests_fail_alone(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceeded):
        llm.submit([1] * 9000, GREEDY).result()
    with pytest.raises(InvalidRequest, match="list of prompts"):
        llm.generate("not a list")
    assert llm.submit("The sky is", GREEDY).result().token_ids


def test_missing_model_and_closed_llm() -> None:
    with pytest.raises(ModelNotFound):
        LLM("/no/such/model")
    llm = LLM()
    generation = llm.submit("Once upon a time", SamplingParams(max_tokens=500, ignore_eos=True))
    next(generation.stream())
    llm.close()
    with pytest.raises(EngineDead):
        generation.result()
    with pytest.raises(EngineDead):
        llm.submit("x")
