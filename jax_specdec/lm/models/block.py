"""A head that drafts a whole block in one pass: DFlash and DSpark.

With g_i the target's residual streams before some of its layers at position i, one after another,
and t_n the newest token, which the target has not run:

    c_i  = hidden_norm(fc(g_i))                 i < n: keys and values of every layer, no queries
    x    = embed([t_n, mask, ..., mask])        the block, at positions n .. n + S - 1
    x    = layer(x), for each layer             every row sees the c_i, and the other rows
    h    = norm(x)
    l    = lm_head(h)

DFlash leaves out row 0; its row j is about position n + j. DSpark (`sample_from_anchor`) uses it:
its row j is about n + j + 1. So here, and in the shapes below, row j is always the one about
position n + 1 + j, of draft j. DSpark then adds to each row a bias that depends on the token before
its position, x_{j-1} (x_{-1} = t_n), and says how likely the draft is to be accepted:

    l_j  = l_j + W2 W1[x_{j-1}]
    a_j  = sigmoid(w . [h_j, W1[x_{j-1}]] + b)

References:
  DFlash, 2026, https://arxiv.org/abs/2602.06036
  DSpark, 2026, https://arxiv.org/abs/2607.05147
"""

import dataclasses
import functools
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec._src.attention.cache import write_rows
from jax_specdec._src.base.arrays import check_array, check_int, require
from jax_specdec._src.base.tree import TREE_MASK_BITS
from jax_specdec.lm.models.cache import Pass, check_length, check_rows, empty_cache
from jax_specdec.lm.models.config import LayerSpec, Shapes, layer_shapes
from jax_specdec.lm.models.heads import DraftHead, HeadConfig, common_shapes, head_logits
from jax_specdec.lm.models.int8 import Int8Weight, matmul
from jax_specdec.lm.models.layers import (
    AttendInLayer,
    NewHeads,
    Weights,
    decoder_layer,
    embed_tokens,
    rms_norm,
    rotated_heads,
    rotations,
)
from jax_specdec.lm.models.protocol import Cache, Rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockHeadConfig(HeadConfig):
    """Sizes and switches of a `BlockHead`.

    Attributes:
      vocab_size: V, the target's.
      hidden_size: H, width of the residual stream.
      layers: one `LayerSpec` for each layer. One with a window slides: its window is counted from
        the first row of the block, for all rows; W + 1 is the anchor, and W positions before it.
      tie_word_embeddings: the target's output matrix is its embedding.
      num_token_ids: the target's.
      draft_vocab_size: Vd, ids that the head scores, at most V. Fewer than V are a list of the
        target's ids, and the head has an output matrix of its own.
      aux_hidden_state_layers: ids of the target's layers before which the residual stream is read,
        0-based and ascending; L, the number of layers, is after the last one.
      target_hidden_size: width of the target's residual stream.
      own_embedding: the head has an embedding of its own; otherwise the target's.
      own_lm_head: the head has an output matrix of its own; otherwise the target's.
      logit_scale: multiplies the logits, and the bias with them.
      block_size: S, rows of the block, at most 64. All are run, however many drafts are wanted.
      mask_token_id: id in all rows but the first, below V. It may be one that is no token.
      sample_from_anchor: the first row gives a draft too, of the position after its own.
      sliding_window_non_causal: a row of a layer with a window sees the whole block, as one of the
        other layers does; otherwise the rows up to itself.
      markov_rank: r, of the bias that depends on the token before; None without one.
      enable_confidence_head: the head has weights for how likely its drafts are to be accepted.
        They are read, trained and saved; nothing here drafts or verifies by them.
      confidence_head_with_markov: it looks at the token before for that.

    Raises:
      ValueError: a field is out of range, or fields contradict one another.

    Example: see `BlockHead`.
    """

    block_size: int
    mask_token_id: Annotated[int, "from 0 on"]
    sample_from_anchor: bool = False
    sliding_window_non_causal: bool = False
    markov_rank: int | None = None
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        # A DFlash block needs a row after the anchor, which drafts nothing. A row has a bit in each
        # mask.
        least = 1 if self.sample_from_anchor else 2
        must = f"be in [{least}, {TREE_MASK_BITS}]"
        require(least <= self.block_size <= TREE_MASK_BITS, "block_size", must, self.block_size)
        # Annotated, so that `check_fields` does not ask for a positive number: it is an id.
        mask = self.mask_token_id
        num_ids = self.vocab_size
        is_id = type(mask) is int and 0 <= mask < num_ids
        require(is_id, "mask_token_id", f"be an id in [0, {num_ids})", mask)
        fits = self.enable_confidence_head and self.markov_rank is not None
        with_markov = self.confidence_head_with_markov
        must = "be false without a confidence head and a markov_rank"
        require(fits or not with_markov, "confidence_head_with_markov", must, with_markov)

    @property
    def max_drafts(self) -> int:
        """The most drafts of a block."""
        return self.block_size - (not self.sample_from_anchor)

    def block_mask(self, spec: LayerSpec) -> np.ndarray:
        """Returns which rows of the block each row sees in a layer: ``[S, 2]`` uint32, in bits."""
        size = self.block_size
        is_causal = spec.window is not None and not self.sliding_window_non_causal
        # Bit i of a word is row i: those up to its own, or all.
        words = [(1 << (row + 1 if is_causal else size)) - 1 for row in range(size)]
        # [S] of 64 bits -> [S, 2] of 32
        return np.array([[word & 0xFFFFFFFF, word >> 32] for word in words], np.uint32)


