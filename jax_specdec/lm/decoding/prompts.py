"""Which prompts the next call reads, and what it is given."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jax_specdec.lm.decoding.bookkeeping import ServedRequest
from jax_specdec.lm.decoding.engine import Engine, NewRequests
from jax_specdec.lm.decoding.programs import PackedRequests


class Prompts(NamedTuple):
    """What the next call that reads prompts reads: several prompts of one size, or a part of one.

    Attributes:
      group: the requests, by slot.
      start: the position of the first token that is read.
      size: tokens of each prompt that are read, padding included.
      rest: the long prompt that is being read after the call; None if there is none.
    """

    group: Mapping[int, ServedRequest]
    start: int
    size: int
    rest: ChunkedPrefill | None

    def arrays(self, engine: Engine) -> PackedRequests:
        """What a program takes; the first request is repeated to fill it."""
        rows = [*self.group.items()]
        if len(rows) > 1:
            rows += rows[:1] * (engine.group_size(self.size) - len(rows))
        requests, end = [request for _, request in rows], self.start + self.size
        # [R, P + 1]: the tokens, and the one that follows them.
        tokens = [one.token_ids[self.start : end + 1] for one in requests]
        padded: Any = np.array([x + [0] * (self.size + 1 - len(x)) for x in tokens], np.int32)
        arrays: dict[str, Any] = dict(
            slots=np.array([slot for slot, _ in rows], np.int32),
            prompts=padded[:, :-1],
            lengths=np.array([one.length for one in requests], np.int32),
            keys=np.array([one.seed for one in requests], np.uint32),
            start=np.full(len(rows), self.start, np.int32),
            next_token_ids=padded[:, -1],
        )
        lengths = [one.prompt_length for one in requests]
        options = engine.options_of([one.options for one in requests], lengths)
        return PackedRequests.of(NewRequests(**arrays, options=options))


class ChunkedPrefill(NamedTuple):
    """A long prompt that is read chunk by chunk, and the slot that is kept for its request."""

    slot: int
    request: ServedRequest
    num_read: int = 0  # tokens, in the calls dispatched so far
    waits: bool = False  # shorter prompts go before the next chunk

    def next_chunk(self, engine: Engine, most: int, usual: int) -> Prompts:
        """The next chunk. The last ends at the prompt's last token but one, or after it.

        Args:
          engine: whose slots are read into; no chunk ends beyond the longest prompt there is.
          most: the most tokens of this call.
          usual: the most while others run, for which there is a program too.
        """
        longest, left = engine.max_length, self.request.length - self.num_read
        size = most if left > usual and self.num_read + most <= longest else usual
        start = min(self.num_read, longest - size)
        rest = None
        if start + size < self.request.length - 1:
            rest = self._replace(num_read=start + size, waits=True)
        return Prompts({self.slot: self.request}, start, size, rest)


def next_group(
    engine: Engine,
    queue: Iterable[ServedRequest],
    slots: Mapping[int, ServedRequest],
    most: int,
    *,
    has_long: bool,
) -> dict[int, ServedRequest]:
    """By free slot, the first request in the queue and others whose prompts have its size.

    Looks only at as many requests as there are free slots. Long prompts, and requests whose calls
    keep failing, are read alone.

    Args:
      engine: whose slots they are.
      queue: in the order in which they came.
      slots: that are not free.
      most: the most tokens that one call reads; a longer prompt is long.
      has_long: whether a long prompt is being read; no other one is then taken.
    """
    free = [slot for slot in range(engine.num_slots) if slot not in slots]
    first = itertools.islice(queue, len(free))
    able = [one for one in first if not has_long or one.length <= most]
    group = able[:1]
    if group and not _is_alone(group[0], most):
        size = engine.prompt_size(group[0].length)
        num_rows = engine.group_size(size)
        if num_rows * size <= most:
            alike = [
                x for x in able if not _is_alone(x, most) and engine.prompt_size(x.length) == size
            ]
            group = alike[:num_rows]
    return dict(zip(free, group, strict=False))


def _is_alone(request: ServedRequest, most: int) -> bool:
    return request.length > most or request.num_failures > 1
