"""The models that ship with the package: a target, a draft model, and heads for the target.

They are checkpoints like any other, in `weights/` of the package, and go through the same readers.
Examples in docstrings, tests and the command line without `--target` run on them.
"""

import importlib.resources
from typing import Literal, overload

import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_specdec._src.base.arrays import check_choice
from jax_specdec.lm.formats.checkpoint import LoadedModel, load_huggingface
from jax_specdec.lm.formats.heads import load_head
from jax_specdec.lm.models.block import BlockHead
from jax_specdec.lm.models.eagle3 import Eagle3Head
from jax_specdec.lm.models.llama import Llama

_WEIGHTS = importlib.resources.files("jax_specdec.lm") / "weights"
_HEADS = ("eagle3", "eagle3-64", "dflash", "dspark")


def load_embedded_pair(
    dtype: DTypeLike = jnp.float32,
) -> tuple[LoadedModel[Llama], LoadedModel[Llama]]:
    """Returns the target and the draft model that ship with the package.

    Two byte-level models of Python source text (`bytes`), trained by `training/` of the project's
    repository on the standard library of Python.

    Args:
      dtype: compute dtype.

    Returns:
      The target and the draft model, each with its weights.

    Example:
      >>> target, draft = load_embedded_pair()
      >>> model, params = target
      >>> model.vocab_size, draft.model.vocab_size
      (256, 256)
    """
    # A package in an archive is unpacked for as long as the files are read.
    with importlib.resources.as_file(_WEIGHTS) as directory:
        target = load_huggingface(directory / "target", dtype)
        return target, load_huggingface(directory / "draft", dtype)


@overload
def load_embedded_head(
    target: LoadedModel[Llama],
    name: Literal["eagle3", "eagle3-64"] = "eagle3",
) -> LoadedModel[Eagle3Head]: ...


@overload
def load_embedded_head(
    target: LoadedModel[Llama],
    name: Literal["dflash", "dspark"],
) -> LoadedModel[BlockHead]: ...


def load_embedded_head(
    target: LoadedModel[Llama], name: str = "eagle3"
) -> LoadedModel[Eagle3Head] | LoadedModel[BlockHead]:
    """Returns a draft head for the embedded target, which ships with the package.

    Args:
      target: the first of `load_embedded_pair`.
      name: "eagle3" scores all 256 bytes, "eagle3-64" the 64 most frequent ones; "dflash" drafts
        the tokens of a block independently of each other, "dspark" each given the one before.

    Returns:
      The head and its weights, in the target's dtype: an `Eagle3Head` or a `BlockHead`.

    Raises:
      ValueError: no head has this name, or the target is another model.

    Example: see `Eagle3Drafter`.
    """
    check_choice("name", name, _HEADS)
    with importlib.resources.as_file(_WEIGHTS / name) as directory:
        if name.startswith("eagle3"):
            return load_head(directory, target, Eagle3Head)
        return load_head(directory, target, BlockHead)
