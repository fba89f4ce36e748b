"""`--draft suffix`, alone and before a head or a model."""

from __future__ import annotations

import json

import pytest
from upper_floor import load_models, parse

from jax_specdec import lm
from jax_specdec.__main__ import main

PROMPT = "x = [1, 2, 3, 4]\ny = [1, 2, 3"


def test_the_names_of_lookups_and_of_pairs() -> None:
    names = ("suffix", "suffix+eagle3", "suffix+model", "eagle3", "model", "ngram")
    options = parse(["bench", "x", *(f"--draft={name}" for name in names)], "1")
    found = load_models(options)[0].drafters
    assert tuple(found) == names
    assert found["suffix"] == (lm.SuffixDrafter(), None)
    for base in ("eagle3", "model"):
        drafter, params = found[f"suffix+{base}"]
        assert drafter == lm.FirstOf(lm.SuffixDrafter(), found[base].drafter)
        assert params[0] is None and params[1] is found[base].params


@pytest.mark.slow
@pytest.mark.newest
def test_the_text_is_that_of_plain_decoding(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", PROMPT, "--draft", "suffix", "-n", "24", "--json"]
    main([*command, "--no-compilation-cache"])
    found = json.loads(capsys.readouterr().out)
    (model, params), _ = lm.load_embedded_pair()
    plain = lm.generate_plain(model, params, [lm.encode_bytes(PROMPT)], max_new_tokens=24)
    assert found["requests"][0]["text"] == lm.decode_bytes(plain.completions[0])
    assert found["num_target_passes"] < 24
