"""What a newcomer is told: the mistakes of a first hour, and the sentence that says what to do.

Refusals of single functions in all their forms are tested with the functions.
"""

import functools
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filled import full, zeros
from formats.checkpoints import CHECKPOINTS
from upper_floor import protocol

import jax_specdec as sd
from jax_specdec import lm

pytestmark = pytest.mark.newest

B, K, V = 2, 3, 8
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)
DENSE = sd.Drafts(zeros(B * K, jnp.int32), jax.device_put(np.arange(0, B * K + 1, K, np.int32)))
PROBS = sd.DraftProbs(full((B, K, V), 1 / V))
QWEN2 = CHECKPOINTS / "qwen2"
WEIGHTS = Path(sd.__file__).parent / "lm" / "weights"


@functools.cache
def pair() -> tuple[lm.formats.LoadedModel, lm.formats.LoadedModel]:
    return lm.load_embedded_pair()


def target() -> lm.formats.LoadedModel:
    return pair()[0]


def draft() -> lm.formats.LoadedModel:
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
    sd.testing.validate(logits, drafts, **(given | changes))


def engine(model: Any = None, drafter: Any = None, config: Any = CONFIG) -> lm.Engine:
    model = target().model if model is None else model
    drafter = lm.NGramDrafter() if drafter is None else drafter
    return lm.Engine(model, drafter, config, num_slots=2, max_length=32)


def driver(engine: Any, params: Any = None) -> lm.EngineDriver:
    return lm.EngineDriver(engine, target().params if params is None else params)


def attach(drafts: Any, positions: Any = (5, 9)) -> sd.Drafts:
    store = sd.DraftStore.create(B, K, V)
    return store.attach(drafts, positions=positions, sampling=sd.SamplingParams(0.8))


def write(drawn: Any) -> sd.DraftStore:
    store = sd.DraftStore.create(B, K, V)
    given: dict[str, Any] = {"positions": [5, 9], "sampling": sd.SamplingParams(0.8)}
    return store.write(0, zeros((B, V)), drawn, **given)


def sample(positions: Any) -> sd.DraftSample:
    keys, sampling = jax.random.split(jax.random.key(0), B), sd.SamplingParams(0.8)
    given: dict[str, Any] = {"sampling": sampling, "keys": keys, "positions": positions}
    return sd.sample_draft_tokens(zeros((B, V)), offset=0, **given)


def dense(counts: Any = None, distribution: Any = None, ids: Any = None) -> sd.Drafts:
    ids = zeros((B, K), jnp.int32) if ids is None else ids
    return sd.Drafts.from_dense(ids, counts, distribution)


def flat(ids: Any, counts: Any) -> sd.Drafts:
    return sd.Drafts.from_flat(jnp.array(ids), jnp.array(counts))


def save(params: Any, dtype: Any = jnp.float32, model: Any = None) -> None:
    model = draft().model if model is None else model
    lm.formats.save_checkpoint("/nowhere/at/all", model, params, dtype)


def retokenize(tokenizer: Any = None, vocab_size: int = 288) -> Any:
    own = lm.load_tokenizer(QWEN2)
    return lm.retokenize(own if tokenizer is None else tokenizer, vocab_size, own, *draft())


COSTS = lm.StepCosts(2, (0, 2), (0.1, 0.2))


def greedy_differences(**changes: Any) -> Any:
    output = lm.GenerateOutput([[1]], None, [])  # type: ignore[arg-type]
    given: dict[str, Any] = {"prompts": [[1]], "output": output, "plain": output}
    return lm.greedy_differences(**target()._asdict() | given | changes)


def encode_without(special_tokens: Any) -> list[int]:
    return lm.load_tokenizer(QWEN2).encode("x", add_special_tokens=special_tokens)


def stats(kept: Any) -> sd.AcceptanceStats:
    ids = np.zeros((1, K + 1), np.int32)
    return sd.AcceptanceStats.from_steps(lm.StepRecord(ids, kept, kept, kept, kept))


