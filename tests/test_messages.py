"""What a newcomer is told: wrong calls, and the sentence that says what to do instead.

Refusals of single functions in all their forms are tested with the functions. Here stand the
mistakes that people make in their first hour, each with the words that they need.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filled import full, zeros

import jax_specdec as sd
from jax_specdec import lm

pytestmark = pytest.mark.newest

B, K, V = 2, 3, 8
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)
DENSE = sd.Drafts(zeros(B * K, jnp.int32), jax.device_put(np.arange(0, B * K + 1, K, np.int32)))
PROBS = sd.DraftProbs(full((B, K, V), 1 / V))


@functools.cache
def pair() -> tuple[lm.models.LoadedModel, lm.models.LoadedModel]:
    return lm.load_embedded_pair()


def target() -> lm.models.LoadedModel:
    return pair()[0]


def draft() -> lm.models.LoadedModel:
    return pair()[1]


@functools.cache
def huge() -> Any:
    """The draft model's weights, some of which float16 does not hold."""
    return jax.tree.map(lambda x: x * 1e6, draft().params)


def generate(*arguments: Any, **changes: Any) -> Any:
    given: dict[str, Any] = {"drafter": lm.NGramDrafter(), "config": CONFIG, "max_new_tokens": 2}
    return lm.generate(*(arguments or (*target(), [[1, 2]])), **(given | changes))


def rejection_sample(logits: Any = None, drafts: Any = DENSE, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "sampling": sd.SamplingParams(jnp.array([0.0, 0.8])),
        "keys": jax.random.split(jax.random.key(0), B),
        "positions": jnp.array([5, 9]),
        "config": CONFIG,
    }
    logits = zeros((B * (K + 1), V)) if logits is None else logits
    return sd.rejection_sample(logits, drafts, **(given | changes))


def validate(drafts: Any, logits: Any = None, **changes: Any) -> None:
    given: dict[str, Any] = {"sampling": sd.SamplingParams(0.8), "config": CONFIG}
    logits = zeros((B * (K + 1), V)) if logits is None else logits
    sd.validate(logits, drafts, **(given | changes))


def engine(model: Any = None, drafter: Any = None, config: Any = CONFIG) -> lm.Engine:
    model = target().model if model is None else model
    drafter = lm.NGramDrafter() if drafter is None else drafter
    return lm.Engine(model, drafter, config, num_slots=2, max_length=32)


def dense(counts: Any = None, distribution: Any = None, ids: Any = None) -> sd.Drafts:
    ids = zeros((B, K), jnp.int32) if ids is None else ids
    return sd.Drafts.from_dense(ids, counts, distribution)


def flat(ids: Any, counts: Any) -> sd.Drafts:
    return sd.Drafts.from_flat(jnp.array(ids), jnp.array(counts))


def save(params: Any, dtype: Any = jnp.float32, model: Any = None) -> None:
    model = draft().model if model is None else model
    lm.models.save_checkpoint("/nowhere/at/all", model, params, dtype)


