"""Files of models and heads: directories in the layout of Hugging Face, read and written.

Each file here reads one thing and names the file in its errors: `files` JSON and text, `tensors`
safetensors, `config_json` and `families` what a model is, `token_ids` and `added_tokens` which ids
it has. `checkpoint` puts a model together; `heads` does so for draft heads, whose many layouts are
in `head_layouts`. What reads is in `lm`; what writes is exported here.
"""

from jax_specdec.lm.formats.checkpoint import LoadedModel, save_checkpoint
from jax_specdec.lm.formats.heads import save_block_head, save_eagle3

__all__ = ["LoadedModel", "save_block_head", "save_checkpoint", "save_eagle3"]