Call = Callable[[], Any]
FIRST = "one per request, that of its first draft, not one per token"
TEXT_HINT = (
    "turn text into ids, with encode_bytes for the embedded models, or with the encode of "
    "load_tokenizer's Tokenizer"
)
LOGITS = "float32, bfloat16 or float16, but it is an array"

# Sentences with advice, each once
ADVICE: dict[type[Exception], dict[str, Call]] = {
    TypeError: {
        "drawn must be a DraftSample, but it is an array [2] of float32: pass what "
        "sample_draft_tokens returned": lambda: write(zeros(B)),
        "drawn.log_normalizer must be an array [B] = [2] of float32, but it is None: a greedy "
        "draft has no q to store": lambda: write(sd.DraftSample(zeros(B, jnp.int32))),
        "drafter must be a Drafter, but it is a LoadedModel: pass "
        "drafter=ModelDrafter(draft.model) and draft_params=draft.params": lambda: generate(
            drafter=draft()
        ),
        "drafter must be a Drafter, but it is a Llama: a model is wrapped, "
        "drafter=ModelDrafter(model)": lambda: generate(drafter=draft().model),
        "drafter must be a Drafter, but it is 'ngram': NGramDrafter() needs no model, and "
        "generate_plain no drafter": lambda: generate(drafter="ngram"),
        "draft_params must be the weights of the model, but it is None: pass its .params": (
            lambda: generate(drafter=lm.ModelDrafter(draft().model))
        ),
        "draft_params must be a model's weights, but it is a LoadedModel: pass its .params": (
            lambda: generate(drafter=lm.ModelDrafter(draft().model), draft_params=draft())
        ),
        "model must be a CausalModel, but it is a LoadedModel, which holds one and its "
        "params: pass its .model here, and its .params where they belong": (
            lambda: lm.ModelDrafter(draft())
        ),
        "model must be a CausalModel, but it is the class Llama: make an object": lambda: (
            lm.ModelDrafter(lm.models.Llama)
        ),
        "model must be a CausalModel, but it is namespace(vocab_size=3, apply=0), which has no "
        "serves, init_cache, commit, check_params: PlainModel makes one of a plain pass": lambda: (
            lm.ModelDrafter(types.SimpleNamespace(vocab_size=3, apply=0))
        ),
        "target must be a CausalModel, but it is namespace(vocab_size=3), which has no serves, "
        "init_cache, apply, commit, check_params": lambda: protocol.check_model(
            "target", types.SimpleNamespace(vocab_size=3)
        ),
        f"prompts must be lists of token ids, but it is 'import ': {TEXT_HINT}": (
            lambda: generate(*target(), "import ")
        ),
        f"prompts[0] must be a list of ints, but it is 'import ': {TEXT_HINT}": (
            lambda: generate(*target(), ["import "])
        ),
        "prompts must be lists of token ids, one per request, but it is [1, 2, 3]: pass [ids]": (
            lambda: generate(*target(), [1, 2, 3])
        ),
        "temperature must be one value, but it is [0.0, 0.8]: for requests that differ, give a "
        "list, options=[RequestOptions(temperature=...), ...]": lambda: generate(
            temperature=[0.0, 0.8]
        ),
        "unknown argument 'max_tokens'; did you mean 'max_new_tokens'?": lambda: generate(
            max_tokens=5
        ),
        "keys must be typed, as jax.random.key and jax.random.split give, but it is an array "
        "[2, 2] of uint32: pass jax.random.wrap_key_data(keys)": lambda: rejection_sample(
            keys=zeros((B, 2), jnp.uint32)
        ),
        "params must be a dict of weights, but it is a LoadedModel: pass its .params": (
            lambda: lm.models.quantize(draft())
        ),
        "config must be a SpecDecodeConfig, but it is 4: "
        "SpecDecodeConfig(num_speculative_tokens=4), for example": lambda: generate(config=4),
        "logprobs must be a LogprobsConfig or None, but it is 5: LogprobsConfig(num_top=5), for ": (
            lambda: generate(logprobs=5)
        ),
        "drafts must be a Drafts, but it is [[0]]: Drafts.from_dense makes it of ids [B, K], ": (
            lambda: rejection_sample(drafts=[[0]])
        ),
        "sampling must be a SamplingParams, but it is {}: SamplingParams(temperature=0.8), for ": (
            lambda: rejection_sample(sampling={})
        ),
        "options must be a RequestOptions, a Sequence or None, but it is {}: "
        "RequestOptions(temperature=0.8), for example": lambda: generate(options={}),
        "ngram.NGramDrafter'>: make an object, NGramDrafter(...)": (
            lambda: generate(drafter=lm.NGramDrafter)
        ),
        "drafter must be a Drafter, but it is 'model': NGramDrafter() needs no model": (
            lambda: generate(drafter="model")
        ),
        "head must be an Eagle3Head, but it is a LoadedModel: pass its .model": (
            lambda: lm.Eagle3Drafter(draft())
        ),
        "head must be a BlockHead, but it is a LoadedModel: pass its .model": (
            lambda: lm.BlockDrafter(draft())
        ),
        "target must be a LoadedModel of a Llama, but it is a Llama: pass what load_huggingface ": (
            lambda: lm.load_embedded_head(target().model)
        ),
        ": params come after their model": lambda: generate(target().params, target().model, [[1]]),
        "draft_budget must be increasing ints, at least one, but it is 4": lambda: lm.Engine(
            target().model, lm.NGramDrafter(), CONFIG, num_slots=1, max_length=8, draft_budget=4
        ),
        "prompts must be a list or a tuple, but it is 'x': pass [text] for one": (
            lambda: lm.generate_text("x")
        ),
        "prompts[0] must be a str, but it is [1, 2]: generate takes lists of token ids": (
            lambda: lm.generate_text([[1, 2]])
        ),
        "target must be a str, a PathLike or None, but it is a LoadedModel: generate takes a ": (
            lambda: lm.generate_text(["x"], draft())
        ),
        "token_id must be an int, but it is 'a'": lambda: lm.load_tokenizer(QWEN2).token_bytes("a"),
        "store_dtype must be a floating dtype, but it is {'embed_tokens'": (
            lambda: lm.ModelDrafter(*draft())
        ),
        "option_sizes must be an OptionSizes, but it is 3": lambda: lm.Engine(
            target().model, lm.NGramDrafter(), CONFIG, num_slots=1, max_length=8, option_sizes=3
        ),
        "config must be a DecoderConfig, but it is a LoadedModel": (
            lambda: lm.models.Llama(target())
        ),
        "function must be a function, but it is 3": lambda: lm.models.PlainModel(3, 3),
        "new_cache must be a function, but it is 3": lambda: lm.models.PlainModel(3, max, 3),
        "vocab_size must be an int, but it is <built-in function max>": (
            lambda: lm.models.PlainModel(max, 3)
        ),
        "plain must be a GenerateOutput, but it is [[1]]": lambda: lm.greedy_differences(
            *target(), [[1]], lm.GenerateOutput([], None, []), [[1]]
        ),
        "registry must be a CollectorRegistry of prometheus_client, but it is 5": (
            lambda: lm.PrometheusExporter(5)
        ),
        "seconds must be a number, but it is '1'": lambda: stats(np.ones(1, int)).log_line("1"),
        "params['fc'][0] must be an array, but it is 1.0": (
            lambda: lm.models.quantize({"fc": [1.0]})
        ),
        f"target must be a Tokenizer, but it is {str(QWEN2)!r}: load_tokenizer reads one from a "
        "directory": lambda: retokenize(str(QWEN2)),
        "validate must be called outside of jax.jit, but target_logits is traced": (
            lambda: jax.jit(lambda logits: validate(DENSE, logits))(zeros((B * (K + 1), V)))
        ),
        "validate must be called outside of jax.jit, but drafts.token_ids is traced": (
            lambda: jax.jit(validate)(DENSE)
        ),
        "parse_output must be called outside of jax.jit, but output.token_ids is traced": (
            lambda: jax.jit(sd.parse_output)(sd.RejectionSampleOutput(DENSE.token_ids, 0, 0, 0))
        ),
        "from_steps must be called outside of jax.jit, but steps.num_kept is traced": (
            lambda: jax.jit(lambda kept: stats(kept))(zeros(B, jnp.int32))
        ),
        "from_counters must be called outside of jax.jit, but counters.words is traced": (
            lambda: jax.jit(sd.AcceptanceStats.from_counters)(sd.AcceptanceCounters.create(K))
        ),
        "generate must be called outside of jax.jit, but params.embed_tokens is traced": (
            lambda: jax.jit(lambda params: generate(target().model, params, [[1]]))(target().params)
        ),
    },
    ValueError: {
        "synthetic_acceptance_rates[1] must be at most synthetic_acceptance_rates[0] = 0.5, but "
        "it is 0.6": lambda: sd.SpecDecodeConfig(
            num_speculative_tokens=2,
            rejection_sample_method="synthetic",
            synthetic_acceptance_rates=[0.5, 0.6],
        ),
        "synthetic_acceptance_rates must be None, but it is [0.5]: rejection_sample_method is "
        "'standard'": lambda: sd.SpecDecodeConfig(
            num_speculative_tokens=1, synthetic_acceptance_rates=[0.5]
        ),
        f"target_logits must be an array [N+B, V] = [8, V] of {LOGITS} [2, 4, 8] of float32: pass "
        "target_logits.reshape(8, 8)": lambda: rejection_sample(zeros((B, K + 1, V))),
        f"target_logits must be an array [N+B, V] = [6, V] of {LOGITS} [8, 8] of float32: drafts "
        "has 2 ids per request, but the logits are for 3": lambda: rejection_sample(
            drafts=dense(ids=zeros((B, 2), jnp.int32))
        ),
        f"target_logits must be an array [N+B, V] = [8, V] of {LOGITS} [6, 8] of float32: each "
        "request has a bonus row after its draft rows, unless bonus_token_ids is given": (
            lambda: rejection_sample(zeros((B * K, V)))
        ),
        "keys must be an array [B] = [2], but it is an array [] of key<fry>: jax.random.split "
        "gives one per request": lambda: rejection_sample(keys=jax.random.key(0)),
        f"[B] = [2] of int32, but it is an array [6] of int32: {FIRST}": lambda: rejection_sample(
            positions=zeros(B * K, jnp.int32)
        ),
        f"[B] = [2] of int32, but it is an array [2, 3] of int32: {FIRST}": (
            lambda: sample([[5, 6, 7], [9, 10, 11]])
        ),
        f"[B] = [2] of int32, but it is an array [2, 4] of int32: {FIRST}": lambda: attach(
            DENSE, positions=zeros((B, K + 1), jnp.int32)
        ),
        "drafts must have at most num_speculative_tokens = 3 drafts per request, as config says, "
        "but it is [4, 4]": lambda: rejection_sample(
            zeros((B * 5, V)), dense(ids=zeros((B, 4), jnp.int32))
        ),
        "drafts.cu_num_draft_tokens must have [B+1] = [3] entries, the first of them 0, but it is "
        "an array [2] of int32: vLLM's offsets have no leading 0: put one before them": (
            lambda: rejection_sample(drafts=sd.Drafts(DENSE.token_ids, jnp.array([3, 6])))
        ),
        "num_draft_tokens[1] must be in [0, K] = [0, 3], but it is 7": lambda: dense([2, 7]),
        "token_ids must be an array [N], but it is an array [2, 2] of int32: from_dense takes "
        "[B, K]": lambda: flat([[1, 2], [3, 4]], [2, 2]),
        "num_draft_tokens, summed, must be at most N = 3, but it is 5: they are counts, not "
        "offsets": lambda: flat([1, 2, 3], [0, 2, 3]),
        "model.vocab_size must be at least 280, the ids of the draft, but it is 256": retokenize,
        "vocab_size must be at least 280, the ids of the target, but it is 256": (
            lambda: retokenize(vocab_size=256)
        ),
        "inf in float16; weights must be finite unless allow_nonfinite is true.": lambda: save(
            huge(), jnp.float16
        ),
    },
    AttributeError: {
        "module 'jax_specdec.lm' has no attribute 'load_model'; load_huggingface reads a "
        "checkpoint, load_embedded_pair the models of the package": lambda: lm.load_model("name"),
        "module 'jax_specdec.lm' has no attribute 'load_heads'; did you mean 'load_head'?": (
            lambda: lm.load_heads
        ),
        "has no attribute 'SamplingParams'; RequestOptions is what one request asks for": (
            lambda: lm.SamplingParams
        ),
        "module 'jax_specdec.lm' has no attribute 'SpecDecodeConfig'; jax_specdec has it": (
            lambda: lm.SpecDecodeConfig
        ),
        "has no attribute 'LlguidanceMatcher'; jax_specdec.grammar has it": (
            lambda: lm.LlguidanceMatcher
        ),
        "module 'jax_specdec', which has models, drafters and loops in jax_specdec.lm, has no "
        "attribute 'generate'": lambda: sd.generate,
    },
    FileNotFoundError: {
        "Qwen/Qwen2.5-0.5B does not exist; `hf download Qwen/Qwen2.5-0.5B --local-dir "
        "Qwen/Qwen2.5-0.5B` downloads a checkpoint to it.": lambda: lm.load_huggingface(
            "Qwen/Qwen2.5-0.5B"
        )
    },
}

