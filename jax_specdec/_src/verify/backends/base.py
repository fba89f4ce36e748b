"""`Backend`: what verification asks of a device."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax

from jax_specdec._src.platform import Platform
from jax_specdec._src.sampling import Filter
from jax_specdec._src.types import RejectionSampleOutput
from jax_specdec._src.verify.part import Part
from jax_specdec._src.verify.position import Position
from jax_specdec._src.verify.requests import CallArrays, Request
from jax_specdec._src.verify.rules import Rule
from jax_specdec._src.verify.statistics import Partials, TargetStatistics

if TYPE_CHECKING:
    from jax_specdec._src.verify.call import Static
    from jax_specdec._src.verify.draw import Residuals, TileMasses
    from jax_specdec._src.verify.q import Listed, Stored
    from jax_specdec._src.verify.rows import Rows
    from jax_specdec._src.verify.source import LocalRows, Source


class Backend(abc.ABC):
    """One way to verify. Stateless; every method is traced, and chooses by static values alone.

    Attributes:
      only: the one platform that it has programs for; None for every platform.
      reads_ahead: whether rows are read before the positions ahead of them are judged.
    """

    only: ClassVar[Platform | None] = None
    reads_ahead: ClassVar[bool] = True

    # A call: where it runs, whether it is served, and its verification as a whole. All else is what
    # `xla.verify` asks for, in this order.

    def on(self, platform: Platform) -> Backend:
        """Returns the backend that reads on a platform."""
        return self

    def no_device(self) -> str | None:
        """Returns why it cannot run on JAX's default device, as a sentence; None if it can."""
        return None

    def unserved(self, arrays: CallArrays, static: Static) -> str | None:
        """Returns why it cannot serve a call, as a sentence; None if it can."""
        return None

    @abc.abstractmethod
    def verify(self, arrays: CallArrays, rule: Rule, static: Static) -> RejectionSampleOutput:
        """Verifies a call, or one device's part of it, that `unserved` does not object to."""

    @abc.abstractmethod
    def keeps_sums(self, part: Part, rule: Rule, filter: Filter | None) -> bool:
        """Returns whether the sums of target rows are kept by tile, to draw by them."""

    # Reading rows: statistics are of target rows, partials of draft rows. What follows from them is
    # the same for all backends: see `reader`.

    @abc.abstractmethod
    def prepared(self, target: Rows) -> Rows:
        """Returns target rows as they are read from then on."""

    @abc.abstractmethod
    def read(
        self,
        rows: LocalRows,
        requests: Request,
        positions: Position,
        rule: Rule,
        samples: bool = True,
    ) -> Position:
        """Returns the positions that a rule has chosen, ``[B, P]``, with what their rows hold.

        If `samples` is false, every request is greedy, and draft rows are not needed.
        """

    @abc.abstractmethod
    def statistics(
        self, rows: LocalRows, requests: Request, positions: Position, rule: Rule, samples: bool
    ) -> TargetStatistics:
        """Returns the statistics of the target rows of positions ``[B, P]``.

        If not `samples`, no sum is needed.
        """

    @abc.abstractmethod
    def draft_partials(
        self, q: Stored, requests: Request, index: jax.Array, inv_temperature: jax.Array
    ) -> Partials:
        """Returns the partials of the draft rows ``index [B, P]`` that are not negative."""

    # Drawing tokens: masses of tiles, then a token by them. Under the block rule masses come first,
    # of all positions, and the rule counts by them.

    @abc.abstractmethod
    def residuals(self, rows: LocalRows, sources: Source) -> Residuals:
        """Returns the residual masses of positions ``[B, P]``, and what was summed to know them."""

    @abc.abstractmethod
    def masses(self, rows: LocalRows, source: Source) -> TileMasses:
        """Returns the masses of the tiles of every part, of sources ``[n]``."""

    @abc.abstractmethod
    def token(
        self, rows: LocalRows, source: Source, masses: TileMasses, recover: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns tokens ``[n]``, and whether their draft rows are bad, by uniforms ``[n, 2]``."""

    @abc.abstractmethod
    def race_token(self, rows: LocalRows, source: Source, exponential: jax.Array) -> jax.Array:
        """Returns tokens ``[n]`` drawn from ``p`` by races with noise ``[n, T+L]``."""

    # What all of these are made of, as the device does it best.

    @abc.abstractmethod
    def in_blocks(self, function: Callable[..., Any], index: jax.Array, *arrays: Any) -> Any:
        """Returns ``function(*arrays)``, which reads rows ``index [n]``, some of them at a time.

        Row -1 need not be read: the result for it is undefined.
        """

    @abc.abstractmethod
    def take(self, tree: Any, index: jax.Array) -> Any:
        """Returns ``x[index]`` of matrices, for rows ``[n]`` in range."""

    @abc.abstractmethod
    def bits(self, words: jax.Array) -> jax.Array:
        """Returns the bits of words ``[..., n]`` as ``[..., 32 n]`` bool, perhaps with more."""

    @abc.abstractmethod
    def listed_slices(
        self, q: Listed, index: jax.Array, first: jax.Array, length: int
    ) -> jax.Array:
        """Returns the entries ``[n, length]`` of the ids from ``first[i]`` on."""

    @abc.abstractmethod
    def pick(self, weights: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Does `draw.pick`."""

    @abc.abstractmethod
    def pick_of_both(
        self, both: jax.Array, u: jax.Array, may_have_mass: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Does `draw.pick_of_both`."""
