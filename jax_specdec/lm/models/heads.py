"""What draft heads have in common: layers that read features of the target, and its embedding.

`Eagle3Head` and `BlockHead` derive from `DraftHead`, their configs from `HeadConfig`. Where a head
has no embedding or output matrix of its own, its params hold the target's (`shared_params`). That
takes no memory: they are the same arrays under the head's names.
"""

import abc
import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from jax_specdec._src.base.arrays import checked_dtype, require
from jax_specdec.lm.models.config import LayersConfig, LayerSpec, Shapes
from jax_specdec.lm.models.int8 import is_int8
from jax_specdec.lm.models.layers import Weights, check_weights, output_logits, random_weights
from jax_specdec.lm.models.protocol import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig(LayersConfig):
    """Layers and switches of a head; `Eagle3Config` and `BlockHeadConfig` say what they are."""

    draft_vocab_size: int
    aux_hidden_state_layers: tuple[int, ...]
    target_hidden_size: int
    own_embedding: bool = False
    own_lm_head: bool = False
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        are_before = all(spec.norms == "before" for spec in self.layers)
        require(are_before, "layers", "have norms before their halves alone", self.layers)
        have_keys = all(spec.keys_of is None for spec in self.layers)
        require(have_keys, "layers", "have keys of their own", self.layers)
        ids = self.aux_hidden_state_layers
        are_ids = isinstance(ids, tuple) and all(type(x) is int and x >= 0 for x in ids)
        # Not empty, none twice, in the order in which the target's pass comes to them.
        ascend = are_ids and ids and list(ids) == sorted({*ids})
        require(
            ascend, "aux_hidden_state_layers", "be different layer ids from 0 on, ascending", ids
        )
        # A head that scores part of the ids cannot take the target's output matrix.
        size = self.draft_vocab_size
        all_ids = self.vocab_size
        require(size <= all_ids, "draft_vocab_size", f"be at most vocab_size = {all_ids}", size)
        must = f"be true with draft_vocab_size = {size}, less than vocab_size = {all_ids}"
        require(size == all_ids or self.own_lm_head, "own_lm_head", must, self.own_lm_head)
        # What is the target's has the target's width.
        fits = self.target_hidden_size == self.hidden_size
        must = f"be hidden_size = {self.hidden_size} where the embedding or output is the target's"
        is_own = self.own_embedding and self.own_lm_head
        require(fits or is_own, "target_hidden_size", must, self.target_hidden_size)

    @classmethod
    def of_target(cls, target: LayersConfig, layers: tuple[LayerSpec, ...], **fields: Any) -> Self:
        """Returns the config of a head that has the sizes of a target.

        Args:
          target: whose vocabulary and width the head has.
          layers: of the head.
          fields: all others, and those that differ.

        Example: see `Eagle3Head`.
        """
        of_target: dict[str, Any] = {
            "vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "tie_word_embeddings": target.tie_word_embeddings,
            "num_token_ids": target.num_token_ids,
            "draft_vocab_size": target.vocab_size,
            "target_hidden_size": target.hidden_size,
        }
        return cls(layers=layers, **of_target | fields)

    @property
    def num_features(self) -> int:
        """Size A * H_target of the feature axis, of A layers."""
        return len(self.aux_hidden_state_layers) * self.target_hidden_size

    @property
    def output_is_embedding(self) -> bool:
        """Whether the output matrix is the target's embedding."""
        return self.tie_word_embeddings and not self.own_lm_head


@dataclasses.dataclass(frozen=True)
class DraftHead(abc.ABC):
    """What an `Eagle3Head` and a `BlockHead` have in common: sizes, and weights of given shapes."""

    config: HeadConfig
    dtype: Any = jnp.dtype("float32")

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", checked_dtype(self.dtype))

    @property
    def vocab_size(self) -> int:
        """Size Vd of the vocabulary axis of the logits."""
        return self.config.draft_vocab_size

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        """Ids of the target's layers before which the residual stream is read, ascending."""
        return self.config.aux_hidden_state_layers

    @property
    def num_features(self) -> int:
        """Size A * H_target of the feature axis."""
        return self.config.num_features

    @property
    @abc.abstractmethod
    def weight_shapes(self) -> Shapes:
        """The structure of the params, with a shape in place of each array."""

    def check_params(self, name: str, params: Params) -> None:
        """Checks weights; see `CausalModel`."""
        check_weights(name, self.weight_shapes, params, self.dtype)

    def init_params(self, key: jax.Array, target_params: Weights | None = None) -> Weights:
        """Returns random weights in the compute dtype, as those of `Llama.init_params`.

        Args:
          key: a typed PRNG key.
          target_params: weights of the target, whose embedding and output matrix are shared where
            the head has none of its own; without it those are random too.

        Returns:
          A dict; see `weight_shapes`. `target_ids` are the first Vd.
        """
        c = self.config
        params = random_weights(self.weight_shapes, key, self.dtype, c.layers)
        # What is the target's is drawn first, and replaced: each array keeps its key, whatever a
        # head shares.
        if target_params is not None:
            params |= shared_params(c, target_params)
        if "target_ids" in params:
            params["target_ids"] = jnp.arange(c.draft_vocab_size, dtype=jnp.int32)
        return params


def common_shapes(config: HeadConfig) -> Shapes:
    """Returns the shapes of the arrays that every head has, beside those of its layers."""
    c = config
    embedding = (c.vocab_size, c.hidden_size)
    lm_head = (c.hidden_size, c.draft_vocab_size)
    # [V, H] is the embedding, which gives logits transposed; a matrix of outputs is [H, Vd].
    shapes: Shapes = {
        "fc": (c.num_features, c.hidden_size),  # first: in it, other kinds of heads differ
        "norm": (c.hidden_size,),
        "embed_tokens": embedding,
        "lm_head": embedding if c.output_is_embedding else lm_head,
    }
    if c.draft_vocab_size < c.vocab_size:
        shapes["target_ids"] = (c.draft_vocab_size,)
    return shapes


def shared_params(config: HeadConfig, target_params: Weights) -> Weights:
    """Returns the target's arrays that a head uses, under the head's names."""
    shared = {}
    if not config.own_embedding:
        shared["embed_tokens"] = target_params["embed_tokens"]
    if not config.own_lm_head:
        # An embedding that gives logits may have an int8 matrix beside it, which does.
        in_int8 = is_int8(target_params.get("lm_head"))
        is_embedding = config.output_is_embedding and not in_int8
        shared["lm_head"] = target_params["embed_tokens" if is_embedding else "lm_head"]
    return shared


def head_logits(config: HeadConfig, params: Weights, output: jax.Array) -> jax.Array:
    """Returns logits ``[B, S, Vd]`` of normed states ``[B, S, H]``, scaled."""
    # A list of ids has no padding. [B, S, H] -> [B, S, Vd]
    is_all = config.draft_vocab_size == config.vocab_size
    num_token_ids = config.num_token_ids if is_all else None
    logits = output_logits(output, params["lm_head"], config.output_is_embedding, num_token_ids)
    return logits if config.logit_scale == 1 else logits * config.logit_scale
