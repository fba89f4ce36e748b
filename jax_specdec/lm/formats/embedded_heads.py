"""Draft heads for the embedded target, which ship with the package."""

import importlib.resources
from collections.abc import Callable
from pathlib import Path
from typing import Literal, overload

from jax_specdec._src.arrays import check_choice
from jax_specdec.lm.formats.block_files import load_block_head
from jax_specdec.lm.formats.checkpoint import LoadedModel
from jax_specdec.lm.formats.eagle3_files import load_eagle3
from jax_specdec.lm.models.block import BlockHead
from jax_specdec.lm.models.eagle3 import Eagle3Head
from jax_specdec.lm.models.llama import Llama

_Loaded = LoadedModel[Eagle3Head] | LoadedModel[BlockHead]
_LOADERS: dict[str, Callable[[Path, LoadedModel[Llama]], _Loaded]] = {
    "eagle3": load_eagle3,
    "eagle3-64": load_eagle3,
    "dflash": load_block_head,
    "dspark": load_block_head,
}


@overload
def load_embedded_head(
    target: LoadedModel[Llama], name: Literal["eagle3", "eagle3-64"] = "eagle3"
) -> LoadedModel[Eagle3Head]: ...


@overload
def load_embedded_head(
    target: LoadedModel[Llama], name: Literal["dflash", "dspark"]
) -> LoadedModel[BlockHead]: ...


def load_embedded_head(target: LoadedModel[Llama], name: str = "eagle3") -> _Loaded:
    """A draft head for the embedded target, which ships with the package.

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
    check_choice("name", name, tuple(_LOADERS))
    weights = importlib.resources.files("jax_specdec.lm") / "weights" / name
    with importlib.resources.as_file(weights) as directory:
        return _LOADERS[name](directory, target)
