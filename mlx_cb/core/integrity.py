"""Whether a scheduler's lists agree with each other; asked by tests and when something is odd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlx_cb.core.request import Request, RequestStatus


def check_places(
    requests: Mapping[str, Request], waiting: Mapping[str, Request], running: Sequence[Request]
) -> None:
    """Raise AssertionError unless every unfinished request is in one place, its own."""
    placed = [*waiting.values(), *running]
    assert len(placed) == len({request.request_id for request in placed})
    for request in placed:
        assert requests[request.request_id] is request
        assert request.status is not RequestStatus.FINISHED
        is_waiting = request.status is not RequestStatus.RUNNING
        assert (request.request_id in waiting) == is_waiting
        assert request.copy_from is None, "a copy was promised and not planned"
    assert all(not request.block_table for request in waiting.values())
