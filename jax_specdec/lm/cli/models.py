"""The models of a command line, and its prompts in their tokens.

`show` calls `load`, and `serve` calls `load_served`. What is small is read and checked before the
weights, which take long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import jax

from jax_specdec import lm
from jax_specdec._src.base.arrays import renamed, require
from jax_specdec._src.base.platform import HAS_OLD_XLA
from jax_specdec.lm import terminal
from jax_specdec.lm.cli.options import DEFAULT_MAX_NEW_TOKENS, Decoding, Options, Serve
from jax_specdec.lm.cli.prompts import InputError, read_file
from jax_specdec.lm.drafters import SUFFIX_PREFIX
from jax_specdec.lm.formats.config_json import CONFIG_FILE
from jax_specdec.lm.loading import Models, TargetText, load_models, read_target_text
from jax_specdec.lm.models.fields import shown


def load(
    options: Decoding, prompts: Sequence[str] = ()
) -> tuple[Models, list[list[int]], list[int] | None, int]:
    """Reads what the options name.

    Returns:
      The models; the token ids of each prompt; those of the prediction, None without one; and the
      budget of each request, in tokens.

    Raises:
      InputError: a file is missing or wrong, a text would be too long, or a drafter has no such K,
        no token in common with the target, or no use for a prediction.
    """
    with _input_errors():
        text = read_target_text(options.target)
        # Before the weights, which take long to read.
        token_ids, budget = _requests(options, prompts, text)
        prediction = None
        if options.prediction is not None:
            expected = read_file(options.prediction, "the prediction")
            prediction = text.encode(expected, add_special_tokens=False)
        models = _load(options, text)
        for name, draft in models.drafters.items():
            is_used = prediction is None or draft.drafter.serves.predictions
            must = "look in texts for --prediction, as ngram, suffix and suffix+ do"
            require(is_used, "--draft", must, name)
        return models, token_ids, prediction, budget


def load_served(options: Serve) -> Models:
    """Reads what a server's options name.

    Raises:
      InputError: as for `load`.
    """
    with _input_errors():
        return _load(options, read_target_text(options.target), history=options.history)


@contextlib.contextmanager
def _input_errors() -> Iterator[None]:
    """Makes an `InputError` of what is raised where a file is missing or wrong."""
    try:
        yield
    # In one line, as all messages of the command line are.
    except (ImportError, OSError, ValueError) as error:
        raise InputError(" ".join(str(error).split())) from error


def _load(options: Options, text: TargetText, *, history: int = 0) -> Models:
    """Reads the weights, and checks that every drafter has every K."""
    # XLA on a CPU converts a whole matrix before each product with it.
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu and (options.weights or options.draft_weights):
        terminal.log("Weights are not held in int8, which is slower on a CPU.")
    # Not for the embedded target, whose `tokenizer` is None: it is in float32.
    dtype = options.dtype
    if on_cpu and text.tokenizer is not None and dtype is None and HAS_OLD_XLA:
        dtype = "float32"
        terminal.log(
            "Weights are held in float32: in 16 bits this JAX takes ten times as long on a CPU."
        )
    models = load_models(
        text,
        options.drafters,
        dtype=dtype,
        weights=None if on_cpu else options.weights,
        draft_weights=None if on_cpu else options.draft_weights,
        history=history,
    )
    _check_drafts(options, models)
    for name, draft in models.drafters.items():
        if isinstance(draft.drafter_alone, lm.RetokenizingDrafter):
            shared = f"{draft.drafter_alone.ids.values.size:,} of {text.vocab_size:,} ids"
            terminal.log(f"{name} has another tokenizer than the target: it drafts {shared}.")
    return models


def _requests(
    options: Decoding, texts: Sequence[str], text: TargetText
) -> tuple[list[list[int]], int]:
    """Encodes prompts, and finds how many new tokens fit.

    Raises:
      ValueError: the target does not know a token, or a prompt or the budget is too long.
    """
    if options.chat:
        assert text.tokenizer is not None  # `--chat` needs `--target`
        encode = text.tokenizer.encode_chat
        prompts = [encode([{"role": "user", "content": content}]) for content in texts]
    else:
        prompts = [text.encode(content) for content in texts]
    where = "" if text.tokenizer is None else shown(text.tokenizer.path)
    for prompt in prompts:
        if not prompt:
            raise ValueError(f"{where} gives no tokens for the prompt")
        # The two files of a checkpoint need not agree.
        if max(prompt) >= text.vocab_size:
            raise ValueError(
                f"{where} gives token id {max(prompt)} for the prompt, but {CONFIG_FILE} beside it "
                f"has vocab_size = {text.vocab_size}"
            )
    # One budget for all, which the longest prompt bounds.
    longest = max(map(len, prompts), default=0)
    room = text.max_length - longest
    if room < 1:
        unit = "bytes" if text.tokenizer is None else "tokens"
        raise ValueError(
            f"the prompt must be shorter than {text.max_length} {unit}, but has {longest}"
        )
    budget = options.max_new_tokens or min(DEFAULT_MAX_NEW_TOKENS, room)
    if budget > room:
        raise ValueError(
            f"--max-new-tokens must be in [1, {room}], which is {text.max_length} less the prompt, "
            f"but is {budget}"
        )
    return prompts, budget


def _check_drafts(options: Options, models: Models) -> None:
    """Checks that every drafter has every K, as the depth of its trees if it has trees."""
    name = "--num-speculative-tokens"
    for drafter, draft in models.drafters.items():
        for config in options.configs:
            k = config.num_speculative_tokens
            limit = draft.max_drafts
            must = f"be at most {limit} with --draft {drafter.removeprefix(SUFFIX_PREFIX)}"
            require(limit is None or k <= limit, name, must, k)
            # What is made here is made again where it is used: this is for the error.
            try:
                draft.drafting(config, options.tree)
            except ValueError as error:
                raise ValueError(f"{renamed(error, name)}, with --tree") from None