REFUSALS: dict[type[Exception], dict[str, list[Callable[[], Any]]]] = {
    TypeError: {
        "drafter must be a Drafter, but it is a LoadedModel: pass "
        "drafter=ModelDrafter(draft.model) and draft_params=draft.params": [
            lambda: generate(drafter=draft()),
            lambda: lm.generate_stream(*target(), [[1]], drafter=draft(), config=CONFIG),
            lambda: engine(drafter=draft()),
        ],
        "drafter must be a Drafter, but it is a Llama: a model is wrapped, "
        "drafter=ModelDrafter(model)": [lambda: generate(drafter=draft().model)],
        "drafter must be a Drafter, but it is <class "
        "'jax_specdec.lm.drafting.ngram.NGramDrafter'>": [
            lambda: generate(drafter=lm.NGramDrafter)
        ],
        "drafter must be a Drafter, but it is 'ngram': NGramDrafter() needs no model, and "
        "generate_plain no drafter": [lambda: generate(drafter="ngram")],
        "drafter must be a Drafter, but it is None: NGramDrafter() needs no model, and "
        "generate_plain no drafter": [lambda: generate(drafter=None)],
        "drafter must be a Drafter, but it is 3": [lambda: generate(drafter=3)],
        "draft_params must be the weights of the model, but it is None: pass its .params": [
            lambda: generate(drafter=lm.ModelDrafter(draft().model)),
            lambda: lm.EngineDriver(
                engine(drafter=lm.ModelDrafter(draft().model)), target().params
            ),
        ],
        "draft_params must be a model's weights, but it is a LoadedModel: pass its .params": [
            lambda: generate(drafter=lm.ModelDrafter(draft().model), draft_params=draft())
        ],
        "model must be a CausalModel, but it is a LoadedModel, which holds one and its "
        "params: pass its .model here, and its .params where they belong": [
            lambda: lm.ModelDrafter(draft()),
            lambda: generate(target(), target().params, [[1]]),
            lambda: engine(target()),
        ],
        "model must be a CausalModel, but it is {": [
            lambda: lm.generate_plain(target().params, target().model, [[1]])
        ],
        "params must be a model's weights, but it is a LoadedModel: pass its .params": [
            lambda: generate(target().model, target(), [[1]]),
            lambda: lm.EngineDriver(engine(), target()),
        ],
        "config must be a SpecDecodeConfig, but it is 3": [
            lambda: generate(config=3),
            lambda: engine(config=3),
        ],
        "logprobs must be a LogprobsConfig or None, but it is 5": [lambda: generate(logprobs=5)],
        "prompts must be lists of token ids, but it is 'import ': turn text into ids, with "
        "encode_bytes for the embedded models, or with the encode of load_tokenizer's "
        "Tokenizer": [lambda: generate(*target(), "import ")],
        "prompts[0] must be a list of ints, but it is 'import ': turn text into ids, with "
        "encode_bytes for the embedded models, or with the encode of load_tokenizer's "
        "Tokenizer": [lambda: generate(*target(), ["import "])],
        "prompts must be lists of token ids, one per request, but it is [1, 2, 3]: pass [ids]": [
            lambda: generate(*target(), [1, 2, 3])
        ],
        "prompts must be lists of token ids, one per request, but it is an array [3] of "
        "int64: pass [ids]": [lambda: generate(*target(), np.array([1, 2, 3]))],
        "prompts must be lists of token ids, but it is 3": [lambda: generate(*target(), 3)],
        "stop_token_ids must be a list of ints, but it is '\\n': turn text into ids, ": [
            lambda: generate(stop_token_ids="\n")
        ],
        "temperature must be a number, but it is '0.8'": [lambda: generate(temperature="0.8")],
        "temperature must be a number, but it is True": [lambda: generate(temperature=True)],
        "temperature must be one value, but it is [0.0, 0.8]: for requests that differ, "
        "give a list, options=[RequestOptions(temperature=...), ...]": [
            lambda: generate(temperature=[0.0, 0.8])
        ],
        "unknown argument 'max_tokens'; did you mean 'max_new_tokens'?": [
            lambda: generate(max_tokens=5)
        ],
        "text must be a str, but it is b'abc'": [lambda: lm.encode_bytes(b"abc")],
        "token_ids must be a list of ints, but it is [[1, 2]]": [lambda: lm.decode_bytes([[1, 2]])],
        "token_ids must be a list of ints, but it is 'abc'": [lambda: lm.decode_bytes("abc")],
        "engine must be an Engine, but it is a LoadedModel": [
            lambda: lm.EngineDriver(target(), target().params)
        ],
        "prompt must be a list of ints, but it is 'import ': turn text into ids, ": [
            lambda: lm.EngineDriver(engine(), target().params).submit("import ")
        ],
        "drafts must be a Drafts, but it is an array [2, 3] of int32": [
            lambda: rejection_sample(drafts=zeros((B, K), jnp.int32))
        ],
        "sampling must be a SamplingParams, but it is 0.8": [
            lambda: rejection_sample(sampling=0.8)
        ],
        "keys must be typed, as jax.random.key and jax.random.split give, but it is 0": [
            lambda: rejection_sample(keys=0)
        ],
        ": pass jax.random.wrap_key_data(keys)": [
            lambda: rejection_sample(
                keys=jax.random.key_data(jax.random.split(jax.random.key(0), B))
            ),
            lambda: validate(DENSE, keys=np.zeros((B, 2), np.uint32)),
        ],
        "sampling.temperature must be an array [B] = [2] of float32, but it is an array "
        "[2] of int32": [lambda: rejection_sample(sampling=sd.SamplingParams(jnp.array([0, 1])))],
        "sampling.top_k must be an array [B] = [2] of int32, but it is 2.5": [
            lambda: rejection_sample(sampling=sd.SamplingParams(0.8, top_k=2.5))
        ],
        "output must be a RejectionSampleOutput, but it is an array [2, 3] of float32": [
            lambda: sd.parse_output(zeros((B, K)))
        ],
        "drafts must be a Drafts, but it is an array [2, 3] of float32": [
            lambda: sd.DraftStore.create(B, K, V).attach(
                zeros((B, K)),
                positions=jnp.array([5, 9]),
                sampling=sd.SamplingParams(0.8),
            )
        ],
        "distribution must be a DraftProbs, a DraftLogits or None, but it is an array [2, "
        "3, 8] of float32": [lambda: dense(None, PROBS.probs)],
        "size must be an int, but it is 1.5": [
            lambda: sd.pack_drafts(zeros((B, K), jnp.int32), [1, 1], size=1.5)
        ],
        "directory must be a path, but it is None": [lambda: lm.load_huggingface(None)],
        "directory must be a path, but it is 5": [lambda: lm.load_tokenizer(5)],
        "max_vocab_size must be an int, but it is '5'": [
            lambda: lm.load_huggingface("x", max_vocab_size="5")
        ],
        "max_vocab_size must be an int, but it is 5.0": [
            lambda: lm.load_huggingface("x", max_vocab_size=5.0)
        ],
        "dtype must be a floating dtype, but it is 'float23'": [
            lambda: lm.models.load_checkpoint(
                Path(sd.__file__).parent / "lm" / "weights" / "draft", "float23"
            )
        ],
        "dtype must be float32, bfloat16 or float16, but it is dtype('int8')": [
            lambda: save(draft().params, jnp.int8)
        ],
        "model must be a Llama, but it is a LoadedModel": [
            lambda: save(draft().params, model=draft())
        ],
    },
    ValueError: {
        "prefill_sizes must be increasing ints, at least one, but it is (8, 8)": [
            lambda: dataclasses.replace(engine(), prefill_sizes=(8, 8))
        ],
        "params['embed_tokens'] must be an array [256, 256] of float32, but it is an array "
        "[256, 128] of float32": [lambda: generate(target().model, draft().params, [[1]])],
        "temperature must be in [0, inf), but it is 1000": [
            lambda: lm.RequestOptions(temperature=10**400)
        ],
        "top_p must be in (0, 1], but it is 0.0": [lambda: generate(top_p=0.0)],
        "top_k must be in [0, 2147483647], but it is -1": [lambda: generate(top_k=-1)],
        "synthetic_acceptance_rates[1] must be at most synthetic_acceptance_rates[0] = "
        "0.5, but it is 0.6": [
            lambda: sd.SpecDecodeConfig(
                num_speculative_tokens=2,
                rejection_sample_method="synthetic",
                synthetic_acceptance_rates=[0.5, 0.6],
            )
        ],
        "synthetic_acceptance_rates must be None, but it is [0.5]: rejection_sample_method "
        "is 'standard'": [
            lambda: sd.SpecDecodeConfig(num_speculative_tokens=1, synthetic_acceptance_rates=[0.5])
        ],
        "rejection_sample_method must be 'standard', 'block', 'agreement' or 'synthetic', "
        "but it is 'strict'": [
            lambda: sd.SpecDecodeConfig(num_speculative_tokens=1, rejection_sample_method="strict")
        ],
        "target_logits must be an array [N+B, V] = [8, V] of float32, bfloat16 or float16, "
        "but it is an array [2, 4, 8] of float32: pass target_logits.reshape(8, 8)": [
            lambda: rejection_sample(zeros((B, K + 1, V)))
        ],
        "target_logits must be an array [N+B, V] = [6, V] of float32, bfloat16 or float16, "
        "but it is an array [8, 8] of float32: drafts has 2 ids per request, but the "
        "logits are for 3": [
            lambda: rejection_sample(drafts=sd.Drafts.from_dense(zeros((B, 2), jnp.int32)))
        ],
        "target_logits must be an array [N+B, V] = [12, V] of float32, bfloat16 or "
        "float16, but it is an array [8, 8] of float32: drafts has 5 ids per request, but "
        "the logits are for 3": [
            lambda: rejection_sample(drafts=sd.Drafts.from_dense(zeros((B, 5), jnp.int32)))
        ],
        "target_logits must be an array [N+B, V] = [8, V] of float32, bfloat16 or float16, "
        "but it is an array [6, 8] of float32: each request has a bonus row after its "
        "draft rows, unless bonus_token_ids is given": [
            lambda: rejection_sample(zeros((B * K, V)))
        ],
        "keys must be an array [B] = [2], but it is an array [] of key<fry>: "
        "jax.random.split gives one per request": [
            lambda: rejection_sample(keys=jax.random.key(0)),
            lambda: validate(DENSE, keys=jax.random.key(0)),
        ],
        "drafts must have at most num_speculative_tokens = 3 drafts per request, as config "
        "says, but it is [4, 4]": [
            lambda: rejection_sample(zeros((B * 5, V)), sd.Drafts.from_dense(zeros((B, 4), int)))
        ],
        "positions must be an array [B] = [2] of int32, but it is an array [] of int32": [
            lambda: rejection_sample(positions=5)
        ],
        "positions must be integers that int32 holds, but it is 2147483648": [
            lambda: rejection_sample(positions=np.array([5, 2**31]))
        ],
        "num_draft_tokens[1] must be in [0, K] = [0, 3], but it is 7": [
            lambda: dense(jnp.array([2, 7])),
            lambda: jax.jit(lambda: dense([2, 7]).token_ids)(),
        ],
        "num_draft_tokens[1] must be in [0, K] = [0, 3], but it is -1": [lambda: dense([2, -1])],
        "num_draft_tokens must be an array [B] = [2], but it is an array [] of int32": [
            lambda: dense(2)
        ],
        "num_draft_tokens must be an array [B] = [2], but it is an array [3] of int32": [
            lambda: dense([2, 1, 1])
        ],
        "token_ids must be an array [N], but it is an array [2, 2] of int32: from_dense "
        "takes [B, K]": [lambda: flat([[1, 2], [3, 4]], [2, 2])],
        "num_draft_tokens must be an array [B], but it is an array [] of int32": [
            lambda: flat([1, 2], 2)
        ],
        "num_draft_tokens, summed, must be at most N = 3, but it is 5: they are counts, "
        "not offsets": [lambda: flat([1, 2, 3], [0, 2, 3])],
        "num_draft_tokens[1] must be at least 0, but it is -1": [lambda: flat([1, 2, 3], [4, -1])],
        "size must be at least 0, but it is -1": [
            lambda: sd.pack_drafts(zeros((B, K), jnp.int32), [1, 1], size=-1)
        ],
        "token_ids must be an array [B, K], but it is an array [2] of int32": [
            lambda: sd.pack_drafts(zeros((B,), jnp.int32), [1, 1])
        ],
        "drafts.distribution.probs[0].sum() must be 1, but it is 1.0009000301361084": [
            lambda: validate(dense(None, sd.DraftProbs(PROBS.probs * 1.0009)))
        ],
        "drafts.distribution.probs[0].sum() must be 1, but it is 4.0": [
            lambda: validate(
                dense(
                    None, sd.DraftProbs(jnp.full((9, V), 0.5), jnp.arange(B * K, dtype=jnp.int32))
                )
            )
        ],
        "drafts.token_ids[0] must be in [0, 8), or -1 for no proposal, but it is 99": [
            lambda: validate(dense([1, 1], None, jnp.full((B, K), 99)))
        ],
        "drafts.token_ids[0] must be in [0, 7), or -1 for no proposal, but it is 7": [
            lambda: validate(dense(None, None, jnp.full((B, K), 7)), vocab_size=7)
        ],
        "drafts.cu_num_draft_tokens, the count of request 0, must be in [0, "
        "num_speculative_tokens] = [0, 3], but it is 5": [
            lambda: validate(flat([0] * 10, [5, 5]), zeros((12, V)))
        ],
        "positions[1] must be at least 0, but it is -1": [
            lambda: validate(DENSE, positions=np.array([4, -1]))
        ],
        "max_vocab_size must be at least 1, but it is 0": [
            lambda: lm.load_huggingface("x", max_vocab_size=0)
        ],
        "inf in float16; weights must be finite unless allow_nonfinite is true.": [
            lambda: save(huge(), jnp.float16)
        ],
        "params['embed_tokens'] must be an array [256, 128], but it is an array [256, 256] "
        "of float32": [lambda: save(target().params)],
    },
    FileNotFoundError: {
        "Qwen/Qwen2.5-0.5B does not exist; `hf download Qwen/Qwen2.5-0.5B --local-dir "
        "Qwen/Qwen2.5-0.5B` downloads a checkpoint to it.": [
            lambda: lm.load_huggingface("Qwen/Qwen2.5-0.5B")
        ],
    },
    OSError: {
        "test_messages.py is a file, but a checkpoint must be a directory of config.json, "
        "safetensors and tokenizer.json; GGUF is not read.": [
            lambda: lm.load_huggingface(__file__)
        ],
    },
}


