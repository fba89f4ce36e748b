"""`--tree`: heads that propose trees of drafts, on the command line and in a server."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from upper_floor import cli_prompts, load_models, load_served, make_driver, parse

from jax_specdec import lm
from jax_specdec.__main__ import main

GEMMA = Path(__file__).parent / "formats/gemma4"
PROMPT = "def quicksort(items):"


def test_a_tree_needs_the_rule_of_agreement_and_takes_it_by_itself() -> None:
    options = parse(["generate", "x", "--draft", "eagle3", "--tree", "32"], "1")
    assert options.tree == 32
    assert options.config.rejection_sample_method == "agreement"
    assert options.config.num_speculative_tokens == 4  # of a path
    assert parse(["generate", "x"], "1").config.rejection_sample_method == "standard"
    assert parse(["generate", "x"], "1").tree is None
    small = parse(["bench", "x", "--draft", "dspark", "--tree", "5", "-k", "2,4"], "1")
    assert [one.num_speculative_tokens for one in small.configs] == [2, 4]
    small = parse(["serve", "--draft", "dspark", "--tree", "5"], "1")
    assert small.config.num_speculative_tokens == 4
    limited = parse(["generate", "x", "--draft=eagle3", "--tree=10", "--max-drafts=9"], "1")
    assert limited.request.max_drafts == 9


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--draft ngram --tree 8", "--tree needs --draft eagle3:DIR, .*, but it is 'ngram'"),
        ("--draft suffix+eagle3 --tree 8", "--tree needs --draft .* it is 'suffix\\+eagle3'"),
        ("--tree 8", "--tree needs --draft .* it is 'model'"),
        ("--draft eagle3 --tree 8 --method block", "--tree needs --method agreement, .*'block'"),
        ("--draft eagle3 --tree 1", "--tree must be in \\[2, 64\\], but it is 1"),
        ("--draft eagle3 --tree 65", "--tree must be in \\[2, 64\\], but it is 65"),
        ("--draft eagle3 --tree 8 -k 8", "--num-speculative-tokens must be less than --tree 8"),
        ("--draft eagle3 --tree 8 --max-drafts 8", "--max-drafts must be in \\[0, 7\\]"),
    ],
)
def test_what_has_no_trees_is_named(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["generate", "x", *arguments.split()], "1")
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(says, line)


@pytest.mark.parametrize("name", ["eagle3", "suffix"])
def test_a_depth_that_a_drafter_does_not_have_is_named(name: str) -> None:
    options = parse(["generate", "x", "--draft", name, "--tree", "64", "-k", "60"], "1")
    says = "--num-speculative-tokens must be in .*, but it is 60, with --tree"
    with pytest.raises(cli_prompts.InputError, match=says):
        load_models(options, ["x"])


def test_an_assistant_has_trees_as_deep_as_k() -> None:
    draft = f"gemma:{GEMMA / 'edge_assistant'}"
    own = ["--target", str(GEMMA / "edge"), "--draft", draft, "--tree", "12", "-k", "3"]
    options = parse(["generate", "x", *own], "1")
    models, *_ = load_models(options, ["x"])
    drafter, config = models.drafters[draft].drafting(options.config, options.tree)
    assert isinstance(drafter, lm.GemmaAssistantDrafter) and drafter.tree_depth == 3
    assert config.num_speculative_tokens == 11
    assert config.rejection_sample_method == "agreement"


@pytest.mark.slow
def test_text_with_trees_is_the_targets(capsys: pytest.CaptureFixture[str]) -> None:
    trees = ["--draft", "eagle3", "--tree", "12", "-k", "4"]
    main(["generate", PROMPT, *trees, "-n", "24", "--json", "--no-compilation-cache"])
    found = json.loads(capsys.readouterr().out)
    (model, params), _ = lm.load_embedded_pair()
    plain = lm.generate_plain(model, params, [lm.encode_bytes(PROMPT)], max_new_tokens=24)
    assert found["requests"][0]["text"] == lm.decode_bytes(plain.completions[0])
    assert found["tree"] == 12 and len(found["accepted_per_position"]) == 4
    assert found["num_target_passes"] < 12


def test_a_server_chooses_how_many_drafts_of_its_trees_pay() -> None:
    sizes = ["--num-slots=2", "--max-length=96"]
    options = parse(["serve", "--draft=eagle3", "--tree=12", "-k=4", *sizes], "1")
    engine = make_driver(options, load_served(options)).engine
    assert engine.draft_budget == (0, 4, 5, 11)
    assert engine.tree_depth == 4
    assert engine.config.num_speculative_tokens == 11
