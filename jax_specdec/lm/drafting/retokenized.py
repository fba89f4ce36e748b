"""Drafting with a model that has another tokenizer: it reads the target's text as its own tokens.

A target token whose text is one token of the draft model is drafted; any other one is read as the
pieces that spell it, so the model's context is the same text, maybe cut where its own tokenizer
would not cut it. Whatever q comes from this, verification keeps the target's distribution.

Reference: Timor et al., 2025, "Accelerating LLM Inference with Lossless Speculative Decoding
Algorithms for Heterogeneous Vocabularies", https://arxiv.org/abs/2502.05202 (algorithm 4, the
intersection of both vocabularies).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec._src.base.arrays import check_int, check_type, known_values, require
from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID
from jax_specdec._src.drafts.store import DraftStore
from jax_specdec.lm.drafting.draft_model import ModelDrafter
from jax_specdec.lm.drafting.drafter import DraftContext, DrafterServes, Proposal
from jax_specdec.lm.models.fields import shown
from jax_specdec.lm.models.protocol import (
    Cache,
    CausalModel,
    Params,
    Rows,
    check_leaf,
    check_model,
    check_params,
)
from jax_specdec.lm.text.tokenizer import Tokenizer

MOST_PIECES = 8
"""Of a longer token, such as a run of 64 spaces, the draft model reads the last ones alone."""
ROOM = 1.5
"""Positions of the draft model's cache for each position of the target's."""


class RetokenizedParams(NamedTuple):
    """What a `RetokenizingDrafter` reads.

    Attributes:
      model: the draft model's weights.
      pieces: ``[V, M]`` int32, the draft model's ids that spell each id of the target, in order;
        at least one, and -1 after the last.

    Example: see `retokenize`.
    """

    model: Params
    pieces: jax.Array


class RetokenizedCache(NamedTuple):
    """What a `RetokenizingDrafter` remembers.

    Attributes:
      model: the draft model's cache, of its own tokens.
      token_ids: ``[B, L]`` int32, the target's tokens that they spell. Axes of size 1 stand before
        them, if the model's cache has its requests along a later axis.
    """

    model: Cache
    token_ids: jax.Array


@dataclasses.dataclass(frozen=True)
class RetokenizingDrafter(ModelDrafter):
    """Drafts with a model of another vocabulary, as `ModelDrafter` does; from `retokenize`.

    The model's own tokens of a text are the pieces of its target tokens, one after another. It
    drafts `ids`, each of which is one piece, and no others. Where the pieces of a text need more
    than 1.5 times the room of its tokens, drafts of this request end; its text does not.

    Attributes:
      ids: ``[Vd]`` integers, the target ids that it drafts.

    Raises:
      TypeError, ValueError: as `ModelDrafter`, or there are no `ids`.

    Example: see `retokenize`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.ids is not None, "ids", "be a list of target ids", self.ids)

    def check_params(self, name: str, params: Params) -> None:
        """Checks the model's weights and the pieces; under `jit` not what the pieces are.

        Raises:
          TypeError: they are no `RetokenizedParams`, or of another dtype.
          ValueError: a shape does not fit, or an id of the target has no pieces, some after a -1,
            or one that is no id of the model.
        """
        check_type(name, params, RetokenizedParams)
        super().check_params(f"{name}.model", params.model)
        ids = self._target_ids
        assert ids is not None
        shape = np.shape(params.pieces)
        is_table = len(shape) == 2 and ids.max() < shape[0] and 1 <= shape[1] <= MOST_PIECES
        must = f"be [V, M], M at most {MOST_PIECES}, with V above all of drafter.ids"
        require(is_table, f"{name}.pieces", must, params.pieces)
        check_leaf(f"{name}.pieces", params.pieces, shape, jnp.int32)
        pieces = known_values(params.pieces)
        if pieces is None:
            return
        # [V, M] -> [V]: the first is a piece, and so is each one before another piece. `_pieces_at`
        # finds a piece by how many there are before it.
        size = self.model.vocab_size
        is_piece = pieces >= 0
        holds = is_piece[:, 0] & (is_piece[:, 1:] <= is_piece[:, :-1]).all(axis=1)
        holds &= (pieces < size).all(axis=1)
        must = f"be at least one id below model.vocab_size = {size}, then -1"
        # The first row that does not hold, if one does not
        row = int(np.argmin(holds))
        require(holds.all(), f"{name}.pieces[{row}]", must, pieces[row].tolist())

    @property
    def serves(self) -> DrafterServes:
        """Declares what a `ModelDrafter` does, but slots: its cache holds texts, too."""
        return dataclasses.replace(super().serves, slots=False)

    def init_cache(self, batch_size: int, max_length: int) -> RetokenizedCache:
        """Returns an empty cache for L = `max_length` tokens of each request."""
        lead = (1,) * self.model.serves.batch_axis
        token_ids = jnp.zeros((*lead, batch_size, max_length), jnp.int32)
        return RetokenizedCache(self.model.init_cache(batch_size, _room(max_length)), token_ids)

    def prefill(
        self,
        params: RetokenizedParams,
        rows: Rows,
        cache: RetokenizedCache,
        features: jax.Array | None = None,
        next_token_ids: jax.Array | None = None,
    ) -> RetokenizedCache:
        """Runs the model over the pieces of prompts, or of a chunk; see `Drafter.prefill`."""
        batch_size, length = rows.token_ids.shape
        requests = jnp.arange(batch_size)[:, None]
        # Store: the chunk's tokens, beside those of earlier chunks. Where a piece lies in the
        # model's cache depends on all tokens before it. [1, .., B, L] -> [B, L]
        token_ids = cache.token_ids.reshape(batch_size, -1)
        token_ids = token_ids.at[requests, rows.places].set(rows.token_ids, mode="drop")
        # [B]: the pieces of the chunk, padding included, are begin to end - 1 of the text's pieces.
        ends = _ends(params, token_ids)
        begin = _before(ends, rows.start)
        end = _before(ends, rows.start + length)
        # Most tokens are one piece: a prompt is read by about four passes, whatever the others are.
        width = math.ceil(length / 4)
        model = self._read_between(params, token_ids, ends, begin, end, width, cache.model)
        return RetokenizedCache(model, token_ids.reshape(cache.token_ids.shape))

    def propose(
        self,
        params: RetokenizedParams,
        context: DraftContext,
        cache: RetokenizedCache,
        store: DraftStore | None,
    ) -> tuple[Proposal, RetokenizedCache]:
        """Drafts K tokens; see `Drafter.propose`."""
        # [B, L] tokens; below, places and lengths are of pieces, by which the model's cache goes.
        token_ids = context.token_ids
        ends = _ends(params, token_ids)
        length = _before(ends, context.lengths)
        # W: the pieces of the newest token, and one of each other new one, as a draft is one piece.
        # Of a request that does not run, what was read stays as it is.
        width = params.pieces.shape[1] + context.num_unread - 1
        room = _room(token_ids.shape[1])
        num_drafts = context.config.num_speculative_tokens
        # [B]: a text whose pieces and drafts do not fit has no drafts any more. It is read as one
        # that just fits, so that all writes stay inside the cache.
        has_room = length + num_drafts <= room
        own_length = jnp.minimum(length, room - num_drafts)
        of_newest = _before(ends, context.lengths - 1)
        start = jnp.where(context.runs, jnp.maximum(own_length - width, 0), of_newest)
        start = jnp.minimum(start, room - width)
        # [B]: where new pieces may begin. What a lookup or a grammar drafts may be more than W:
        # those before the last W are read first, most often none.
        begin = _before(ends, context.lengths - context.num_unread)
        begin = jnp.where(context.runs, begin, start)
        model = self._read_between(params, token_ids, ends, begin, start, width, cache.model)
        # [B, W]: the last of them, with the newest token's last piece, whose row gives draft 0
        recent = Rows(_pieces_at(params, token_ids, ends, start, width), start)
        proposal, model = self._draft(params, recent, own_length, context, model, store)
        drafts = jnp.where(has_room[:, None], proposal.token_ids, PLACEHOLDER_TOKEN_ID)
        # [B, L] -> [1, .., B, L]: the next prefill of a chunk finds the text here.
        text = token_ids.reshape(cache.token_ids.shape)
        return proposal._replace(token_ids=drafts), RetokenizedCache(model, text)

    def _read_between(
        self,
        params: RetokenizedParams,
        token_ids: jax.Array,
        ends: jax.Array,
        begin: jax.Array,
        end: jax.Array,
        width: int,
        cache: Cache,
    ) -> Cache:
        """Returns the model's cache after it has read pieces `begin` to `end`, ``[B]`` each.

        No more than there is room for are read, in passes over `width` pieces.
        """
        room = _room(token_ids.shape[1])
        end = jnp.minimum(end, room)

        def read(state: tuple[jax.Array, Cache]) -> tuple[jax.Array, Cache]:
            """Returns where unread pieces begin after one more pass, and the cache."""
            # [B]: the next piece of each request to read. Held inside the room, a pass reads some
            # pieces once more. Requests that are through read on, beyond `end`; what that writes is
            # overwritten before it is seen.
            first, cache = state
            start = jnp.minimum(first, room - width)
            ids = _pieces_at(params, token_ids, ends, start, width)
            _, cache = self._read(params, Rows(ids, start), cache)
            return jnp.where(first < end, first + width, first), cache

        _, cache = lax.while_loop(lambda state: (state[0] < end).any(), read, (begin, cache))
        return cache

    def _own_ids(self, params: RetokenizedParams, token_ids: jax.Array) -> jax.Array:
        # A target id that is drafted is one piece: its first, and only one.
        return params.pieces[token_ids, 0]

    def _read(self, params: RetokenizedParams, rows: Rows, cache: Cache) -> tuple[jax.Array, Cache]:
        logits, cache = super()._read(params.model, rows, cache)
        # [B, S, all tokens of the model] -> [B, S, Vd]: column j is the piece of entry j of `ids`
        return logits[..., self._own_ids(params, jnp.asarray(self._target_ids))], cache


