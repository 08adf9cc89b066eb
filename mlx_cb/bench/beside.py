"""What streams notice of something that goes on beside them, and what it costs the server.

The same load runs alone and beside it, in turn, round after round. Owns two things that can go on:
connections that drip their requests, and people who look at the operator's page. Knows nothing
about how servers are started.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import msgspec

from mlx_cb.bench.compare import Conditions, plan_seed
from mlx_cb.bench.exchange import Endpoint, exchange, get_json_bytes
from mlx_cb.bench.generator import drive
from mlx_cb.bench.servers import RunningServer
from mlx_cb.bench.stats import Summary, median, summarize
from mlx_cb.bench.workloads.base import Workload
from mlx_cb.errors import MlxCbError

DRIP_EVERY_S = 2.0
PEOPLE_EVERY = 5  # looks; as the page does it
_REQUEST = b"GET / HTTP/1.1\r\nX-A: "
# A handshake's first record, of which 512 bytes are announced and hardly any come.
_HANDSHAKE = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"


@dataclass(frozen=True, slots=True)
class Pass:
    """One run of the load.

    Attributes:
        itl: gaps between the streams' chunks, seconds.
        cpu_s: CPU time of the server meanwhile; None when its process is not known.
        failures: streams that did not end as asked.
    """

    itl: Summary
    cpu_s: float | None
    span_s: float
    tokens: int
    failures: int


@dataclass(slots=True)
class Rounds:
    """The passes alone and beside, in the order of the rounds."""

    alone: list[Pass] = field(default_factory=list)
    beside: list[Pass] = field(default_factory=list)

    def ratio(self, percentile: str) -> float:
        """How much longer the streams' gaps are beside it: medians over the rounds."""
        alone, beside = (
            median([one.itl[percentile] for one in passes]) for passes in (self.alone, self.beside)
        )
        return beside / alone

    @property
    def extra_cpu_s(self) -> list[float]:
        """CPU time that was spent beyond the pass alone, by round; empty when none is known."""
        pairs = zip(self.alone, self.beside, strict=True)
        return [b.cpu_s - a.cpu_s for a, b in pairs if a.cpu_s is not None and b.cpu_s is not None]


Beside = Callable[[], AbstractAsyncContextManager[object]]


async def measure_beside(
    server: RunningServer,
    conditions: Conditions,
    workload: Workload,
    beside: Beside,
    told: Callable[[str, Pass], None] = lambda name, one: None,
) -> Rounds:
    """Run the load alone and beside it, `conditions.rounds` times. Raises MlxCbError on failures.

    The order changes with every round, so that what drifts (a warmer machine) favours neither.
    """
    rounds = Rounds()
    kinds: list[tuple[str, Beside, list[Pass]]] = [
        ("alone", contextlib.nullcontext, rounds.alone), ("beside", beside, rounds.beside),
    ]  # fmt: skip
    for number in range(conditions.rounds):
        for name, around, passes in kinds if number % 2 == 0 else kinds[::-1]:
            seed = plan_seed(name, conditions.seed, number)
            async with around():
                passes.append(await _one_pass(server, conditions, workload, seed))
            told(name, passes[-1])
    failures = sum(one.failures for one in rounds.alone + rounds.beside)
    if failures:
        raise MlxCbError(f"{failures} streams did not end as asked: {server.log_tail()}")
    return rounds


async def _one_pass(
    server: RunningServer, conditions: Conditions, workload: Workload, seed: int
) -> Pass:
    before = server.cpu_seconds()
    run = await drive(conditions.target(server), workload.plan(seed))
    after = server.cpu_seconds()
    return Pass(
        itl=summarize([gap for record in run.records for gap in record.gaps_s]),
        cpu_s=None if before is None or after is None else after - before,
        span_s=max(record.ended_s for record in run.records),
        tokens=sum(record.output_tokens for record in run.records),
        failures=sum(not record.is_complete for record in run.records),
    )


@dataclass(slots=True)
class Dripping:
    """`number` connections that never finish their request, or over TLS their handshake.

    One that the server closes comes back at once; `closed` counts those.
    """

    endpoint: Endpoint
    number: int
    closed: int = 0

    @contextlib.asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """All of them are there from the beginning to the end of this context."""
        connected = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(self._drip(connected)) for _ in range(self.number)]
        try:
            for _ in tasks:
                await connected.acquire()
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _drip(self, connected: asyncio.Semaphore) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_connection(
                    self.endpoint.host, self.endpoint.port
                )
            except OSError:
                await asyncio.sleep(DRIP_EVERY_S)
                continue
            connected.release()
            try:
                await _until_closed(reader, writer, _HANDSHAKE if self.endpoint.tls else _REQUEST)
                self.closed += 1
            finally:
                writer.close()


async def _until_closed(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, begin: bytes
) -> None:
    """Send a byte now and then until the server has had enough."""
    writer.write(begin)
    while True:
        with contextlib.suppress(TimeoutError, ConnectionError):
            await asyncio.wait_for(reader.read(), DRIP_EVERY_S)
        if reader.at_eof() or reader.exception() is not None:
            return
        writer.write(b"x")


@dataclass(slots=True)
class Onlookers:
    """Looks at the operator's page's state `per_second` times, as its script does once.

    `looks` counts them. Each opens a connection of its own, which a browser would not.
    """

    endpoint: Endpoint
    key: str | None
    per_second: float
    looks: int = 0

    @contextlib.asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """Somebody looks from the beginning to the end of this context. Raises MlxCbError."""
        looking = asyncio.create_task(self._look_on())
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.wait([looking])
        if not looking.cancelled():
            looking.result()

    async def _look_on(self) -> None:
        step = line = 0
        began = time.monotonic()
        for number in range(10**9):
            people = "&people=1" if number % PEOPLE_EVERY == 0 else ""
            path = f"/admin/state?after={step}&line={line}{people}"
            answer = await get_json_bytes(self.endpoint, path, key=self.key)
            if answer.status != 200:
                raise MlxCbError(f"/admin/state answers with {answer.status}: is that an admin?")
            self.looks += 1
            state = msgspec.json.decode(answer.body)
            steps: Sequence[list[int]] = (state["overview"] or {"steps": []})["steps"]
            step = max(step, steps[-1][0] - 1) if steps else step
            line = state["log"][-1]["number"] if state["log"] else line
            await asyncio.sleep(max(0.0, began + (number + 1) / self.per_second - time.monotonic()))


async def page_bytes(endpoint: Endpoint, key: str | None) -> int:
    """Compressed size of the operator's page, which is one request. Raises MlxCbError."""
    head = endpoint.head("GET", "/admin", 0, key)
    answer = await exchange(
        endpoint, head.replace(b"\r\n\r\n", b"\r\nAccept-Encoding: gzip\r\n\r\n")
    )
    if answer.status != 200:
        raise MlxCbError(f"/admin answers with {answer.status}: is that an admin?")
    return len(answer.body)
