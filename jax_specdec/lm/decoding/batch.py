"""`Batch`: the sequences of a batch while they grow, and what their requests ask for.

It is the part of a `DecodeState` that does not depend on models. `Decoder` gives what it holds to
the drafter and to the verification (`Batch.context`), and `append` adds what a step emits, ends
requests and makes the step's `StepRecord`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_specdec._src.base.arrays import pytree
from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID, RejectionSampleOutput, Status
from jax_specdec._src.logits.logprobs import TokenLogprobs
from jax_specdec._src.logits.processors import Sequences
from jax_specdec._src.stats.emitted import StepRecord, truncate
from jax_specdec.lm.decoding.packing import BatchOptions
from jax_specdec.lm.drafting.drafter import DraftContext

_BUCKET = 32


def round_up(size: int) -> int:
    """Returns the least multiple of 32 that is at least `size` and 32.

    So prompts of similar lengths share a compilation, and matrix units read aligned caches.
    """
    return max(1, -(-size // _BUCKET)) * _BUCKET


@pytree(
    token_ids="[B, L] int32",
    lengths="[B] int32",
    done="[B] bool",
    status="[B] int32",
    keys="[B]",
    options=(BatchOptions,),
    known_lengths="[B] int32",
)
@dataclasses.dataclass(frozen=True)
class Batch:
    """B sequences in buffers of a fixed length L, and what their requests ask for.

    Attributes:
      token_ids: ``[B, L]`` int32: prompt, then generated tokens; undefined from ``lengths`` on.
      lengths: ``[B]`` int32.
      done: ``[B]`` bool.
      status: ``[B]`` int32, a `Status`: why a request ended early, or OK.
      keys: ``[B]`` keys of Threefry.
      options: what the requests ask for.
      known_lengths: ``[B]`` int32, the length of the text that each request had before it was read
        again: `token_ids` hold it, and it is generated again, as it was. None where nobody does so.
    """

    token_ids: jax.Array
    lengths: jax.Array
    done: jax.Array
    status: jax.Array
    keys: jax.Array
    options: BatchOptions
    known_lengths: jax.Array | None = None

    @property
    def repeats(self) -> jax.Array:
        """``[B]`` bool, whether the next token of a request is known."""
        if self.known_lengths is None:
            return jnp.zeros_like(self.done)
        return self.lengths < self.known_lengths

    @property
    def most_new(self) -> jax.Array:
        """``[B]`` int32, the most tokens that a step appends: what the budget leaves, or is known.

        What is generated again ends where it was interrupted: the next step is that which would
        have followed.
        """
        left = self.options.max_lengths - self.lengths
        if self.known_lengths is None:
            return left
        return jnp.where(self.repeats, self.known_lengths - self.lengths, left)

    def with_processors(self, vocab_size: int) -> Batch:
        """Returns the batch with processors that know its sequences, as `append` keeps them.

        Until then they are as they were packed. A request that is read again, after it left its
        slot, gets what they knew back.
        """
        if self.options.processors is None:
            return self
        sequences = Sequences(
            token_ids=self.token_ids,
            lengths=self.lengths,
            prompt_lengths=self.options.prompt_lengths,
            vocab_size=vocab_size,
        )
        processors = self.options.processors.with_sequences(sequences)
        return dataclasses.replace(
            self, options=dataclasses.replace(self.options, processors=processors)
        )

    def context(self, config: SpecDecodeConfig) -> DraftContext:
        """Returns what the drafter and the target are given for a step."""
        changes_rows = self.options.changes_rows
        if changes_rows is not None:
            # [B] -> []: processors are not applied while no request that runs asks for any
            changes_rows = jnp.any(changes_rows & ~self.done)
        return DraftContext(
            token_ids=self.token_ids,
            lengths=self.lengths,
            sampling=self.options.sampling,
            keys=self.keys,
            config=config,
            changes_rows=changes_rows,
            processors=self.options.processors,
            active=~self.done,
            predictions=self.options.predictions,
            prompt_lengths=self.options.prompt_lengths,
        )


def append(
    batch: Batch,
    output: RejectionSampleOutput,
    num_proposed: jax.Array,
    logprobs: TokenLogprobs | None = None,
) -> tuple[Batch, StepRecord]:
    """Appends what a verification emitted, up to a stop token, the budget or what was known.

    Args:
      batch: the sequences; those that are done stay as they are, because `output` has no token for
        them.
      num_proposed: ``[B]`` int32, drafts offered to it.
      logprobs: of the emitted tokens; None unless asked for.

    Returns:
      The batch and the record of the step.
    """
    # [B, K+1]: the accepted drafts, one token more, then -1
    emitted = output.token_ids
    options = batch.options
    # [B]: a stop token or the budget may cut what was emitted; a stop token itself is kept
    num_kept, stopped = truncate(
        emitted,
        output.num_emitted,
        stop_token_ids=options.stop_token_ids,
        max_tokens=batch.most_new,
    )
    offset = jnp.arange(emitted.shape[1], dtype=jnp.int32)[None, :]  # [1, K+1], in the step
    position = jnp.arange(batch.token_ids.shape[1], dtype=jnp.int32)[None, :]  # [1, L]
    # [B, L]: the emitted token that is due at each position; [B, K+1] -> [B, L]
    due = position - batch.lengths[:, None]
    source = jnp.clip(due, 0, emitted.shape[1] - 1)
    is_new = (due >= 0) & (due < num_kept[:, None])
    token_ids = jnp.where(is_new, jnp.take_along_axis(emitted, source, axis=1), batch.token_ids)
    lengths = batch.lengths + num_kept
    failed = ~batch.done & (output.status != int(Status.OK))  # done requests are INACTIVE
    is_kept = offset < num_kept[:, None]  # [B, K+1]
    record = StepRecord(
        token_ids=jnp.where(is_kept, emitted, PLACEHOLDER_TOKEN_ID),
        num_kept=num_kept,
        # of a request that failed, or is done, nothing was verified
        num_proposed=jnp.where(output.num_emitted > 0, num_proposed, 0),
        num_accepted=output.num_accepted,
        num_emitted=output.num_emitted,
        logprobs=None if logprobs is None else logprobs.where(is_kept),
    )
    # Processors count the tokens that are kept: of the record, in which the others are -1.
    if options.processors is not None:
        processors = options.processors.append(record.token_ids)
        options = dataclasses.replace(options, processors=processors)
    batch = dataclasses.replace(
        batch,
        token_ids=token_ids,
        lengths=lengths,
        done=batch.done | stopped | failed | (lengths >= options.max_lengths),
        # Of a request that is done the output is INACTIVE: it keeps the status it ended with.
        status=jnp.where(failed, output.status, batch.status),
        options=options,
    )
    return batch, record
