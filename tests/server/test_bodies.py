"""What is wrong with a body is said in the words of the API that was asked: C026, C075 to C077.

The paths are all that take JSON and generate, count or encode; each with a body that it answers.
"""

from __future__ import annotations

import codecs
import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest

from mlx_cb.server.body import DEEPEST, LARGEST_CHECKED
from mlx_cb.server.compression import zstd

Serve = Callable[..., Any]
SAY = [{"role": "user", "content": "hello"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAY},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": SAY},
    "/v1/messages": {"messages": SAY, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": SAY},
    "/api/chat": {"messages": SAY, "model": "m", "stream": False},
    "/api/generate": {"prompt": "hello", "model": "m", "stream": False},
    "/api/show": {"model": "m"},
    "/completion": {"prompt": "hello"},
    "/tokenize": {"content": "hello"},
    "/apply-template": {"messages": SAY},
    "/api/v0/chat/completions": {"messages": SAY},
}
EVERY_PATH = pytest.mark.parametrize("path", sorted(GOOD))


@pytest.fixture(scope="module")
def server(serve_all: Serve) -> Any:
    return serve_all({"text": "x"})


def said(path: str, answer: Any) -> tuple[str, str | None]:
    """Message and field of a refusal, after a look at its shape."""
    assert answer.status_code == 400, (path, answer.status_code, answer.text)
    error = answer.json()["error"]
    if path.startswith("/api/") and not path.startswith("/api/v0/"):
        assert isinstance(error, str)
        return error, None
    if path.startswith("/v1/messages"):
        assert answer.json()["type"] == "error"
        assert error["type"] == "invalid_request_error"
        return error["message"], None
    assert set(error) == {"message", "type", "param", "code"}
    return error["message"], error["param"]


def raw(path: str, put: bytes) -> bytes:
    """The path's good body with the bytes `put` in place of its (first) text."""
    text = "m" if path == "/api/show" else "hello"
    body = json.dumps(GOOD[path]).encode()
    assert f'"{text}"'.encode() in body
    return body.replace(f'"{text}"'.encode(), put, 1)


@EVERY_PATH
def test_the_good_bodies_are_answered(server: Any, path: str) -> None:
    assert server.post(path, GOOD[path]).status_code == 200
    marked = codecs.BOM_UTF8 + json.dumps(GOOD[path]).encode()
    assert server.post(path, content=marked).status_code == 200


NO_JSON = {
    "empty": (b"", "empty"),
    "blank": (b" \n", "empty"),
    "cut": (b'{"messages": [{"role": "user", "content": "a', "ends too early"),
    "word": (b"hello", "not valid JSON"),
    "trailing comma": (b'{"a": 1,}', "not valid JSON"),
    "NaN": (b'{"temperature": NaN}', "not valid JSON"),
    "single quotes": (b"{'a': 1}", "not valid JSON"),
    "utf-16": ('{"a": 1}'.encode("utf-16"), "UTF-16"),
}


@EVERY_PATH
def test_c075_what_is_no_json_says_why(server: Any, path: str) -> None:
    for name, (body, words) in NO_JSON.items():
        message, param = said(path, server.post(path, content=body))
        assert words in message, name
        assert param is None
        assert "truncated" not in message


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("zstd", zstd.compress)])
def test_c078_a_compressed_body_without_its_header_is_known(
    server: Any, encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    path = "/v1/chat/completions"
    packed = pack(json.dumps(GOOD[path]).encode())
    message, _ = said(path, server.post(path, content=packed))
    assert f"compressed with {encoding}" in message
    assert "Content-Encoding" in message


@EVERY_PATH
def test_c075_bytes_that_are_no_utf8_are_named_with_their_place(server: Any, path: str) -> None:
    for put in (b'"\xe9"', b'"ab\xff\xfe"', b'"\xc3"', b'"\xed\xa0\x80"'):  # the last: a surrogate
        body = raw(path, put)
        place = body.index(put) + next(n for n, byte in enumerate(put) if byte > 127)
        message, param = said(path, server.post(path, content=body))
        assert f"not valid UTF-8: byte 0x{body[place]:02x} at position {place}" in message
        assert param is None
    ignored = json.dumps(GOOD[path]).encode()[:-1] + b', "whatever": "\xe9"}'
    message, _ = said(path, server.post(path, content=ignored))
    assert "not valid UTF-8: byte 0xe9" in message


@EVERY_PATH
def test_c075_what_follows_the_object_is_refused(server: Any, path: str) -> None:
    message, _ = said(path, server.post(path, content=json.dumps(GOOD[path]).encode() + b" {}"))
    assert "not valid JSON" in message


@EVERY_PATH
@pytest.mark.parametrize("body", [b"[]", b"5", b'"x"', b"true", b"null"])
def test_c076_json_that_is_no_object(server: Any, path: str, body: bytes) -> None:
    message, _ = said(path, server.post(path, content=body))
    assert "the request body: expected `object`" in message


HALVES = {
    b'"\\ud83d"': "\\ud83d", b'"a\\ud800b"': "\\ud800", b'"\\udc00"': "\\udc00",
    b'"\\ude00\\ud83d"': "\\ude00", b'"\\ud83d\\ud83d"': "\\ud83d",
}  # fmt: skip


@EVERY_PATH
def test_c077_half_of_a_pair_is_named_with_its_place(server: Any, path: str) -> None:
    place = next(iter(GOOD[path]))
    place += "[0].content" if place in ("messages", "input") else ""
    for text, half in HALVES.items():
        message, param = said(path, server.post(path, content=raw(path, text)))
        assert f"{place}: {half} is half of a surrogate pair" in message
        assert param in (place, None)


@EVERY_PATH
def test_c077_whole_pairs_and_strange_characters_are_text(server: Any, path: str) -> None:
    if path == "/api/show":
        return
    combining = b'"' + "é\u0301".encode() * 1000 + b'"'
    for text in (b'"\\ud83d\\ude00"', b'"\\u0000"', b'"\\u2028"', combining):
        assert server.post(path, content=raw(path, text)).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", '["\\ud800"]'), ("user", '"\\udc00"'), ("model", '"\\ud800"'),
        ("tools", '[{"type": "function", "function": {"name": "a\\ud800"}}]'),
        ("metadata", '{"a\\ud800": 1}'),
    ],
)  # fmt: skip
def test_c077_halves_in_other_fields_never_fail_the_server(
    server: Any, field: str, value: str
) -> None:
    """Where it would be used it is refused, where it is ignored it may pass."""
    path = "/v1/chat/completions"
    body = json.dumps(GOOD[path])[:-1] + f', "{field}": {value}}}'
    answer = server.post(path, content=body.encode())
    if field in ("stop", "model", "tools"):
        message, param = said(path, answer)
        assert "is half of a surrogate pair" in message
        assert param is not None
        assert param.startswith(field)
    else:
        assert answer.status_code in (200, 400)


