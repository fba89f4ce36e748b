"""`BatchOptions`: the options of requests, packed into the arrays of a batch.

`generate` packs what its requests ask for, and nothing is compiled for the rest. An `Engine` packs
all that it serves, at its own sizes, because its programs must fit whoever comes. Packing makes
NumPy arrays, on the host: they go to the device with all else of a request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_specdec._src.base.arrays import pytree
from jax_specdec._src.base.sampling import SAMPLING_PARAMETERS, TEMPERATURE, SamplingParams
from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID
from jax_specdec._src.logits.process_logits import LogitsProcessors
from jax_specdec.lm.decoding.options import (
    CHANGE_ROWS,
    PACKING,
    Asked,
    OptionSizes,
    RequestOptions,
    on_host,
)


@pytree(
    prompt_lengths="[B] int32",
    max_lengths="[B] int32",
    stop_token_ids="[B, M] int32",
    max_drafts="[B] int32",
    sampling=(SamplingParams,),
    changes_rows="[B] bool",
    processors=(LogitsProcessors,),
    predictions="[B, A] int32",
)
@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """The options of B requests as arrays; None for what no request asks for.

    Attributes:
      prompt_lengths: ``[B]`` int32, the position where the output begins.
      max_lengths: ``[B]`` int32, the length at which the budget is spent.
      stop_token_ids: ``[B, M]`` int32; -1 is none.
      max_drafts: ``[B]`` int32, the most drafts of a step; the largest int32 for any number.
      sampling: temperatures and filters.
      changes_rows: ``[B]`` bool, whether a request asks for any of `processors`.
      processors: what changes logits, as it was packed, or, in a step, up to date with the
        sequences.
      predictions: ``[B, A]`` int32, what requests expect to be generated; -1 is none.
    """

    prompt_lengths: jax.Array
    max_lengths: jax.Array
    stop_token_ids: jax.Array
    max_drafts: jax.Array
    sampling: SamplingParams
    changes_rows: jax.Array | None = None
    processors: LogitsProcessors | None = None
    predictions: jax.Array | None = None

    @classmethod
    def create(
        cls,
        options: Sequence[RequestOptions],
        prompt_lengths: Sequence[int],
        vocab_size: int,
        *,
        max_stop_tokens: int | None = None,
        keep_neutral: bool = False,
        sizes: OptionSizes | None = None,
    ) -> BatchOptions:
        """Returns the options of B requests as NumPy arrays.

        Args:
          vocab_size: V.
          max_stop_tokens: M; None for the most that a request has.
          keep_neutral: make every array, also where no request asks for it, so that the compiled
            programs of an `Engine` do not depend on who comes.
          sizes: of the arrays, which the requests fit; None for what they need.
        """
        # [B] each
        lengths = np.array(prompt_lengths, np.int32)
        budgets = np.array([one.max_new_tokens for one in options], np.int32)
        any_number = np.iinfo(np.int32).max
        max_drafts = [any_number if one.max_drafts is None else one.max_drafts for one in options]
        # [B, M]: -1 after the last stop token of a request
        if max_stop_tokens is None:
            max_stop_tokens = max((len(one.stop_token_ids) for one in options), default=0)
        stops = np.full((len(options), max_stop_tokens), PLACEHOLDER_TOKEN_ID, np.int32)
        for row, request in zip(stops, options, strict=True):
            row[: len(request.stop_token_ids)] = request.stop_token_ids

        # Arrays that no request asks for are left out, and nothing is compiled for them.
        names_of = [one.non_neutral.keys() for one in options]
        served = frozenset[str]().union(*names_of)
        # [B] each, by name; the temperature is always there
        sampling = {
            parameter.name: np.array(
                [getattr(one, parameter.name) for one in options], parameter.dtype
            )
            for parameter in SAMPLING_PARAMETERS
            if keep_neutral or parameter is TEMPERATURE or parameter.name in served
        }
        # A field of `LogitsProcessors` may serve several options, as that of the penalties does.
        sizes = OptionSizes.of(options) if sizes is None else sizes
        asked = Asked(options, sizes, on_host(stops), vocab_size)
        packed: dict[str, Any] = {
            field: pack(asked)
            for field, (names, pack) in PACKING.items()
            if keep_neutral or not served.isdisjoint(names)
        }
        predictions = None
        if sizes.prediction and (keep_neutral or "prediction" in served):
            # [B, A]: -1 after the last token of each
            predictions = np.full((len(options), sizes.prediction), PLACEHOLDER_TOKEN_ID, np.int32)
            for row, request in zip(predictions, options, strict=True):
                row[: len(request.prediction or ())] = request.prediction or ()
        # [B]: a step in which none of those runs leaves the processors out
        changes_rows = np.array([bool(names & CHANGE_ROWS) for names in names_of])
        return cls(
            prompt_lengths=on_host(lengths),
            max_lengths=on_host(lengths + budgets),
            stop_token_ids=asked.stop_token_ids,
            max_drafts=on_host(np.array(max_drafts, np.int32)),
            sampling=SamplingParams(**sampling),
            changes_rows=on_host(changes_rows) if packed else None,
            processors=LogitsProcessors(**packed) if packed else None,
            predictions=None if predictions is None else on_host(predictions),
        )

    @property
    def neutral(self) -> BatchOptions:
        """The options without all that only an `Engine` with `request_options` serves."""
        # Arrays become None, so a step with these is another program: see `Engine.step`.
        sampling = SamplingParams(self.sampling.temperature)
        return dataclasses.replace(
            self, sampling=sampling, changes_rows=None, processors=None, predictions=None
        )
