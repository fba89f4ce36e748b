"""Drafting with a smaller model, whose vocabulary is the target's or a part of it.

Each step reads the tokens that are new since the last one, which gives the first draft, and then
each draft, which gives the next one. What the model read of rejected drafts lies in its cache at
positions that the next step overwrites. `RetokenizingDrafter` is the same with a model of another
vocabulary: it puts other tokens in the place of the target's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_specdec._src.base.arrays import (
    check_array,
    check_int,
    check_listed,
    checked_dtype,
    host_int32,
)
from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.platform import Platform, traced_for_platform
from jax_specdec._src.drafts.store import DraftStore
from jax_specdec.lm.drafting.drafter import DraftContext, Drafter, DrafterServes, Proposal
from jax_specdec.lm.drafting.draw import Row, draft_chain, ids_of
from jax_specdec.lm.models.protocol import (
    Cache,
    CausalModel,
    Params,
    Rows,
    apply_groups,
    check_model,
    check_params,
)


@dataclasses.dataclass(frozen=True)
class _HashableIds:
    """A list of ids that is hashed and compared by value, as a static argument must be."""

    data: bytes

    @classmethod
    def of(cls, ids: Any) -> _HashableIds:
        """Returns a list of ids of any type, checked."""
        values = host_int32("ids", ids)
        check_array("ids", values, "[Vd]", {})
        check_listed("ids", values, 2**31)
        return cls(values.tobytes())

    @property
    def values(self) -> npt.NDArray[np.int32]:
        """``[Vd]`` int32."""
        return np.frombuffer(self.data, np.int32)


@dataclasses.dataclass(frozen=True)
class ModelDrafter(Drafter):
    """Drafts token by token with a model. Its vocabulary may be a part of the target's.

    With ``draft_sample_method="probabilistic"``, drafts are sampled under each request's sampling
    parameters, and the logits they were sampled from are stored for verification (but under the
    agreement rule, which reads none, they share the noise of the target's tokens). With "greedy"
    they are argmaxes, verified one-hot.

    Attributes:
      model: any `CausalModel`.
      store_dtype: dtype that logits are sampled from and stored in; None for the dtype of the
        model's logits. A narrower one saves memory. It changes which tokens are drafted, not the
        distribution of the emitted tokens.
      ids: ``[Vd]`` integers, the target ids that the columns of the model's logits stand for, as
        for an EAGLE-3 head; None if column ``j`` is id ``j``. The model's input is target ids.
      num_candidates: C, or None. If given, drafts are sampled from the C likeliest ids of each row
        alone, and the store holds C logits per draft. This saves memory and costs acceptance. Under
        the agreement rule, which keeps no store, they are sampled from all ids.

    Raises:
      TypeError: `model` is not a `CausalModel`, `store_dtype` no floating dtype, `ids` are not
        integers, or `num_candidates` is not an int.
      ValueError: `ids` are not ``[Vd]``, or one is negative or listed twice; `num_candidates` is
        below 1.

    Example: see `generate`.
    """

    model: CausalModel
    store_dtype: Any = None
    ids: Any = dataclasses.field(default=None, repr=False)
    num_candidates: int | None = None

    def __post_init__(self) -> None:
        check_model("model", self.model)
        if self.store_dtype is not None:
            checked_dtype(self.store_dtype, name="store_dtype")
        if self.ids is not None and not isinstance(self.ids, _HashableIds):
            object.__setattr__(self, "ids", _HashableIds.of(self.ids))
        if self.num_candidates is not None:
            check_int("num_candidates", self.num_candidates)

    @property
    def serves(self) -> DrafterServes:
        """Declares the axis of requests, which is that of the model's cache, and its rows."""
        model = self.model.serves
        return DrafterServes(batch_axis=model.batch_axis, slots=model.groups, kept_rows="texts")

    def check_params(self, name: str, params: Params) -> None:
        """Checks the model's weights, if it says how."""
        check_params(name, self.model, params)

    def init_cache(self, batch_size: int, max_length: int) -> Cache:
        """Returns the model's cache."""
        return self.model.init_cache(batch_size, max_length)

    def init_store(
        self, params: Params, batch_size: int, config: SpecDecodeConfig
    ) -> DraftStore | None:
        """Returns an empty store for the logits of K drafts per request; None if none is read.

        Raises:
          ValueError: the model has fewer or more logits than `ids`, or fewer than `num_candidates`.
        """

        def one_token(params: Params) -> jax.Array:
            row = Rows(jnp.zeros((1, 1), jnp.int32), jnp.zeros((1,), jnp.int32))
            return self._read(params, row, self.model.init_cache(1, 1))[0]

        # Of [1, 1, Vd] the shape and the dtype alone: nothing is run.
        logits = jax.eval_shape(one_token, params)
        width = logits.shape[-1]
        ids = self._target_ids
        if ids is not None:
            check_array("ids", ids, "[Vd]", {"Vd": width})
        if self.num_candidates is not None:
            check_int("num_candidates", self.num_candidates, 1, width)
        if not config.keeps_draft_distribution:
            return None
        # Rows of candidates list their own ids; others have one list for all, or all ids in order.
        has_candidates = self.num_candidates is not None
        store = DraftStore.create(
            batch_size,
            config.num_speculative_tokens,
            self.num_candidates or width,
            logits.dtype if self.store_dtype is None else self.store_dtype,
            ids=None if has_candidates or ids is None else jnp.asarray(ids),
            own_ids=has_candidates,
        )
        sharding = self.model.serves.sharding
        if sharding is None or sharding.mesh is None or store.ids is not None:
            return store
        # [K*B, Vd]: split as the logits are, so that no row is gathered when it is written
        rows = NamedSharding(sharding.mesh, P(None, sharding.vocab_axis))
        return dataclasses.replace(store, logits=lax.with_sharding_constraint(store.logits, rows))

    def prefill(
        self,
        params: Params,
        rows: Rows,
        cache: Cache,
        features: jax.Array | None = None,
        next_token_ids: jax.Array | None = None,
    ) -> Cache:
        """Runs the model over the prompts, or a chunk of them; see `Drafter.prefill`."""
        return apply_groups(self.model, params, [rows], cache)[1]

    def propose(
        self, params: Params, context: DraftContext, cache: Cache, store: DraftStore | None
    ) -> tuple[Proposal, Cache]:
        """Drafts K tokens; see `Drafter.propose`."""
        # [B, W]: all that is new, as what was verified need not be what the model drafted and read.
        # Of a request that does not run, what was read stays as it is.
        width = context.num_unread
        # [B], the first position, at most lengths - 1, so that the newest token is among the rows.
        # What is read after it, in a text shorter than W or of a request that does not run, lies at
        # positions that later rows overwrite.
        lengths = context.lengths
        start = jnp.where(context.runs, jnp.maximum(lengths - width, 0), lengths - 1)
        place = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
        recent = jnp.take_along_axis(context.token_ids, place, axis=1, mode="clip")
        rows = Rows(recent, start, context.slots)
        return self._draft(params, rows, lengths, context, cache, store)

    def _draft(
        self,
        params: Params,
        recent: Rows,
        lengths: jax.Array,
        context: DraftContext,
        cache: Cache,
        store: DraftStore | None,
    ) -> tuple[Proposal, Cache]:
        """Returns K drafts and the model's cache, after the model has read recent tokens.

        Args:
          recent: its tokens, ``[B, W]``; the newest is one of them.
          lengths: ``[B]`` int32, its tokens up to the newest.
          cache: the model's.
        """
        # [Vd], known when the program is traced. Rows on target ids need columns up to the largest
        # of them, and no more: without a list, those that the model has.
        target_ids = self._target_ids
        ids = ids_of(None, self.model.vocab_size)
        if target_ids is not None:
            ids = ids_of(jnp.asarray(target_ids), int(target_ids.max()) + 1)

        def forward(cache: Cache, last: jax.Array, offset: jax.Array) -> tuple[Row, Cache]:
            """Returns the row of a draft and the cache, after the model has read the one before."""
            # [B, 1]: the last draft, at position n + offset, with n that of the newest token
            token_ids = self._own_ids(params, last)[:, None]
            rows = Rows(token_ids, lengths + offset - 1, recent.slots)
            # [B, 1] -> [B, 1, Vd] -> [B, Vd]
            if lengths.shape[0] > 1:
                logits, cache = self._read(params, rows, cache)
                return Row(logits[:, 0], ids), cache
            alone, cache = traced_for_platform(_read_alone, (params, rows, cache), self)
            return Row(alone, ids), cache

        logits, cache = self._read(params, recent, cache)
        # [B, W, Vd] -> [B, Vd]: the row of the newest token
        # Draft 0 is drawn from it, so the model runs K - 1 times more.
        newest = (lengths - 1 - recent.start)[:, None, None]
        return draft_chain(
            Row(jnp.take_along_axis(logits, newest, axis=1)[:, 0], ids),
            cache,
            forward,
            context,
            store,
            num_candidates=self.num_candidates,
            sharding=self.model.serves.sharding,
        )

    def _own_ids(self, params: Params, token_ids: jax.Array) -> jax.Array:
        """Returns the model's ids ``[B]`` of drafts ``[B]``."""
        del params
        return token_ids

    def _read(self, params: Params, rows: Rows, cache: Cache) -> tuple[jax.Array, Cache]:
        """Returns logits ``[B, S, Vd]`` of the model's tokens, and its cache."""
        (output,), cache = apply_groups(self.model, params, [rows], cache)
        return output.logits, cache

    @property
    def _target_ids(self) -> npt.NDArray[np.int32] | None:
        """``[Vd]`` int32, `ids`; None if column ``j`` is id ``j``."""
        return self.ids.values if isinstance(self.ids, _HashableIds) else None


def _read_alone(
    arrays: tuple[Params, Rows, Cache], drafter: ModelDrafter, platform: Platform
) -> tuple[jax.Array, Cache]:
    """Returns the logits ``[B, Vd]`` of a token of one request, and the cache.

    On GPUs, XLA takes matrix products with a single row as sums, and a pass of a 1B model over two
    rows takes three quarters of the time (1.24 and 1.63 ms on an H100). So the token gets a second
    row there, whose key and value lie at the next position. Nothing sees them: the next pass
    overwrites them. The cache has that position, because the target's has one for every draft.
    """
    params, rows, cache = arrays
    if platform not in ("cpu", "tpu"):
        rows = rows._replace(token_ids=jnp.repeat(rows.token_ids, 2, axis=1))  # [1, 2]
    logits, cache = drafter._read(params, rows, cache)
    return logits[:, 0], cache
