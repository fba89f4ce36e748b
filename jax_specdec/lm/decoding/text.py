"""`generate_text`: text in, text out, in one call.

It loads a model and its tokenizer, encodes the prompts, calls `generate` and decodes what follows.
Nothing else uses it: who wants the model, the records of steps or a server calls these parts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from jax_specdec._src.base.arrays import check_type
from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec.lm.decoding.generate import generate
from jax_specdec.lm.decoding.options import RequestFields
from jax_specdec.lm.drafting.draft_model import ModelDrafter
from jax_specdec.lm.drafting.drafter import Drafter
from jax_specdec.lm.drafting.ngram import NGramDrafter
from jax_specdec.lm.formats.checkpoint import load_huggingface
from jax_specdec.lm.formats.embedded import load_embedded_pair
from jax_specdec.lm.models.protocol import Params
from jax_specdec.lm.text.bytes import decode_bytes, encode_bytes
from jax_specdec.lm.text.tokenizer import TextStream, load_tokenizer

DEFAULT_CONFIG = SpecDecodeConfig(num_speculative_tokens=4)


def generate_text(
    prompts: Sequence[str],
    target: str | Path | None = None,
    *,
    drafter: Drafter | None = None,
    draft_params: Params = None,
    config: SpecDecodeConfig = DEFAULT_CONFIG,
    **fields: Unpack[RequestFields],
) -> list[str]:
    """Continues texts: loads a checkpoint and its tokenizer, encodes, generates and decodes.

    Each call reads the checkpoint anew. To keep it, and to see acceptance, call `load_huggingface`,
    `load_tokenizer` and `generate`, as this function does.

    Args:
      prompts: a text for each request, none empty.
      target: the directory of a checkpoint, as for `load_huggingface`; None for the embedded
        target, a small model of Python source.
      drafter: None for lookup in the text so far; for the embedded target, its draft model.
      config: static settings; by default K is 4.
      **fields: of `RequestOptions`, such as ``temperature=0.8``, for every request. By default a
        text ends at the stop tokens of the checkpoint.

    Returns:
      What follows each prompt.

    Raises:
      ImportError, OSError, TypeError, ValueError: as `load_huggingface`, `load_tokenizer` and
        `generate`.

    Example:
      >>> from jax_specdec import lm
      >>> text, = lm.generate_text(["def quicksort(items):"], max_new_tokens=60)
      >>> len(text.encode())
      60
    """
    check_type("prompts", prompts, list, tuple, hint="pass [text] for one")
    for i, prompt in enumerate(prompts):
        check_type(f"prompts[{i}]", prompt, str, hint="generate takes lists of token ids")
    hint = "generate takes a model and its params"
    check_type("target", target, str, os.PathLike, None, hint=hint)
    # Without a checkpoint: the embedded pair, whose tokens are bytes, so no tokenizer is needed.
    if target is None:
        (model, params), draft = load_embedded_pair()
        if drafter is None:
            drafter = ModelDrafter(draft.model)
            draft_params = draft.params
        ids = [encode_bytes(prompt) for prompt in prompts]
        streams = [TextStream(decode_bytes, one) for one in ids]
    else:
        drafter = NGramDrafter() if drafter is None else drafter
        # The tokenizer first: where it is missing, no weights are read for nothing.
        tokenizer = load_tokenizer(target)
        model, params = load_huggingface(target)
        ids = [tokenizer.encode(prompt) for prompt in prompts]
        streams = [tokenizer.stream(one) for one in ids]
        # The checkpoint's stop tokens, unless the caller names some
        fields = {"stop_token_ids": tokenizer.stop_token_ids, **fields}
    output = generate(
        model, params, ids, drafter=drafter, draft_params=draft_params, config=config, **fields
    )
    # a stream knows its prompt, because what a token adds to a text may depend on those before it
    pairs = zip(streams, output.completions, strict=True)
    return [stream.decode(completion, final=True) for stream, completion in pairs]
