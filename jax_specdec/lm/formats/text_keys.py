"""Keys beside a `tokenizer.json` that change texts or their tokens: each is followed or refused.

How to sample and how long a text may be (`temperature`, `top_p`, `max_new_tokens` and others) is
for each request to say, and not for `generation_config.json`. `load_tokenizer` calls these
functions; docs/models.md has a table of the keys.
"""

from pathlib import Path

from jax_specdec.lm.formats.added_tokens import TOKENIZER_CONFIG_FILE, special_tokens
from jax_specdec.lm.formats.config_json import CONFIG_FILE
from jax_specdec.lm.formats.files import JsonObject, JsonValue, read_json
from jax_specdec.lm.formats.token_ids import GENERATION_FILE

_Served = dict[str, tuple[JsonValue, ...]]

_GENERATION: _Served = {
    # Tokens that a text must have or must not have, or that end it.
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_decoder_ids": ([],),
    "forced_eos_token_id": ([],),
    "sequence_bias": ([], {}),
    "stop_strings": ([], ""),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    # Ways of decoding that no request can ask for.
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1.0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0.0,),
    "top_h": (),
    "typical_p": (1.0,),
    "watermarking_config": (),
}
"""Keys that would change every text, and the values that do not."""

_TOKENIZER: _Served = {
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": (False,),
    "fast_tokenizer_files": ([], ["tokenizer.json"]),
    "split_special_tokens": (False,),
}
"""Likewise of `tokenizer_config.json`."""

# Without "Fast", which is at the end of the name in most files.
_LLAMA_CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer")


def check_text_keys(directory: Path) -> None:
    """Checks that `generation_config.json` and `tokenizer_config.json` ask for what is done.

    Without the first, `config.json` has its keys, as in checkpoints before 2023.

    Raises:
      OSError: a file cannot be opened.
      ValueError: a file cannot be parsed, or a key asks for something else.
    """
    # As in `transformers`, config.json is not asked where the other file says anything.
    generation = read_json(directory / GENERATION_FILE, optional=True)
    if not generation:
        generation = read_json(directory / CONFIG_FILE, optional=True)
    tokenizer = read_json(directory / TOKENIZER_CONFIG_FILE, optional=True)
    for raw, table in ((generation, _GENERATION), (tokenizer, _TOKENIZER)):
        for key, served in table.items():
            is_served = raw.get(key) in (None, *served)
            raw.require(is_served, key, "which is not followed: delete it to go without")


def check_prefix_space(directory: Path, has_prefix: bool) -> None:
    """Checks that `add_prefix_space` says what a `tokenizer.json` does.

    Args:
      has_prefix: whether the tokenizer puts a space before a text.

    Raises:
      OSError: `tokenizer_config.json` cannot be opened.
      ValueError: it cannot be parsed, or says the opposite.
    """
    # Texts are encoded as tokenizer.json says. That the two agree is all that is asked here.
    raw = read_json(directory / TOKENIZER_CONFIG_FILE, optional=True)
    does = "adds one" if has_prefix else "adds none"
    key = "add_prefix_space"
    raw.require(raw.get(key) in (None, has_prefix), key, f"but the tokenizer.json beside it {does}")


def tokens_around(directory: Path) -> tuple[str | None, str | None] | None:
    """Returns the tokens before and after a text; None if `tokenizer.json` alone says which.

    Each of the two is None where no token is added there.

    `add_bos_token` and `add_eos_token` are keys of the class of Llama's tokenizers in
    `transformers` 4, where they go before `tokenizer.json`; other classes do not look at them.

    Raises:
      OSError: a file cannot be opened.
      ValueError: a file cannot be parsed, or a key is neither true nor false.
    """
    # One key is enough: then the other has its default, whatever tokenizer.json does.
    raw = read_json(directory / TOKENIZER_CONFIG_FILE, optional=True)
    keys = {"add_bos_token": True, "add_eos_token": False}
    if all(raw.get(key) is None for key in keys) or not _is_of_llama(directory, raw):
        return None
    # The defaults of the class, where no file names the tokens.
    names = {"bos_token": "<s>", "eos_token": "</s>", **special_tokens(directory)}
    around: list[str | None] = []
    for key, default in keys.items():
        is_added = raw.given(key, default)
        raw.require(isinstance(is_added, bool), key, "which is neither true nor false")
        around.append(names[key.removeprefix("add_")] if is_added else None)
    first, last = around
    return first, last


def _is_of_llama(directory: Path, raw: JsonObject) -> bool:
    """Returns whether `transformers` takes its class of Llama's tokenizers."""
    # Without the name of a class, that of the family: a Qwen2 has another one. A Qwen2 that names
    # Llama's, as DeepSeek's distilled models do, has Llama's.
    config = read_json(directory / CONFIG_FILE, optional=True)
    name = raw.get("tokenizer_class") or config.get("tokenizer_class")
    if name is None:
        return bool(config.given("model_type", "llama") == "llama")
    return str(name).removesuffix("Fast") in _LLAMA_CLASSES
