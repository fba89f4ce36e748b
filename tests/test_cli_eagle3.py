"""`--draft eagle3:DIR`: a head in place of a draft model."""

from __future__ import annotations

from pathlib import Path

import pytest
from models.weights import random_weights
from upper_floor import cli_prompts, load_models, parse

from jax_specdec import lm


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A head of random weights for the embedded target."""
    model, params = lm.load_embedded_pair()[0]
    head = lm.models.Eagle3Head(
        lm.models.Eagle3Config.of_target(
            model.config, layers=model.config.layers[:1], aux_hidden_state_layers=(2, 4, 5)
        )
    )
    weights = random_weights(head, 0) | {"embed_tokens": params["embed_tokens"]}
    lm.formats.save_eagle3(tmp_path / "head", head, weights)
    return tmp_path / "head"


def test_a_folder_is_read_as_a_head_of_the_target(folder: Path) -> None:
    name = f"eagle3:{folder}"
    options = parse(["bench", "x", "--draft", name, "--draft", "ngram"], "1")
    models, *_ = load_models(options)
    assert isinstance(models.drafters[name].drafter, lm.Eagle3Drafter)
    assert models.drafters[name].params["embed_tokens"] is models.target.params["embed_tokens"]
    assert isinstance(models.drafters["ngram"].drafter, lm.NGramDrafter)


def test_the_embedded_target_has_two_heads() -> None:
    models, *_ = load_models(parse(["generate", "x", "--draft", "eagle3"], "1"))
    drafter = models.drafters["eagle3"].drafter
    assert isinstance(drafter, lm.Eagle3Drafter) and drafter.head.vocab_size == 256
    assert lm.load_embedded_head(models.target, "eagle3-64").model.vocab_size == 64
    with pytest.raises(ValueError, match="^name must"):
        lm.load_embedded_head(models.target, "eagle")  # type: ignore[arg-type]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    options = parse(["generate", "x", "--draft", f"eagle3:{tmp_path / 'none'}"], "1")
    with pytest.raises(cli_prompts.InputError, match="none does not exist"):
        load_models(options, ["x"])
