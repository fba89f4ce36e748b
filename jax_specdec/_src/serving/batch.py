"""The sequences of a batch while they grow: shared by speculative and plain decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec._src.logprobs import TokenLogprobs
from jax_specdec._src.noise import check_keys, fold_in_each
from jax_specdec._src.penalties import Penalties
from jax_specdec._src.serving import inputs
from jax_specdec._src.serving.options import BatchOptions, RequestOptions, per_request
from jax_specdec._src.types import (
    PLACEHOLDER_TOKEN_ID,
    RejectionSampleOutput,
    SamplingParams,
    Status,
)

_BUCKET = 32
"""Sizes are rounded up to this, so that prompts of similar length share a compilation."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """B sequences in buffers of fixed length L.

    Attributes:
      token_ids: ``[B, L]`` int32: prompt, then generated tokens; undefined past ``lengths``.
      lengths: ``[B]`` int32.
      ends: ``[B]`` int32, the length at which the budget is spent.
      done: ``[B]`` bool.
      temperature: ``[B]`` float32.
      keys: ``[B]`` keys of Threefry.
      stop_token_ids: ``[B, M]`` int32, a request ends after emitting one of its own; -1 is none.
      status: ``[B]`` int32, a `Status`: why a request ended early, or OK.
      options: what requests ask for besides; None where nobody asks for anything.
    """

    token_ids: jax.Array
    lengths: jax.Array
    ends: jax.Array
    done: jax.Array
    temperature: jax.Array
    keys: jax.Array
    stop_token_ids: jax.Array
    status: jax.Array
    options: BatchOptions | None = None

    @property
    def sampling(self) -> SamplingParams:
        """What the verification and a drafter sample with."""
        filters = () if self.options is None else self.options.filters
        return SamplingParams(self.temperature, *filters)

    @property
    def token_bitmask(self) -> jax.Array | None:
        """Tokens that each request allows; None where all do."""
        return None if self.options is None else self.options.token_bitmask

    def penalties(self, vocab_size: int) -> Penalties | None:
        """Of the sequences so far; None where nobody asks for any."""
        if self.options is None:
            return None
        return self.options.count(self.token_ids, self.lengths, self.done, vocab_size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepRecord:
    """What one step did, per request; stacked ``[S, ...]`` over the steps of a generation.

    The counts of the verification are taken before stop tokens and budgets cut its tokens, so
    acceptance rates computed from them are not biased by where sequences end.

    Attributes:
      token_ids: ``[B, K+1]`` int32, the tokens kept, padded with -1.
      num_kept: ``[B]`` int32, tokens added to the sequence.
      num_proposed: ``[B]`` int32, drafts offered to the verification; 0 for finished requests.
      num_accepted: ``[B]`` int32, drafts it accepted.
      num_emitted: ``[B]`` int32, tokens it emitted; 0 for finished requests.
      logprobs: `TokenLogprobs` of the tokens kept; None unless asked for.

    Example:
      >>> import jax_specdec as sd
      >>> (target, params), (draft, draft_params) = sd.load_embedded_pair()
      >>> steps = sd.generate(
      ...     target, params, [sd.encode("def add(a, b):")],
      ...     drafter=sd.ModelDrafter(draft), draft_params=draft_params,
      ...     config=sd.SpecDecodeConfig(num_speculative_tokens=2), max_new_tokens=8).steps
      >>> int(steps.num_kept.sum())
      8
    """

    token_ids: jax.Array
    num_kept: jax.Array
    num_proposed: jax.Array
    num_accepted: jax.Array
    num_emitted: jax.Array
    logprobs: TokenLogprobs | None = None


@dataclasses.dataclass(frozen=True)
class GenerateOutput:
    """A finished generation, on the host.

    Attributes:
      completions: B lists of generated token ids, a stop token included.
      steps: `StepRecord` of NumPy arrays with a leading axis of S steps.
      status: B `Status` values; not OK where a request ended because it could not be verified.

    Example:
      >>> import jax_specdec as sd
      >>> _, (model, params) = sd.load_embedded_pair()  # the smaller one
      >>> output = sd.generate_plain(model, params, [sd.encode("import ")], max_new_tokens=4)
      >>> output.status
      [<Status.OK: 0>]
    """

    completions: list[list[int]]
    steps: StepRecord
    status: list[Status]


def make_batch(
    prompts: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    temperature: float | Sequence[float],
    key: jax.Array | None,
    max_new_tokens: int | Sequence[int],
    stop_token_ids: Sequence[int],
    slack: int,
    options: RequestOptions | Sequence[RequestOptions] | None = None,
) -> tuple[Batch, int, int]:
    """Check a user's request and lay it out.

    Args:
      prompts: B token id lists.
      vocab_size: V.
      temperature: one, or B.
      key: typed key or None.
      max_new_tokens: one, or B.
      stop_token_ids: of every request.
      slack: positions past the end that a step may write to.
      options: one, or B; None for none.

    Returns:
      The batch, the padded prompt length, and the most steps it can take, both rounded up.
    """
    rows = inputs.token_lists(prompts, vocab_size)
    temperatures = inputs.temperatures(temperature, len(rows))
    budgets = inputs.budgets(max_new_tokens, len(rows))
    stops = inputs.stop_ids(stop_token_ids, vocab_size)
    asked = per_request(options, len(rows))
    key = jax.random.key(0) if key is None else key
    check_keys("key", key)
    if key.shape != ():
        raise TypeError(f"key must be one key, but its shape is {list(key.shape)}")

    prompt_size = _round_up(max(map(len, rows)))
    length = _round_up(prompt_size + max(budgets) + slack)
    token_ids = np.zeros((len(rows), length), np.int32)
    for b, row in enumerate(rows):
        token_ids[b, : len(row)] = row
    lengths = np.array([len(row) for row in rows], np.int32)
    batch = Batch(
        token_ids=jnp.asarray(token_ids),
        lengths=jnp.asarray(lengths),
        ends=jnp.asarray(lengths + np.array(budgets, np.int32)),
        done=jnp.asarray(np.array(budgets) == 0),
        temperature=jnp.asarray(np.array(temperatures, np.float32)),
        keys=fold_in_each(key, len(rows)),
        stop_token_ids=jnp.asarray(np.array([stops] * len(rows), np.int32)),
        status=jnp.full((len(rows),), int(Status.OK), jnp.int32),
        options=jax.tree.map(jnp.asarray, BatchOptions.create(asked, lengths.tolist(), vocab_size)),
    )
    return batch, prompt_size, _round_up(max(budgets))


def _round_up(size: int) -> int:
    """At least one bucket."""
    return max(1, -(-size // _BUCKET)) * _BUCKET


def append(
    batch: Batch,
    output: RejectionSampleOutput,
    num_proposed: jax.Array,
    logprobs: TokenLogprobs | None = None,
) -> tuple[Batch, StepRecord]:
    """Add a verification's tokens to the sequences, up to a stop token or the budget.

    Args:
      batch: the sequences.
      output: what was emitted for them.
      num_proposed: ``[B]`` int32, drafts offered.
      logprobs: of what was emitted.

    Returns:
      The batch and the record of the step.
    """
    emitted = output.token_ids
    offset = jnp.arange(emitted.shape[1], dtype=jnp.int32)[None, :]
    is_stop = jnp.any(emitted[:, :, None] == batch.stop_token_ids[:, None, :], axis=2)
    stop_at = jnp.min(jnp.where(is_stop, offset, emitted.shape[1]), axis=1)
    num_kept = jnp.minimum(output.num_emitted, batch.ends - batch.lengths)
    stopped = stop_at < num_kept
    num_kept = jnp.where(stopped, stop_at + 1, num_kept)

    place = jnp.arange(batch.token_ids.shape[1], dtype=jnp.int32)[None, :] - batch.lengths[:, None]
    source = jnp.clip(place, 0, emitted.shape[1] - 1)
    is_new = (place >= 0) & (place < num_kept[:, None])
    token_ids = jnp.where(is_new, jnp.take_along_axis(emitted, source, axis=1), batch.token_ids)
    lengths = batch.lengths + num_kept
    failed = ~batch.done & (output.status != int(Status.OK))
    is_kept = offset < num_kept[:, None]
    record = StepRecord(
        token_ids=jnp.where(is_kept, emitted, PLACEHOLDER_TOKEN_ID),
        num_kept=num_kept,
        num_proposed=jnp.where(output.num_emitted > 0, num_proposed, 0),
        num_accepted=output.num_accepted,
        num_emitted=output.num_emitted,
        logprobs=None if logprobs is None else logprobs.where(is_kept),
    )
    batch = dataclasses.replace(
        batch,
        token_ids=token_ids,
        lengths=lengths,
        done=batch.done | stopped | failed | (lengths >= batch.ends),
        status=jnp.where(failed, output.status, batch.status),
    )
    return batch, record


def run_until_done(
    step: Callable[[Any], tuple[Any, StepRecord]],
    state: Any,
    batch_of: Callable[[Any], Batch],
    max_steps: int,
) -> tuple[Batch, StepRecord, jax.Array]:
    """Step in one `while_loop` until every request is done.

    Args:
      step: ``state -> (state, record)``.
      state: where to begin.
      batch_of: the `Batch` inside a state.
      max_steps: at least the largest budget; every step adds a token, so no more are needed.

    Returns:
      The final batch, the records stacked ``[max_steps, ...]``, and how many there are.
    """
    shapes = jax.eval_shape(step, state)[1]
    records = jax.tree.map(lambda s: jnp.zeros((max_steps, *s.shape), s.dtype), shapes)

    def goes_on(carry: Any) -> jax.Array:
        return ~jnp.all(batch_of(carry[0]).done)

    def body(carry: Any) -> Any:
        state, records, count = carry
        state, record = step(state)
        records = jax.tree.map(
            lambda all_, one: lax.dynamic_update_index_in_dim(all_, one, count, 0), records, record
        )
        return state, records, count + 1

    state, records, count = lax.while_loop(goes_on, body, (state, records, jnp.int32(0)))
    return batch_of(state), records, count


def collect(
    prompts: Sequence[Sequence[int]], batch: Batch, steps: StepRecord, num_steps: jax.Array
) -> GenerateOutput:
    """Bring a finished generation to the host."""
    count = int(num_steps)
    token_ids, lengths, status = jax.device_get((batch.token_ids, batch.lengths, batch.status))
    return GenerateOutput(
        completions=[
            token_ids[b, len(prompt) : lengths[b]].tolist() for b, prompt in enumerate(prompts)
        ],
        steps=jax.tree.map(lambda x: x[:count], jax.device_get(steps)),
        status=[Status(s) for s in status],
    )