def block_shapes(config: BlockHeadConfig) -> Shapes:
    """Returns the params pytree of a config, with a shape in place of each array.

    A dict with ``embed_tokens [V, H]``, ``fc [A * H_target, H]``, ``hidden_norm [H]``, ``norm
    [H]``, ``lm_head [H, Vd]`` (the target's embedding ``[V, H]`` if that is its output matrix and
    shared), and ``layers``, as in `layer_shapes`.
    With `markov_rank` there are ``markov_w1 [V, r]`` and ``markov_w2 [Vd, r]``, with a confidence
    head ``confidence_proj [H, 1]``, or ``[H + r, 1]``, and ``confidence_bias [1]``. With Vd < V
    there is ``target_ids [Vd]`` int32, the target's id of each of the head's.
    """
    c = config
    rank = c.markov_rank
    layers = [layer_shapes(spec, c.hidden_size) for spec in c.layers]
    shapes = common_shapes(c) | {"layers": layers, "hidden_norm": (c.hidden_size,)}
    if rank is not None:
        shapes["markov_w1"] = (c.vocab_size, rank)
        shapes["markov_w2"] = (c.draft_vocab_size, rank)
    if c.enable_confidence_head:
        width = c.hidden_size
        if rank is not None and c.confidence_head_with_markov:
            width += rank
        shapes |= {"confidence_proj": (width, 1), "confidence_bias": (1,)}
    return shapes


class BlockOutput(NamedTuple):
    """What a head computes for a block of each request; row j is about position n + 1 + j.

    Attributes:
      logits: ``[B, K, Vd]`` in the compute dtype, without the bias of the token before.
      states: ``[B, K, H]`` in the compute dtype, whose products the logits are.
      cache: of the structure of the one passed in.

    Example: see `BlockHead`.
    """

    logits: jax.Array
    states: jax.Array
    cache: Cache


