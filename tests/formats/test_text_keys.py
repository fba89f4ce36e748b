"""Keys beside a tokenizer that change texts: followed as `transformers` does, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from jax_specdec import lm

pytestmark = pytest.mark.newest

CONFIG, GENERATION, MODEL = "tokenizer_config.json", "generation_config.json", "config.json"
WORDS = {"a": 0, "b": 1, "<s>": 2, "</s>": 3, "$A:1 b": 4}


def checkpoint(directory: Path, *, adds: bool = False, **files: Any) -> Path:
    """Words; `adds` has the tokenizer itself begin texts with <s>."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel(WORDS, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>", "$A:1 b"])
    if adds:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 2)])
    return with_files(directory, tokenizer, **files)


def with_files(directory: Path, tokenizer: tokenizers.Tokenizer, **files: Any) -> Path:
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


# Tokens around a text

BEGINS, ENDS, NOTHING = {"add_bos_token": True}, {"add_eos_token": True}, {"add_bos_token": False}
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
PLAIN = [0, 1]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", None),
        ("llama", "LlamaTokenizer"),
        ("qwen2", "LlamaTokenizerFast"),  # DeepSeek's distilled Qwen2
        ("llama", "CodeLlamaTokenizerFast"),
    ],
)
def test_tokens_around_texts_are_those_that_a_llama_tokenizer_is_told(
    tmp_path: Path, family: str, name: str | None
) -> None:
    """What version 4.57 of `transformers` gives; without keys, what 5.24 gives, too."""
    for adds in (False, True):
        for keys, wanted in [
            ({}, [2] * adds + PLAIN),
            ({"add_bos_token": None}, [2] * adds + PLAIN),
            (BEGINS, [2, *PLAIN]),
            (NOTHING, PLAIN),
            (ENDS, [2, *PLAIN, 3]),
            ({**NOTHING, **ENDS}, [*PLAIN, 3]),
            ({**BEGINS, "bos_token": {"content": "$A:1 b"}}, [4, *PLAIN]),
        ]:
            config = {**NAMES, "tokenizer_class": name, **keys}
            checkpoint(tmp_path, adds=adds, tokenizer_config=config, config={"model_type": family})
            tokenizer = lm.load_tokenizer(tmp_path)
            assert tokenizer.encode("a b") == wanted
            assert tokenizer.encode("a b", add_special_tokens=False) == PLAIN


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2", None),
        ("qwen3", None),
        ("qwen3", "Qwen2Tokenizer"),
        ("llama", "PreTrainedTokenizerFast"),
        ("llama", "GPT2Tokenizer"),
    ],
)
def test_other_tokenizers_do_not_look_at_these_keys(
    tmp_path: Path, family: str, name: str | None
) -> None:
    for adds in (False, True):
        for keys in (BEGINS, NOTHING, ENDS):
            config = {**NAMES, "tokenizer_class": name, **keys}
            checkpoint(tmp_path, adds=adds, tokenizer_config=config, config={"model_type": family})
            assert lm.load_tokenizer(tmp_path).encode("a b") == [2] * adds + PLAIN


def test_names_of_tokens_may_be_in_the_map_or_those_of_llama(tmp_path: Path) -> None:
    checkpoint(tmp_path, tokenizer_config={**BEGINS, **ENDS})
    assert lm.load_tokenizer(tmp_path).encode("a b") == [2, *PLAIN, 3]
    checkpoint(tmp_path, tokenizer_config=BEGINS, special_tokens_map={"bos_token": "</s>"})
    assert lm.load_tokenizer(tmp_path).encode("a b") == [3, *PLAIN]


