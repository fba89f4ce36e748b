"""Differences of greedy texts from those of plain decoding, and how close the decisions were.

Speculative decoding of a greedy request gives the text of plain decoding, near ties aside: a pass
over K + 1 tokens rounds sums otherwise than a pass over one. `greedy_differences` says of each text
of `generate` that differs from one of `generate_plain` whether that was such a tie.
`jax-specdec bench` prints it; nothing that serves calls it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec._src.base.arrays import check_type, require
from jax_specdec._src.base.types import Array
from jax_specdec.lm.decoding import inputs
from jax_specdec.lm.decoding.batch import Batch
from jax_specdec.lm.decoding.core import PLAIN
from jax_specdec.lm.decoding.generate import GenerateOutput
from jax_specdec.lm.decoding.options import RequestOptions, options_per_request
from jax_specdec.lm.decoding.packing import BatchOptions
from jax_specdec.lm.models.protocol import (
    CausalModel,
    Params,
    Rows,
    apply_groups,
    check_model,
    check_params,
)


@dataclasses.dataclass(frozen=True)
class GreedyDifference:
    """The first token at which a greedy generation differs from plain decoding.

    Attributes:
      request: index of the request.
      index: index into its completion.
      token_id: what it emitted there; None if it had ended.
      plain_token_id: what plain decoding emitted there; None if that had ended.
      gap: difference of the two largest target logits there. Sums of float32 numbers depend on
        how many tokens a pass holds; a gap below 1e-4 is within that rounding.

    Example:
      >>> GreedyDifference(request=0, index=17, token_id=40, plain_token_id=91, gap=2e-6).gap < 1e-4
      True
    """

    request: int
    index: int
    token_id: int | None
    plain_token_id: int | None
    gap: float


def greedy_differences(
    model: CausalModel,
    params: Params,
    prompts: Sequence[Sequence[int] | Array],
    output: GenerateOutput,
    plain: GenerateOutput,
    options: RequestOptions | Sequence[RequestOptions] | None = None,
) -> list[GreedyDifference]:
    """Returns the first difference of each request that has one, and how close the decision was.

    Args:
      prompts: those of both generations.
      output: of `generate` at temperature 0.
      plain: of `generate_plain` at temperature 0.
      options: of both.

    Returns:
      One entry for each request that differs.

    Raises:
      TypeError: an output, the model or a prompt is something else.
      ValueError: there is not one prompt for each text.

    Example:
      >>> from jax_specdec import lm
      >>> _, (model, params) = lm.load_embedded_pair()
      >>> prompts = [lm.encode_bytes("import ")]
      >>> plain = lm.generate_plain(model, params, prompts, max_new_tokens=4)
      >>> lm.greedy_differences(model, params, prompts, plain, plain)
      []
    """
    check_model("model", model)
    check_params("params", model, params)
    check_type("output", output, GenerateOutput)
    check_type("plain", plain, GenerateOutput)
    prompts = inputs.token_lists(prompts, model.vocab_size)
    for name, texts in (("output", output), ("plain", plain)):
        must = f"have a text for each of {len(prompts)} prompts"
        fits = len(texts.completions) == len(prompts)
        require(fits, f"{name}.completions", must, texts.completions)
    differences = []
    request_options = options_per_request(options, len(prompts), {})
    pairs = zip(output.completions, plain.completions, strict=True)
    for b, (ours, theirs) in enumerate(pairs):
        if ours == theirs:
            continue
        # a text that ended first has None where the other goes on
        both = itertools.zip_longest(ours, theirs)
        # What comes after the first difference says nothing: the texts are then two texts.
        index, (token_id, plain_token_id) = next(
            (i, pair) for i, pair in enumerate(both) if pair[0] != pair[1]
        )
        # [1, T]: what both texts begin with; its last row decided
        sequence = jnp.array([[*prompts[b], *theirs[:index]]], jnp.int32)
        cache = model.init_cache(1, sequence.shape[1])
        rows = Rows(sequence, jnp.zeros((1,), jnp.int32))
        ((logits, _),), _ = apply_groups(model, params, [rows], cache)
        # [1, T, V] -> [V]
        row = _processed(logits[:, -1], request_options[b], sequence, len(prompts[b]))
        # Those of the two best tokens, which are those of the two texts where it was a tie.
        second, best = np.sort(row)[-2:]
        gap = float(best - second)
        differences.append(GreedyDifference(b, index, token_id, plain_token_id, gap))
    return differences


def _processed(
    logits: jax.Array, options: RequestOptions, sequence: jax.Array, prompt_length: int
) -> np.ndarray:
    """Returns the row ``[V]`` that a greedy token is the argmax of, from ``logits [1, V]``."""
    # A batch of this one request, as it was before the token: penalties and other processors read
    # the sequence, and where its output begins. The key is not used, for nothing is drawn.
    vocab_size = logits.shape[1]
    batch = Batch(
        token_ids=sequence,
        lengths=jnp.array([sequence.shape[1]], jnp.int32),
        done=jnp.zeros((1,), bool),
        status=jnp.zeros((1,), jnp.int32),
        keys=jax.random.split(jax.random.key(0), 1),
        options=BatchOptions.create([options], [prompt_length], vocab_size),
    )
    rows = batch.with_processors(vocab_size).context(PLAIN).processed(logits)
    return np.array(rows[0], np.float32)
