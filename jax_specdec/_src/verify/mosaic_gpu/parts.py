"""`PartKernels`: what `verify.xla` reads a device's part of a split vocabulary by, on a GPU."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_specdec._src.verify.draft_rows import DraftRows
from jax_specdec._src.verify.draw import Kernels, LocalRows, pieces_of_tiles
from jax_specdec._src.verify.mosaic_gpu import phases
from jax_specdec._src.verify.mosaic_gpu.plan import KernelConfig
from jax_specdec._src.verify.position import Position
from jax_specdec._src.verify.reader import of_owners
from jax_specdec._src.verify.requests import Request
from jax_specdec._src.verify.rows import Partials, Rows, TargetStatistics

MAX_PIECES = 32
"""Parts of the vocabulary that may share a tile if the kernel draws: a lane for each."""


@dataclasses.dataclass(frozen=True)
class PartKernels(Kernels):
    """`draw.Kernels` by the launches of `phases`."""

    config: KernelConfig | None

    def statistics(
        self, rows: LocalRows, requests: Request, positions: Position, samples: bool
    ) -> TargetStatistics:
        """Returns the statistics of target rows; see `draw.Kernels`.

        Rows without a use are skipped. Of rows that a filter limits, the kernel finds the largest
        entries first. XLA searches for the thresholds, and the kernel sums what is not below them.
        """
        target = rows.target
        greedy = requests.greedy
        filter = requests.filter
        # [B, P]: the row of each position, -1 where it has none.
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
        least = target.find_thresholds(None, filter, wanted, peak, inv, rows.form)
        # [B, P] again; -inf of rows that are not limited.
        least = least.at[place].get(mode="fill", fill_value=-jnp.inf)
        # The second launch: the sums of what is left. The argmax is that of the first.
        kept = self._read(target, requests, index, greedy, least)._replace(argmax=partials.argmax)
        partials = jax.tree.map(lambda x, y: jnp.where(index < 0, x, y), partials, kept)
        return TargetStatistics(partials, least, None)

    def draft_partials(
        self, rows: LocalRows, draft: DraftRows, requests: Request, index: jax.Array
    ) -> Partials | None:
        """Returns partials of draft rows; see `draw.Kernels`.

        Draft rows must be split as the target's are: else XLA reads them.
        """
        if not (rows.form.draft_is_split and isinstance(draft.rows, Rows)):
            return None
        least = draft.storage.thresholds
        if least is not None:  # [R] -> [B, P]
            least = least[jnp.clip(index, 0, least.shape[0] - 1)]
        found = self._read(draft.storage, requests, index, requests.greedy, least)
        return found._replace(argmax=None)

    def _read(
        self,
        rows: Rows,
        requests: Request,
        index: jax.Array,
        by_argmax: jax.Array,
        least: jax.Array | None = None,
    ) -> Partials:
        """Returns partials of the rows ``[B, n]`` that are not negative, from `least` on."""
        index = jnp.minimum(index, rows.matrix.shape[0] - 1)
        # The launch takes rows [B * n] of requests [B].
        found = phases.row_statistics(
            rows,
            index.reshape(-1),
            requests.inv_temperature,
            by_argmax,
            jax.tree.map(lambda x: x.reshape(-1), least),
            config=self.config,
        )
        return jax.tree.map(lambda x: x.reshape(index.shape), found)

    def masses(self, rows: LocalRows, source: Position) -> jax.Array:
        """Returns the masses of tiles; see `draw.Kernels`.

        Of candidates the kernel sums ``p`` alone, and XLA takes the candidates off it.
        """
        if rows.candidates is None:
            return phases.part_masses(rows, source)
        p_masses = phases.part_masses(dataclasses.replace(rows, draft=None), source)[:, 1]
        return rows.masses(source._replace(p_masses=p_masses))

    def draw(
        self, rows: LocalRows, source: Position, masses: jax.Array, recover: jax.Array
    ) -> tuple[jax.Array, jax.Array] | None:
        """Returns tokens, and whether a draft row is bad; see `draw.Kernels`.

        Of candidates, XLA reads the one tile that is chosen.
        """
        pieces = pieces_of_tiles(rows.target.width, rows.num_parts, rows.num_tiles)
        if rows.candidates is not None or pieces.shape[1] > MAX_PIECES:
            return None
        token_id, bad_draft = phases.part_draw(rows, source, recover, masses)
        bad_draft = source.uses_q & (bad_draft | source.draft_scale.bad)
        # The part that drew has the token, the others 0.
        return rows.form.sum(token_id), bad_draft
