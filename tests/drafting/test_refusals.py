"""What no drafter can be made of: each field's rule and wording, in one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving import tiny

import jax_specdec as sd
from jax_specdec import lm

from . import loops, test_block, test_eagle3

TABLE = tiny.Trigram(3)
BOUNDS = "must satisfy 1 <= min_ngram <= max_ngram, but they are"
Makes = Callable[..., lm.Drafter]


def block(**fields: Any) -> lm.BlockDrafter:
    return lm.BlockDrafter(test_block.HEAD, **fields)


def eagle3(**fields: Any) -> lm.Eagle3Drafter:
    return lm.Eagle3Drafter(test_eagle3.HEAD, **fields)


def model(**fields: Any) -> lm.ModelDrafter:
    return lm.ModelDrafter(TABLE, **fields)


def of_pieces(**fields: Any) -> lm.RetokenizingDrafter:
    return lm.RetokenizingDrafter(loops.TARGET, **fields)


REFUSED: list[tuple[Makes, dict[str, Any], type[Exception], str]] = [
    (lm.NGramDrafter, dict(min_ngram=2.0), TypeError, "min_ngram must be an int, but it is 2.0"),
    (lm.NGramDrafter, dict(max_ngram=4.0), TypeError, "max_ngram must be an int, but it is 4.0"),
    (lm.NGramDrafter, dict(min_ngram=0, max_ngram=2), ValueError, f".* {BOUNDS} 0 and 2"),
    (lm.NGramDrafter, dict(min_ngram=3, max_ngram=2), ValueError, f".* {BOUNDS} 3 and 2"),
    (lm.NGramDrafter, dict(min_ngram=-1, max_ngram=-1), ValueError, f".* {BOUNDS} -1 and -1"),
    (lm.SuffixDrafter, dict(max_match=1), ValueError, r"max_match must be in \[2, 127\], but"),
    (
        lm.SuffixDrafter,
        dict(max_match=4, min_match=4),
        ValueError,
        r"min_match must be in \[1, 3\]",
    ),
    (lm.SuffixDrafter, dict(min_match=2.0), TypeError, "min_match must be an int, but it is 2.0"),
    (lm.SuffixDrafter, dict(max_occurrences=0), ValueError, r"max_occurrences must be in \[1, 127"),
    (lm.SuffixDrafter, dict(history=-1), ValueError, r"history must be in \[0, 16777216\], but"),
    (lm.SuffixDrafter, dict(spec_factor="1"), TypeError, "spec_factor must be a number, but it is"),
    (lm.SuffixDrafter, dict(spec_factor=0), ValueError, r"spec_factor must be in \(0, 127\], but"),
    (
        lm.SuffixDrafter,
        dict(spec_factor=0.1, max_match=10),
        ValueError,
        "spec_factor must give a match of max_m",
    ),
    (lm.SuffixDrafter, dict(min_probability=2), ValueError, r"min_probability must be in \(0, 1\]"),
    (lm.SuffixDrafter, dict(min_probability=np.nan), ValueError, "min_probability must be in"),
    (
        lm.SuffixDrafter,
        dict(max_match=8, tree_depth=8),
        ValueError,
        r"tree_depth must be in \[0, 7\], but it is 8",
    ),
    (model, dict(ids=[[1, 2]]), ValueError, "ids"),
    (model, dict(ids=[1, 1, 2]), ValueError, "ids"),
    (model, dict(ids=[1, -1, 2]), ValueError, r"ids\[1\]"),
    (model, dict(ids=[0.5]), TypeError, "ids"),
    (model, dict(num_candidates=0), ValueError, "num_candidates"),
    (of_pieces, {}, ValueError, "ids must be a list of target ids"),
    (lm.Eagle3Drafter, dict(head="head"), TypeError, "head must be an Eagle3Head"),
    (eagle3, dict(tree_depth=-1), ValueError, r"tree_depth must be in \[0, 17\]"),
    (eagle3, dict(tree_depth=18), ValueError, r"tree_depth must be in \[0, 17\]"),
    (eagle3, dict(tree_depth=2.0), TypeError, "tree_depth must"),
    (lm.BlockDrafter, dict(head="head"), TypeError, "head must be a BlockHead"),
    (block, dict(num_candidates=0), ValueError, r"num_candidates must be in \[1, 5\]"),
    (block, dict(num_candidates=6), ValueError, r"num_candidates must be in \[1, 5\]"),
    (block, dict(tree_depth=6), ValueError, r"tree_depth must be in \[0, 5\]"),
    (block, dict(tree_depth="3"), TypeError, "tree_depth must"),
]


@pytest.mark.parametrize(
    ("make", "fields", "error", "message"),
    REFUSED,
    ids=[f"{make.__name__}-{fields}" for make, fields, *_ in REFUSED],
)
def test_a_field_that_does_not_fit_is_named(
    make: Makes, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        make(**fields)


@pytest.mark.parametrize(
    ("drafter", "params"),
    [
        (test_block.DRAFTER, test_block.HEAD_PARAMS),
        (test_eagle3.DRAFTER, test_eagle3.HEAD_PARAMS),
    ],
    ids=["block", "eagle3"],
)
def test_without_features_there_is_nothing_to_draft_from(drafter: Any, params: Any) -> None:
    """A head drafts, and reads a prompt, only where it gets what the target computed."""
    ones = jnp.ones(1, jnp.int32)
    keys = jax.random.split(jax.random.key(0), 1)
    sampling = sd.SamplingParams(jnp.zeros(1))
    context = lm.DraftContext(ones[None], ones, sampling, keys, loops.CONFIG)
    with pytest.raises(ValueError, match="^context must have features"):
        drafter.propose(params, context, None, None)
    with pytest.raises(ValueError, match="^prefill must get features"):
        drafter.prefill(params, None, None)
