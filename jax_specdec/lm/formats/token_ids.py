"""Which token ids a checkpoint has, by its `tokenizer.json`; needs no library.

A model has rows for more ids than its tokenizer has tokens. `load_huggingface` counts the tokens
with this, so that the others are never drawn, and must do so where the `tokenizers` library is not
installed. The ids are also what `load_tokenizer` adds further tokens to.
"""

from pathlib import Path

from jax_specdec.lm.formats.added_tokens import tokens_beside
from jax_specdec.lm.formats.config_json import CONFIG_FILE
from jax_specdec.lm.formats.files import JsonValue, read_json
from jax_specdec.lm.models.fields import MAX_INT, is_token_id, quoted

TOKENIZER_FILE = "tokenizer.json"
GENERATION_FILE = "generation_config.json"


def count_token_ids(path: Path) -> int:
    """Returns one more than the last id of a tokenizer; needs no library.

    Raises:
      FileNotFoundError: there is no `tokenizer.json` at the path.
      OSError: it is not a file, or cannot be opened.
      ValueError: it holds no ids, one that is not an integer in [0, 2**31), or one for two tokens;
        or a file beside it adds tokens that it cannot have.
    """
    # Ids may have gaps, and an added token may stand anywhere: the last id counts, not how many.
    vocab, added = read_token_ids(path)
    return max([*vocab.values(), *added, *tokens_beside(path.parent, vocab, added)]) + 1


def read_token_ids(path: Path) -> tuple[dict[str, int], dict[int, dict[str, JsonValue]]]:
    """Returns the vocabulary in a `tokenizer.json`, and by id the objects of tokens that it adds.

    Raises as `count_token_ids` does, but for files beside it, which are not read.
    """
    raw = read_json(path)
    where = raw.where
    vocab = _vocabulary(raw.get("model"))
    if not vocab:
        raise ValueError(f"{where} has no vocabulary of token ids in it.")
    added = raw.given("added_tokens", [])
    are_objects = isinstance(added, list) and all(isinstance(token, dict) for token in added)
    raw.require(are_objects, "added_tokens", "which is not a list of objects")
    # Each with what a message calls it: the token, or its place in the list of added ones.
    added_ids = [(index, token.get("id")) for index, token in enumerate(added)]
    for field, ids in (("model.vocab", vocab), ("added_tokens", added_ids)):
        for key, token_id in ids:
            if not is_token_id(token_id):
                raise ValueError(
                    f"{where} has {field} with the id {quoted(token_id)} for {quoted(key)}, but a "
                    f"token id must be an integer in [0, {MAX_INT}]."
                )
    # An id of the vocabulary may be an added token's, too: some special tokens are in both.
    tokens: dict[int, str] = {}
    for token, token_id in vocab:
        if (first := tokens.setdefault(token_id, token)) != token:
            raise ValueError(
                f"{where} has model.vocab with the id {token_id} for {quoted(first)} and for "
                f"{quoted(token)}, but an id must mean one token."
            )
    return dict(vocab), {token["id"]: token for token in added}


def _vocabulary(model: JsonValue) -> list[tuple[str, JsonValue]]:
    """Returns tokens and the values given as their ids; empty if there is no vocabulary."""
    # BPE, WordPiece and WordLevel have an object of tokens and ids. Unigram has a list of tokens
    # and scores, in which the place is the id.
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        return list(vocab.items())
    if isinstance(vocab, list) and all(
        isinstance(x, list) and len(x) == 2 and isinstance(x[0], str) for x in vocab
    ):
        return [(piece, index) for index, (piece, _) in enumerate(vocab)]
    return []


def stop_token_ids(directory: Path) -> tuple[int, ...]:
    """Returns the ids in `generation_config.json`, or else in `config.json`, that end a text.

    Raises:
      OSError: a file cannot be opened.
      ValueError: a file cannot be parsed, or has something that is no id or list of ids.
    """
    # A chat model's generation config lists the ends of turns, where its config may still have the
    # one end of a document. The first file with the key decides, and an empty list is one.
    for path in (directory / GENERATION_FILE, directory / CONFIG_FILE):
        raw = read_json(path, optional=True)
        if (value := raw.get("eos_token_id")) is not None:
            ids = value if isinstance(value, list) else [value]
            are_ids = all(map(is_token_id, ids))
            raw.require(are_ids, "eos_token_id", "which is no id or list of ids")
            return tuple(ids)
    return ()