def retokenize(
    target: Tokenizer,
    vocab_size: int,
    draft: Tokenizer,
    model: CausalModel,
    params: Params,
) -> tuple[RetokenizingDrafter, RetokenizedParams]:
    """Returns a drafter, and its weights, for a target whose tokenizer is not the draft model's.

    It drafts the ids of the target whose text is one token of the draft model; a special token is
    one of the same name. All others it reads as pieces: the longest token of the draft model that
    the text begins with, then that of the rest, and so on.

    Args:
      target: the target's tokenizer.
      vocab_size: V of the target's model.
      draft: the tokenizer of the draft model.

    Raises:
      TypeError: `target` or `draft` is not a `Tokenizer`, `model` not a model, or `params` not its
        weights.
      ValueError: no token is the same in both, or a model has fewer ids than its tokenizer.

    Example:
      >>> import tempfile, jax.numpy as jnp, tokenizers
      >>> from jax_specdec import lm
      >>> def words(*names):
      ...     ids = {name: token_id for token_id, name in enumerate(names)}
      ...     tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids))
      ...     tokenizer.decoder = tokenizers.decoders.Fuse()
      ...     with tempfile.TemporaryDirectory() as directory:
      ...         tokenizer.save(f"{directory}/tokenizer.json")
      ...         return lm.load_tokenizer(directory)
      >>> model = lm.models.PlainModel(3, lambda table, ids, start, cache: (table[ids], cache))
      >>> drafter, params = lm.retokenize(
      ...     words("ab", "aba", "a"), 3, words("a", "b", "ab"), model, jnp.eye(3))
      >>> drafter.ids.values.tolist(), params.pieces.tolist()
      ([0, 2], [[2, -1], [2, 0], [0, -1]])
    """
    check_model("model", model)
    check_params("params", model, params)
    vocab_size = check_int("vocab_size", vocab_size)
    for name, tokenizer, axis, count in (
        ("target", target, "vocab_size", vocab_size),
        ("draft", draft, "model.vocab_size", model.vocab_size),
    ):
        hint = "load_tokenizer reads one from a directory"
        check_type(name, tokenizer, Tokenizer, hint=hint)
        # A model's vocabulary axis may be padded, so it may have more ids than its tokenizer.
        least = tokenizer.library_tokenizer.get_vocab_size(with_added_tokens=False)
        require(count >= least, axis, f"be at least {least}, the ids of the {name}", count)
    # Ids that are drafted: those of the target whose text the draft model has as one token.
    draft_ids = _ids_by_text(_texts(draft, model.vocab_size))
    texts = _texts(target, vocab_size)
    target_ids = _ids_by_text(texts)
    ids = sorted(target_ids[text] for text in target_ids.keys() & draft_ids.keys())
    name = shown(draft.path)
    require(bool(ids), "draft", f"share tokens with {shown(target.path)}", name, error=ValueError)
    # [V, M]: the pieces of every id of the target, also of those that are only read
    spelled = [_spelled(text, draft_ids)[-MOST_PIECES:] for text in texts]
    pieces = np.full((vocab_size, max(map(len, spelled))), -1, np.int32)
    for row, piece_ids in zip(pieces, spelled, strict=True):
        row[: len(piece_ids)] = piece_ids
    return RetokenizingDrafter(model, ids=ids), RetokenizedParams(params, jnp.asarray(pieces))