# Where a function says so and no other test has it call its checker
NAMED: list[tuple[type[Exception], str, Call]] = [
    (TypeError, "drafter", lambda: engine(drafter=draft())),
    (TypeError, "model", lambda: engine(target())),
    (TypeError, "model", lambda: lm.generate_plain(target().params, target().model, [[1]])),
    (TypeError, "model", lambda: save(draft().params, model=draft())),
    (TypeError, "config", lambda: engine(config=3)),
    (TypeError, "stop_token_ids", lambda: generate(stop_token_ids="\n")),
    (TypeError, "text", lambda: lm.encode_bytes(b"abc")),
    (TypeError, "token_ids", lambda: lm.decode_bytes([[1, 2]])),
    (TypeError, "engine", lambda: driver(target())),
    (TypeError, "prompt", lambda: driver(engine()).submit("import ")),
    (TypeError, "output", lambda: sd.parse_output(zeros((B, K)))),
    (TypeError, "drafts", lambda: attach(zeros((B, K)))),
    (TypeError, "directory", lambda: lm.load_huggingface(None)),
    (TypeError, "directory", lambda: lm.load_tokenizer(5)),
    (TypeError, "dtype", lambda: lm.load_huggingface(WEIGHTS / "draft", "float23")),
    (TypeError, "dtype", lambda: save(draft().params, jnp.int8)),
    (TypeError, "params", lambda: driver(engine(), [1.0])),
    (TypeError, "params", lambda: generate(target().model, "x", [[1]])),
    (ValueError, "params", lambda: lm.SuffixDrafter(history=4).add({}, [1])),
    (TypeError, "matchers[0]", lambda: sd.grammar.advance_matchers([zeros(2)], [[1]])),
    (TypeError, "draft_budget", lambda: lm.StepCosts(2, np.int32(3), (0.1,))),
    (TypeError, "seconds", lambda: lm.StepCosts(2, (0, 1), 0.1)),
    (TypeError, "seconds[1]", lambda: lm.StepCosts(2, (0, 1), (0.1, "0.2"))),
    (TypeError, "unconditional_rates", lambda: COSTS.best("x")),
    (ValueError, "unconditional_rates", lambda: COSTS.best([0.5])),
    (TypeError, "share", lambda: COSTS.best([0.5, 0.5], "x")),
    (TypeError, "path", lambda: COSTS.save(None)),
    (TypeError, "path", lambda: lm.StepCosts.load(5)),
    (TypeError, "bad_words", lambda: lm.RequestOptions(bad_words=np.int32(3))),
    (TypeError, "vocab_size", lambda: lm.RequestOptions().check(None)),
    (TypeError, "options[0]", lambda: lm.OptionSizes.of([{}])),
    (TypeError, "options", lambda: lm.OptionSizes.of(None)),
    (TypeError, "options", lambda: lm.OptionSizes().check({})),
    (TypeError, "model", lambda: greedy_differences(model=draft())),
    (TypeError, "prompts", lambda: greedy_differences(prompts=None)),
    (ValueError, "output.completions", lambda: greedy_differences(prompts=[[1], [2]])),
    (TypeError, "prompt_token_ids", lambda: lm.TextStream(lm.decode_bytes, ["a"])),
    (TypeError, "other", lambda: lm.load_tokenizer(QWEN2).has_same_vocabulary("qwen2")),
    (TypeError, "other", lambda: lm.load_tokenizer(QWEN2).check_same_vocabulary(None)),
    (TypeError, "add_special_tokens", lambda: encode_without(None)),
    (ValueError, "params['embed_tokens']", lambda: save(target().params)),
    (ValueError, "positions", lambda: rejection_sample(positions=np.array([5, 2**31]))),
    (ValueError, "num_draft_tokens[1]", lambda: jax.jit(lambda: dense([2, 7]).token_ids)()),
    (ValueError, "num_draft_tokens", lambda: dense(2)),
    (ValueError, "num_draft_tokens", lambda: flat([1, 2], 2)),
    (ValueError, "num_draft_tokens[1]", lambda: flat([1, 2, 3], [4, -1])),
    (ValueError, "weights", lambda: lm.load_huggingface(WEIGHTS / "draft", weights="int4")),
    (ValueError, "token_ids", lambda: sd.Drafts.from_dense(zeros((B,), jnp.int32))),
]


