"""`generate`, `generate_stream` and `generate_plain`: decoding a batch that is known beforehand.

Each checks its arguments and lays them out in `_prepare`: a `Decoder`, which is static, and a
`Batch`, whose shapes are rounded up so that similar calls share programs. `generate` then reads the
prompts and makes all steps in one program with a `lax.while_loop`, `generate_stream` one program
call for each step. Requests that come and go are for an `Engine`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec._src.base.arrays import check_outside_jit, check_type
from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.noise import check_keys, fold_in_each, threefry_keys
from jax_specdec._src.base.types import Array, Status
from jax_specdec._src.logits.logprobs import LogprobsConfig, TokenLogprobs
from jax_specdec._src.stats.emitted import StepRecord
from jax_specdec.lm.decoding import inputs
from jax_specdec.lm.decoding.batch import Batch, round_up
from jax_specdec.lm.decoding.core import PLAIN, Decoder
from jax_specdec.lm.decoding.exact import check_exact, check_free_text, check_rows
from jax_specdec.lm.decoding.options import RequestFields, RequestOptions, options_per_request
from jax_specdec.lm.decoding.packing import BatchOptions
from jax_specdec.lm.decoding.state import DecodeState
from jax_specdec.lm.decoding.weights import on_all_devices
from jax_specdec.lm.drafting.drafter import Drafter, NoDrafter
from jax_specdec.lm.models.protocol import CausalModel, Params, check_model, check_params


@dataclasses.dataclass(frozen=True)
class GenerateOutput:
    """A finished generation, on the host.

    Attributes:
      completions: B lists of generated token ids; a stop token is included.
      steps: a `StepRecord` of NumPy arrays with a leading axis of S steps.
      status: B values of `Status`; not OK for a request that ended because it could not be
        verified.

    Example: see `generate`.
    """

    completions: list[list[int]]
    steps: StepRecord
    status: list[Status]

    @functools.cached_property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """B `TokenLogprobs` of NumPy arrays, a row for each token of the completion; or None.

        They are those of `steps`, joined as `completions` are: an array ``[B, K+1, ...]`` there is
        ``[n, ...]`` here, n the number of tokens. None unless `generate` was given `logprobs`.
        """
        by_step = self.steps.logprobs
        if by_step is None:
            return None
        # [S, B, K+1]: whether a step emitted a token there
        is_kept = np.arange(by_step.logprobs.shape[2]) < np.asarray(self.steps.num_kept)[..., None]
        # [S, B, K+1, ...] -> [S, K+1, ...] -> [n, ...]
        return [
            jax.tree.map(lambda x, b=b: x[:, b][is_kept[:, b]], by_step)
            for b in range(len(self.completions))
        ]

    def __repr__(self) -> str:
        failed = sum(one != Status.OK for one in self.status)
        return (
            f"<GenerateOutput: {len(self.completions)} requests, "
            f"{sum(map(len, self.completions))} tokens, {len(self.steps.num_kept)} steps"
            f"{f', {failed} failed' if failed else ''}>"
        )


def generate(
    model: CausalModel,
    params: Params,
    prompts: Sequence[Sequence[int] | Array],
    *,
    drafter: Drafter,
    draft_params: Params = None,
    config: SpecDecodeConfig,
    options: RequestOptions | Sequence[RequestOptions] | None = None,
    key: jax.Array | None = None,
    logprobs: LogprobsConfig | None = None,
    exact: bool = False,
    **fields: Unpack[RequestFields],
) -> GenerateOutput:
    """Generates with speculative decoding: the target's own distribution, in fewer passes.

    Runs as one compiled `while_loop`, compiled once for each shape of the batch.

    Args:
      model: the target, any `CausalModel`.
      prompts: B token id lists of any lengths, none empty. Without prompts the output is empty.
      drafter: a `ModelDrafter`, an `NGramDrafter`, or any `Drafter`.
      options: what the requests ask for, one for all or a list with one for each.
      key: a typed key, or None for ``jax.random.key(0)``. Request b uses ``fold_in(key, b)``,
        unless its options have a seed.
      logprobs: which log-probabilities the steps have; None for none.
      exact: texts are those of ``generate_plain`` with the same prompts, config and `exact`, to the
        last bit of their log-probabilities, whatever the drafter: every pass of the target has the
        rows of a step with drafts. Without it they may differ where two ids nearly tie, because
        sums of floats in passes of another width differ in their last bits. Requests must be
        greedy, or the rule agreement: other rules sample by what was drafted. Before the first text
        of each shape, `jax_specdec.testing.row_dependence` checks the model on this device; figures
        by machine are in ``docs/exact.md``.
      **fields: of `RequestOptions`, such as ``temperature=0.8``. They hold for every request and
        override its options.

    Returns:
      `GenerateOutput`.

    Raises:
      TypeError: an argument has another type, ids are not integers, or the key is not typed.
      ValueError: an empty prompt, an id or an option out of range, a list of the wrong length, or
        weights of another shape than the model's; `exact` with a drafter of trees, with a sampled
        request unless the rule is agreement, with the synthetic rule, or with a model whose logits
        are split over devices, or depend on a token's row in a pass on this device.

    Example:
      >>> import jax_specdec as sd
      >>> from jax_specdec import lm
      >>> (target, params), (draft, draft_params) = lm.load_embedded_pair()
      >>> output = lm.generate(
      ...     target, params, [lm.encode_bytes("def quicksort(items):")],
      ...     drafter=lm.ModelDrafter(draft), draft_params=draft_params,
      ...     config=sd.SpecDecodeConfig(num_speculative_tokens=4), max_new_tokens=60)
      >>> len(output.completions[0])
      60
    """
    return _prepare(
        model, params, prompts, drafter, draft_params, config, options, key, logprobs, exact, fields
    ).run()


def generate_stream(
    model: CausalModel,
    params: Params,
    prompts: Sequence[Sequence[int] | Array],
    *,
    drafter: Drafter,
    draft_params: Params = None,
    config: SpecDecodeConfig,
    options: RequestOptions | Sequence[RequestOptions] | None = None,
    key: jax.Array | None = None,
    logprobs: LogprobsConfig | None = None,
    exact: bool = False,
    **fields: Unpack[RequestFields],
) -> Iterator[StepRecord]:
    """Yields what each step of `generate` emitted, as it comes.

    Arguments and errors are those of `generate`, and so are the tokens and the acceptance of every
    step.

    Yields:
      One `StepRecord` of NumPy arrays ``[B, ...]`` for each step.

    Example: see `TextStream`.
    """
    return _prepare(
        model, params, prompts, drafter, draft_params, config, options, key, logprobs, exact, fields
    ).steps()


def generate_plain(
    model: CausalModel,
    params: Params,
    prompts: Sequence[Sequence[int] | Array],
    *,
    config: SpecDecodeConfig | None = None,
    options: RequestOptions | Sequence[RequestOptions] | None = None,
    key: jax.Array | None = None,
    logprobs: LogprobsConfig | None = None,
    exact: bool = False,
    **fields: Unpack[RequestFields],
) -> GenerateOutput:
    """Generates without drafts, one token per pass of the target: the baseline of `generate`.

    Arguments and errors are those of `generate`. Only one thing of `config` matters, whether it
    asks for the agreement rule: that rule draws tokens in its own way, so its texts are those of
    plain decoding with such a config. With `exact` its K matters too: it gives a pass its rows.

    Returns:
      `GenerateOutput`; its steps propose nothing and emit one token each.

    Example: see `greedy_differences`.
    """
    config = PLAIN if config is None else config
    return _prepare(
        model, params, prompts, NoDrafter(), None, config, options, key, logprobs, exact, fields
    ).run()


class _Prepared(NamedTuple):
    """The arguments of `generate`, `generate_stream` and `generate_plain`, checked and laid out.

    Attributes:
      decoder: what a step does.
      params: the target's weights, where its model wants them.
      draft_params: the drafter's weights, on the same devices.
      prompts: B token id lists.
      batch: the B requests, before their prompts are read.
      prompt_size: length of the padded prompts.
      max_steps: the most steps that the batch can take.
    """

    decoder: Decoder
    params: Params
    draft_params: Params
    prompts: list[list[int]]
    batch: Batch
    prompt_size: int
    max_steps: int

    def run(self) -> GenerateOutput:
        """Runs all steps in one compiled loop."""
        # Without requests there is nothing to compile.
        if not self.prompts:
            return GenerateOutput([], jax.device_get(_empty_records(self.decoder, 0, 0)), [])
        batch, steps, num_steps = _generate(
            self.params,
            self.draft_params,
            self.batch,
            decoder=self.decoder,
            prompt_size=self.prompt_size,
            max_steps=self.max_steps,
        )
        # This waits for the device. The program has returned no caches: their memory is free.
        count = int(num_steps)
        token_ids, lengths, status = jax.device_get((batch.token_ids, batch.lengths, batch.status))
        return GenerateOutput(
            completions=[
                token_ids[b, len(prompt) : lengths[b]].tolist()
                for b, prompt in enumerate(self.prompts)
            ],
            # [max_steps, B, ...] -> [S, B, ...]
            steps=jax.tree.map(lambda x: x[:count], _of_host(steps)),
            status=[Status(s) for s in status],
        )

    def steps(self) -> Iterator[StepRecord]:
        """Yields the records of one step after another, each a call of its own."""
        decoder = self.decoder
        done = np.asarray(self.batch.done)
        if done.all():  # also if there is no request: then there is nothing to compile
            return
        state = _prefill(
            decoder, self.params, self.draft_params, self.batch, prompt_size=self.prompt_size
        )
        # Each turn waits for the step: whether there is a next one depends on it.
        while not done.all():
            state, record = _step(decoder, self.params, self.draft_params, state)
            done = jax.device_get(state.batch.done)
            yield _of_host(record)


def _prepare(
    model: CausalModel,
    params: Params,
    prompts: Sequence[Sequence[int] | Array],
    drafter: Drafter,
    draft_params: Params,
    config: SpecDecodeConfig,
    options: RequestOptions | Sequence[RequestOptions] | None,
    key: jax.Array | None,
    logprobs: LogprobsConfig | None,
    exact: bool,
    fields: RequestFields,
) -> _Prepared:
    """Checks the arguments, and lays them out."""
    # In this order, because later checks read what earlier ones have checked.
    inputs.check_drafter(drafter, config)
    check_model("model", model)
    check_params("params", model, params)
    check_params("draft_params", drafter, draft_params)
    check_outside_jit("generate", params=params, draft_params=draft_params, key=key)
    inputs.check_logprobs(logprobs, model)
    check_type("exact", exact, bool)
    if exact:
        check_exact(model, drafter, config)
    token_lists = inputs.token_lists(prompts, model.vocab_size)
    asked = options_per_request(options, len(token_lists), fields)
    for request_options in asked if exact else ():
        check_free_text(config, request_options)
    # `generate_plain` takes options and configs of `generate`, and reads nothing of drafts in them.
    if not isinstance(drafter, NoDrafter):
        for request_options in asked:
            request_options.check_drafts(config.num_speculative_tokens)
            inputs.check_prediction(drafter, request_options.prediction)
        inputs.check_trees(model, drafter, config)
        if all(one.max_drafts == 0 for one in asked):
            drafter = NoDrafter()  # nobody wants a draft
    if isinstance(drafter, NoDrafter):
        # Nobody looks in predictions: a batch has the programs of one without.
        asked = [dataclasses.replace(one, prediction=None) for one in asked]
    decoder = Decoder(model, drafter, config, logprobs, exact=exact)
    batch, prompt_size, max_steps = make_batch(
        token_lists, asked, vocab_size=model.vocab_size, key=key, slack=decoder.most_rows
    )
    params, draft_params, batch = on_all_devices((params, draft_params, batch), model)
    # Last, because it compiles a pass, of the very shape that the steps have.
    if exact and token_lists:
        check_rows(decoder, params, *batch.token_ids.shape)
    return _Prepared(decoder, params, draft_params, token_lists, batch, prompt_size, max_steps)


def make_batch(
    prompts: list[list[int]],
    options: list[RequestOptions],
    *,
    vocab_size: int,
    key: jax.Array | None,
    slack: int,
) -> tuple[Batch, int, int]:
    """Returns the requests as arrays, and the sizes that their programs are compiled for.

    Args:
      prompts: B token id lists.
      vocab_size: V.
      key: a typed key, or None for ``jax.random.key(0)``.
      slack: how many positions past the last token a step may write to; with a drafter at least
        K + 1, as a `DraftContext` says of its L.

    Returns:
      The batch; the length of the padded prompts; and the most steps that it can take. Both
      numbers are rounded up.

    Raises:
      TypeError: `key` is not one typed key.
      ValueError: an id of the options is outside the vocabulary.
    """
    key = jax.random.key(0) if key is None else key
    check_keys("key", key)
    if key.shape != ():
        raise TypeError(f"key must be one key, but its shape is {list(key.shape)}")
    for request_options in options:
        request_options.check(vocab_size)
    # P, L and the steps are shapes or static. Rounded up, they are the same for many batches.
    budget = max((one.max_new_tokens for one in options), default=0)
    prompt_size = round_up(max(map(len, prompts), default=0))
    # [B, L]: prompts, padded, with room for the output and what the last step may write past it
    token_ids = np.zeros((len(prompts), round_up(prompt_size + budget + slack)), np.int32)
    for b, prompt in enumerate(prompts):
        token_ids[b, : len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    arrays = BatchOptions.create(options, lengths.tolist(), vocab_size)
    # [B]: the requests' own seeds in place of the shared key, all as keys of Threefry, whatever
    # the kind of `key`
    keys = fold_in_each(key, len(options))
    seeds = {b: one.seed for b, one in enumerate(options) if one.seed is not None}
    if seeds:
        seeded = jnp.stack([jax.random.key(np.uint32(seed)) for seed in seeds.values()])
        keys = keys.at[np.array(list(seeds))].set(threefry_keys(seeded))
    batch = Batch(
        token_ids=jax.device_put(token_ids),
        lengths=jax.device_put(lengths),
        done=jax.device_put(lengths >= arrays.max_lengths),  # of no budget
        status=jnp.full((len(prompts),), int(Status.OK), jnp.int32),
        keys=keys,
        options=jax.device_put(arrays),
    )
    return batch, prompt_size, round_up(budget)


def _empty_records(decoder: Decoder, num_steps: int, num_requests: int) -> StepRecord:
    """Returns records of steps that did nothing, stacked ``[num_steps, ...]``."""
    counts = jnp.zeros((num_steps, num_requests), jnp.int32)
    # [S, B] -> [S, B, D+1] -> [S, B, D+1, n]: a step emits the accepted drafts and one token more
    token_ids = jnp.zeros((*counts.shape, decoder.most_accepted + 1), jnp.int32)
    logprobs = None
    if decoder.logprobs is not None:
        numbers = token_ids.astype(jnp.float32)
        top = jnp.zeros((*token_ids.shape, decoder.logprobs.num_top), jnp.int32)
        thresholds = numbers if decoder.logprobs.thresholds else None
        logprobs = TokenLogprobs(numbers, top, top.astype(jnp.float32), thresholds)
    return StepRecord(token_ids, counts, counts, counts, counts, logprobs)


def _of_host(record: StepRecord) -> StepRecord:
    """Returns records as NumPy arrays, of those that a program returns; waits for the device."""
    host_record = jax.device_get(record)
    if host_record.logprobs is None:
        return host_record
    # Programs return log-probabilities as bits: see `_as_returned`.
    return dataclasses.replace(host_record, logprobs=host_record.logprobs.of_bits())


def _as_returned(record: StepRecord) -> StepRecord:
    """Returns records as a program returns them; see `TokenLogprobs.as_bits`."""
    if record.logprobs is None:
        return record
    return dataclasses.replace(record, logprobs=record.logprobs.as_bits())


@functools.partial(jax.jit, static_argnames="decoder", donate_argnames="state")
def _step(
    decoder: Decoder, params: Params, draft_params: Params, state: DecodeState
) -> tuple[DecodeState, StepRecord]:
    """Makes one step of `generate_stream`, a program of its own."""
    state, record = decoder.step(params, draft_params, state)
    return state, _as_returned(record)


# `self` is the decoder. Nothing is donated: a batch is small, and caches are made here.
_prefill = jax.jit(Decoder.prefilled_state, static_argnames=("self", "prompt_size"))
_Carry = tuple[DecodeState, StepRecord, jax.Array]


@functools.partial(jax.jit, static_argnames=("decoder", "prompt_size", "max_steps"))
def _generate(
    params: Params,
    draft_params: Params,
    batch: Batch,
    *,
    decoder: Decoder,
    prompt_size: int,
    max_steps: int,
) -> tuple[Batch, StepRecord, jax.Array]:
    """Returns the final batch, the records ``[max_steps, ...]``, and how many steps there were.

    `max_steps` is at least the largest budget. That is enough, because every step adds a token.
    """
    state = decoder.prefilled_state(params, draft_params, batch, prompt_size)
    # A loop has arrays of fixed shapes: room for as many steps as there may be, [max_steps, B, ...]
    records = _empty_records(decoder, max_steps, batch.lengths.shape[0])

    # Requests that are done stay in the batch, and every pass has their rows, until all are done.
    def goes_on(carry: _Carry) -> jax.Array:
        return ~jnp.all(carry[0].batch.done)

    def body(carry: _Carry) -> _Carry:
        state, records, count = carry
        state, record = decoder.step(params, draft_params, state)
        # [B, ...] -> row `count` of [max_steps, B, ...], in place
        records = jax.tree.map(
            lambda array, entry: lax.dynamic_update_index_in_dim(array, entry, count, 0),
            records,
            record,
        )
        return state, records, count + 1

    state, records, count = lax.while_loop(goes_on, body, (state, records, jnp.int32(0)))
    return state.batch, _as_returned(records), count
