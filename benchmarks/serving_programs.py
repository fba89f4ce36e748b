"""The compiled loops that `bench_throughput_gpu.py` times, made of the package's own parts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import jax_specdec as sd
from jax_specdec._src.drafting.drafter import Proposal
from jax_specdec._src.serving import batch as batch_lib
from jax_specdec._src.serving import step as step_lib
from jax_specdec._src.serving.batch import Batch

LLAMA_3_8B = sd.LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=500000.0,
)
LLAMA_3_1B = dataclasses.replace(
    LLAMA_3_8B,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    head_dim=64,
    tie_word_embeddings=True,
)
TINY = sd.LlamaConfig(
    vocab_size=300,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


def random_params(model: sd.Llama, seed: int) -> dict[str, Any]:
    """Random weights, made on the device a layer at a time: one layer's program serves for all."""
    one = dataclasses.replace(
        model, config=dataclasses.replace(model.config, num_hidden_layers=1)
    ).init_params
    first, *keys = jax.random.split(jax.random.key(seed), model.config.num_hidden_layers + 1)
    rest = jax.jit(lambda key: {k: v for k, v in one(key).items() if k != "layers"})(first)
    layer = jax.jit(lambda key: one(key)["layers"][0])
    return {**rest, "layers": [layer(key) for key in keys]}


@dataclasses.dataclass(frozen=True)
class Given:
    """A `CausalModel` whose pass has been made: its weights are the logits."""

    vocab_size: int

    def init_cache(self, batch_size: int, max_length: int) -> Any:
        return ()

    def apply(self, params: Any, token_ids: Any, start: Any, cache: Any) -> tuple[Any, Any]:
        return params, cache


class Caches(NamedTuple):
    """What grows with the batch. Each loop copies it once and then writes in place."""

    target: Any
    draft: Any
    store: Any


@dataclasses.dataclass(frozen=True)
class Study:
    """Target, drafter, and the ways to verify among which a loop chooses when it runs.

    A step of the package compiles its config in. Here one compiled loop serves all configs: only
    verification, `step.verify` around logits that are there already, is a branch.

    Attributes:
      target: the target.
      drafter: its drafter.
      configs: ways to verify; all of one K. After the last comes no verification at all, which
        appends the drafts and any token.
    """

    target: sd.Llama
    drafter: sd.ModelDrafter
    configs: tuple[sd.SpecDecodeConfig, ...]

    def init(self, draft_params: Any, prompt: int, batch: int, steps: int) -> tuple[Batch, Caches]:
        """Sequences of `prompt` tokens with empty caches: what they hold costs no time."""
        k = self.configs[0].num_speculative_tokens
        sequences, *_ = batch_lib.make_batch(
            [[i % self.target.vocab_size for i in range(prompt)]] * batch,
            vocab_size=self.target.vocab_size,
            temperature=0.8,
            key=None,
            max_new_tokens=steps * (k + 1),
            stop_token_ids=(),
            slack=k + 1,
        )
        length = sequences.token_ids.shape[1]
        caches = Caches(
            self.target.init_cache(batch, length),
            self.drafter.init_cache(batch, length),
            self.drafter.init_store(draft_params, batch, self.configs[0]),
        )
        return sequences, caches

    @functools.partial(jax.jit, static_argnums=0)
    def speculative(
        self, params: Any, draft_params: Any, batch: Batch, caches: Caches, way: Any, steps: Any
    ) -> jax.Array:
        """Draft and verify `steps` times; tokens emitted per request ``[B]``."""

        def step(_: Any, state: Any) -> Any:
            batch, caches, emitted = state
            proposal, draft_cache = self._draft(draft_params, batch, caches)
            last = jnp.take_along_axis(batch.token_ids, batch.lengths[:, None] - 1, axis=1)
            tokens = jnp.concatenate([last, proposal.token_ids], axis=1)
            logits, target_cache = self.target.apply(
                params, tokens, batch.lengths - 1, caches.target
            )
            branches = [functools.partial(self._verify, config) for config in self.configs]
            batch, count = lax.switch(way, [*branches, self._skip], batch, logits, proposal)
            return batch, Caches(target_cache, draft_cache, proposal.store), emitted + count

        zero = jnp.zeros_like(batch.lengths)
        return lax.fori_loop(0, steps, step, (batch, caches, zero))[2]

    @functools.partial(jax.jit, static_argnums=0)
    def draft(self, params: Any, batch: Batch, caches: Caches, steps: Any) -> jax.Array:
        """Draft alone, `steps` times at the same place; something that depends on all of it."""

        def step(_: Any, state: Any) -> Any:
            caches, total = state
            proposal, cache = self._draft(params, batch, caches)
            return Caches(caches.target, cache, proposal.store), total + proposal.token_ids[:, -1]

        return lax.fori_loop(0, steps, step, (caches, jnp.zeros_like(batch.lengths)))[1]

    @functools.partial(jax.jit, static_argnums=0)
    def plain(self, params: Any, batch: Batch, caches: Caches, steps: Any) -> jax.Array:
        """One token per pass of the target, as `generate_plain`; tokens per request ``[B]``."""
        size = batch.lengths.shape[0]
        nothing = sd.Drafts(jnp.zeros((0,), jnp.int32), jnp.zeros((size + 1,), jnp.int32))
        zero = jnp.zeros_like(batch.lengths)

        def step(_: Any, state: Any) -> Any:
            batch, cache, emitted = state
            last = jnp.take_along_axis(batch.token_ids, batch.lengths[:, None] - 1, axis=1)
            logits, cache = self.target.apply(params, last, batch.lengths - 1, cache)
            output = sd.rejection_sample(
                logits[:, 0],
                nothing,
                sampling=sd.SamplingParams(batch.temperature),
                keys=batch.keys,
                positions=batch.lengths,
                active=~batch.done,
                config=sd.SpecDecodeConfig(num_speculative_tokens=1),
            )
            batch, _ = batch_lib.append(batch, output, zero)
            return batch, cache, emitted + output.num_emitted

        return lax.fori_loop(0, steps, step, (batch, caches.target, zero))[2]

    def _draft(self, params: Any, batch: Batch, caches: Caches) -> tuple[Proposal, Any]:
        return step_lib.draft(
            self.drafter,
            params,
            batch,
            caches.draft,
            caches.store,
            self.configs[0],
            self.target.vocab_size,
        )

    def _verify(
        self, config: sd.SpecDecodeConfig, batch: Batch, logits: jax.Array, proposal: Proposal
    ) -> tuple[Batch, jax.Array]:
        given = Given(self.target.vocab_size)
        batch, _, record, _ = step_lib.verify(given, logits, batch, (), proposal, config)
        return batch, record.num_emitted

    def _skip(self, batch: Batch, logits: jax.Array, proposal: Proposal) -> tuple[Batch, jax.Array]:
        size, k = proposal.token_ids.shape
        output = sd.RejectionSampleOutput(
            jnp.concatenate([proposal.token_ids, proposal.token_ids[:, :1]], axis=1),
            jnp.full((size,), k, jnp.int32),
            jnp.full((size,), k + 1, jnp.int32),
            jnp.zeros((size,), jnp.int32),
        )
        batch, record = batch_lib.append(batch, output, output.num_accepted)
        return batch, record.num_emitted
