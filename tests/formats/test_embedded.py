"""The pair that ships with the package: small enough, and as good as documented."""

import hashlib
import importlib.resources
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import scipy.special
from models.weights import sizes
from upper_floor import BYTE_VOCAB_SIZE

from jax_specdec import lm
from jax_specdec.lm import DOCUMENT_SEPARATOR, encode_bytes, load_embedded_pair
from jax_specdec.lm.formats import LoadedModel

from .checkpoints import logits_of

SNIPPET = '''\
def merge_intervals(intervals):
    """Return the union of closed intervals as a sorted list of disjoint ones."""
    merged = []
    for start, end in sorted(intervals):
        if end < start:
            raise ValueError("interval ends before it starts: %r" % ((start, end),))
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


class Counter:
    def __init__(self):
        self.count = 0

    def increment(self, amount=1):
        self.count += amount
        return self.count
'''
"""Written for this test: in no standard library."""

TRAINING = Path(__file__).parents[2] / "training"


@pytest.fixture(scope="module")
def pair() -> tuple[LoadedModel, LoadedModel]:
    return load_embedded_pair()


def num_parameters(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def bits_per_byte(loaded: LoadedModel, text: str) -> float:
    token_ids = np.array([DOCUMENT_SEPARATOR, *encode_bytes(text)], np.int32)
    logits = np.asarray(logits_of(*loaded, token_ids), np.float64)[:-1]
    log_probs = scipy.special.log_softmax(logits, axis=1)
    return float(-np.mean(log_probs[np.arange(len(log_probs)), token_ids[1:]]) / np.log(2))


def test_all_weights_together_are_under_19_megabytes() -> None:
    weights = importlib.resources.files("jax_specdec.lm") / "weights"
    with importlib.resources.as_file(weights) as directory:
        sizes = [path.stat().st_size for path in Path(directory).rglob("*") if path.is_file()]
    assert 10_000_000 < sum(sizes) < 19_000_000


def test_the_draft_is_at_least_ten_times_smaller(pair: tuple[LoadedModel, LoadedModel]) -> None:
    target, draft = pair
    assert 10 * num_parameters(draft.params) <= num_parameters(target.params)
    assert target.model.vocab_size == draft.model.vocab_size == BYTE_VOCAB_SIZE


@pytest.mark.newest
def test_both_models_know_python_and_the_target_knows_it_better(
    pair: tuple[LoadedModel, LoadedModel],
) -> None:
    target, draft = (bits_per_byte(loaded, SNIPPET) for loaded in pair)
    assert target + 0.1 < draft < 2.2
    # A model that has learnt only how frequent each byte is.
    counts = np.bincount(encode_bytes(SNIPPET), minlength=BYTE_VOCAB_SIZE) / len(SNIPPET)
    entropy = -np.sum(counts[counts > 0] * np.log2(counts[counts > 0]))
    assert target < entropy / 2


def test_the_documented_results_are_those_of_the_shipped_weights() -> None:
    results = json.loads((TRAINING / "results.json").read_text())["evaluation"]
    weights = importlib.resources.files("jax_specdec.lm") / "weights"
    for name, digest in results["weights_sha256"].items():
        data = (weights / name / "model.safetensors").read_bytes()
        assert hashlib.sha256(data).hexdigest() == digest
    bits = results["held_out_bits_per_byte"]
    assert bits["draft"] - bits["target"] >= 0.15
    readme = (TRAINING / "README.md").read_text()
    for value in (bits["target"], bits["draft"], results["completions"]["parsed"]):
        assert str(value) in readme


@pytest.mark.parametrize("name", ["eagle3-64", "dspark"])
def test_a_head_in_int8_shares_what_its_target_has_in_int8(
    pair: tuple[LoadedModel, LoadedModel], name: str
) -> None:
    target, _ = pair
    lean_target = target._replace(params=lm.models.quantize(target.params))
    head = lm.load_embedded_head(target, name)
    lean = lm.load_embedded_head(lean_target, name)
    assert lean.model == head.model
    found = lm.models.quantize(lean.params)
    wanted = lm.models.quantize(head.params)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    is_shared = found["lm_head"] is lean_target.params["lm_head"]
    assert is_shared == (name == "dspark")  # the other has an output matrix of 64 ids


def test_a_head_that_stores_the_output_matrix_shares_it_in_int8(tmp_path: Path) -> None:
    config = sizes(40, 16, 24, 4, (2, 1, 8))
    model = lm.models.Llama(config)
    params = model.init_params(jax.random.key(0))
    head = lm.models.Eagle3Head(
        lm.models.Eagle3Config.of_target(
            config, layers=config.layers[:1], aux_hidden_state_layers=(1, 2)
        )
    )
    lm.formats.save_eagle3(tmp_path, head, head.init_params(jax.random.key(1), params))
    # The integers of a matrix twice as large are the same, and its scales are not.
    for own in (
        params,
        model.init_params(jax.random.key(2)),
        jax.tree.map(lambda x: 2 * x, params),
    ):
        lean = lm.models.quantize(own)
        for target in (own, lean):
            found = lm.load_head(tmp_path, LoadedModel(model, target))
            assert found.model.config.own_lm_head == (own is not params)
            assert (found.params["lm_head"] is target["lm_head"]) == (own is params)
            in_int8 = lm.models.quantize(found.params)["lm_head"]
            assert (in_int8 is target["lm_head"]) == (own is params and target is lean)
            wanted = lm.models.quantize(params)["lm_head"]
            jax.tree.map(np.testing.assert_array_equal, in_int8, wanted)
