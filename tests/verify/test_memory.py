"""Verification copies a target row and a draft row at a time. Compiles only, runs nothing."""

import jax
import jax.numpy as jnp
import pytest

import jax_specdec as sd

pytestmark = pytest.mark.newest

VOCAB, K = 128256, 4
# JAX 0.10.2 turns a whole half-precision operand into float32 before it is read.
HALF = ["bfloat16", "float16"] if jax.__version_info__ >= (0, 11) else []


def shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def drafts_of(kind: str, b: int, dtype: str) -> sd.Drafts:
    n = b * K
    distributions = {
        "probs": sd.DraftProbs(shape(n, VOCAB)),
        "logits": sd.DraftLogits(shape(n, VOCAB, dtype=dtype)),
    }
    return sd.Drafts(shape(n, dtype="int32"), shape(b + 1, dtype="int32"), distributions[kind])


def temporary_rows(b: int, dtype: str, kind: str, config: sd.SpecDecodeConfig) -> float:
    """Of the keyed form, everything included: how many float32 rows."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), b))
    lowered = jax.jit(sd.rejection_sample, static_argnames="config").lower(
        shape(b * K + b, VOCAB, dtype=dtype),
        drafts_of(kind, b, dtype),
        sampling=sd.SamplingParams(temperature=shape(b)),
        keys=keys,
        positions=shape(b, dtype="int32"),
        config=config,
    )
    return lowered.compile().memory_analysis().temp_size_in_bytes / (4 * VOCAB)


@pytest.mark.parametrize(
    ("dtype", "kind", "b"),
    [
        ("float32", "probs", 1),
        pytest.param("float32", "probs", 8, marks=pytest.mark.slow),
        pytest.param("float32", "logits", 8, marks=pytest.mark.slow),
        *[(dtype, "logits", 8) for dtype in HALF[:1]],
        *[pytest.param(dtype, "logits", 8, marks=pytest.mark.slow) for dtype in HALF[1:]],
        *[pytest.param(dtype, "logits", 1, marks=pytest.mark.slow) for dtype in HALF],
    ],
)
def test_temporaries_are_two_rows_however_many_requests(dtype, kind, b):
    used = temporary_rows(b, dtype, kind, sd.SpecDecodeConfig(num_speculative_tokens=K))
    assert used < 2.1, f"{used:.2f} rows"


def test_block_temporaries_are_two_rows():
    config = sd.SpecDecodeConfig(num_speculative_tokens=K, rejection_sample_method="block")
    used = temporary_rows(8, "float32", "logits", config)
    assert used < 2.1, f"{used:.2f} rows"


def test_synthetic_temporaries_are_two_rows():
    config = sd.SpecDecodeConfig(
        num_speculative_tokens=K,
        rejection_sample_method="synthetic",
        synthetic_acceptance_length=3.0,
    )
    used = temporary_rows(8, "float32", "probs", config)
    assert used < 2.1, f"{used:.2f} rows"


def test_a_softmax_of_every_row_would_not():
    logits = shape(5, VOCAB)

    def plain(x, e):
        p = jax.nn.softmax(x, axis=-1)
        return jnp.argmax(p / e, axis=-1), p[:, 0]

    compiled = jax.jit(plain).lower(logits, logits).compile()
    assert compiled.memory_analysis().temp_size_in_bytes > 4 * VOCAB * 4
