"""Which prompts the next call reads, and what it is given."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jax_specdec.lm.decoding.bookkeeping import ServedRequest
from jax_specdec.lm.decoding.engine import Engine, NewRequests


class ChunkedPrefill(NamedTuple):
    """A long prompt that is read chunk by chunk, and the slot that is kept for its request."""

    slot: int
    request: ServedRequest
    num_read: int = 0  # tokens, in the calls dispatched so far
    waits: bool = False  # shorter prompts go before the next chunk

    @property
    def is_read(self) -> bool:
        """Whether no chunk is left."""
        return self.num_read >= self.request.length

    def next_chunk(self, engine: Engine, most: int, usual: int) -> tuple[int, int]:
        """Where the next chunk begins and ends.

        Args:
          engine: whose caches it is read into; no chunk ends beyond the longest prompt there is.
          most: the most tokens of this call.
          usual: the most while others run, for which there is a program too.
        """
        longest, left = engine.max_length, self.request.length - self.num_read
        size = most if left > usual and self.num_read + most <= longest else usual
        start = min(self.num_read, longest - size)
        return start, start + size

    def tokens(self, start: int, end: int) -> np.ndarray:
        """The prompt's tokens from `start` to `end`, that one included; zeros after its last."""
        here = self.request.token_ids[start : end + 1]
        return np.array(here + [0] * (end + 1 - start - len(here)), np.int32)


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


def new_requests(engine: Engine, group: Mapping[int, ServedRequest], size: int) -> NewRequests:
    """Requests by slot as arrays; the first one is repeated to fill what `admit` takes.

    Args:
      engine: that takes them.
      group: whose prompts are read together, or one alone.
      size: that their prompts are padded to.
    """
    rows = [*group.items()]
    if len(rows) > 1:
        rows += rows[:1] * (engine.group_size(size) - len(rows))
    requests = [request for _, request in rows]
    prompts = [one.token_ids + [0] * (size - one.length) for one in requests]
    arrays: dict[str, Any] = dict(
        slots=np.array([slot for slot, _ in rows], np.int32),
        prompts=np.array(prompts, np.int32),
        lengths=np.array([one.length for one in requests], np.int32),
        keys=np.array([one.seed for one in requests], np.uint32),
    )
    lengths = [one.prompt_length for one in requests]
    options = engine.options_of([one.options for one in requests], lengths)
    return NewRequests(**arrays, options=options)