@EVERY_PATH
def test_a_key_that_is_given_twice_is_named(server: Any, path: str) -> None:
    body = json.dumps(GOOD[path]).encode()
    twice = body[:-1] + b', "metadata": {"a": 1, "b": 2, "a": 3}}'
    message, param = said(path, server.post(path, content=twice))
    assert "a is given twice" in message
    assert param in ("a", None)
    half = body[:-1] + b', "\\ud800": 1, "\\ud800": 2}'
    message, _ = said(path, server.post(path, content=half))
    assert "given twice" in message or "half of a surrogate pair" in message


WRONG_TYPES: dict[str, dict[str, tuple[Any, ...]]] = {
    "/v1/chat/completions": {
        "temperature": ("x", [], True), "max_tokens": (1.5, "9"), "stream": (1, "yes"),
        "messages": (3, "hi", {}), "tools": ({}, "x"), "n": ("2",), "logit_bias": ([],),
        "stream_options": (True,), "response_format": ("json",), "seed": (1.5, "7"),
    },
    "/v1/completions": {"prompt": (3, None, {}), "suffix": (1,), "echo": ("x",), "best_of": ("x",)},
    "/v1/responses": {
        "input": (3, {}), "instructions": (1,), "tools": ({},), "text": ("json",),
        "max_output_tokens": ("9",), "reasoning": ("high",), "previous_response_id": (7,),
    },
    "/v1/messages": {
        "messages": (3, "hi"), "system": (3,), "tools": ({},), "tool_choice": ("auto",),
        "max_tokens": ("9", 1.5), "thinking": (True,), "stop_sequences": ("END",),
    },
    "/v1/messages/count_tokens": {"messages": ("hi",), "system": (3,)},
    "/api/chat": {
        "messages": ("hi",), "options": ([],), "stream": ("no",), "tools": ({},), "think": ([],),
        "keep_alive": ([],), "model": (3, None),
    },
    "/api/generate": {"prompt": (3,), "options": (1,), "raw": ("x",), "suffix": (1,)},
    "/api/show": {"model": (3,)},
    "/completion": {"prompt": (3, {}), "n_predict": ("9",), "stop": ("END",)},
    "/tokenize": {"content": (3,), "with_pieces": (3,)},
    "/apply-template": {"messages": ("hi",)},
    "/api/v0/chat/completions": {"temperature": ("x",)},
}  # fmt: skip


@EVERY_PATH
def test_a_wrong_type_names_its_field(server: Any, path: str) -> None:
    for field, values in WRONG_TYPES[path].items():
        for value in values:
            answer = server.post(path, {**GOOD[path], field: value})
            message, param = said(path, answer)
            assert message.startswith(field), (field, value, message)
            assert param is None or param.startswith(field)


@EVERY_PATH
def test_a_body_may_be_so_deep_and_no_deeper(server: Any, path: str) -> None:
    def nested(levels: int) -> bytes:
        deep = b"[" * levels + b'"[{[{"' + b"]" * levels
        return json.dumps(GOOD[path]).encode()[:-1] + b', "whatever": ' + deep + b"}"

    assert server.post(path, content=nested(DEEPEST - 1)).status_code == 200
    for levels in (DEEPEST, 200, 900):
        message, param = said(path, server.post(path, content=nested(levels)))
        assert f"whatever: nested deeper than {DEEPEST} levels" in message
        assert param in ("whatever", None)
    message, _ = said(path, server.post(path, content=nested(100_000)))
    assert f"nested deeper than {DEEPEST} levels" in message


def test_a_huge_body_that_is_too_deep_is_refused_too(server: Any) -> None:
    body = b'{"prompt": "%s", "whatever": %s}'
    deep = b"[" * 50_000 + b"]" * 50_000
    path = "/v1/completions"
    answer = server.post(path, content=body % (b"x" * LARGEST_CHECKED, deep))
    assert "nested deeper" in said(path, answer)[0]
