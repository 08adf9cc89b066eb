"""Slows down whoever guesses keys: per address, without shutting out those who have one.

Only different wrong keys count, since a program that keeps sending one old key guesses nothing.
Keys that were right from an address before are let through while guesses from it are refused, so
that a guesser behind the same router locks nobody out. Knows nothing about HTTP.
"""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

FREE_GUESSES = 5
_LONGEST_S = 60.0
_FORGET_S = 900.0
_MOST_ADDRESSES = 10_000
_MOST_DIGESTS = 64


@dataclass(slots=True)
class _Address:
    """What came from one address. Times in the clock's seconds."""

    guesses: int = 0
    last: float = 0.0
    closed_until: float = 0.0
    wrong: OrderedDict[str, None] = field(default_factory=OrderedDict)
    right: OrderedDict[str, None] = field(default_factory=OrderedDict)


class Attempts:
    """Wrong keys by address."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._addresses: OrderedDict[str, _Address] = OrderedDict()

    def wait(self, address: str, digest: str) -> float:
        """Seconds until this address may try this key; 0.0 means now."""
        known = self._addresses.get(network_of(address))
        if known is None or digest in known.right or digest in known.wrong:
            return 0.0
        return max(0.0, known.closed_until - self._clock())

    def passed(self, address: str, digest: str) -> None:
        """The key was right."""
        _remember(self._known(address).right, digest)

    def failed(self, address: str, digest: str) -> None:
        """The key was wrong."""
        known, now = self._known(address), self._clock()
        # A revoked key is wrong from now on.
        known.right.pop(digest, None)
        if digest in known.wrong:
            return
        _remember(known.wrong, digest)
        if now - known.last > _FORGET_S:
            known.guesses = 0
        known.last = now
        known.guesses += 1
        if known.guesses >= FREE_GUESSES:
            doublings = min(known.guesses - FREE_GUESSES, 10)
            known.closed_until = now + min(_LONGEST_S, 2.0**doublings)

    def _known(self, address: str) -> _Address:
        network = network_of(address)
        known = self._addresses.setdefault(network, _Address())
        self._addresses.move_to_end(network)
        while len(self._addresses) > _MOST_ADDRESSES:
            self._addresses.popitem(last=False)
        return known


def _remember(digests: OrderedDict[str, None], digest: str) -> None:
    digests[digest] = None
    digests.move_to_end(digest)
    while len(digests) > _MOST_DIGESTS:
        digests.popitem(last=False)


def network_of(address: str) -> str:
    """The address, of IPv6 the half that a network is given: the rest is anyone's to choose."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)
