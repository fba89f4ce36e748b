"""What `--draft` names: a table of drafters, and how each is loaded.

A drafter is loaded in two steps. `DrafterKind.read` reads what takes no time, and refuses a
directory that does not fit; what it returns, a `Load`, reads the weights, once those of the target
are there. So a mistake in the last of several names is named before the first weights are read.
`loading` does this for `generate`, `bench` and `serve`; the names, helps and refusals of the
command line come from the same table.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from jax_specdec import SpecDecodeConfig, lm
from jax_specdec._src.base.arrays import either, require
from jax_specdec.lm.drafting.drafter import NoDrafter
from jax_specdec.lm.formats.config_json import CONFIG_FILE, read_config
from jax_specdec.lm.formats.files import is_there
from jax_specdec.lm.models.protocol import Params

NO_DRAFTS = "none"
"""Instead of a drafter: plain decoding."""
SUFFIX_PREFIX = "suffix+"
"""What stands before a drafter that has a lookup beside it."""
TREE_CANDIDATES = 64
"""Ids of each row of a block that a tree of a head with a Markov bias is chosen from."""

_Head = TypeVar("_Head", lm.models.Eagle3Head, lm.BlockHead, lm.models.GemmaAssistantHead)
Loaded = lm.formats.LoadedModel[lm.models.Llama]


class Draft(NamedTuple):
    """A drafter and its weights."""

    drafter: lm.Drafter
    params: Params | None = None

    @property
    def max_drafts(self) -> int | None:
        """The most drafts of a step, or of a path of its tree; None where the drafter sets none."""
        drafter = self.drafter_alone
        return drafter.head.config.max_drafts if isinstance(drafter, lm.BlockDrafter) else None

    @property
    def drafter_alone(self) -> lm.Drafter:
        """The drafter without the lookup beside it."""
        return self.drafter.head if isinstance(self.drafter, lm.FirstOf) else self.drafter

    def beside(self, lookup: Draft) -> Draft:
        """Returns the drafter with a lookup beside it."""
        assert isinstance(lookup.drafter, lm.SuffixDrafter)
        return Draft(lm.FirstOf(lookup.drafter, self.drafter), (lookup.params, self.params))

    def drafting(
        self, config: SpecDecodeConfig, num_nodes: int | None
    ) -> tuple[lm.Drafter, SpecDecodeConfig]:
        """Returns the drafter and the config of a step.

        Args:
          config: for chains. Its K is the depth of trees.
          num_nodes: of each tree, the newest token among them; None for chains.

        Raises:
          ValueError: `tree_depth` cannot be K.
        """
        drafter = self.drafter
        if num_nodes is None:
            return drafter, config
        # Names of other drafters are refused before: see `proposes_trees`.
        heads = lm.Eagle3Drafter | lm.BlockDrafter | lm.GemmaAssistantDrafter
        assert isinstance(drafter, lm.SuffixDrafter | heads)
        drafter = dataclasses.replace(drafter, tree_depth=config.num_speculative_tokens)
        # With a Markov bias each node needs a row of its own: of C candidates, not of all ids.
        if isinstance(drafter, lm.BlockDrafter) and drafter.head.config.markov_rank is not None:
            num_candidates = min(TREE_CANDIDATES, drafter.head.vocab_size)
            drafter = dataclasses.replace(drafter, num_candidates=num_candidates)
        # Node 0 is the newest token; each of the others is a draft.
        return drafter, dataclasses.replace(config, num_speculative_tokens=num_nodes - 1)


class Given(NamedTuple):
    """What drafters are loaded for.

    Attributes:
      tokenizer: of the target; None for the embedded target.
      dtype: compute dtype of checkpoints; None for the stored one.
      weights: of draft models and heads; "int8" for matrices in 8 bits.
      history: tokens of earlier texts in which a lookup looks, too.
    """

    tokenizer: lm.Tokenizer | None
    dtype: str | None = None
    weights: Literal["int8"] | None = None
    history: int = 0

    def draft(self, drafter: lm.Drafter, params: Params) -> Draft:
        """Returns a drafter with its weights, in 8 bits if that is wanted."""
        return Draft(drafter, lm.models.quantize(params) if self.weights else params)


Load = Callable[[Loaded], Draft]
"""Reads the weights of a drafter, once there are those of the target."""


class DrafterKind(NamedTuple):
    """A row of the table of drafters.

    Attributes:
      name: as `--draft` has it. One that ends with DIR stands for all that begin alike.
      words: where its drafts come from.
      read: reads what takes no time, from what is given and a directory, before any weights.
      for_embedded: whether the embedded target may have it.
      for_checkpoints: whether other targets may.
      has_trees: whether it proposes trees.
      has_weights: whether it runs a model, beside which there may be a lookup.
      of_others: of a head of the embedded target: the name of the same for another target.
      aliases: what else may be taken for its name.
    """

    name: str
    words: str
    read: Callable[[Given, str], Load]
    for_embedded: bool = True
    for_checkpoints: bool = True
    has_trees: bool = False
    has_weights: bool = True
    of_others: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def prefix(self) -> str:
        """What stands before a directory."""
        return self.name.removesuffix(_DIR)

    def has(self, name: str) -> bool:
        """Returns whether a name is of this kind, if of no narrower one; see `kind_of_drafter`."""
        return name.startswith(self.prefix) if self.name.endswith(_DIR) else name == self.name


def _read_draft_model(given: Given, directory: str) -> Load:
    """Reads the tokenizer of a checkpoint, which never proposes what is no token of the target."""
    # The config is read for its mistakes alone, and once more with the weights.
    read_config(Path(directory) / CONFIG_FILE)
    tokenizer = lm.load_tokenizer(directory)
    # The embedded target, which has none, has no such drafter: see `DrafterKind.for_embedded`.
    of_target = given.tokenizer
    assert of_target is not None

    def load(target: Loaded) -> Draft:
        # Matrices in int8 are made one by one as they are read, and not by `Given.draft`.
        read = functools.partial(lm.load_huggingface, directory, given.dtype, weights=given.weights)
        size = target.model.vocab_size
        if not of_target.has_same_vocabulary(tokenizer):
            return Draft(*lm.retokenize(of_target, size, tokenizer, *read()))
        # Ids mean the same to both. Those that only the draft model has are never drafted: rows
        # past the target's axis are cut, and what is padding to the target gets logits of -inf.
        model, params = read(max_vocab_size=size)
        config = model.config
        target_ids = target.model.config.num_token_ids or size
        known = min(config.num_token_ids or config.vocab_size, target_ids)
        is_all = known == config.vocab_size
        config = dataclasses.replace(config, num_token_ids=None if is_all else known)
        return Draft(lm.ModelDrafter(dataclasses.replace(model, config=config)), params)

    return load


def _reads_head(
    head_class: type[_Head], drafter: Callable[[_Head], lm.Drafter]
) -> Callable[[Given, str], Load]:
    """Returns what reads a head of a kind from a directory, and drafts with it by `drafter`."""

    def read_head(given: Given, directory: str) -> Load:
        _check_is_there(directory)

        def load(target: Loaded) -> Draft:
            head = lm.load_head(directory, target, head_class)
            return given.draft(drafter(head.model), head.params)

        return load

    return read_head


def _check_is_there(directory: str) -> None:
    """Raises a FileNotFoundError if what is to be a directory is the name of an embedded head."""
    # As in `--draft eagle3:eagle3`. Any other directory that is missing is named by its reader.
    if not Path(directory).exists() and any(directory == x.name for x in DRAFTERS if x.of_others):
        hint = f"the head of the embedded target is --draft {directory}"
        raise FileNotFoundError(f"{directory} does not exist; {hint}.")


# The names of the drafters below have no directory: `directory` is "" there.


def _read_embedded_model(given: Given, directory: str) -> Load:
    def load(target: Loaded) -> Draft:
        _, (model, params) = lm.load_embedded_pair()
        return given.draft(lm.ModelDrafter(model), params)

    return load


def _read_embedded_eagle3(given: Given, directory: str) -> Load:
    def load(target: Loaded) -> Draft:
        head = lm.load_embedded_head(target)
        return given.draft(lm.Eagle3Drafter(head.model), head.params)

    return load


def _read_embedded_block(kind: Literal["dflash", "dspark"], given: Given, directory: str) -> Load:
    def load(target: Loaded) -> Draft:
        head = lm.load_embedded_head(target, kind)
        return given.draft(lm.BlockDrafter(head.model), head.params)

    return load


def _read_ngram(given: Given, directory: str) -> Load:
    return lambda target: Draft(lm.NGramDrafter())


def _read_suffix(given: Given, directory: str) -> Load:
    drafter = lm.SuffixDrafter(history=given.history)
    return lambda target: Draft(drafter, drafter.init_params())


def _read_no_drafter(given: Given, directory: str) -> Load:
    return lambda target: Draft(NoDrafter())


_DIR = "DIR"
_HEAD = "a head of the embedded target"
DRAFTERS = (
    DrafterKind(_DIR, "a checkpoint", _read_draft_model, for_embedded=False),
    DrafterKind(
        f"eagle3:{_DIR}",
        "an EAGLE-3 head",
        _reads_head(lm.models.Eagle3Head, lm.Eagle3Drafter),
        has_trees=True,
    ),
    DrafterKind(
        f"block:{_DIR}",
        "a DFlash or DSpark head",
        _reads_head(lm.BlockHead, lm.BlockDrafter),
        has_trees=True,
    ),
    DrafterKind(
        f"gemma:{_DIR}",
        "a Gemma 4 assistant",
        _reads_head(lm.models.GemmaAssistantHead, lm.GemmaAssistantDrafter),
        for_embedded=False,
        has_trees=True,
    ),
    DrafterKind("ngram", "a lookup in the text so far", _read_ngram, has_weights=False),
    DrafterKind("suffix", "one with counts", _read_suffix, has_trees=True, has_weights=False),
    DrafterKind("model", "the embedded draft model", _read_embedded_model, for_checkpoints=False),
    DrafterKind(
        "eagle3",
        _HEAD,
        _read_embedded_eagle3,
        for_checkpoints=False,
        has_trees=True,
        of_others=f"eagle3:{_DIR}",
        aliases=("eagle",),
    ),
    *(
        DrafterKind(
            name,
            _HEAD,
            functools.partial(_read_embedded_block, name),
            for_checkpoints=False,
            has_trees=True,
            of_others=f"block:{_DIR}",
        )
        for name in ("dflash", "dspark")
    ),
    DrafterKind(NO_DRAFTS, "nowhere, in plain decoding", _read_no_drafter, has_weights=False),
)
"""All drafters, in the order in which helps and messages name them."""


def kind_of_drafter(name: str) -> DrafterKind:
    """Returns the row of a drafter; of the one beside which a lookup is, if there is one."""
    # The narrowest row: every name is that of a checkpoint too, "DIR", and a whole name or a prefix
    # is longer.
    name = name.removeprefix(SUFFIX_PREFIX)
    return max((kind for kind in DRAFTERS if kind.has(name)), key=lambda one: len(one.name))


def is_pair(name: str) -> bool:
    """Returns whether a lookup is beside a drafter."""
    return name.startswith(SUFFIX_PREFIX)


def proposes_trees(name: str) -> bool:
    """Returns whether a drafter can propose trees."""
    return kind_of_drafter(name).has_trees and not is_pair(name)


def names_of(holds: Callable[[DrafterKind], bool]) -> str:
    """Returns the names of some kinds, as a list in words."""
    return either(kind.name for kind in DRAFTERS if holds(kind))


def described() -> str:
    """Returns where drafts come from, by the names of drafters."""
    # Rows of the same words stand together in the table.
    groups = itertools.groupby(DRAFTERS, lambda one: one.words)
    return ", ".join(f"{words} ({', '.join(x.name for x in group)})" for words, group in groups)


def check_name(draft: str, *, has_target: bool) -> None:
    """Checks that the target can have a drafter.

    Args:
      draft: as `--draft` names it.
      has_target: whether the target is a checkpoint.

    Raises:
      ValueError: it cannot.
    """
    name = draft.removeprefix(SUFFIX_PREFIX)
    kind = kind_of_drafter(name)
    must = "be followed by a head or a model, as in suffix+eagle3"
    is_whole = not is_pair(draft) or (name != "" and kind.has_weights and not is_pair(name))
    require(is_whole, f"--draft {SUFFIX_PREFIX}", must, draft)
    holds: Callable[[DrafterKind], bool]
    holds = operator.attrgetter("for_checkpoints" if has_target else "for_embedded")
    must = f"be {names_of(holds)} {'with' if has_target else 'without'} --target"
    hint = _instead_of(draft, name, holds)
    may_be = kind.name != _DIR or (name.strip() and hint is None)
    require(holds(kind) and may_be, "--draft", must, draft, hint)
    if kind.name.endswith(_DIR) and not name.removeprefix(kind.prefix).strip():
        raise ValueError(f"--draft {name} must be followed by the directory of a head")


def check_target(target: str) -> None:
    """Checks that what `--target` names may be a directory.

    Raises:
      ValueError: it is empty, or no directory but the name of a drafter.
    """
    kind = kind_of_drafter(target)
    is_drafter = kind.name != _DIR and not is_there(Path(target))
    hint = f"{kind.name} is a drafter, which --draft names" if is_drafter else None
    is_directory = target.strip() and not is_drafter
    require(is_directory, "--target", "be the directory of a checkpoint", target, hint)


def _instead_of(draft: str, name: str, holds: Callable[[DrafterKind], bool]) -> str | None:
    """Returns how a message about a drafter ends, if its name may be meant for another.

    Args:
      name: the end of `draft`, without a lookup.
      holds: whether the target may have a drafter.
    """
    kind_of_name = kind_of_drafter(name)
    if kind_of_name.name != _DIR:
        others = kind_of_name.of_others
        return f"a head of another target is {others}" if others else None
    if name and is_there(Path(name)):
        return None
    # A drafter in capitals, or one of the embedded target before a directory.
    kind, colon, directory = name.partition(":")
    meant = kind.lower() + colon + directory
    for row in DRAFTERS:
        if colon and row.of_others and kind.lower() in (row.name, *row.aliases):
            meant = row.of_others.removesuffix(_DIR) + directory
    meant_kind = kind_of_drafter(meant)
    if meant_kind.name != _DIR and holds(meant_kind):
        return f"did you mean {draft.removesuffix(name) + meant!r}?"
    return f"there is neither such a directory nor a prefix {kind + colon!r}" if colon else None