@dataclasses.dataclass(frozen=True)
class BlockHead(DraftHead):
    """A DFlash or DSpark head: drafts a block of tokens in one pass over features of the target.

    The cache is that of a `Llama` with the head's layers, addressed by absolute position: below n
    an entry belongs to the features there, at n and after it to a row of the block.

    Attributes:
      config: the sizes.
      dtype: compute dtype of matrix products, states, cache and logits, the target's. Norms, rotary
        angles and the attention softmax are float32 whatever it is.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_specdec.lm import BlockHeadConfig
      >>> from jax_specdec.lm.models import DecoderConfig, LayerSpec, Rows
      >>> layer = LayerSpec(
      ...     num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=64,
      ...     qk_norm=True)
      >>> target = DecoderConfig(vocab_size=256, hidden_size=32, layers=(layer,) * 4)
      >>> head = BlockHead(BlockHeadConfig.of_target(
      ...     target, layers=(layer,) * 2, aux_hidden_state_layers=(2, 4), block_size=8,
      ...     mask_token_id=255, sample_from_anchor=True, markov_rank=4))
      >>> params = jax.jit(head.init_params)(jax.random.key(0))
      >>> cache = head.init_cache(batch_size=1, max_length=16)
      >>> features = jnp.zeros((1, 3, head.num_features))  # of the tokens at positions 0, 1, 2
      >>> cache = jax.jit(head.write_context)(params, features, jnp.array([0]), cache)
      >>> newest = jnp.array([105])
      >>> rows = Rows(newest[:, None], start=jnp.array([3]))
      >>> output = jax.jit(head.apply)(params, rows, cache)
      >>> output.logits.shape  # of positions 4 to 11
      (1, 8, 256)
      >>> logits = output.logits[:, 0] + jax.jit(head.bias)(params, newest)  # of position 4
    """

    config: BlockHeadConfig
    dtype: Any = jnp.dtype("float32")

    @property
    def weight_shapes(self) -> Shapes:
        """The structure of the params, with a shape in place of each array."""
        return block_shapes(self.config)

    def init_cache(self, batch_size: int, max_length: int) -> Cache:
        """Returns an empty cache for T = max_length positions of requests, and a block after them.

        Args:
          batch_size: B.
          max_length: T; the cache has T + S positions.
        """
        # The block of a request at the last position, T - 1, ends at T - 1 + S - 1.
        size = max_length + self.config.block_size
        return empty_cache(self.config.layers, self.dtype, batch_size, size)

    def context(
        self, params: Weights, features: jax.Array, positions: jax.Array
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Returns keys and values of features of the target, for each layer.

        Args:
          params: weights of the structure and shapes of `block_shapes`, in the compute dtype.
          features: ``[B, S, A * H_target]`` in the compute dtype, the target's residual streams
            before the layers of `aux_hidden_state_layers`, one after another.
          positions: ``[B, S]`` int32.

        Returns:
          Key and value ``[B, S, N_kv, D]`` of each layer, rotated.

        Raises:
          ValueError: an argument has another shape.
          TypeError: features are not of the compute dtype, or positions not int32.
        """
        c = self.config
        sizes = {"A*H": self.num_features}
        check_array("features", features, f"[B, S, A*H] {self.dtype}", sizes)
        check_array("positions", positions, "[B, S] int32", sizes)
        # c = hidden_norm(fc(g)): [B, S, A H_target] -> [B, S, H]. All layers read the same rows:
        # the context has no residual stream.
        rows = rms_norm(matmul(features, params["fc"]), params["hidden_norm"], c.norm)
        cos_sin = rotations(c.layers, positions)
        pairs = []
        for index, (spec, layer) in enumerate(zip(c.layers, params["layers"], strict=True)):
            # Features are only attended to: their query is not read.
            _, key, value = rotated_heads(spec, layer, rows, cos_sin[index])
            assert key is not None and value is not None  # a head has layers of its own
            pairs.append((key, value))
        return pairs

    def write_context(
        self,
        params: Weights,
        features: jax.Array,
        start: jax.Array,
        cache: Cache,
        slots: jax.Array | None = None,
    ) -> Cache:
        """Returns the cache after S consecutive positions of each request were written.

        Args:
          features: as for `context`; row s of request b is at position start[b] + s.
          start: ``[B]`` int32.
          cache: from `init_cache` or a previous call.
          slots: ``[B]`` int32, the requests of the cache, as `Rows` has them; None for all.

        Raises:
          ValueError: as for `context`, or the cache has fewer positions.
          TypeError: as for `context`.
        """
        check_array("start", start, "[B] int32", {})
        check_length("features", features.shape[1], cache)
        # [B, S]
        positions = start[:, None] + jnp.arange(features.shape[1], dtype=jnp.int32)[None, :]
        pairs = self.context(params, features, positions)
        requests = None if slots is None else slots[:, None]  # [B, 1]
        return [
            write_rows(layer, key, value, positions, requests)
            for layer, (key, value) in zip(cache, pairs, strict=True)
        ]

    def apply(
        self, params: Weights, rows: Rows, cache: Cache, num_drafts: int | None = None
    ) -> BlockOutput:
        """Runs a block of each request, after its newest token.

        All S rows of the block are run and written to the cache, at positions ``start[b]`` to
        ``start[b] + S - 1``; none sees what lies after them. Weights are not checked;
        `check_params` does that.

        Args:
          rows: one token of each request, the newest, ``[B, 1]``, as an id of the target, at
            position n; the cache has the context of positions 0 to n - 1.
          cache: from `write_context` or a previous call.
          num_drafts: K, how many rows to return; None for all that give a draft.

        Returns:
          Logits, states and the cache; see `BlockOutput`.

        Raises:
          ValueError: rows have another shape, the cache has fewer positions than a block, or
            `num_drafts` is out of range.
          TypeError: rows have other dtypes.
        """
        config = self.config
        limit = config.max_drafts
        count = limit if num_drafts is None else check_int("num_drafts", num_drafts, 1, limit)
        check_rows("rows", rows, cache)
        require(rows.token_ids.shape[1] == 1, "rows.token_ids", "be [B, 1]", rows.token_ids)
        check_length("a block", config.block_size, cache)
        # [B, 1] -> [B, S]: the newest token, and masks
        ids = jnp.pad(
            rows.token_ids,
            ((0, 0), (0, config.block_size - 1)),
            constant_values=config.mask_token_id,
        )
        # Positions n to n + S - 1. Rows see positions below n, the context, and of the block what
        # `block_mask` says; other positions are not seen.
        block = rows._replace(token_ids=ids)
        step = Pass.of([block], cache, config.layers)
        new_cache = list(cache)

        def attend(index: int, query: jax.Array, key: NewHeads, value: NewHeads) -> jax.Array:
            # [B, S, N, D]: keys and values of the block are written, then all rows read
            spec = config.layers[index]
            read, new_cache[index] = step.attend(
                spec, query, key, value, cache[index], config.block_mask(spec)
            )
            return read

        # [B, S] -> [B, S, H]: a head has no other input but these ids and the context
        embedded = embed_tokens(params["embed_tokens"], ids)
        states = self.run(params, embedded, step.positions, attend)
        # [B, S, H] -> [B, K, H]: DFlash leaves out row 0. Only these rows get logits.
        first = config.block_size - limit
        states = states[:, first : first + count]
        return BlockOutput(head_logits(config, params, states), states, new_cache)

    def run(
        self, params: Weights, embedded: jax.Array, positions: jax.Array, attend: AttendInLayer
    ) -> jax.Array:
        """Runs the layers around a given attention: what `apply` and training share.

        Args:
          embedded: ``[B, R, H]``, rows of the embedding of blocks, in the compute dtype.
          positions: ``[B, R]`` int32, for the rotary embedding.
          attend: called once for each layer.

        Returns:
          The states h ``[B, R, H]`` of all rows; `head_logits` gives their logits.
        """
        c = self.config
        x = embedded
        cos_sin = rotations(c.layers, positions)
        for index, (spec, layer) in enumerate(zip(c.layers, params["layers"], strict=True)):
            # x = layer(x): [B, R, H]
            layer_attend = functools.partial(attend, index)
            x = decoder_layer(spec, layer, x, cos_sin[index], layer_attend)
        # h = norm(x): [B, R, H]
        return rms_norm(x, params["norm"], c.norm)

    def bias(
        self, params: Weights, token_ids: jax.Array, columns: jax.Array | None = None
    ) -> jax.Array:
        """Returns what the token before adds to logits; for a head with a `markov_rank`.

        Args:
          token_ids: ``[...]`` int32, the token before each row, as an id of the target.
          columns: ``[..., C]`` int32, of the logits, with leading axes that broadcast with those of
            `token_ids`; None for all Vd of them.

        Returns:
          ``[..., Vd]`` or ``[..., C]`` in the compute dtype.
        """
        # W2 W1[x]: [...] -> [..., r] -> [..., Vd], or [..., C]
        before = embed_tokens(params["markov_w1"], token_ids)
        after = params["markov_w2"]
        # Where few columns are asked for, only their rows of W2 are read: [..., C, r].
        if columns is None:
            bias = matmul(before, after, outputs_first=True)
        elif isinstance(after, Int8Weight):
            bias = after.columns(before, columns)
        else:
            bias = jnp.einsum("...cr,...r->...c", after[columns], before)
        # As the logits, to which it is added.
        return bias if self.config.logit_scale == 1 else bias * self.config.logit_scale
