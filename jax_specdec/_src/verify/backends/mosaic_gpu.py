"""`MosaicGpu`: kernels for Hopper GPUs: one that verifies, and three for parts of a vocabulary.

They are imported where a call uses them: see the docstring of the package `mosaic_gpu`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.platform import Platform
from jax_specdec._src.types import RaceNoise, RejectionSampleOutput
from jax_specdec._src.verify.backends.gather import Gather
from jax_specdec._src.verify.draw import TileMasses
from jax_specdec._src.verify.mosaic_gpu import support
from jax_specdec._src.verify.mosaic_gpu.plan import KernelConfig
from jax_specdec._src.verify.position import Position
from jax_specdec._src.verify.q import Dense, Listed, Stored
from jax_specdec._src.verify.requests import CallArrays, Request
from jax_specdec._src.verify.rows import Rows
from jax_specdec._src.verify.rules import Rule, rule_of
from jax_specdec._src.verify.source import LocalRows, Source
from jax_specdec._src.verify.statistics import Partials, TargetStatistics, of_owners
from jax_specdec._src.verify.tiles import pieces_of_tiles

if TYPE_CHECKING:
    from jax_specdec._src.verify.call import Static

MAX_PIECES = 32
"""Parts of the vocabulary that may share a tile if the kernel draws: a lane for each."""


class MosaicGpu(Gather):
    """One launch verifies a batch of whole rows; `MosaicParts` one device's part of each."""

    only: ClassVar[Platform | None] = "cuda"

    def no_device(self) -> str | None:
        return support.no_device()

    def unserved(self, arrays: CallArrays, static: Static) -> str | None:
        k = static.config.num_speculative_tokens
        why_not = support.rule_unsupported(rule_of(static.config))
        axis = static.layout.vocab_axis
        # A rule that the kernel lacks, or what does not fit its memory.
        if not why_not and axis is not None:
            return support.part_unsupported(
                arrays,
                k,
                size=static.size,
                num_parts=lax.axis_size(axis),
                config=static.kernel_config,
            )
        return why_not or support.unsupported(
            arrays.target_logits,
            arrays.drafts.distribution,
            is_race=isinstance(arrays.randomness, RaceNoise),
            num_requests=arrays.sampling.temperature.shape[0],
            k=k,
            size=static.size,
            config=static.kernel_config,
        )

    def verify(self, arrays: CallArrays, rule: Rule, static: Static) -> RejectionSampleOutput:
        if static.layout.vocab_axis is not None:
            return MosaicParts(static.kernel_config).verify(arrays, rule, static)
        # Whole rows: the kernel does all that `xla.verify` does.
        from jax_specdec._src.verify.mosaic_gpu import launch

        return launch.verify(
            arrays,
            rule,
            k=static.config.num_speculative_tokens,
            size=static.size,
            config=static.kernel_config,
        )


