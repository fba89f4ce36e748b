"""The compiled loops that `bench_throughput_gpu.py` times, made of the package's own parts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jax_specdec as sd
from jax_specdec._src.serving.batch import Batch, append
from jax_specdec._src.serving.core import PLAIN, Decoder, DecodeState
from jax_specdec._src.serving.generate import make_batch

LLAMA_3_8B = sd.models.LlamaConfig(
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
TINY = sd.models.LlamaConfig(
    vocab_size=300,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


def random_params(model: sd.models.Llama, seed: int) -> dict[str, Any]:
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


@dataclasses.dataclass(frozen=True)
class Study:
    """Target, drafter, and the ways to verify among which a loop chooses when it runs.

    A step of the package compiles its config in. Here one compiled loop serves all configs: only
    verification, `Decoder.verify` around logits that are there already, is a branch.

    Attributes:
      target: the target.
      drafter: its drafter.
      configs: ways to verify; all of one K. After the last comes no verification at all, which
        appends the drafts and any token.
    """

    target: sd.models.Llama
    drafter: sd.ModelDrafter
    configs: tuple[sd.SpecDecodeConfig, ...]

    @property
    def decoder(self) -> Decoder:
        """Drafts, under whichever config."""
        return Decoder(self.target, self.drafter, self.configs[0])

    def init(self, draft_params: Any, prompt: int, batch: int, steps: int) -> DecodeState:
        """Sequences of `prompt` tokens with empty caches: what they hold costs no time."""
        k = self.configs[0].num_speculative_tokens
        options = sd.RequestOptions(temperature=0.8, max_new_tokens=steps * (k + 1))
        sequences, *_ = make_batch(
            [[i % self.target.vocab_size for i in range(prompt)]] * batch,
            [options] * batch,
            vocab_size=self.target.vocab_size,
            key=None,
            slack=k + 1,
        )
        return self.decoder.empty_state(None, draft_params, sequences)

    @functools.partial(jax.jit, static_argnums=0)
    def speculative(
        self, params: Any, draft_params: Any, state: DecodeState, way: Any, steps: Any
    ) -> jax.Array:
        """Draft and verify `steps` times; tokens emitted per request ``[B]``."""

        def step(_: Any, carry: Any) -> Any:
            state, emitted = carry
            state = self.decoder.draft(draft_params, state)
            batch, ids = state.batch, state.draft_token_ids
            last = jnp.take_along_axis(batch.token_ids, batch.lengths[:, None] - 1, axis=1)
            logits, target_cache = self.target.apply(
                params,
                jnp.concatenate([last, ids], axis=1),
                batch.lengths - 1,
                state.target_cache,
            )[:2]
            branches = [functools.partial(self._verify, config) for config in self.configs]
            verified = dataclasses.replace(state, target_cache=(), draft_cache=())
            batch, count = lax.switch(way, [*branches, self._skip], verified, logits)
            state = dataclasses.replace(state, batch=batch, target_cache=target_cache)
            return state, emitted + count

        return lax.fori_loop(0, steps, step, (state, jnp.zeros_like(state.batch.lengths)))[1]

    @functools.partial(jax.jit, static_argnums=0)
    def draft(self, params: Any, state: DecodeState, steps: Any) -> jax.Array:
        """Draft alone, `steps` times at the same place; something that depends on all of it."""

        def step(_: Any, carry: Any) -> Any:
            state, total = carry
            state = self.decoder.draft(params, state)
            return state, total + state.draft_token_ids[:, -1]

        return lax.fori_loop(0, steps, step, (state, jnp.zeros_like(state.batch.lengths)))[1]

    @functools.partial(jax.jit, static_argnums=0)
    def plain(self, params: Any, state: DecodeState, steps: Any) -> jax.Array:
        """One token per pass of the target, as `generate_plain`; tokens per request ``[B]``."""
        decoder = Decoder(self.target, None, PLAIN)
        empty = decoder.empty_state(None, None, state.batch)
        begin = dataclasses.replace(empty, target_cache=state.target_cache)

        def step(_: Any, carry: Any) -> Any:
            state, emitted = carry
            state, record = decoder.step(params, None, state)
            return state, emitted + record.num_emitted

        return lax.fori_loop(0, steps, step, (begin, jnp.zeros_like(state.batch.lengths)))[1]

    def _verify(
        self, config: sd.SpecDecodeConfig, state: DecodeState, logits: jax.Array
    ) -> tuple[Batch, jax.Array]:
        given = Decoder(Given(self.target.vocab_size), None, config)
        state, record = given.verify(logits, state)
        return state.batch, record.num_emitted

    def _skip(self, state: DecodeState, logits: jax.Array) -> tuple[Batch, jax.Array]:
        ids = state.draft_token_ids
        size, k = ids.shape
        output = sd.RejectionSampleOutput(
            jnp.concatenate([ids, ids[:, :1]], axis=1),
            jnp.full((size,), k, jnp.int32),
            jnp.full((size,), k + 1, jnp.int32),
            jnp.zeros((size,), jnp.int32),
        )
        batch, record = append(state.batch, output, output.num_accepted)
        return batch, record.num_emitted
