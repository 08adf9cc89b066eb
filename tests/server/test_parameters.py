"""Sampling parameters, seeds, token limits, stops: C017, C018, C031 to C042."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

Serve = Callable[..., Any]
TEN = {"tokens": [f"t{n} " for n in range(10)]}
ENDLESS = {"tokens": ["x"], "repeat": True}
LIMITED = {"max_model_len": 256}
ROUTES = ["/v1/chat/completions", "/v1/completions"]
NUMBERS = [
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty",
]  # fmt: skip


def ask(server: Any, route: str = ROUTES[0], **fields: Any) -> httpx2.Response:
    if route.endswith("chat/completions"):
        return server.chat(**fields)
    return server.post(route, {"prompt": "hello", **fields})


def received(server: Any, answer: httpx2.Response) -> Any:
    """The parameters that the engine got for this answer."""
    assert answer.status_code == 200, answer.text
    return server.engine.played[answer.headers["x-request-id"]].params


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", NUMBERS)
def test_c037_bad_numbers_are_refused_by_name(serve: Serve, route: str, name: str) -> None:
    server = serve(TEN)
    for value in (-3, "abc", [], {}, True, 1e308):
        answer = ask(server, route, **{name: value})
        assert answer.status_code == 400, (name, value)
        assert answer.json()["error"]["param"] == name
    for word in ("NaN", "Infinity", "-Infinity", "1e999"):
        body = f'{{"prompt":"a","messages":[{{"role":"user","content":"a"}}],"{name}":{word}}}'
        answer = server.post(route, content=body.encode())
        assert answer.status_code == 400, (name, word)
    assert ask(server, route, **{name: None}).status_code == 200


def test_c038_greedy_whatever_the_rest(serve: Serve) -> None:
    server = serve(TEN)
    for top_p in (0, 1e-9, 1):
        for top_k in (0, 1):
            answer = ask(server, temperature=0, top_p=top_p, top_k=top_k, min_p=1)
            assert received(server, answer).is_greedy


def test_parameters_reach_the_engine(serve: Serve) -> None:
    server = serve(TEN)
    params = received(
        server,
        ask(
            server, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, presence_penalty=1,
            frequency_penalty=-1, repetition_penalty=1.1, logit_bias={"3": 5, "7": -100},
            max_tokens=9, stop=["END", "\n\n"], seed=7, min_tokens=2, ignore_eos=True,
            stop_token_ids=[5],
        ),
    )  # fmt: skip
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 40, 0.1)
    assert (params.presence_penalty, params.frequency_penalty) == (1, -1)
    assert params.repetition_penalty == 1.1
    assert params.logit_bias == ((3, 5), (7, -100))
    assert (params.max_tokens, params.stop, params.seed) == (9, ("END", "\n\n"), 7)
    assert (params.min_tokens, params.ignore_eos, params.stop_token_ids) == (2, True, (5,))


def test_c039_logit_bias_outside_the_vocabulary(serve: Serve) -> None:
    server = serve(TEN)
    size = server.engine.model_info.vocab_size
    for bias in (
        {str(size): 1}, {str(size + 1000): 1}, {"-1": 1}, {"abc": 1}, {"1.5": 1}, {"0": 1000},
        {"0": "5"}, {"0": None}, [], "x",
    ):  # fmt: skip
        answer = ask(server, logit_bias=bias)
        assert answer.status_code == 400, bias
        assert "logit_bias" in answer.json()["error"]["param"]
    many = {str(n): -100 for n in range(size)}
    assert ask(server, logit_bias=many).status_code == 200
    assert ask(server, logit_bias={"0": 100, str(size - 1): -100}).status_code == 200


def test_c040_and_c042_seeds(serve: Serve) -> None:
    server = serve(TEN)
    for seed in (0, 1, 2**31, 2**32, 2**63, 2**64 - 1):
        assert received(server, ask(server, seed=seed)).seed == seed
    assert received(server, ask(server, seed=-1)).seed is None  # any seed, as llama.cpp has it
    assert received(server, ask(server)).seed is None
    for seed in (-2, 2**64, 1.5, "7", True, [1]):
        answer = ask(server, seed=seed)
        assert answer.status_code == 400, seed
        assert answer.json()["error"]["param"] == "seed"


def test_c041_every_choice_has_a_seed_of_its_own(serve: Serve) -> None:
    server = serve(TEN)
    answer = ask(server, n=3, seed=42)
    request_id = answer.headers["x-request-id"]
    played = server.engine.played
    seeds = [played[key].params.seed for key in (request_id, f"{request_id}-1", f"{request_id}-2")]
    assert seeds == [42, 43, 44]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stop", [None, [], "", [""], ["", "END"], ["a"] * 5, "z" * 10000])
def test_c017_stops_that_say_nothing(serve: Serve, route: str, stop: Any) -> None:
    answer = ask(serve({"tokens": ["one ", "two"]}), route, stop=stop)
    assert answer.status_code == 200
    assert "one two" in answer.text


def test_c017_a_stop_of_another_type_is_refused(serve: Serve) -> None:
    server = serve(TEN)
    for stop in (3, [3], {}, [None]):
        answer = ask(server, stop=stop)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_c014_c018_a_split_stop_cuts_alike_everywhere(
    serve: Serve, route: str, stream: bool
) -> None:
    server = serve({"tokens": ["al", "pha be", "ta gam", "ma omega"], "repeat": True})
    answer = ask(server, route, stop=["beta gamma"], stream=stream)
    assert "omega" not in answer.text
    assert "bet" not in answer.text
    assert '"finish_reason":"stop"' in answer.text
    # The rest was not generated: an abandoned request would go on for ever.
    deadline = time.monotonic() + 2
    played = server.engine.played[answer.headers["x-request-id"]]
    while played.status != "finished":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert played.num_tokens <= 5


def test_c031_c036_a_long_prompt_is_refused_before_anything(serve: Serve) -> None:
    server = serve(TEN, script=LIMITED)
    for stream in (False, True):
        started = time.monotonic()
        answer = ask(server, "/v1/completions", prompt="x" * 50_000, stream=stream)
        assert time.monotonic() - started < 1
        assert answer.status_code == 400
        assert answer.headers["content-type"] == "application/json"
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "256" in error["message"]
        assert "50000" in error["message"]
    assert not server.engine.played


@pytest.mark.parametrize("size", [250, 254, 255])
@pytest.mark.parametrize("max_tokens", [1, 2, 6, 100, None, -1, 128_000])
def test_c032_near_the_limit_the_rest_is_given(
    serve: Serve, size: int, max_tokens: int | None
) -> None:
    server = serve(ENDLESS, script=LIMITED)
    answer = ask(server, "/v1/completions", prompt="x" * size, max_tokens=max_tokens)
    assert answer.status_code == 200
    wanted = 256 - size if max_tokens in (None, -1) else min(max_tokens, 256 - size)
    assert answer.json()["usage"]["completion_tokens"] == wanted
    assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_c032_no_room_is_a_refusal(serve: Serve) -> None:
    server = serve(ENDLESS, script=LIMITED)
    for size in (256, 257):
        answer = ask(server, "/v1/completions", prompt="x" * size, max_tokens=1)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_c033_without_a_limit_the_context_is_the_limit(serve: Serve) -> None:
    server = serve(ENDLESS, script={"max_model_len": 2048})
    answer = ask(server, "/v1/completions", prompt="x" * 100)
    assert answer.json()["usage"]["completion_tokens"] == 1948
    assert answer.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_c034_finish_reason_says_what_ended(serve: Serve, route: str, stream: bool) -> None:
    server = serve(TEN)
    for max_tokens, reason in ((1, "length"), (9, "length"), (10, "length"), (11, "stop")):
        answer = ask(server, route, max_tokens=max_tokens, stream=stream)
        assert f'"finish_reason":"{reason}"' in answer.text, max_tokens


def test_c035_the_newer_name_of_the_limit_wins(serve: Serve) -> None:
    server = serve(TEN)
    for fields, limit in (
        ({"max_completion_tokens": 5}, 5),
        ({"max_completion_tokens": 5, "max_tokens": 5}, 5),
        ({"max_completion_tokens": 3, "max_tokens": 7}, 3),
        ({"max_tokens": 4}, 4),
    ):
        assert ask(server, **fields).json()["usage"]["completion_tokens"] == limit


def test_c036_with_stream_every_refusal_is_a_real_status(serve: Serve) -> None:
    server = serve(TEN, script={**LIMITED, "model": "one"}, strict_model=True)
    for body in (
        {"messages": [{"role": "user", "content": "x" * 5000}]},
        {"messages": [{"role": "user", "content": "x"}], "model": "unknown"},
        {"messages": [{"role": "user", "content": "x"}], "temperature": -1},
        {"messages": []},
    ):
        answer = server.post("/v1/chat/completions", {**body, "stream": True})
        assert answer.status_code in (400, 404)
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["error"]["message"]
