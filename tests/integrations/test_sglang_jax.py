"""The adapter for chains: a table of requests, alone and over meshes, in its scheduler's form."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from measure import collectives
from serving.chi_square import assert_distributed

import jax_specdec as sd
from jax_specdec.adapters import sglang_jax

from .sglang_jax_cases import OURS, THEIRS, Row
from .test_integration_doc import DFLASH, run

N, V = 4, 128
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=N - 1)
CASES = [*THEIRS, *OURS]
LOGPROBS = sd.LogprobsConfig(num_top=2)


def logits_of(entry: Row) -> np.ndarray:
    peaked = isinstance(entry, int)
    row = np.full(V, np.nan if entry is None else -100.0 if peaked else -np.inf, np.float32)
    if isinstance(entry, int):
        row[entry] = 100.0
    elif entry:
        row[list(entry)] = list(entry.values())
    return row


def arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:
    logits = np.array([logits_of(entry) for case in CASES for entry in case.rows])
    given = dict(
        temperatures=np.array([[case.temperature] for case in CASES], np.float32),
        top_ks=np.array([case.top_k for case in CASES], np.int32),
        top_ps=np.array([case.top_p for case in CASES], np.float32),
        min_ps=np.array([case.min_p for case in CASES], np.float32),
        keys=jax.random.key(5),
    )
    chains = np.array([case.chain for case in CASES], np.int32)
    lengths = np.array([case.seq_len for case in CASES], np.int32)
    return (logits, chains, lengths), given


def verifier(**static: Any) -> Any:
    call = functools.partial(sglang_jax.verify_chains, config=CONFIG, logprobs=LOGPROBS, **static)
    return jax.jit(call)


def check_all(found: sglang_jax.ChainVerification) -> None:
    """Every array that a scheduler reads says what the table says."""
    found = jax.device_get(found)
    index, gather = found.accept_index.reshape(-1, N), found.gather_index.reshape(-1, N)
    verified = np.where(found.accept_index >= 0, found.predict[found.accept_index], -1)
    for b, case in enumerate(CASES):
        count = len(case.expected)
        assert found.output.token_ids[b, :count].tolist() == case.expected, case.name
        assert found.output.num_emitted[b] == count, case.name
        # What their scheduler reads has a token for every slot that is in use: 0 for bad requests.
        emitted = case.expected or [0] * (case.seq_len != 0)
        count = len(emitted)
        assert found.accept_lens[b] == count, case.name
        want = [*range(b * N, b * N + count), *[-1] * (N - count)]
        assert index[b].tolist() == want, case.name
        last = max(count - 1, 0)
        assert gather[b].tolist() == [b * N + min(j, last) for j in range(N)], case.name
        assert verified[b * N :][:count].tolist() == emitted, case.name
        assert (found.predict[b * N :][:N] >= 0).all()
        assert found.verified_ids[b] == (emitted[-1] if count else 0), case.name
        count = len(case.expected)
        bad = found.output.status[b] == sd.Status.BAD_INPUT
        assert bad == case.is_bad, case.name
        logits = np.array([logits_of(entry) for entry in case.rows[:count]], np.float64)
        for j, token in enumerate(case.expected):
            log_p = logits[j] - logits[j].max()
            log_p -= np.log(np.exp(log_p).sum())
            np.testing.assert_allclose(found.logprobs.logprobs[b, j], log_p[token], atol=1e-5)
        assert np.isnan(found.logprobs.logprobs[b, count:]).all()


def test_the_table_has_all_of_theirs_and_enough_of_ours():
    assert len(THEIRS) == 9 and len(CASES) == 38
    assert all(len(case.chain) == len(case.rows) == N for case in CASES)
    assert all(case.defect is None for case in THEIRS)
    assert sum(case.defect is not None for case in OURS) == 5


def test_every_request_emits_what_is_expected():
    positional, named = arguments()
    check_all(verifier()(*positional, **named))


@functools.cache
def mesh() -> Mesh:
    """Not made while the file is imported: a machine may have one device."""
    return jax.make_mesh((2, 4), ("data", "tensor"), (AxisType.Explicit,) * 2)


def placed() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As their model leaves it: logits over both axes, flat chains and requests over data."""
    (logits, chains, lengths), named = arguments()

    def put(x: jax.Array, *axes: str | None) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh(), P(*axes)))

    keys = put(named.pop("keys"))
    named = {name: put(x, "data") for name, x in named.items()}
    logits = put(logits, "data", "tensor")
    return (logits, put(chains.reshape(-1), "data"), put(lengths, "data")), named | dict(keys=keys)


@pytest.mark.long
@pytest.mark.newest
def test_logits_over_data_and_tensor_stay_where_they_are():
    positional, named = placed()
    compiled = verifier(sharding=sd.VerifySharding(mesh(), "tensor", "data"))
    compiled = compiled.lower(*positional, **named).compile()
    found = compiled(*positional, **named)
    check_all(found)
    for array in jax.tree.leaves(found):
        assert array.sharding.spec[0] == "data"
    moved = collectives(compiled.as_text())
    part = positional[0].nbytes // 8
    assert moved and max(moved.values()) < part, moved


