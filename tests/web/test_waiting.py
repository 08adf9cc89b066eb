"""How many people somebody waits for, as a real engine's status tells it."""

from __future__ import annotations

from mlx_cb.engine.overview import count_users
from mlx_cb.server.conversations.waiting import _reason
from mlx_cb.server.users import User
from tests import tiny


def test_who_was_here_before_is_not_ahead() -> None:
    core = tiny.engine(tiny.llama_model(), max_num_seqs=1, prefix_cache=True)
    core.add("before", list(range(40)), tiny.greedy(3), user="carol")
    tiny.run(core)
    core.add("hers", list(range(30)), tiny.greedy(50), user="alice")
    core.add("his", list(range(30)), tiny.greedy(3), user="bob")
    for _ in range(4):
        core.step()
    status = {"users": count_users(core.scheduler)}
    assert "carol" in status["users"]  # what the prefix cache did for her is still told
    assert _reason(User("bob"), {"status": "waiting"}, status).people == 1