@dataclasses.dataclass(frozen=True)
class MosaicParts(Gather):
    """`Gather`, by the launches of `mosaic_gpu.parts` for a part of the vocabulary.

    Attributes:
      config: settings that change the speed only, or None for the default.
    """

    config: KernelConfig | None

    def prepared(self, target: Rows) -> Rows:
        return target  # kernels read bits as they need them

    def statistics(
        self, rows: LocalRows, requests: Request, positions: Position, rule: Rule, samples: bool
    ) -> TargetStatistics:
        """Returns them, and skips rows without a use.

        Of rows that a filter limits, the kernel finds the largest entries first. XLA searches for
        the thresholds, and the kernel sums what is not below them.
        """
        target = rows.target
        greedy = requests.greedy
        filter = requests.filter
        # [B, P]: the row of each position, -1 where it has none
        wanted = requests.is_ok[:, None] & (positions.offset < requests.num_rows[:, None])
        index = jnp.where(wanted, positions.row, -1)
        if filter is None:
            return TargetStatistics(self._read(target, requests, index, greedy), None, None)
        # The first launch: argmaxes of greedy requests, maxima of those with a filter, and the sums
        # of the others.
        limited = filter.limits(target.size) & ~greedy
        partials = self._read(target, requests, index, greedy | limited)
        # [M]: the maximum, the filter and the temperature of each row that is limited. The search
        # takes rows of the matrix, not positions; an index past the last row is dropped.
        index = jnp.where(limited[:, None], index, -1)
        num_rows = target.matrix.shape[0]
        place = jnp.where(index < 0, num_rows, index)
        peak = jnp.full((num_rows,), -jnp.inf, jnp.float32).at[place].set(partials.max, mode="drop")
        given = filter, limited, requests.inv_temperature
        filter, wanted, inv = of_owners(requests, num_rows, given)
        least = self.thresholds(target, None, filter, wanted, peak, inv)
        # [B, P] again; -inf of rows that are not limited
        least = least.at[place].get(mode="fill", fill_value=-jnp.inf)
        # The second launch: the sums of what is left. The argmax is that of the first.
        kept = self._read(target, requests, index, greedy, least)._replace(argmax=partials.argmax)
        # What was read once stands for rows that no filter limits.
        partials = jax.tree.map(lambda x, y: jnp.where(index < 0, x, y), partials, kept)
        return TargetStatistics(partials, least, None)

    def draft_partials(
        self, q: Stored, requests: Request, index: jax.Array, inv_temperature: jax.Array
    ) -> Partials:
        # The kernel reads rows that are split as the target's are. XLA reads whole ones, and lists.
        if not (isinstance(q, Dense) and q.storage.part.is_split):
            return super().draft_partials(q, requests, index, inv_temperature)
        in_range = jnp.clip(index, 0, q.storage.matrix.shape[0] - 1)
        least = jax.tree.map(lambda x: x[in_range], q.storage.thresholds)  # [B, P]
        found = self._read(q.storage, requests, index, requests.greedy, least)
        return found._replace(argmax=None)

    def _read(
        self,
        rows: Rows,
        requests: Request,
        index: jax.Array,
        by_argmax: jax.Array,
        least: jax.Array | None = None,
    ) -> Partials:
        """Returns the partials of the rows ``[B, n]`` that are not negative, from `least` on."""
        from jax_specdec._src.verify.mosaic_gpu import parts

        # [B * n]: rows one after another
        index = jnp.minimum(index, rows.matrix.shape[0] - 1)
        # The launch takes rows [B * n] of requests [B].
        found = parts.row_statistics(
            rows,
            index.reshape(-1),
            requests.inv_temperature,
            by_argmax,
            jax.tree.map(lambda x: x.reshape(-1), least),
            config=self.config,
        )
        return jax.tree.map(lambda x: x.reshape(index.shape), found)

    def own_masses(self, rows: LocalRows, source: Source) -> jax.Array:
        from jax_specdec._src.verify.mosaic_gpu import parts

        if not isinstance(rows.q, Listed):
            return parts.part_masses(rows, source)
        # With listed ids, the kernel sums `p` alone, and XLA takes the ids off it.
        p_masses = parts.part_masses(rows.alone(), source)[:, 1]
        return self.masses_of(rows, source._replace(p_masses=p_masses))

    def token(
        self, rows: LocalRows, source: Source, masses: TileMasses, recover: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        from jax_specdec._src.verify.mosaic_gpu import parts

        # With listed ids, XLA reads the one tile that is chosen.
        pieces = pieces_of_tiles(rows.target.width, rows.part.num_parts, rows.num_tiles)
        if isinstance(rows.q, Listed) or pieces.shape[1] > MAX_PIECES:
            return super().token(rows, source, masses, recover)
        # 0 from all devices but the one that holds the token
        token_id, bad_draft = parts.part_draw(rows, source, recover, masses.both)
        bad_draft = source.uses_q & (bad_draft | source.draft_scale.bad)
        # The part that drew has the token, the others 0.
        return rows.part.sum(token_id), bad_draft