@pytest.mark.parametrize(
    ("error", "sentence", "call"),
    [
        pytest.param(error, sentence, call, id=sentence[:50])
        for error, sentences in REFUSALS.items()
        for sentence, calls in sentences.items()
        for call in calls
    ],
)
def test_a_mistake_is_answered_by_one_sentence_that_helps(
    error: type[Exception], sentence: str, call: Callable[[], Any]
) -> None:
    with pytest.raises(error, match=re.escape(sentence)) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_nothing_is_written_where_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inf in float16"):
        lm.models.save_checkpoint(tmp_path / "own", draft().model, huge(), jnp.float16)
    assert not (tmp_path / "own").exists()
    lm.models.save_checkpoint(
        tmp_path / "own", draft().model, huge(), jnp.float16, allow_nonfinite=True
    )
    _, params = lm.models.load_checkpoint(tmp_path / "own", jnp.float16, allow_nonfinite=True)
    assert not all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


# What is taken because its meaning is plain

PLAIN = {
    "one number": lambda x: float(x[0]),
    "a list": lambda x: x.tolist(),
    "NumPy, 64 bits": lambda x: x.astype(np.int64 if x.dtype == np.int32 else np.float64),
    "a scalar of JAX": lambda x: jnp.asarray(x[0]),
}


@pytest.mark.parametrize(
    "form",
    [x if x == "a list" else pytest.param(x, marks=pytest.mark.long) for x in PLAIN],
)
def test_parameters_in_any_plain_form_give_the_tokens_of_arrays(form: str) -> None:
    plain = PLAIN[form]
    keys, config, rng = jax.random.split(jax.random.key(3), B), CONFIG, np.random.default_rng(1)
    logits = jax.device_put(rng.standard_normal((B * (K + 1), V)).astype(np.float32))
    drafts = dense(None, None, np.int32(rng.integers(V, size=(B, K))))
    temperature, top_p = np.full(B, 0.5, np.float32), np.full(B, 0.9, np.float32)
    top_k, positions = np.full(B, 5, np.int32), np.array([7, 11], np.int32)
    arrays = jax.device_put(sd.SamplingParams(temperature, top_k=top_k, top_p=top_p))
    array_positions = jax.device_put(positions)
    taken = sd.SamplingParams(
        plain(temperature),
        top_k=int(plain(top_k)) if form == "one number" else plain(top_k),
        top_p=plain(top_p),
    )
    own_positions = positions.astype(np.int64) if "NumPy" in form else positions.tolist()

    def verify(logits: jax.Array, sampling: sd.SamplingParams, positions: Any) -> jax.Array:
        given = dict(sampling=sampling, keys=keys, positions=positions, config=config)
        return sd.rejection_sample(logits, drafts, **given).token_ids

    def tokens(sampling: sd.SamplingParams, positions: Any) -> list[list[int]]:
        return verify(logits, sampling, positions).tolist()

    wanted = tokens(arrays, array_positions)
    assert tokens(taken, own_positions) == wanted
    traced = jax.jit(lambda logits: verify(logits, taken, own_positions))(logits)
    assert traced.tolist() == wanted
    validate(drafts, logits, sampling=taken, positions=own_positions)
    own, drawn = (
        sd.sample_draft_tokens(logits[:B], sampling=sampling, keys=keys, positions=where, offset=0)
        for sampling, where in ((taken, own_positions), (arrays, array_positions))
    )
    assert own.token_ids.tolist() == drawn.token_ids.tolist()
    store = sd.DraftStore.create(B, K, V)
    for sampling, where in ((taken, own_positions), (arrays, array_positions)):
        numbers = drawn.log_normalizer, drawn.row_max
        store = store.write(0, logits[:B], *numbers, positions=where, sampling=sampling)
        attached = store.attach(dense([1, 1]), positions=where, sampling=sampling)
        assert int(sd.count_fallbacks(attached, sampling=sampling)) == 0
