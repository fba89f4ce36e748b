"""`--draft block:DIR`: a DFlash or DSpark head in place of a draft model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from models.weights import random_weights
from upper_floor import cli_prompts, load_models, load_served, parse

from jax_specdec import lm


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A head of random weights for the embedded target, with a block of 5."""
    model, params = lm.load_embedded_pair()[0]
    head = lm.BlockHead(
        lm.BlockHeadConfig.of_target(
            model.config,
            layers=(dataclasses.replace(model.config.layers[0], qk_norm=True),),
            aux_hidden_state_layers=(2, 4, 5),
            block_size=5,
            mask_token_id=255,
            sample_from_anchor=True,
            markov_rank=2,
        )
    )
    shared = {name: params[name] for name in ("embed_tokens", "lm_head") if name in params}
    lm.formats.save_block_head(tmp_path / "head", head, random_weights(head, 0) | shared)
    return tmp_path / "head"


@pytest.mark.parametrize("command", ["bench", "serve", "generate"])
def test_a_folder_is_read_as_a_head_of_the_target(command: str, folder: Path) -> None:
    name, prompts = f"block:{folder}", [] if command == "serve" else ["x"]
    options = parse([command, *prompts, "--draft", name, "-k", "5"], "1")
    models = load_served(options) if command == "serve" else load_models(options, prompts)[0]
    drafter, params = models.drafters[name]
    assert isinstance(drafter, lm.BlockDrafter) and drafter.head.config.markov_rank == 2
    assert params["embed_tokens"] is models.target.params["embed_tokens"]


def test_more_drafts_than_the_block_has_are_named(folder: Path) -> None:
    options = parse(["generate", "x", "-k6", "--draft", f"block:{folder}"], "1")
    says = "--num-speculative-tokens must be at most 5 with --draft block:.*, but it is 6"
    with pytest.raises(cli_prompts.InputError, match=says):
        load_models(options, ["x"])


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_the_embedded_target_has_block_heads(name: str) -> None:
    models, *_ = load_models(parse(["generate", "x", "--draft", name], "1"))
    drafter, _ = models.drafters[name]
    assert isinstance(drafter, lm.BlockDrafter)
    assert (drafter.head.config.markov_rank is not None) == (name == "dspark")
