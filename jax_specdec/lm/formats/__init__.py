"""Files of models and heads: checkpoints that are read and written."""

from jax_specdec.lm.formats.checkpoint import LoadedModel, save_checkpoint
from jax_specdec.lm.formats.heads import save_block_head, save_eagle3

__all__ = ["LoadedModel", "save_block_head", "save_checkpoint", "save_eagle3"]
