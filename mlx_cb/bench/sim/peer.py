"""mlx_lm.server under virtual time: what its generation thread does, pass by pass.

Read in mlx-lm 0.32.2: `server.py` (`ResponseGenerator._generate`, `TimeBudget`) and `generate.py`
(`BatchGenerator._next`). One decode pass for the running batch, then a pass of its own over up to
`prompt_concurrency` prompts padded to the longest, before any stream moves on; the last prompt
token is a pass again. First come, first served, no queue bound. New calls and hang-ups are looked
at every half second while anything runs. Seeds, tools and drafts are not modelled.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from dataclasses import dataclass, field

from mlx_cb.bench.sim.client import Client, SimCall
from mlx_cb.bench.sim.clock import VirtualClock
from mlx_cb.bench.sim.cost import PassShape, draw_seconds
from mlx_cb.bench.sim.substrate import Substrate

TIME_BUDGET_S = 0.5


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """Its flags, at their defaults."""

    decode_concurrency: int = 32
    prompt_concurrency: int = 8
    prefill_step_size: int = 2048
    prompt_cache_size: int = 10


TUNED = PeerSettings(prompt_concurrency=1, prefill_step_size=64)


@dataclass(slots=True, eq=False)
class _Sequence:
    """A call in the generator. `known` tokens are in its cache, the last prompt token excepted."""

    call: SimCall
    client: Client
    known: int
    cached: int
    num_said: int = 0
    has_stopped: bool = False

    @property
    def missing(self) -> int:
        """Prompt tokens to compute before the last one."""
        return len(self.call.prompt) - 1 - self.known


@dataclass(slots=True)
class _Batch:
    """Sequences that decode together, in a cache padded to `length`."""

    sequences: list[_Sequence] = field(default_factory=list)
    length: int = 0


class PeerServer:
    """One generation thread, and threads around it whose time is `peer_row_s`."""

    def __init__(
        self, clock: VirtualClock, substrate: Substrate, settings: PeerSettings, *, seed: int = 0
    ) -> None:
        self.clock = clock
        self.substrate = substrate
        self.settings = settings
        self._noise = random.Random(seed)
        self._requests: deque[tuple[SimCall, Client]] = deque()
        self._unprocessed: deque[_Sequence] = deque()
        self._prompts: list[_Sequence] = []
        self._batch = _Batch()
        self._by_call: dict[int, _Sequence] = {}
        self._prompt_cache: list[list[int]] = []
        self._is_busy = False
        self._window_ends = 0.0
        self._host = 0.0  # the generation thread's own time
        self._device = 0.0  # until then the device has work
        self._tokens_ready = 0.0  # then the tokens chosen last can be read
        self._copied = 0  # tokens to be moved by the next pass
        self._next_token = 0

    # HTTP threads.

    def send(self, call: SimCall, client: Client) -> None:
        """See SimServer."""
        self.clock.after(
            self.substrate.peer_front_s / 2, functools.partial(self._arrive, call, client)
        )

    def hang_up(self, call: SimCall) -> None:
        """Noticed when the next bytes cannot be written; see SimServer."""
        sequence = self._by_call.get(call.number)
        if sequence is not None:
            sequence.has_stopped = True

    def _arrive(self, call: SimCall, client: Client) -> None:
        self._requests.append((call, client))
        if not self._is_busy:
            self._is_busy = True
            # What comes in the same instant is taken in together.
            self.clock.at(self.clock.now, self._begin_window)

    # The generation thread.

    def _begin_window(self) -> None:
        """Take in what has come and what has gone, then generate for half a second."""
        gone = {id(s) for s in self._by_call.values() if s.has_stopped}
        if gone:
            self._remove(gone)
        while self._requests:
            self._insert(*self._requests.popleft())
        if not self._by_call:
            self._is_busy = False
            return
        self._host = max(self._host, self.clock.now)
        self._window_ends = self.clock.now + TIME_BUDGET_S
        self._next()

    def _remove(self, gone: set[int]) -> None:
        self._unprocessed = deque(s for s in self._unprocessed if id(s) not in gone)
        self._prompts = [s for s in self._prompts if id(s) not in gone]
        self._shrink([s for s in self._batch.sequences if id(s) not in gone])
        self._by_call = {n: s for n, s in self._by_call.items() if id(s) not in gone}

    def _insert(self, call: SimCall, client: Client) -> None:
        if call.has_ended:
            return
        known = max((_common(call.prompt, entry) for entry in self._prompt_cache), default=0)
        known = min(known, len(call.prompt) - 1)
        sequence = _Sequence(call, client, known, cached=known)
        self._by_call[call.number] = sequence
        self._unprocessed.append(sequence)

    def _next(self) -> None:
        """One `BatchGenerator._next`, computed at its beginning; its outputs come at its end."""
        said = self._decode()
        if len(self._batch.sequences) < self.settings.decode_concurrency:
            self._fill_prompts()
            self._join()
            self._prefill()
        self._host += self.substrate.peer_host_seconds(len(said))
        self.clock.at(self._host, functools.partial(self._hand_out, said))

    def _decode(self) -> list[tuple[_Sequence, bool]]:
        """Launch the next pass, read the tokens of the one before: (who said one, was it its last).

        The pass is launched before it is known who has ended: that row is wasted.
        """
        batch = self._batch
        if not batch.sequences:
            return []
        count = len(batch.sequences)
        before = self._tokens_ready
        batch.length += 1
        self._launch(PassShape(count, count, context=count * batch.length))
        self._tokens_ready = self._device
        self._host = max(self._host, before)
        said = []
        for sequence in batch.sequences:
            sequence.num_said += 1
            said.append((sequence, sequence.num_said >= sequence.call.call.max_tokens))
        if any(is_last for _, is_last in said):
            self._shrink([sequence for sequence, is_last in said if not is_last])
        return said

    def _fill_prompts(self) -> None:
        count = min(
            self.settings.prompt_concurrency - len(self._prompts),
            self.settings.decode_concurrency - len(self._batch.sequences),
            len(self._unprocessed),
        )
        for _ in range(count):
            self._prompts.append(self._unprocessed.popleft())

    def _join(self) -> None:
        """Those with one prompt token left: a pass over it, then they are in the batch."""
        joining = [sequence for sequence in self._prompts if sequence.missing == 0]
        if not joining:
            return
        self._prompts = [sequence for sequence in self._prompts if sequence.missing]
        length = max(len(sequence.call.prompt) for sequence in joining)
        self._launch(PassShape(len(joining), len(joining), context=len(joining) * length))
        self._tokens_ready = self._device
        for sequence in joining:
            sequence.known = len(sequence.call.prompt)
        batch = self._batch
        batch.sequences += joining
        batch.length = max(batch.length, length)
        self._copied += len(batch.sequences) * batch.length

    def _prefill(self) -> None:
        """One pass over the next part of every prompt, all padded to the longest."""
        if not self._prompts:
            return
        step = self.settings.prefill_step_size
        parts = [min(sequence.missing, step) for sequence in self._prompts]
        count, length = len(parts), max(parts)
        before = max(sequence.known for sequence in self._prompts)
        self._launch(
            PassShape(
                rows=count * length,
                context=count * before,
                chunks=1,
                pairs=count * length * (before + length / 2),
                scores=count * length * (before + length),
            )
        )
        self._host = max(self._host, self._device)
        for sequence, part in zip(self._prompts, parts, strict=True):
            sequence.known += part
            if sequence.missing == 0:
                self._remember(sequence.call.prompt[:-1])

    def _launch(self, shape: PassShape) -> None:
        shape.copied, self._copied = self._copied, 0
        seconds = draw_seconds(self.substrate.peer, shape, self._noise)
        self._device = max(self._device, self._host) + seconds
        if not self.substrate.runs_beside_host:
            self._host = self._device

    def _shrink(self, keep: list[_Sequence]) -> None:
        batch = self._batch
        if len(keep) == len(batch.sequences):
            return
        batch.sequences = keep
        # The padding that all of them have is cut off.
        batch.length = max((len(s.call.prompt) + s.num_said for s in keep), default=0)
        self._copied += len(keep) * batch.length

    def _hand_out(self, said: list[tuple[_Sequence, bool]]) -> None:
        """Tokens and ends reach the clients; the thread goes on."""
        for sequence, is_last in said:
            self._next_token = (self._next_token + 1) % 2**30
            if is_last:
                self._by_call.pop(sequence.call.number, None)
        deliver = functools.partial(self._deliver, said, self._next_token)
        self.clock.after(self.substrate.peer_front_s / 2, deliver)
        if self.clock.now > self._window_ends or not self._has_work:
            self._begin_window()
        else:
            self._next()

    @property
    def _has_work(self) -> bool:
        return bool(self._batch.sequences or self._prompts or self._unprocessed)

    def _deliver(self, said: list[tuple[_Sequence, bool]], last_token: int) -> None:
        first = last_token - len(said) + 1
        for offset, (sequence, is_last) in enumerate(said):
            sequence.client.hear(sequence.call, [first + offset], sequence.cached)
            if is_last:
                sequence.client.end(sequence.call)
                self._remember(sequence.call.prompt + sequence.call.answer[:-1])

    def _remember(self, tokens: list[int]) -> None:
        """Keep a sequence for its prefixes; what it begins with goes, then the oldest."""
        kept = [entry for entry in self._prompt_cache if _common(entry, tokens) < len(entry)]
        self._prompt_cache = [*kept, tokens][-self.settings.prompt_cache_size :]


def _common(one: list[int], other: list[int]) -> int:
    """Length of the common prefix."""
    low, high = 0, min(len(one), len(other))
    if one[:1] != other[:1]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