def _texts(tokenizer: Tokenizer, size: int) -> list[bytes | str]:
    """Returns the UTF-8 of each token; a str, its name, for a special one."""
    special = tokenizer.special_tokens
    return [special.get(i) or tokenizer.token_bytes(i) for i in range(size)]


def _ids_by_text(texts: list[bytes | str]) -> dict[bytes | str, int]:
    """Returns the id of each text: the last one, as tokens of bytes come first, added ones last."""
    return {text: token_id for token_id, text in enumerate(texts) if text}


def _spelled(text: bytes | str, draft_ids: Mapping[bytes | str, int]) -> list[int]:
    """Returns the draft model's ids that spell a text, at least one."""
    if text in draft_ids:
        return [draft_ids[text]]
    # The name of a special token that the draft model has not is read as plain text.
    remaining = text.encode() if isinstance(text, str) else text
    pieces = []
    while remaining:
        # The longest token that the text begins with; a byte that begins none is passed over.
        size = next((n for n in range(len(remaining), 0, -1) if remaining[:n] in draft_ids), 0)
        if size:
            pieces.append(draft_ids[remaining[:size]])
        remaining = remaining[size or 1 :]
    # At least one: an id without a piece would share the end of the one before it.
    return pieces or [0]


def _room(length: int) -> int:
    """Returns the positions of the draft model's cache for so many tokens of the target."""
    return math.ceil(ROOM * length) + MOST_PIECES


