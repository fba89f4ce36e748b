"""The compiled programs of an engine, which all drivers of equal engines share.

Most call a method of `Engine` under `jax.jit`. The engine is a static argument, compared by value.
The state is donated, so its caches are changed in place. `DeviceState` is who calls them. A copy
between host and device takes longer than to dispatch a step, so new requests go to the device as
one array (`PackedRequests`), and what the host reads of a step comes back as one, beside
log-probabilities and rates (`StepResult`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec._src.stats.emitted import StepRecord
from jax_specdec.lm.decoding.bookkeeping import StepResult
from jax_specdec.lm.decoding.engine import Engine, NewRequests
from jax_specdec.lm.decoding.schedule import Prompts
from jax_specdec.lm.decoding.state import DecodeState, Drafted, Features
from jax_specdec.lm.models.protocol import Cache, HasCache, Params, put_cache, take_cache

release = jax.jit(Engine.release, static_argnums=0, donate_argnames="state")


def remember(engine: Engine, draft_params: Params, token_ids: jax.Array) -> Params:
    """Returns the drafter's params, with what a request generated, padded with -1 to `max_length`.

    Not one program, which would copy the weights that do not change: the drafter has its own.
    """
    return engine.drafter.add(draft_params, token_ids)


def _with_result(state: DecodeState, record: StepRecord) -> tuple[DecodeState, StepResult]:
    """Returns the state, and what the host reads of it and of the record."""
    columns = (
        record.num_kept,
        record.num_proposed,
        record.num_accepted,
        state.batch.done.astype(jnp.int32),
        state.batch.status,
    )
    # [S, K+1], five [S] -> [S, K+6]; of trees, whose paths are shorter, D + 1 and D + 6
    numbers = jnp.concatenate([record.token_ids, jnp.stack(columns, axis=1)], axis=1)
    draft_rates = state.draft_rates
    rates = None if draft_rates is None else draft_rates.values
    logprobs = None if record.logprobs is None else record.logprobs.as_bits()
    return state, StepResult(numbers, logprobs, rates, state.counters, draft_rates)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedRequests:
    """`NewRequests` as one array of the host, for one copy to the device.

    A copy of each of its arrays takes a call longer than to dispatch a step.

    Attributes:
      words: ``[N]`` uint32, the arrays one after another; a bool is a word.
      layout: static: the structure, and the shape and dtype of each array.
    """

    words: jax.Array | np.ndarray
    layout: tuple[Any, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, requests: NewRequests) -> PackedRequests:
        """Returns NumPy arrays of 32 bits, or of bools, packed."""
        leaves, treedef = jax.tree.flatten(requests)
        # A view keeps the bits of int32 and float32. A bool has 8 bits, so it becomes a word.
        words = [
            x.astype(np.uint32) if x.dtype == bool else np.ascontiguousarray(x).view(np.uint32)
            for x in leaves
        ]
        # It is static: for other shapes, or other arrays of options, a program is compiled anew.
        layout = treedef, tuple((x.shape, x.dtype) for x in leaves)
        return cls(np.concatenate([x.ravel() for x in words]), layout)

    @property
    def requests(self) -> NewRequests:
        """What was packed, as arrays of the device."""
        treedef, kinds = self.layout
        # Where each array ends in the words; all of this is known when a program is traced.
        ends = np.cumsum([math.prod(shape) for shape, _ in kinds])
        leaves = []
        for (shape, dtype), end in zip(kinds, ends.tolist(), strict=True):
            words = self.words[end - math.prod(shape) : end].reshape(shape)
            is_flag = jnp.issubdtype(dtype, jnp.bool_)
            leaves.append(words != 0 if is_flag else lax.bitcast_convert_type(words, dtype))
        requests: NewRequests = jax.tree.unflatten(treedef, leaves)
        return requests


def pack(engine: Engine, prompts: Prompts) -> PackedRequests:
    """Returns what a program takes; the first request is repeated to fill it."""
    # R slots and requests: 1, or as many as a call of this size reads. See `Engine.admit_shapes`.
    rows = [*prompts.group.items()]
    if len(rows) > 1:
        rows += rows[:1] * (engine.group_size(prompts.size) - len(rows))
    requests = [request for _, request in rows]
    # [R, P+1]: the tokens, and the one that follows them; 0 past the end of a prompt
    starts = [*prompts.start]
    starts += starts[:1] * (len(rows) - len(starts))
    tokens = [
        one.token_ids[start : start + prompts.size + 1]
        for one, start in zip(requests, starts, strict=True)
    ]
    padded: Any = np.array([x + [0] * (prompts.size + 1 - len(x)) for x in tokens], np.int32)
    arrays: dict[str, Any] = dict(
        slots=np.array([slot for slot, _ in rows], np.int32),
        prompts=padded[:, :-1],
        lengths=np.array([one.length for one in requests], np.int32),
        keys=np.array([one.seed for one in requests], np.uint32),
        start=np.array(starts, np.int32),
        next_token_ids=padded[:, -1],
    )
    if engine.exact:
        # [R, T]: prompt and tokens so far, of one that comes back; else nothing, all -1
        known = [one.tokens[: one.num_known] for one in requests]
        arrays["known_token_ids"] = np.array(
            [text + [-1] * (engine.max_length - len(text)) for text in known], np.int32
        )
    # `length`, above, counts what a request had generated before; this does not. So budgets and
    # penalties know where its output begins.
    lengths = [one.prompt_length for one in requests]
    options = engine.options_of([one.options for one in requests], lengths)
    return PackedRequests.of(NewRequests(**arrays, options=options))


@functools.partial(jax.jit, static_argnums=0, donate_argnames="state")
def admit(
    engine: Engine, params: Params, draft_params: Params, state: DecodeState, packed: PackedRequests
) -> DecodeState:
    """Returns what `Engine.admit` does."""
    return engine.admit(params, draft_params, state, packed.requests)


@functools.partial(jax.jit, static_argnums=0, donate_argnames="state")
def copy(engine: Engine, state: DecodeState, slots: jax.Array) -> DecodeState:
    """Returns the state after what one of two slots, ``[2]`` int32, holds was copied to the other.

    That slot does not run. It is as long as the first from now on, and has no features: what steps
    write there before its prompt is read comes after all that was copied.

    One pair in a call: several would take the room of as many slots for a moment.
    """
    source, target = slots[:1], slots[1:]  # [1] each
    batch = state.batch
    length = batch.token_ids.shape[1]

    def copied(owner: HasCache, axis: int, cache: Cache) -> Cache:
        # [.., S entries, ..] -> [.., 1 entry, ..] -> [.., S entries, ..], of every array
        like = jax.eval_shape(lambda: owner.init_cache(1, length))
        return put_cache(cache, take_cache(cache, like, source, axis), target, axis)

    features = state.features
    if features is not None:
        features = features._replace(lengths=features.lengths.at[target].set(0))
    return dataclasses.replace(
        state,
        batch=dataclasses.replace(
            batch,
            # [S, L]: what drafters and penalties read of the text
            token_ids=batch.token_ids.at[target].set(batch.token_ids[source]),
            lengths=batch.lengths.at[target].set(batch.lengths[source]),
        ),
        target_cache=copied(engine.model, engine.model.serves.batch_axis, state.target_cache),
        draft_cache=copied(engine.drafter, engine.drafter.serves.batch_axis, state.draft_cache),
        features=features,
    )


# Of most weights only the shapes are read. They stay arguments all the same, because a program runs
# where its arguments are: so the state is made where the weights are.
@functools.partial(jax.jit, static_argnums=0, keep_unused=True)
def init(engine: Engine, params: Params, draft_params: Params, **counts: Any) -> DecodeState:
    """Returns a state of empty slots; of its fields, `counts` do not begin anew."""
    return dataclasses.replace(engine.init_state(draft_params, params), **counts)


@functools.partial(
    jax.jit,
    static_argnums=0,
    static_argnames=("all_neutral", "num_drafts"),
    donate_argnames="state",
)
def step(
    engine: Engine,
    params: Params,
    draft_params: Params,
    state: DecodeState,
    packed: PackedRequests | None = None,
    slots: jax.Array | None = None,
    *,
    all_neutral: bool = False,
    num_drafts: int | None = None,
) -> tuple[DecodeState, StepResult]:
    """Makes a step, which may read prompts too; returns also what the host reads of it."""
    state, record = engine.step(
        params,
        draft_params,
        state,
        None if packed is None else packed.requests,
        num_drafts=num_drafts,
        all_neutral=all_neutral,
        slots=slots,
    )
    return _with_result(state, record)


@functools.partial(jax.jit, static_argnums=0, donate_argnames="state")
def draft(
    engine: Engine,
    draft_params: Params,
    state: DecodeState,
    features: Features | None,
    has_grammar: jax.Array,
    slots: jax.Array | None = None,
) -> tuple[DecodeState, Drafted]:
    """Makes the first half of a step; returns its drafts by themselves.

    Features and drafts end in a half of a step, so they cannot be donated with the state. Requests
    with a grammar, ``[S]`` bool, get chains of drafts, which the host can follow.
    """
    state = dataclasses.replace(state, features=features)
    state = engine.draft(draft_params, state, slots=slots)
    assert state.proposal is not None
    # The host reads the drafts before it can make masks, so they are returned beside the state.
    drafted = state.proposal.with_chains(has_grammar)
    return dataclasses.replace(state, proposal=None), drafted


@functools.partial(jax.jit, static_argnums=0, donate_argnames="state")
def masked_step(
    engine: Engine,
    params: Params,
    draft_params: Params,
    state: DecodeState,
    token_bitmask: jax.Array,
    slots: jax.Array | None = None,
) -> tuple[DecodeState, StepResult]:
    """Makes a step without drafts whose rows are masked; returns also what the host reads."""
    # n = 0: the drafter only reads the newest tokens, if it has a cache. Each request has one row,
    # so the host makes masks [R, ceil(V/32)] without seeing a draft, and one program is enough.
    state = engine.draft(draft_params, state, num_drafts=0, slots=slots)
    return _with_result(*engine.verify(params, state, token_bitmask))


@functools.partial(jax.jit, static_argnums=0, donate_argnames="state")
def verify(
    engine: Engine,
    params: Params,
    state: DecodeState,
    drafted: Drafted,
    token_ids: jax.Array,
    is_forced: jax.Array,
    token_bitmask: jax.Array,
) -> tuple[DecodeState, StepResult]:
    """Makes the second half of a step with `ForcedDrafts`; returns also what the host reads."""
    if drafted.parents is not None:
        # `with_chains` has changed the ranks of drafts: nothing is learned from those.
        is_forced |= drafted.are_chains
    # [R, K] of the host: the drafts, with those that a grammar forces in the place of some
    state = dataclasses.replace(state, proposal=dataclasses.replace(drafted, token_ids=token_ids))
    return _with_result(*engine.verify(params, state, token_bitmask, is_forced))
