"""Checks of what `exact` promises: texts that are those of plain decoding to the last bit.

`check_exact` and `check_free_text` look at declarations and options, before anything runs.
`check_rows` runs the target's pass over drafts on this device, because XLA may round a token's sums
in another way in another row. `generate` and `EngineDriver.warm_up` call them; ``docs/exact.md``
says what is promised.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import cast

import jax
import jax.numpy as jnp

from jax_specdec._src.base.arrays import require
from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.platform import Platform, traced_for_platform
from jax_specdec._src.testing.row_dependence import RowDependence, row_dependence
from jax_specdec.lm.decoding.core import Decoder
from jax_specdec.lm.decoding.options import RequestOptions
from jax_specdec.lm.drafting.drafter import Drafter
from jax_specdec.lm.models.protocol import Cache, CausalModel, Output, Params, Rows


class NotExactError(ValueError):
    """A model's pass gives a token other bits in another row, on this device."""


def check_exact(model: CausalModel, drafter: Drafter, config: SpecDecodeConfig) -> None:
    """Checks that texts can be those of plain decoding to the last bit.

    Raises:
      ValueError: the drafter proposes trees, whose keys lie at other positions than those of plain
        decoding; the logits are split over devices, whose sums have not been tried; or the rule is
        synthetic, whose text is not the target's.
    """
    depth = drafter.serves.tree_depth
    require(not depth, "drafter", "propose chains, without a tree_depth, if exact", drafter)
    sharding = model.serves.sharding
    must = "have its logits on one device if exact"
    require(sharding is None or sharding.mesh is None, "model", must, model)
    method = config.rejection_sample_method
    must = "not be synthetic if exact"
    require(method != "synthetic", "config.rejection_sample_method", must, method)


def check_free_text(config: SpecDecodeConfig, options: RequestOptions) -> None:
    """Checks that the text of a request does not depend on what is drafted.

    Raises:
      ValueError: it is sampled, by another rule than agreement.
    """
    is_free = config.rejection_sample_method == "agreement"
    must = 'be 0 if exact, unless rejection_sample_method is "agreement"'
    hint = "the other rules sample another text when other tokens are drafted"
    require(is_free or options.temperature == 0, "temperature", must, options.temperature, hint)


_found: dict[Hashable, RowDependence | None] = {}
"""What passes of this process were found to depend on, by all that their programs depend on."""


@functools.partial(jax.jit, static_argnums=1, keep_unused=True)
def _num_rows(params: Params, decoder: Decoder) -> jax.Array:
    """Returns the rows of a pass over drafts, ``[]`` int32, where its weights are."""
    # A program runs where its arguments are, and alone knows on which platform that is.
    return cast(jax.Array, traced_for_platform(_rows_on, (), decoder))


def _rows_on(arrays: tuple[()], decoder: Decoder, platform: Platform) -> jax.Array:
    del arrays
    return jnp.int32(decoder.num_rows(platform))


def check_rows(decoder: Decoder, params: Params, num_requests: int, length: int) -> None:
    """Checks that the target's pass over drafts gives a token the same bits in every row.

    Once in a process for each model and shape: it compiles the pass, and makes some hundred.

    Args:
      decoder: whose pass it is.
      num_requests: B.
      length: L, positions of a request in the cache.

    Raises:
      NotExactError: it does not.
    """
    model = decoder.model
    # The target's program depends on all of this and on nothing else; on the drafter by the layers
    # alone whose features it reads. Of weights, shapes, dtypes and places count, not their values.
    leaves, structure = jax.tree.flatten(params)
    kinds = tuple((jnp.shape(x), jnp.result_type(x), getattr(x, "sharding", None)) for x in leaves)
    sizes = num_requests, decoder.num_drafts, length
    program = model, decoder.drafter.serves.aux_hidden_state_layers, sizes, structure, kinds
    if program not in _found:
        # The pass that steps make, so that its rounding is what is looked at: S rows of B requests
        def apply(
            params: Params, token_ids: jax.Array, start: jax.Array, cache: Cache
        ) -> tuple[Output, Cache]:
            (output,), cache = decoder.run(params, [Rows(token_ids, start)], cache, length)
            return output, cache

        _found[program] = row_dependence(
            apply,
            params,
            model.init_cache,
            vocab_size=model.vocab_size,
            num_requests=num_requests,
            num_rows=int(_num_rows(params, decoder)),
            max_length=length,
            batch_axis=model.serves.batch_axis,
        )
    dependence = _found[program]
    if dependence is not None:
        raise NotExactError(
            "model must give a token the same bits in every row of a pass if exact, but on this "
            f"device {dependence.output} depends on {dependence.reason}"
        )
