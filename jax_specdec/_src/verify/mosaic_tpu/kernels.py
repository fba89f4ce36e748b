"""`TpuKernels`: what `verify.xla` reads rows by, on a TPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_specdec._src.verify.draw import Kernels, LocalRows
from jax_specdec._src.verify.largest import Largest
from jax_specdec._src.verify.mosaic_tpu.residual import residual_masses
from jax_specdec._src.verify.mosaic_tpu.statistics import row_statistics
from jax_specdec._src.verify.position import Position
from jax_specdec._src.verify.reader import at_positions, of_owners
from jax_specdec._src.verify.requests import Request
from jax_specdec._src.verify.rows import Partials, TargetStatistics


class TpuKernels(Kernels):
    """`draw.Kernels` by `row_statistics` and `residual_masses`. XLA does the rest."""

    def statistics(
        self, rows: LocalRows, requests: Request, positions: Position, samples: bool
    ) -> TargetStatistics:
        """See `draw.Kernels`. With a filter in two passes, around the search for thresholds.

        Thresholds are searched for among the largest entries, if this device has whole rows.
        """
        target, form, least, ranked = rows.target, rows.form, None, None
        num_rows, end = target.matrix.shape[0], jnp.int32(target.width)
        if target.first_id is not None:
            end = jnp.clip(target.size - target.first_id, 0, end)
        given = requests.inv_temperature, requests.greedy, requests.is_ok & ~requests.greedy
        inv, greedy, wanted, filter = of_owners(requests, num_rows, (*given, requests.filter))
        statistics = functools.partial(row_statistics, target.matrix, end, inv)
        if samples and filter is not None and form.axis is None:
            ranked = wanted & filter.is_searched(target.size)
        peak, argmax, sums, lists = statistics(greedy, with_sums=samples, ranked=ranked)
        if samples and filter is not None:
            largest = None
            if lists is not None:
                mass = functools.partial(jnp.sum, sums, axis=1)
                largest = functools.partial(Largest.of, lists, mass)
            least = target.find_thresholds(None, filter, wanted, peak, inv, form, largest)
            _, _, sums, _ = statistics(greedy, (peak, least))
        argmax = argmax if target.first_id is None else target.first_id + argmax
        partials = Partials(peak, jnp.sum(sums, axis=1), argmax).checked()
        kept = sums[:, : rows.num_tiles] if samples and form.keeps_sums else None
        found = TargetStatistics(partials, least, kept)
        return at_positions(found, positions, form.platform)

    def residual_masses(self, rows: LocalRows, source: Position) -> jax.Array | None:
        """See `draw.Kernels`. Rows that the kernel cannot copy are left to XLA."""
        return residual_masses(rows, source)