@pytest.mark.parametrize(
    ("error", "sentence", "call"),
    [
        pytest.param(error, sentence, call, id=sentence[:50])
        for error, sentences in ADVICE.items()
        for sentence, call in sentences.items()
    ],
)
def test_a_mistake_is_answered_by_one_sentence_that_helps(
    error: type[Exception], sentence: str, call: Call
) -> None:
    with pytest.raises(error, match=re.escape(sentence)) as raised:
        call()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("error", "name", "call"), NAMED)
def test_a_wrong_argument_is_named(error: type[Exception], name: str, call: Call) -> None:
    with pytest.raises(error, match=rf"^{re.escape(name)} must .*, but it is "):
        call()


def test_nothing_is_written_where_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inf in float16"):
        lm.formats.save_checkpoint(tmp_path / "own", draft().model, huge(), jnp.float16)
    assert not (tmp_path / "own").exists()
    lm.formats.save_checkpoint(
        tmp_path / "own", draft().model, huge(), jnp.float16, allow_nonfinite=True
    )
    _, params = lm.load_huggingface(tmp_path / "own", jnp.float16, allow_nonfinite=True)
    assert not all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


# What is taken because its meaning is plain

PLAIN = {"one number": lambda x: float(x[0]), "a list": lambda x: x.tolist()}


@pytest.mark.long
@pytest.mark.parametrize("form", ["one number", pytest.param("a list", marks=pytest.mark.slow)])
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
    own_positions = positions.tolist()

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
