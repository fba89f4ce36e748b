"""What the tokens of a part of the vocabulary weigh, read from global memory: each warp a tile.

Rows are read once and nothing of them is kept, so a warp needs no other and no shared memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_specdec._src.types import DraftDistribution, DraftProbs
from jax_specdec._src.verify import rules, tiles
from jax_specdec._src.verify.mosaic_gpu.request import LARGEST, LOG2E
from jax_specdec._src.verify.mosaic_gpu.threads import WARP
from jax_specdec._src.verify.resample import Source
from jax_specdec._src.verify.rows import storage_of

_FAR = 2**30
"""Greater than any column."""


@dataclasses.dataclass(frozen=True)
class Part:
    """What is static of a part of the vocabulary and of the draft distributions there.

    Attributes:
      width: ids of a part.
      size: ids of the whole vocabulary that count.
      count: tiles that a part may lie in.
      each: consecutive ids that a thread reads at once.
      draft: "none", "probs" or "logits".
      one_hot: whether drafts may be.
    """

    width: int
    size: int
    count: int
    each: int
    draft: str
    one_hot: bool

    @classmethod
    def of(
        cls,
        target: jax.Array,
        distribution: DraftDistribution | None,
        *,
        size: int,
        num_parts: int,
    ) -> Part:
        storage = [] if distribution is None else [storage_of(distribution)]
        width = target.shape[1]
        each = 16 // max(x.dtype.itemsize for x in (target, *storage))
        kind = "probs" if isinstance(distribution, DraftProbs) else "logits"
        return cls(
            width=width,
            size=size,
            count=tiles.tiles_of_part(width, num_parts),
            each=each if width % each == 0 else 1,
            draft=kind if storage else "none",
            one_hot=distribution is None or distribution.valid is not None,
        )

    @property
    def groups(self) -> int:
        """How often a warp reads of a tile."""
        return tiles.TILE // self.chunk

    @property
    def chunk(self) -> int:
        """Ids that a warp reads at once."""
        return WARP * self.each


def source_operands(source: Source, part: Part) -> dict[str, jax.Array]:
    """What the kernels read of sources ``[G]``."""
    scale = jax.vmap(lambda s: s.stats.scale(s.inv_temperature))(source)
    operands = {
        "row": source.row,
        "shift": scale.shift,
        "log": scale.log_scale,
        "inv": source.inv_temperature,
    }
    if part.one_hot:
        operands["without"] = jnp.where(source.without_token, source.token_id, -1)
    if part.draft != "none":
        operands |= {
            "draft_row": source.draft_row,
            "from_residual": source.from_residual,
            "weight": source.weight,
        }
    if part.draft == "logits":
        operands |= {
            "draft_shift": source.scale.scale.shift,
            "draft_log": source.scale.scale.log_scale,
        }
    return operands


class PartWeights:
    """Weights of the ids of one tile, while a kernel is traced; each warp its own.

    Args:
      threads: the operations of the warpgroup.
      refs: "target", "draft", and what `source_operands` gives.
      part: what is static.
      item: ``[128]`` int32, which source.
      first_id: ``[]`` int32, where the part begins.
    """

    def __init__(
        self, threads: Any, refs: dict[str, Any], part: Part, item: jax.Array, first_id: jax.Array
    ):
        self.threads, self.refs, self.part = threads, refs, part
        self.first_id = first_id
        self.end = jnp.clip(part.size - first_id, 0, part.width)
        self.lane = threads.index() & (WARP - 1)

        def of(name: str) -> jax.Array:
            return threads.gather(refs[name], item)

        row = of("row")
        self.is_wanted, self.row = row >= 0, jnp.clip(row, 0, refs["target"].shape[0] - 1)
        self.shift, self.log = of("shift"), of("log") * LOG2E
        self.scale = jnp.minimum(of("inv") * LOG2E, LARGEST)
        self.from_residual = self.row < 0
        self.without = of("without") - first_id if part.one_hot else None
        if part.draft != "none":
            self.draft_row = jnp.clip(of("draft_row"), 0, refs["draft"].shape[0] - 1)
            self.from_residual, self.weight = of("from_residual") != 0, of("weight")
        if part.draft == "logits":
            self.draft_shift, self.draft_log = of("draft_shift"), of("draft_log") * LOG2E

    def start(self, tile: jax.Array, group: jax.Array | int) -> jax.Array:
        """The column at which each thread begins to read; negative in what other parts hold.

        Args:
          tile: counted from the part's first.
          group: which read of the tile.
        """
        begin = tile * tiles.TILE - jnp.bitwise_and(self.first_id, tiles.TILE - 1)
        return begin + group * self.part.chunk + self.lane * self.part.each

    def entries(self, name: str, row: jax.Array, start: jax.Array, fill: float) -> list[jax.Array]:
        """Entries from `start` on; `fill` where an id does not count or is of another part."""
        each = self.part.each
        inside = jnp.clip(start, 0, self.part.width - each)
        found = self.threads.row_entries(self.refs[name], row, inside, each)
        place = jnp.where(start < 0, _FAR, start)
        return [jnp.where(place < self.end - j, x, fill) for j, x in enumerate(found)]

    def targets(self, start: jax.Array) -> list[jax.Array]:
        return self.entries("target", self.row, start, -jnp.inf)

    def drafts(self, start: jax.Array) -> list[jax.Array]:
        fill = 0.0 if self.part.draft == "probs" else -jnp.inf
        return self.entries("draft", self.draft_row, start, fill)

    def probs(self, entries: list[jax.Array]) -> list[jax.Array]:
        """``p``."""
        return [jnp.exp2((x - self.shift) * self.scale - self.log) for x in entries]

    def plain(self, start: jax.Array, p: list[jax.Array]) -> list[jax.Array]:
        """``p``, 0 for a rejected one-hot draft."""
        if self.without is None:
            return p
        return [jnp.where(start + j == self.without, 0.0, x) for j, x in enumerate(p)]

    def residual(self, p: list[jax.Array], entries: list[jax.Array]) -> list[jax.Array]:
        """``(weight * p - q)+``."""
        if self.part.draft == "probs":
            return [rules.residual(self.weight, a, q) for a, q in zip(p, entries, strict=True)]
        q = [jnp.exp2((x - self.draft_shift) * self.scale - self.draft_log) for x in entries]
        return [rules.excess(self.weight * a, b) for a, b in zip(p, q, strict=True)]

    def either(self, fn: Callable[[Callable[[list[jax.Array]], Any]], Any]) -> Any:
        """`fn`, given how weights are found: from starts of groups to ``[(weights, p)]``."""

        def plain(starts: list[jax.Array]) -> Any:
            p = [self.probs(x) for x in [self.targets(start) for start in starts]]
            return [(self.plain(start, x), x) for start, x in zip(starts, p, strict=True)]

        def residual(starts: list[jax.Array]) -> Any:
            both = [(self.targets(start), self.drafts(start)) for start in starts]
            p = [self.probs(x) for x, _ in both]
            return [(self.residual(x, q), x) for x, (_, q) in zip(p, both, strict=True)]

        if self.part.draft == "none":
            return fn(plain)
        return self.threads.either(self.from_residual, lambda: fn(residual), lambda: fn(plain))