def test_hidden_states_are_gathered_on_an_explicit_mesh():
    own = NamedSharding(mesh(), P("data", None))

    @jax.jit
    def gathered(states, logits, chains, lengths):
        found = sglang_jax.verify_chains(
            logits,
            chains,
            lengths,
            config=CONFIG,
            temperatures=None,
            sharding=sd.VerifySharding(mesh(), "tensor", "data"),
        )
        return states.at[found.gather_index].get(out_sharding=own), found.accept_lens

    (logits, chains, lengths), _ = placed()
    states = np.random.default_rng(0).normal(size=(logits.shape[0], 3)).astype(np.float32)
    found, lens = gathered(jax.device_put(states, own), logits, chains, lengths)
    assert found.sharding.spec[0] == "data"
    lens, states = np.asarray(lens), states.reshape(-1, N, 3)
    assert lens.min() == 0 and lens.max() == N
    for b, rows in enumerate(np.asarray(found).reshape(-1, N, 3)):
        last = max(lens[b] - 1, 0)
        np.testing.assert_array_equal(rows[: last + 1], states[b, : last + 1])
        assert (rows[last:] == states[b, last]).all()


@pytest.mark.long
def test_blocks_of_dflash_are_verified_as_theirs_are_and_may_be_sampled():
    """The recipe on the page, as `dflash_greedy_verify` is tested, beside requests that sample."""
    greedy, sampled = 64, 8000
    rng = np.random.default_rng(1)
    predict = rng.integers(0, 3, (greedy, N))  # the argmax of each row; a third of drafts agree
    blocks = rng.integers(0, 3, (greedy + sampled, N)).astype(np.int32)
    logits = np.full((greedy + sampled, N, V), -np.inf, np.float32)
    logits[..., :8] = rng.normal(size=8)
    np.put_along_axis(logits[:greedy], predict[..., None], 10.0, axis=2)
    temperatures = np.repeat(np.float32([0.0, 0.7]), [greedy, sampled])
    used = np.arange(greedy + sampled) % 64 != 5

    def put(x: np.ndarray | jax.Array, *axes: str) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh(), P(*axes)))

    verify = functools.partial(run(DFLASH)["dflash_verify"], draft_token_num=N, mesh=mesh())
    found = jax.jit(verify)(
        put(blocks.reshape(-1), "data"),
        put(logits.reshape(-1, V), "data", "tensor"),
        seq_lens=put(np.where(used, 9, 0).astype(np.int32), "data"),
        keys=put(jax.random.key(3)),
        temperatures=put(temperatures, "data"),
    )
    assert all(array.sharding.spec[0] == "data" for array in found)
    lens, flat, verified, accepted = (np.asarray(array) for array in found)
    flat = flat.reshape(-1, N)
    np.testing.assert_array_equal(accepted, np.maximum(lens - 1, 0))
    np.testing.assert_array_equal(lens[~used], 0)
    # Greedy: drafts up to the first that is not the argmax of the row before it, and that argmax.
    agree = np.cumprod(blocks[:greedy, 1:] == predict[:, :-1], axis=1).sum(axis=1)
    assert {*agree.tolist()} == {0, 1, 2, 3}
    for b in np.flatnonzero(used[:greedy]):
        assert lens[b] == agree[b] + 1
        np.testing.assert_array_equal(flat[b, : lens[b]], predict[b, : lens[b]])
        assert verified[b] == predict[b, agree[b]]
    # Sampled: the token at each place that was reached has the law of its row.
    law = np.exp(logits[-1, 0] / 0.7)
    for place in range(2):
        reached = lens[greedy:] > place
        counts = np.bincount(flat[greedy:][reached, place], minlength=V)
        assert_distributed(counts, law / law.sum(), f"token {place}")


@pytest.mark.slow
@pytest.mark.newest
def test_inside_shard_map_places_are_those_of_the_part():
    positional, named = placed()
    key, names = named.pop("keys"), sorted(named)

    def part(key, logits, chains, lengths, *rest):
        found = sglang_jax.verify_chains(
            logits,
            chains,
            lengths,
            **dict(zip(names, rest, strict=True)),
            keys=jax.random.fold_in(key, jax.lax.axis_index("data")),
            config=CONFIG,
            logprobs=LOGPROBS,
            sharding=sd.VerifySharding(vocab_axis="tensor"),
        )
        first = jax.lax.axis_index("data") * lengths.shape[0] * N
        index = jnp.where(found.accept_index >= 0, found.accept_index + first, -1)
        return found._replace(accept_index=index, gather_index=found.gather_index + first)

    own = P("data")
    call = jax.shard_map(
        part,
        mesh=mesh(),
        in_specs=(P(), P("data", "tensor"), own, own, *[own] * len(names)),
        out_specs=own,
    )
    compiled = jax.jit(call)
    check_all(compiled(key, *positional, *[named[name] for name in names]))


def test_explicitly_split_logits_without_a_sharding_are_refused():
    positional, named = placed()
    with pytest.raises(ValueError, match="sharding must be given where target_logits are split"):
        sglang_jax.verify_chains(*positional, config=CONFIG, **named)


@pytest.mark.slow
@pytest.mark.newest
def test_a_large_vocabulary_is_neither_gathered_nor_copied():
    bs, vocab = 64, 128256

    def array(*shape: int, axes: tuple[str, ...] = ("data",), dtype: str = "float32") -> Any:
        place = NamedSharding(mesh(), P(*axes))
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=place)

    call = functools.partial(
        sglang_jax.verify_chains,
        config=CONFIG,
        sharding=sd.VerifySharding(mesh(), "tensor", "data"),
    )
    compiled = jax.jit(call).lower(
        array(bs * N, vocab, axes=("data", "tensor")),
        array(bs * N, dtype="int32"),
        array(bs, dtype="int32"),
        temperatures=array(bs),
        keys=jax.eval_shape(lambda: jax.random.key(0)),
    )
    compiled = compiled.compile()
    moved = collectives(compiled.as_text())
    assert len(moved) == 3 and max(moved.values()) < 2**15, moved
    part = bs * N * vocab * 4 // 8
    # On a CPU, which writes exponentials to memory before it sums them.
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * part
