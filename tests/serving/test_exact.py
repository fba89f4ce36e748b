"""`exact=True`: texts and their bits, whatever is drafted, beside whom, and however interrupted."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.weights import first_layers, of_features, sizes
from upper_floor import Decoder

import jax_specdec as sd
from jax_specdec import lm

from .grammars import Follows
from .tiny import Trigram

pytestmark = [pytest.mark.newest, pytest.mark.xdist_group("exact")]

K = 4
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K, rejection_sample_method="agreement")
# In float32 the sums of this model, on a CPU too, differ in their last bits between passes of
# different widths: what breaks the promise shows.
LOADED = lm.load_embedded_pair()
(TARGET, PARAMS), (DRAFT, DRAFT_PARAMS) = first_layers(LOADED[0], 3), LOADED[1]
HEAD, HEAD_PARAMS = of_features(lm.load_embedded_head(LOADED[0]), (0, 1, 2))
BLOCK, BLOCK_PARAMS = of_features(lm.load_embedded_head(LOADED[0], "dspark"), (0, 1, 2))
MESH = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
SHARDED = lm.models.TensorParallelLlama(TARGET, MESH, "tensor")
SUFFIX = lm.SuffixDrafter()
DRAFTERS: dict[str, tuple[lm.Drafter, Any]] = {
    "model": (lm.ModelDrafter(DRAFT), DRAFT_PARAMS),
    "EAGLE-3": (lm.Eagle3Drafter(HEAD), HEAD_PARAMS),
    "n-grams": (lm.NGramDrafter(min_ngram=1), None),
    "both": (lm.FirstOf(SUFFIX, lm.Eagle3Drafter(HEAD)), (SUFFIX.init_params(), HEAD_PARAMS)),
}
B16 = jnp.dtype("bfloat16")
TARGET_16 = dataclasses.replace(TARGET, dtype=B16)
BLOCK_16 = lm.BlockDrafter(dataclasses.replace(BLOCK, dtype=B16))
PARAMS_16, BLOCK_PARAMS_16 = (
    jax.tree.map(lambda x: x.astype(B16) if x.dtype == jnp.float32 else x, params)
    for params in (PARAMS, BLOCK_PARAMS)
)
BLOCK_PARAMS_16["lm_head"] = BLOCK_PARAMS_16["embed_tokens"]  # one array, as loaded
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(32, 127, n).tolist() for n in (3, 17, 1, 30, 9, 24)]
BUDGETS = [24, 9, 30, 12, 20, 16]
TEMPERATURES = [0.0, 0.8, 1.2, 0.0, 0.8, 0.0]
Text = tuple[list[int], bytes]


@functools.cache
def tiny(dtype: str) -> tuple[lm.CausalModel, Any]:
    """A model in whose norms an unpadded pass over 5 rows is not exact, with AVX-512."""
    model = lm.models.Llama(sizes(128, 192, 32, 1, (2, 1, 8)), jnp.dtype(dtype))
    return model, jax.jit(model.init_params)(jax.random.key(0))


def engine_of(name: str, **changes: Any) -> lm.Engine:
    settings: dict[str, Any] = dict(
        num_slots=2, max_length=64, prefill_sizes=(16,), logprobs=sd.LogprobsConfig(), exact=True
    )
    drafter = changes.pop("drafter", None) or DRAFTERS[name][0]
    model = changes.pop("model", TARGET)
    return lm.Engine(model, drafter, CONFIG, **settings | changes)


def serve(
    engine: lm.Engine,
    name: str,
    order: list[int],
    between: Callable[[lm.EngineDriver, int], object] = lambda driver, step: None,
    weights: Any = None,
    **asked: Any,
) -> list[Text]:
    """Of each of `PROMPTS` the ids, and the bits of their log-probabilities."""
    driver = lm.EngineDriver(engine, *weights or (PARAMS, DRAFTERS[name][1]))
    ids = {
        driver.submit(
            PROMPTS[i], max_new_tokens=BUDGETS[i], temperature=TEMPERATURES[i], seed=i, **asked
        ): i
        for i in order
    }
    texts: dict[int, Text] = {i: ([], b"") for i in order}
    step = 0
    while not driver.is_idle:
        between(driver, step)
        step += 1
        for update in driver.step():
            i = ids[update.request_id]
            texts[i] = longer(texts[i], update)
    return [texts[i] for i in sorted(texts)]


def longer(text: Text, update: lm.RequestUpdate) -> Text:
    if not update.token_ids:
        return text
    bits = np.asarray(update.logprobs.logprobs)[: len(update.token_ids)].tobytes()
    return text[0] + update.token_ids, text[1] + bits


@functools.cache
def plain(num_slots: int = 2) -> list[Text]:
    """Alone one after another, without drafts."""
    engine = engine_of("n-grams", num_slots=num_slots)
    return [
        text for i in range(len(PROMPTS)) for text in serve(engine, "n-grams", [i], max_drafts=0)
    ]


@dataclasses.dataclass(frozen=True)
class Noting(Trigram):
    """Notes how many rows its passes have; with a name, because what is equal is traced once."""

    name: str
    num_rows: ClassVar[list[int]] = []

    def apply(self, params: Any, groups: Any, *args: Any) -> Any:
        self.num_rows.extend(rows.token_ids.shape[1] for rows in groups)
        return super().apply(params, groups, *args)


@pytest.mark.parametrize(("platform", "num_rows"), [("cpu", 8), ("cuda", 5), ("tpu", 5)])
def test_a_pass_has_the_rows_of_the_platform_that_its_program_is_for(
    platform: str, num_rows: int
) -> None:
    """Whatever the default device is: on a CPU 8, a multiple of four, in place of K + 1 = 5."""
    engine = engine_of("n-grams", model=Noting(128, platform))
    params = jax.ShapeDtypeStruct((128, 128, 128), np.float32)
    state = jax.eval_shape(engine.init_state, None, params)
    Noting.num_rows.clear()
    # Traced for the default device, and then for the platform, if that is another one.
    jax.jit(engine.step).trace(params, None, state).lower(lowering_platforms=(platform,))
    assert Noting.num_rows[-1] == num_rows
    assert engine.buffer_length >= engine.max_length + num_rows


def preempting(driver: lm.EngineDriver, step: int) -> None:
    if step in (4, 16):
        for request_id in range(len(PROMPTS)):
            driver.preempt(request_id)


def dropping(driver: lm.EngineDriver, step: int) -> None:
    """What an exception does."""
    if step in (6, 21):
        driver._is_whole = False


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_generate_are_those_of_generate_plain(
    dtype: str, request: pytest.FixtureRequest
) -> None:
    if dtype == "float32":  # whose last bits show what a compiler does to some rows
        request.getfixturevalue("optimized")
    given: dict[str, Any] = dict(
        config=CONFIG,
        options=[lm.RequestOptions(temperature=x) for x in (0.0, 0.0, 0.0, 0.8) * 2],
        max_new_tokens=32,
        logprobs=sd.LogprobsConfig(),
        exact=True,
    )
    prompts = [list(range(i, 3 * i + 1)) for i in range(8)]
    plain = lm.generate_plain(*tiny(dtype), prompts, **given)
    found = lm.generate(*tiny(dtype), prompts, drafter=lm.NGramDrafter(min_ngram=1), **given)
    assert found.steps.num_accepted.sum() > 20
    assert texts_of(found) == texts_of(plain)


def texts_of(output: lm.GenerateOutput) -> list[Text]:
    kept = np.arange(K + 1)[None, None, :] < output.steps.num_kept[:, :, None]  # [S, B, K+1]
    logprobs = output.steps.logprobs.logprobs
    bits = [logprobs[:, b][kept[:, b]].tobytes() for b in range(kept.shape[1])]
    return list(zip(output.completions, bits, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_an_engine_stay_whatever_is_drafted_and_interrupted(dtype: str) -> None:
    model, params = tiny(dtype)
    engine = engine_of("n-grams", model=model)
    wanted = serve(engine, "n-grams", [*range(6)], weights=(params, None), max_drafts=0)
    found = serve(engine, "n-grams", [4, 0, 3, 5, 2, 1], preempting, (params, None))
    assert found == wanted


@pytest.mark.parametrize("k", [1, 2, 4, 5, 8])
def test_a_pass_on_a_cpu_has_a_multiple_of_four_rows(k: int) -> None:
    widths = set()

    def run(table: jax.Array, ids: jax.Array, start: jax.Array, cache: Any) -> Any:
        widths.add(ids.shape[1])
        return table[ids], cache

    model = lm.models.PlainModel(8, run)
    config = sd.SpecDecodeConfig(num_speculative_tokens=k)
    engine = lm.Engine(model, lm.NGramDrafter(), config, num_slots=2, max_length=32, exact=True)
    jax.eval_shape(engine.step, jnp.eye(8), None, engine.init_state())
    assert widths == {4 * (k // 4 + 1)}


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["EAGLE-3", "n-grams", *(pytest.param(x, marks=pytest.mark.slow) for x in ("model", "both"))],
)
def test_bits_are_those_of_plain_decoding_alone(name: str) -> None:
    assert serve(engine_of(name), name, [4, 0, 3, 5, 2, 1]) == plain()


@pytest.mark.slow
@pytest.mark.parametrize("bits", [16, 8])
def test_bits_in_narrow_weights_are_those_without_drafts(bits: int) -> None:
    weights = PARAMS_16, BLOCK_PARAMS_16
    if bits == 8:
        weights = lm.models.quantize(PARAMS_16), lm.models.quantize(BLOCK_PARAMS_16)
    engine = engine_of("DSpark", model=TARGET_16, drafter=BLOCK_16)
    wanted = serve(engine, "DSpark", [*range(6)], weights=weights, max_drafts=0)
    assert serve(engine, "DSpark", [4, 0, 3, 5, 2, 1], preempting, weights) == wanted


@pytest.mark.long
@pytest.mark.parametrize("name", ["EAGLE-3", "n-grams"])
@pytest.mark.parametrize("between", [preempting, dropping])
def test_bits_stay_whatever_interrupts(name: str, between: Any) -> None:
    assert serve(engine_of(name), name, [*range(6)], between) == plain()


def beside_a_grammar(between: Callable[[lm.EngineDriver, int], object]) -> list[Text]:
    """A text without a grammar, and one of even and odd ids in turn."""
    engine = engine_of("EAGLE-3")
    texts: dict[int, Text] = {}
    with lm.EngineDriver(engine, PARAMS, HEAD_PARAMS) as driver:
        asked: dict[str, Any] = dict(max_new_tokens=BUDGETS[1], temperature=TEMPERATURES[1], seed=1)
        texts[driver.submit(PROMPTS[1], **asked)] = ([], b"")
        asked = dict(max_new_tokens=20, temperature=0.8)
        asked |= {"matcher": Follows(lambda text: range(len(text) % 2, 30, 2))}
        texts[driver.submit(PROMPTS[0], **asked)] = ([], b"")
        step = 0
        while not driver.is_idle:
            between(driver, step)
            step += 1
            for update in driver.step():
                texts[update.request_id] = longer(texts[update.request_id], update)
    return [*texts.values()]


@pytest.mark.long
def test_bits_stay_beside_and_under_a_grammar() -> None:
    texts = beside_a_grammar(lambda driver, step: None)
    assert texts[0] == plain()[1]
    assert [token % 2 for token in texts[1][0]] == [0, 1] * 10
    assert beside_a_grammar(preempting) == texts


@pytest.mark.slow
def test_bits_stay_with_a_budget_of_drafts() -> None:
    engine = engine_of("EAGLE-3", draft_budget=(0, K))
    numbers = iter([0, K, K] * 100)
    driver_step = lm.DraftChoice.next
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm.DraftChoice, "next", lambda self: next(numbers))
        assert serve(engine, "EAGLE-3", [*range(6)], preempting) == plain()
    assert lm.DraftChoice.next is driver_step


@pytest.mark.long
@pytest.mark.parametrize("name", ["EAGLE-3", pytest.param("n-grams", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("rule", "temperature"),
    [pytest.param("standard", 0.0, marks=pytest.mark.slow), ("agreement", 0.8)],
)
def test_generate_is_generate_plain(rule: Any, temperature: float, name: str) -> None:
    config = sd.SpecDecodeConfig(num_speculative_tokens=K, rejection_sample_method=rule)
    given: dict[str, Any] = dict(
        config=config, max_new_tokens=20, temperature=temperature, exact=True
    )
    wanted = lm.generate_plain(TARGET, PARAMS, PROMPTS, **given).completions
    drafter, params = DRAFTERS[name]
    found = lm.generate(TARGET, PARAMS, PROMPTS, drafter=drafter, draft_params=params, **given)
    assert found.completions == wanted


@pytest.mark.slow
def test_the_code_of_the_page_says_true(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "exact.md").read_text("utf-8")
    code = "".join(part.partition("```")[0] for part in page.split("```python\n")[1:])
    exec(compile(code, "exact.md", "exec"), {})
    assert capsys.readouterr().out == "True\nNone\n"


def fault_narrow(patch: pytest.MonkeyPatch) -> None:
    def without_exact(name: str) -> None:
        right = getattr(Decoder, name)

        def wrong(self: Any, *given: Any) -> Any:
            return right(dataclasses.replace(self, exact=False), *given)

        patch.setattr(Decoder, name, wrong)

    without_exact("_drafts_of")
    without_exact("score")


def fault_chunks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lm.Engine, "chunk_sizes", property(lambda self: (11,)))


def fault_read_as_prompt(patch: pytest.MonkeyPatch) -> None:
    submit = lm.EngineDriver.submit

    def submitted(self: lm.EngineDriver, *prompt: Any, **asked: Any) -> int:
        i = submit(self, *prompt, **asked)
        self._waiting[i] = self._waiting[i]._replace(replay=None)
        return i

    patch.setattr(lm.EngineDriver, "submit", submitted)


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [
        *(pytest.param(x, marks=pytest.mark.slow) for x in (fault_narrow, fault_chunks)),
        fault_read_as_prompt,
    ],
)
def test_bits_show_a_planted_fault(fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    # Of fewer than 16 rows in a pass products differ in their bits, and of one row again.
    num_slots = 2 if fault is fault_chunks else 1
    wanted = plain(num_slots)
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        jax.clear_caches()
        asked = dict(max_drafts=0) if fault is fault_narrow else {}
        engine = engine_of("EAGLE-3", num_slots=num_slots)
        found = serve(engine, "EAGLE-3", [*range(6)], preempting, **asked)
    jax.clear_caches()
    assert found != wanted


def by_row(
    table: jax.Array, token_ids: jax.Array, start: jax.Array, cache: Any
) -> tuple[jax.Array, Any]:
    weight = 1 + 1e-6 * jnp.arange(token_ids.shape[1], dtype=jnp.float32)  # [S]
    return table[token_ids] * weight[None, :, None], cache


BY_ROW = lm.models.PlainModel(8, by_row), np.eye(8, dtype=np.float32) + np.float32(0.3)


def warm_up_by_row() -> None:
    model, params = BY_ROW
    engine = lm.Engine(
        model, lm.NGramDrafter(), CONFIG, num_slots=2, max_length=16, prefill_sizes=(8,), exact=True
    )
    programs = []
    try:
        lm.EngineDriver(engine, params).warm_up(lambda *done: programs.append(done[0]))
    finally:
        assert programs == [0]  # nothing else was compiled


def by_rule(rule: Any, **fields: Any) -> dict[str, Any]:
    return dict(
        config=sd.SpecDecodeConfig(
            num_speculative_tokens=1, rejection_sample_method=rule, **fields
        ),
        exact=True,
    )


def submit_to_block() -> None:
    model, params = BY_ROW
    sizes = dict(num_slots=2, max_length=16, prefill_sizes=(8,))
    driver = lm.EngineDriver(
        lm.Engine(model, lm.NGramDrafter(), **sizes, **by_rule("block")), params
    )
    driver.submit([1], max_new_tokens=1)
    driver.submit([1], max_new_tokens=1, temperature=0.5)


def admit_known(engine: lm.Engine) -> None:
    one = jnp.ones(1, jnp.int32)
    requests = lm.NewRequests(
        slots=0 * one,
        prompts=jnp.ones((1, 16), jnp.int32),
        lengths=one,
        keys=jax.random.split(jax.random.key(0), 1),
        options=engine.options_of([lm.RequestOptions()], [1]),
        known_token_ids=jnp.ones((1, 64), jnp.int32),
    )
    state = jax.eval_shape(engine.init_state)
    jax.eval_shape(lambda state: engine.admit(PARAMS, None, state, requests), state)


TREES = lm.Eagle3Drafter(HEAD, tree_depth=2)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: engine_of("n-grams", drafter=TREES), ValueError, "^drafter must propose chains"),
        (
            lambda: engine_of("n-grams", prefill_sizes=(8, 16)),
            ValueError,
            "^prefill_sizes must be one size if exact",
        ),
        (lambda: engine_of("n-grams", exact=1), TypeError, "^exact must be"),
        (
            warm_up_by_row,
            ValueError,
            "^model must give .* the same bits .* but on this device outputs.logits depends on its",
        ),
        (
            lambda: lm.generate_plain(*BY_ROW, [[1]], config=CONFIG, exact=True),
            ValueError,
            "^model must give .* the same bits .* but on this device outputs.logits depends on its",
        ),
        *(
            (call, ValueError, '^temperature must be 0 if exact, unless .* is "agreement"')
            for call in (
                lambda: lm.generate_plain(*BY_ROW, [[1]], exact=True, temperature=0.5),
                lambda: lm.generate(
                    *BY_ROW, [[1]], drafter=SUFFIX, temperature=0.5, **by_rule("standard")
                ),
                lambda: lm.generate_stream(
                    *BY_ROW, [[1]], drafter=SUFFIX, temperature=0.5, **by_rule("block")
                ),
                submit_to_block,
            )
        ),
        (
            lambda: lm.generate_plain(
                *BY_ROW, [[1]], **by_rule("synthetic", synthetic_acceptance_length=1.5)
            ),
            ValueError,
            "^config.rejection_sample_method must not be synthetic if exact",
        ),
        (
            lambda: admit_known(engine_of("n-grams", exact=False)),
            ValueError,
            "^known_token_ids must be None, because the engine is not exact",
        ),
        (
            lambda: lm.EngineDriver(engine_of("n-grams"), PARAMS, prompts_in_steps=True),
            ValueError,
            "^prompts_in_steps must be false for an exact engine",
        ),
        (
            lambda: lm.generate_plain(SHARDED, SHARDED.shard_params(PARAMS), [[1]], exact=True),
            ValueError,
            "^model must have its logits on one device if exact",
        ),
    ],
)
def test_what_is_not_exact_is_refused(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()
