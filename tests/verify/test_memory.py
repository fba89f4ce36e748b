"""Verification copies a target row and a draft row at a time. Compiles only, runs nothing."""

import functools

import jax
import jax.numpy as jnp
import pytest
from lower_floor import assume

import jax_specdec as sd

pytestmark = [pytest.mark.newest, pytest.mark.long]

VOCAB, K = 128256, 4
# JAX 0.10.2 turns a whole half-precision operand into float32 before it is read.
SYNTHETIC = dict(rejection_sample_method="synthetic", synthetic_acceptance_length=3.0)


def shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def distribution_of(kind: str, b: int, dtype: str) -> sd.DraftProbs | sd.DraftLogits:
    if kind == "probs":
        return sd.DraftProbs(shape(b * K, VOCAB))
    return sd.DraftLogits(shape(b * K, VOCAB, dtype=dtype))


def temporary_rows(
    b: int,
    dtype: str,
    distribution: sd.DraftProbs | sd.DraftLogits | None,
    config: sd.SpecDecodeConfig,
    form: str = "cpu",
) -> float:
    """Of the keyed form, everything included: how many float32 rows."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), b))
    call = functools.partial(sd.rejection_sample, implementation="xla")
    with assume(form):
        traced = jax.jit(call, static_argnames="config").trace(
            shape(b * K + b, VOCAB, dtype=dtype),
            sd.Drafts(shape(b * K, dtype="int32"), shape(b + 1, dtype="int32"), distribution),
            sampling=sd.SamplingParams(temperature=shape(b)),
            keys=keys,
            positions=shape(b, dtype="int32"),
            config=config,
        )
    return traced.lower().compile().memory_analysis().temp_size_in_bytes / (4 * VOCAB)


@pytest.mark.parametrize(
    ("rule", "dtype", "kind", "b"),
    [
        ({}, "bfloat16", "logits", 8),
        pytest.param(
            {"rejection_sample_method": "block"}, "float32", "logits", 8, marks=pytest.mark.slow
        ),
        pytest.param(SYNTHETIC, "float32", "probs", 8, marks=pytest.mark.slow),
    ],
)
def test_temporaries_are_two_rows_however_many_requests(rule, dtype, kind, b):
    config = sd.SpecDecodeConfig(num_speculative_tokens=K, **rule)
    used = temporary_rows(b, dtype, distribution_of(kind, b, dtype), config)
    assert used < 2.1, f"{used:.2f} rows"


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_calls_under_vmap_do_not_copy_the_rows_that_they_share(platform):
    b, mapped = 8, 16
    rows = shape(b * (K + 1), VOCAB)

    def verify(temperature: jax.Array, logits: jax.Array, q: jax.Array) -> jax.Array:
        return sd.rejection_sample(
            logits,
            sd.Drafts.from_dense(jnp.zeros((b, K), jnp.int32), distribution=sd.DraftLogits(q)),
            sampling=sd.SamplingParams(temperature),
            keys=jax.random.split(jax.random.key(0), b),
            positions=jnp.arange(b),
            config=sd.SpecDecodeConfig(num_speculative_tokens=K),
            implementation="xla",
        ).token_ids

    call = jax.jit(jax.vmap(verify, in_axes=(0, None, None)))
    with assume(platform):
        lowered = call.lower(shape(mapped, b), rows, shape(b * K, VOCAB))
    used = lowered.compile().memory_analysis().temp_size_in_bytes
    assert used < 3 * 4 * rows.size, f"{used / (4 * rows.size):.2f} of the rows"


def test_a_softmax_of_every_row_would_not():
    logits = shape(5, VOCAB)

    def plain(x, e):
        p = jax.nn.softmax(x, axis=-1)
        return jnp.argmax(p / e, axis=-1), p[:, 0]

    compiled = jax.jit(plain).lower(logits, logits).compile()
    assert compiled.memory_analysis().temp_size_in_bytes > 4 * VOCAB * 4
