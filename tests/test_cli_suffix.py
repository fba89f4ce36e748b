"""`--draft suffix`, alone and before a head or a model."""

from __future__ import annotations

import json

import pytest
from upper_floor import load_models, make_driver, parse

from jax_specdec import lm
from jax_specdec.__main__ import main

PROMPT = "x = [1, 2, 3, 4]\ny = [1, 2, 3"


def test_the_names_of_lookups_and_of_pairs() -> None:
    names = ("suffix", "suffix+eagle3", "suffix+model", "eagle3", "model", "ngram")
    options = parse(["bench", "x", *(f"--draft={name}" for name in names)], "1")
    found = load_models(options, ["x"]).drafters
    assert tuple(found) == names
    assert found["suffix"] == (lm.SuffixDrafter(), None)
    for base in ("eagle3", "model"):
        drafter, params = found[f"suffix+{base}"]
        assert drafter == lm.FirstOf(lm.SuffixDrafter(), found[base].drafter)
        assert params[0] is None and params[1] is found[base].params


@pytest.mark.long
@pytest.mark.newest
@pytest.mark.parametrize("name", ["suffix", pytest.param("suffix+eagle3", marks=pytest.mark.slow)])
def test_the_text_is_that_of_plain_decoding(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", PROMPT, "--draft", name, "-n", "24", "--json", "--no-compilation-cache"]
    main(command)
    found = json.loads(capsys.readouterr().out)
    (model, params), _ = lm.load_embedded_pair()
    plain = lm.generate_plain(model, params, [lm.encode_bytes(PROMPT)], max_new_tokens=24)
    assert found["requests"][0]["text"] == lm.decode_bytes(plain.completions[0])
    assert found["num_target_passes"] < 24


@pytest.mark.slow
def test_a_server_with_a_history_serves_greedy_requests() -> None:
    sizes = ["--num-slots=2", "--max-length=96", "--max-logprobs=0", "-k=2"]
    options = parse(["serve", "--draft=suffix+eagle3", "--history=500", *sizes], "1")
    driver = make_driver(options, load_models(options, []))
    assert driver.engine.drafter.lookup == lm.SuffixDrafter(history=500)
    with pytest.raises(ValueError, match="^temperature must be 0 unless"):
        driver.submit([1], temperature=1.0, max_new_tokens=4)
    driver.submit(lm.encode_bytes(PROMPT), max_new_tokens=8)
    tokens = []
    while not driver.is_idle:
        tokens += [token for update in driver.step() for token in update.token_ids]
    assert len(tokens) == 8
    assert driver._weights[1][0]["next"] == 9  # the answer, and a seam
