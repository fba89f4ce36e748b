"""What drafts and rows cost of a target pass, timed on the prompts."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec.lm.cli.run import Session
from jax_specdec.lm.decoding.core import PLAIN, Decoder, DecodeState
from jax_specdec.lm.decoding.generate import make_batch
from jax_specdec.lm.drafting.ngram import NGramDrafter

_PASSES = 8
_REPEATS = 3


@dataclasses.dataclass(frozen=True)
class Costs:
    """Times relative to a target pass over one row of each request.

    Attributes:
      draft_token: of each drafter, by its name in the options; a K-th of the time to draft a tree.
      rows: of a target pass over ``K + 1`` rows, by K; with trees, over one more than their drafts.
    """

    draft_token: dict[str, float]
    rows: dict[int, float]

    def __str__(self) -> str:
        """Both, in a sentence."""
        drafts = ", ".join(f"{cost:.2f} ({name})" for name, cost in self.draft_token.items())
        counts = ", ".join(str(k + 1) for k in self.rows)
        rows = ", ".join(f"{cost:.2f}" for cost in self.rows.values())
        return (
            f"A draft token costs {drafts} of a target pass over one row; a pass over {counts} "
            f"rows costs {rows}."
        )


def measure_costs(session: Session) -> Costs:
    """Time the target's passes by their width, and the drafters."""
    options = session.options
    target = session.models.target.model
    one = _seconds(session, Decoder(target, None, PLAIN), None)
    configs = {config.num_speculative_tokens: config for config in options.configs}
    if options.tree is not None:
        num_drafts = options.tree - 1  # node 0 is the newest token
        wide = dataclasses.replace(options.config, num_speculative_tokens=num_drafts)
        configs = {num_drafts: wide}
    rows = {
        k: _seconds(session, Decoder(target, NGramDrafter(), config), None)
        for k, config in configs.items()
    }
    drafts = {}
    most = max(options.configs, key=lambda config: config.num_speculative_tokens)
    for name in options.drafters:
        draft = session.models.drafters[name]
        decoder = Decoder(target, *draft.drafting(most, options.tree))
        seconds = _seconds(session, decoder, draft.params, drafts=True)
        drafts[name] = seconds / most.num_speculative_tokens / one
    return Costs(drafts, {k: seconds / one for k, seconds in rows.items()})


def _seconds(session: Session, decoder: Decoder, draft_params: Any, drafts: bool = False) -> float:
    """Of drafting K tokens, or else of the target pass that verifies them."""
    target, prompts = session.models.target, session.models.prompts
    batch, _, _ = make_batch(
        prompts,
        [session.request(session.options.temperatures[0])] * len(prompts),
        vocab_size=target.model.vocab_size,
        key=None,
        slack=decoder.num_drafts + 1,
    )
    state = decoder.empty_state(target.params, draft_params, batch)
    times = []
    for _ in range(_REPEATS + 1):  # the first compiles
        begin = time.perf_counter()
        state = _repeat(target.params, draft_params, state, decoder=decoder, drafts=drafts)
        jax.block_until_ready(state)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:]) / _PASSES


@functools.partial(jax.jit, static_argnames=("decoder", "drafts"), donate_argnames=("state",))
def _repeat(
    params: Any, draft_params: Any, state: DecodeState, *, decoder: Decoder, drafts: bool
) -> DecodeState:
    """One half of a step, over and over, on sequences that keep their lengths.

    What a call gives is the last token of the next one, or the compiler would run one call.
    """

    def body(_: Any, state: DecodeState) -> DecodeState:
        batch = state.batch
        if drafts:
            new = decoder.draft(draft_params, state)
            new = dataclasses.replace(  # a pass of the target would bring them
                new,
                features=state.features,
                num_features=state.num_features,
                confidences=None,
                draft_parents=None,
            )
            newest = new.draft_token_ids[:, 0]
        else:
            ids = jnp.zeros_like(state.draft_token_ids)
            new, record = decoder.verify(params, dataclasses.replace(state, draft_token_ids=ids))
            newest = record.token_ids[:, 0]
        place = jnp.arange(newest.shape[0]), batch.lengths - 1
        token_ids = batch.token_ids.at[place].set(jnp.maximum(newest, 0))
        return dataclasses.replace(new, batch=dataclasses.replace(batch, token_ids=token_ids))

    return lax.fori_loop(0, _PASSES, body, state)
