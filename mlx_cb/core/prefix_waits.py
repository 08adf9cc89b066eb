"""Knows which blocks are being computed right now, so that nobody computes them a second time.

A request whose text goes on with such blocks waits for them. Knows no blocks of the pool and does
not decide who runs: the scheduler gives a waiting request's turn to the one it waits for.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_cb.core.request import Request


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """What is worth waiting for: `request` computes the first `num_tokens` tokens of both.

    `last` is the hash of the last block of them.
    """

    request: Request
    num_tokens: int
    last: bytes


class PrefixWaits:
    """Block hashes of prompts in the making, by the request that will have computed them."""

    def __init__(self) -> None:
        self._expected: dict[bytes, Request] = {}
        self._waiting: dict[str, SharedPrefix] = {}

    def expect(self, request: Request, first: int, last: int) -> None:
        """A request was admitted and computes its blocks `first` to `last`."""
        self._waiting.pop(request.request_id, None)
        for content_hash in request.block_hashes[first:last]:
            self._expected.setdefault(content_hash, request)

    def settle(self, request: Request, first: int, last: int) -> None:
        """Its blocks `first` to `last` are computed, or will never be."""
        for content_hash in request.block_hashes[first:last]:
            if self._expected.get(content_hash) is request:
                del self._expected[content_hash]

    def known(self, request: Request) -> SharedPrefix | None:
        """What the request was found to wait for, if that is still in the making."""
        shared = self._waiting.get(request.request_id)
        if shared is not None and self._expected.get(shared.last) is shared.request:
            return shared
        return None

    def find(self, request: Request, first: int, block_size: int) -> SharedPrefix | None:
        """The blocks from `first` on that another one computes; the request's hashes are known."""
        hashes = request.block_hashes
        end = (request.num_tokens - 1) // block_size
        if first >= end:
            return None
        provider = self._expected.get(hashes[first])
        if provider is None:
            return None
        last = first + 1
        while last < end and self._expected.get(hashes[last]) is provider:
            last += 1
        return SharedPrefix(provider, last * block_size, hashes[last - 1])

    def wait(self, request: Request, shared: SharedPrefix) -> None:
        """Keep what was found, so that the next look costs nothing."""
        self._waiting[request.request_id] = shared

    def leave(self, request: Request) -> None:
        """The request waits no longer."""
        self._waiting.pop(request.request_id, None)
