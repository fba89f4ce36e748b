"""Which kind of head a `config.json` is of, so that a wrong reader can name the right one."""

from collections.abc import Collection
from typing import NamedTuple

from jax_specdec.lm.formats.files import JsonObject


class HeadKind(NamedTuple):
    """A kind of draft head, and what reads it.

    Attributes:
      noun: what it is.
      reader: the function.
      prefix: what stands before its directory on a command line.
    """

    noun: str
    reader: str
    prefix: str


EAGLE3 = HeadKind("an EAGLE-3 head", "load_eagle3", "eagle3:")
BLOCK = HeadKind("a DFlash or DSpark head", "load_block_head", "block:")
ASSISTANT = HeadKind("a Gemma 4 assistant", "load_gemma_assistant", "gemma:")

ASSISTANT_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
"""What assistants have as their `model_type`."""


def kind_of_head(raw: JsonObject) -> HeadKind | None:
    """Returns the kind of head that a `config.json` is of, in any layout; None for none."""
    if raw.get("model_type") in ASSISTANT_TYPES:
        return ASSISTANT
    architectures = raw.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    # "dspark", "Qwen3DSparkModel", "LlamaForCausalLMEagle3"
    said = " ".join(map(str, [raw.get("speculators_model_type"), *names])).lower()
    if "dflash" in said or "dspark" in said or "dflash_config" in raw:
        return BLOCK
    # Older files of EAGLE call themselves what their layer is.
    if "eagle3" in said or "draft_vocab_size" in raw:
        return EAGLE3
    return None


def check_kind(own: HeadKind | None, raw: JsonObject) -> None:
    """Checks that a `config.json` is not of a head of another kind; `own` is None for no head.

    Raises:
      ValueError: it is; the sentence says what reads it.
    """
    found = kind_of_head(raw)
    if found not in (None, own):
        reads = f"{found.reader} and --draft {found.prefix}DIR read"
        raise ValueError(f"{raw.where} is of {found.noun}, which {reads}.")


def check_is_head(where: str, names: Collection[str]) -> None:
    """Checks, by the names of its tensors, that a directory does not hold a whole model.

    Raises:
      ValueError: it does.
    """
    has_features = "fc.weight" in names or "model.fc.weight" in names
    if "model.norm.weight" in names and not has_features:
        reads = "load_huggingface and --draft DIR read"
        raise ValueError(f"{where} holds a whole model and no head, which {reads}.")
