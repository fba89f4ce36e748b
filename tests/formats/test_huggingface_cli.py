"""The command line on Hugging Face checkpoints; mistakes in one: `test_huggingface`."""

import json
import sys
from pathlib import Path

import pytest
import tokenizers
from upper_floor import load_served, parse

from jax_specdec.__main__ import main

from .checkpoints import CHECKPOINTS, copy, cut_vocabulary, edit_json, other_tokenizer

pytestmark = pytest.mark.newest


def refuse(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command line that is refused says: one line and no output."""
    with pytest.raises(SystemExit) as exit_:
        main(["generate", "--no-compilation-cache", *arguments])
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def test_a_missing_directory_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert refuse(capsys, "a", "--target", "nowhere") == (
        "jax-specdec generate: nowhere does not exist; `hf download OWNER/nowhere --local-dir "
        "nowhere` downloads a checkpoint to it.\n"
    )
    error = refuse(capsys, "a", "--target", "Qwen/Qwen2.5-0.5B")
    assert "hf download Qwen/Qwen2.5-0.5B --local-dir Qwen/Qwen2.5-0.5B` down" in error
    error = refuse(capsys, "a", "--target", "/nowhere/model")
    assert "hf download OWNER/model --local-dir /nowhere/model` down" in error


def test_a_draft_model_with_another_tokenizer_drafts_what_both_have(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The merges that are left out are tokens which the draft model reads as pieces."""
    draft = copy("qwen2_draft", tmp_path / "draft")
    path = draft / "tokenizer.json"
    asked = ["generate", "--no-compilation-cache", "--target", str(CHECKPOINTS / "qwen2")]
    asked += ["--max-new-tokens", "24", "Prüfung der 草稿"]
    texts = []
    for is_other in (False, True):
        if is_other:
            other_tokenizer(draft)
        main([*asked, "--draft", str(draft)])
        captured = capsys.readouterr()
        texts.append(captured.out)
        assert ("has another tokenizer than the target: it drafts 27" in captured.err) == is_other
    assert texts[0] == texts[1]
    unlike = tokenizers.Tokenizer(tokenizers.models.WordLevel({"nothing": 0}))
    unlike.save(str(path))
    error = refuse(capsys, "a", "--target", str(CHECKPOINTS / "qwen2"), "--draft", str(draft))
    assert error.startswith("jax-specdec generate: draft must share tokens with ")


@pytest.mark.parametrize("longer", ["qwen2", "qwen2_draft"])
def test_what_was_added_to_one_tokenizer_is_not_drafted(tmp_path: Path, longer: str) -> None:
    paths = [str(copy(name, tmp_path / name)) for name in ("qwen2", "qwen2_draft")]
    path = str(tmp_path / longer / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save(path)
    options = parse(["serve", "--target", paths[0], "--draft", paths[1]], "0")
    model = load_served(options).drafters[paths[1]].drafter.model
    assert (model.vocab_size, model.config.num_token_ids) == (288, 283)


def test_weights_are_in_32_bits_where_the_cpu_has_no_product_in_16(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[load_served.__module__]
    target = ["--target", str(CHECKPOINTS / "gemma3")]  # stored in bfloat16
    for converts in (True, False):
        monkeypatch.setattr(module, "HAS_OLD_XLA", converts)
        for own in ([], ["--dtype", "bfloat16"]):
            model = load_served(parse(["serve", *target, *own], "0")).target.model
            is_changed = converts and not own
            assert model.dtype == ("float32" if is_changed else "bfloat16")
            assert capsys.readouterr().err.startswith("Weights are held in f") == is_changed


def test_a_prompt_that_the_target_cannot_read_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = cut_vocabulary(copy("qwen2", tmp_path / "target"), 270)
    error = refuse(capsys, "a", "--target", str(target))
    assert "tokenizer.json gives token id 280 for the prompt, but config.json beside it" in error
    assert "vocab_size = 270" in error


def test_a_stop_token_outside_the_vocabulary_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = copy("qwen2", tmp_path / "target")
    edit_json(target / "generation_config.json", eos_token_id=[282, 5000])
    error = refuse(capsys, "a", "--target", str(target))
    assert f"{target} has eos_token_id = 5000, but config.json there has vocab_size = 288" in error


@pytest.mark.parametrize(
    "prompt, count, message",
    [
        ("aaaa", "600", "--max-new-tokens must be in [1, 507], which is 512 less the prompt, but"),
        ("a" * 600, "1", "the prompt must be shorter than 512 tokens, but has 601"),
    ],
    ids=["budget", "prompt"],
)
def test_a_text_longer_than_the_model_reads_is_refused(
    capsys: pytest.CaptureFixture[str], prompt: str, count: str, message: str
) -> None:
    options = ["--target", str(CHECKPOINTS / "qwen2"), "--max-new-tokens", count]
    assert message in refuse(capsys, prompt, *options)


def test_a_tokenizer_that_makes_nothing_of_the_prompt_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = copy("qwen2", tmp_path / "target")
    path = target / "tokenizer.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**raw, "post_processor": None, "normalizer": STRIP}))
    assert "tokenizer.json gives no tokens for the prompt" in refuse(
        capsys, " ", "--target", str(target)
    )


STRIP = {"type": "Strip", "strip_left": True, "strip_right": True}
