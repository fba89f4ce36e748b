"""Which kind of head a `config.json` is of.

No key says it in all layouts, so what files call themselves says it, and keys that only one
kind has. Readers ask here before they read, so that a head given as a model, a model given as a
head, or a head of another kind is refused with the name of what reads it.
"""

from collections.abc import Collection
from typing import NamedTuple

from jax_specdec._src.base.arrays import either, require
from jax_specdec.lm.formats.files import JsonObject
from jax_specdec.lm.models.block import BlockHead
from jax_specdec.lm.models.eagle3 import Eagle3Head
from jax_specdec.lm.models.gemma_assistant import GemmaAssistantHead


class HeadKind(NamedTuple):
    """A kind of draft head.

    Attributes:
      noun: what it is.
      head: its class.
      prefix: what stands before its directory on a command line.
    """

    noun: str
    head: type[Eagle3Head | BlockHead | GemmaAssistantHead]
    prefix: str


EAGLE3 = HeadKind("an EAGLE-3 head", Eagle3Head, "eagle3:")
BLOCK = HeadKind("a DFlash or DSpark head", BlockHead, "block:")
ASSISTANT = HeadKind("a Gemma 4 assistant", GemmaAssistantHead, "gemma:")

ASSISTANT_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
"""What assistants have as their `model_type`."""


def kind_of_head(raw: JsonObject) -> HeadKind | None:
    """Returns the kind of head that a `config.json` is of, in any layout; None for none."""
    if raw.get("model_type") in ASSISTANT_TYPES:
        return ASSISTANT
    architectures = raw.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    # "dspark", "Qwen3DSparkModel", "LlamaForCausalLMEagle3"
    labels = " ".join(map(str, [raw.get("speculators_model_type"), *names])).lower()
    # First block heads, which may have a draft_vocab_size, too.
    if "dflash" in labels or "dspark" in labels or "dflash_config" in raw:
        return BLOCK
    # Older files of EAGLE call themselves what their layer is, such as "LlamaForCausalLM".
    if "eagle3" in labels or "draft_vocab_size" in raw:
        return EAGLE3
    return None


def checked_kind(raw: JsonObject, wanted: type | None) -> HeadKind:
    """Returns the kind of head that a `config.json` is of; `wanted` is its class, None for any.

    Where the file does not say it, that is the wanted kind, or EAGLE-3, whose older files do not.

    Raises:
      ValueError: the file is of a head of another kind.
      TypeError: `wanted` is no class of heads.
    """
    kinds = {kind.head: kind for kind in (EAGLE3, BLOCK, ASSISTANT)}
    names = either(head.__name__ for head in kinds)
    must = f"be {names}, or None"
    require(wanted in (None, *kinds), "kind", must, wanted, error=TypeError)
    stated = kind_of_head(raw)
    if wanted is None:
        return stated or EAGLE3
    wanted_kind = kinds[wanted]
    if stated not in (None, wanted_kind):
        reads = f"load_head with {stated.head.__name__} and --draft {stated.prefix}DIR read it"
        raise ValueError(f"{raw.where} is of {stated.noun}, not of {wanted_kind.noun}; {reads}.")
    return wanted_kind


def check_is_no_head(raw: JsonObject) -> None:
    """Checks that a `config.json` is not of a head.

    Raises:
      ValueError: it is; the sentence says what reads it.
    """
    kind = kind_of_head(raw)
    if kind is not None:
        reads = f"load_head and --draft {kind.prefix}DIR read"
        raise ValueError(f"{raw.where} is of {kind.noun}, which {reads}.")


def check_is_head(where: str, names: Collection[str]) -> None:
    """Checks, by the names of its tensors, that a directory does not hold a whole model.

    Raises:
      ValueError: it does.
    """
    # Some heads have this final norm, too. All have a matrix for what they read of the target, of
    # assistants the last one here, and no model has one.
    of_heads = {"fc.weight", "model.fc.weight", "pre_projection.weight"}
    if "model.norm.weight" in names and of_heads.isdisjoint(names):
        reads = "load_huggingface and --draft DIR read"
        raise ValueError(f"{where} holds a whole model and no head, which {reads}.")
