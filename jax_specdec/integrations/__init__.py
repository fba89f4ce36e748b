"""Adapters for JAX serving stacks and models, which import nothing of theirs.

`tpu_inference` takes and returns the flat layout of vllm-project/tpu-inference, `sglang_jax` the
rectangle of sgl-project/sglang-jax. `keys` turns one key per step into one key per request.
`models` makes a `CausalModel` of a model whose cache has one write index for the whole batch.
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from jax_specdec.integrations import keys as keys
    from jax_specdec.integrations import models as models
    from jax_specdec.integrations import sglang_jax as sglang_jax
    from jax_specdec.integrations import tpu_inference as tpu_inference


def __getattr__(name: str) -> object:
    if name in ("keys", "models", "sglang_jax", "tpu_inference"):  # imported when it is first used
        return _importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