def _ends(params: RetokenizedParams, token_ids: jax.Array) -> jax.Array:
    """Returns the number of pieces up to each token and with it, ``[B, L]`` int32."""
    # [B, L, M] -> [B, L]; ids past the end of a text may be anything
    pieces = params.pieces.at[token_ids].get(mode="clip")
    return jnp.cumsum(jnp.sum(pieces >= 0, axis=2, dtype=jnp.int32), axis=1, dtype=jnp.int32)


def _before(ends: jax.Array, position: jax.Array) -> jax.Array:
    """Returns the number of pieces before the token at a position of each request, ``[B]``."""
    # [B, L] -> [B, 1] -> [B]: up to the token before, and with it; 0 before the first token
    at = jnp.take_along_axis(ends, jnp.maximum(position - 1, 0)[:, None], axis=1)[:, 0]
    return jnp.where(position > 0, at, 0)


def _pieces_at(
    params: RetokenizedParams, token_ids: jax.Array, ends: jax.Array, start: jax.Array, width: int
) -> jax.Array:
    """Returns pieces `start` to `start + width` of each text, ``[B, W]`` int32."""
    # [B, W]: the place of each piece, and the token that it is of: the first that ends after it.
    # `ends` grows from token to token. Past the last token of the buffer, pieces of that are read.
    place = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    token = jax.vmap(lambda ends, place: jnp.searchsorted(ends, place, side="right"))(ends, place)
    token = jnp.minimum(token, ends.shape[1] - 1)
    pieces = params.pieces.at[jnp.take_along_axis(token_ids, token, axis=1)].get(mode="clip")
    # [B, W, M] -> [B, W]: which of the token's pieces it is
    count = jnp.sum(pieces >= 0, axis=2, dtype=jnp.int32)
    index = place - (jnp.take_along_axis(ends, token, axis=1) - count)
    index = jnp.clip(index, 0, count - 1)
    return jnp.take_along_axis(pieces, index[..., None], axis=2)[..., 0]