def test_a_conversation_begins_as_its_template_says(tmp_path: Path) -> None:
    template = "{{ bos_token }} {{ messages[0].content }}"
    config = {**NAMES, **BEGINS, "chat_template": template}
    checkpoint(tmp_path, adds=True, tokenizer_config=config)
    messages = [{"role": "user", "content": "a b"}]
    tokenizer = lm.load_tokenizer(tmp_path)
    for plain in (False, True):
        assert tokenizer.encode_chat(messages, plain_messages=plain) == [2, *PLAIN]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**BEGINS, "bos_token": "<begin>"}, "json adds '<begin>' to texts, which tokenizer.json"),
        ({"add_eos_token": "yes"}, "has add_eos_token = 'yes', which is neither true nor false"),
    ],
)
def test_tokens_that_cannot_be_added_are_named(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    # Without a size in config.json the named token would get the next id.
    checkpoint(tmp_path, tokenizer_config=config, config={"vocab_size": len(WORDS)})
    with pytest.raises(ValueError, match=message):
        lm.load_tokenizer(tmp_path)


# What is not followed


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bad_words_ids", [[1]]),
        ("begin_suppress_tokens", [1]),
        ("force_words_ids", [[1]]),
        ("forced_bos_token_id", 1),
        ("forced_eos_token_id", 1),
        ("sequence_bias", [[[1], -10.0]]),
        ("stop_strings", "b"),
        ("stop_strings", ["b"]),
        ("suppress_tokens", [1]),
        ("encoder_repetition_penalty", 1.2),
        ("exponential_decay_length_penalty", [3, 1.1]),
        ("guidance_scale", 1.5),
        ("no_repeat_ngram_size", 3),
        ("num_beams", 4),
        ("typical_p", 0.9),
        ("watermarking_config", {"bias": 2.0}),
    ],
)
def test_keys_of_generation_that_change_texts_are_refused(
    tmp_path: Path, key: str, value: Any
) -> None:
    checkpoint(tmp_path, generation_config={"eos_token_id": 3, key: value})
    message = rf"{GENERATION} has {key} = .*, which is not followed: delete it to go without\.$"
    with pytest.raises(ValueError, match=message):
        lm.load_tokenizer(tmp_path)
    # As `transformers` does, config.json is looked at where there is no other file.
    checkpoint(tmp_path, generation_config={"eos_token_id": 3}, config={key: value})
    assert lm.load_tokenizer(tmp_path).stop_token_ids == (3,)
    (tmp_path / GENERATION).unlink()
    with pytest.raises(ValueError, match=rf"[/\\]{MODEL} has {key} = "):
        lm.load_tokenizer(tmp_path)


def test_keys_that_say_nothing_and_those_of_requests_are_taken(tmp_path: Path) -> None:
    says_nothing = {
        "bad_words_ids": None,
        "forced_eos_token_id": None,
        "guidance_scale": 1.0,
        "no_repeat_ngram_size": 0,
        "num_beams": 1,
        "stop_strings": [],
        "suppress_tokens": [],
        "typical_p": 1.0,
    }
    of_requests = {
        "do_sample": True,
        "max_length": 20,
        "max_new_tokens": 2048,
        "min_new_tokens": 2,
        "repetition_penalty": 1.05,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
    }
    tokens = {
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": True,
        "do_lower_case": True,
        "legacy": False,
        "model_max_length": 1,
        "split_special_tokens": False,
    }
    generation = {"eos_token_id": [3, 4], **says_nothing, **of_requests}
    checkpoint(tmp_path, generation_config=generation, tokenizer_config=tokens)
    tokenizer = lm.load_tokenizer(tmp_path)
    assert tokenizer.stop_token_ids == (3, 4)
    assert tokenizer.encode("a b") == PLAIN


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("split_special_tokens", True),
        ("fast_tokenizer_files", ["tokenizer.json", "tokenizer.5.0.json"]),
        ("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True),
    ],
)
def test_keys_of_tokenizers_that_change_texts_are_refused(
    tmp_path: Path, key: str, value: Any
) -> None:
    checkpoint(tmp_path, tokenizer_config={key: value})
    with pytest.raises(ValueError, match=rf"{CONFIG} has {key} = .* is not followed: delete it"):
        lm.load_tokenizer(tmp_path)


@pytest.mark.parametrize("does", [False, True])
@pytest.mark.parametrize("kind", ["byte level", "metaspace", "prepended"])
def test_a_space_before_texts_is_what_the_tokenizer_adds(
    tmp_path: Path, kind: str, does: bool
) -> None:
    tokenizer = tokenizers.Tokenizer(models.WordLevel(WORDS, unk_token="a"))
    if kind == "byte level":  # as Qwen's, in a sequence
        level = pre_tokenizers.ByteLevel(add_prefix_space=does)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), level])
    elif kind == "metaspace":
        scheme = "first" if does else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    elif does:
        tokenizer.normalizer = normalizers.Prepend("▁")
    for said in (None, does):
        with_files(tmp_path, tokenizer, tokenizer_config={"add_prefix_space": said})
        lm.load_tokenizer(tmp_path)
    with_files(tmp_path, tokenizer, tokenizer_config={"add_prefix_space": not does})
    adds = "adds one" if does else "adds none"
    message = f"has add_prefix_space = {not does}, but the tokenizer.json beside it {adds}"
    with pytest.raises(ValueError, match=message):
        lm.load_tokenizer(tmp_path)
