"""The scripted engine's own rules: which reply fits, what a wrong script says."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_cb.engine.script import read_script
from mlx_cb.errors import UnsupportedModel

Serve = Callable[..., Any]
DOCUMENT = Path(__file__).parents[2] / "docs" / "scripted.md"


def test_the_documented_script_is_valid(tmp_path: Path) -> None:
    found = re.search(r"```yaml\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    assert found
    (tmp_path / "s.yaml").write_text(found[1])
    script = read_script(tmp_path / "s.yaml")
    assert len(script.replies) == 6
    tokens = script.replies[3].script_tokens()
    assert b"".join(token.value for token in tokens) == "alpha 👍!".encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("s.yaml", "replies: [{text: hi}]"),
        ("s.json", '{"replies": [{"text": "hi"}]}'),
        ("s.toml", '[[replies]]\ntext = "hi"'),
    ],
)
def test_three_forms_of_file(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert read_script(tmp_path / name).replies[0].text == "hi"


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("replies: [{txt: hi}]", "txt"),
        ("replies: 3", "replies"),
        ("a: [", "line"),
        ("{}", "replies"),
    ],
)
def test_a_wrong_script_says_where(tmp_path: Path, content: str, word: str) -> None:
    (tmp_path / "s.yaml").write_text(content)
    with pytest.raises(UnsupportedModel) as caught:
        read_script(tmp_path / "s.yaml")
    assert word in caught.value.message


def test_the_first_reply_that_fits_wins(serve: Serve) -> None:
    server = serve(
        {"match": "one", "text": "first", "times": 1}, {"match": "one", "text": "later"},
        {"match": "two", "turn": 1, "text": "never"}, script={"model": "m"},
    )  # fmt: skip
    texts = [server.chat("one").json()["choices"][0]["message"]["content"] for _ in range(3)]
    assert texts == ["first", "later", "later"]
    answer = server.chat("two")
    assert answer.status_code == 400
    assert "no reply" in answer.json()["error"]["message"]


def test_replies_wait_for_a_free_place(serve: Serve) -> None:
    server = serve({"text": "a", "prefill_s": 0.2}, script={"max_num_seqs": 1})
    server.chat(n=3)
    starts = sorted(played.first_token_at for played in server.engine.played.values())
    assert all(b - a > 0.15 for a, b in itertools.pairwise(starts))
