"""From a command line to the options of its command, checked before anything runs.

argparse reads the words of a command line by the table in `options`. What was given is then a
dictionary, `given`, by the names of options. `_check` adds what follows from it (target, drafters,
rule, numbers of drafts), raises where options contradict each other, and makes the dataclass. What
is not in `given` has the default of its field, so `"tree" in given` says that --tree was given.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar

from jax_specdec._src.base.arrays import argument_of, check_int, either, renamed, require
from jax_specdec._src.base.config import SpecDecodeConfig, did_you_mean
from jax_specdec._src.base.sampling import TEMPERATURE
from jax_specdec.lm import terminal
from jax_specdec.lm.cli.options import (
    COMMANDS,
    DEFAULT_K,
    Bench,
    Options,
    Serve,
    flag_of,
    options_of,
)
from jax_specdec.lm.cli.other_names import OTHER_NAMES
from jax_specdec.lm.decoding.options import FLAGS, RequestOptions
from jax_specdec.lm.drafters import (
    NO_DRAFTS,
    check_name,
    check_target,
    is_pair,
    kind_of_drafter,
    names_of,
    proposes_trees,
)


class _HasFields(Protocol):
    """A dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


_Made = TypeVar("_Made", bound=_HasFields)
_OF_A_REQUEST = (*(row.name for row in FLAGS), "max_drafts")
Given = dict[str, Any]
"""What a command line gave, by the names of options; then the fields of its command."""


def parse(arguments: Sequence[str] | None, version: str) -> Options:
    """Returns what a command line asks for; if it is wrong, exits with code 2 and one line.

    Args:
      arguments: without the program's name; None for ``sys.argv``.
      version: what `--version` prints.
    """
    parser = _Parser(prog="jax-specdec", description="Speculative decoding for JAX.")
    parser.add_argument("--version", action="version", version=f"jax-specdec {version}")
    parsers: dict[str | None, _Parser] = {None: parser}
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for kind in COMMANDS:
        parsers[kind.command] = subparsers.add_parser(
            kind.command,
            help=kind.summary,
            description=kind.description,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            argument_default=argparse.SUPPRESS,  # what is not given is absent
        )
        for row in options_of(kind):
            row.add_to(parsers[kind.command])
    words = sys.argv[1:] if arguments is None else list(arguments)
    # argparse would say that the command is missing.
    if words and words[0].startswith("-") and words[0] not in parser.flags:
        parser.error(f"{words[0]} must come after a command, as in jax-specdec generate {words[0]}")
    # Unknown options come back, so that the message can say what to write instead.
    namespace, unknown = parser.parse_known_args(words)
    given = vars(namespace)
    name = given.pop("command")
    command_parser = parsers[name]
    if unknown:
        hints = (_instead_of(word, name, parsers) for word in unknown)
        hint = next(filter(None, hints), "")
        command_parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    # `jax-specdec` alone: help, on standard output, with exit code 0.
    if name is None:
        parser.print_help()
        parser.exit()
    (kind,) = (command for command in COMMANDS if command.command == name)
    try:
        return _check(kind, given)
    except (TypeError, ValueError) as error:
        command_parser.error(str(error))


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, and takes no abbreviations."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(allow_abbrev=False, **arguments)

    def error(self, message: str) -> NoReturn:
        """Writes a message to standard error, and exits with code 2."""
        # argparse would write its usage, which is long, before it.
        terminal.log(f"{self.prog}: {' '.join(message.split())}")
        sys.exit(2)

    @property
    def flags(self) -> list[str]:
        """The names of its options."""
        return [flag for action in self._actions for flag in action.option_strings]


def _instead_of(unknown: str, command: str | None, parsers: Mapping[str | None, _Parser]) -> str:
    """Returns how a message about an unknown option ends: with what to write instead, if known."""
    # --max_num_seqs=8 is --max-num-seqs.
    name = unknown.partition("=")[0].replace("_", "-")
    # An option, maybe with a value, or a sentence; or the name itself, of which nothing is known.
    wanted = OTHER_NAMES.get(name, name)
    if not wanted.startswith("--"):
        return f"; {wanted}" if wanted != name else ""
    # This command has the option; or others have; or one of this command's is near it.
    flag = wanted.partition(" ")[0]
    if flag in parsers[command].flags:
        return f"; did you mean {wanted!r}?"
    # "jax-specdec generate", or "jax-specdec" alone, which has --version.
    owners = [parser.prog for parser in parsers.values() if flag in parser.flags]
    if owners:
        return f"; {either(owners)} has {wanted}"
    return did_you_mean(name, parsers[command].flags)


def _check(kind: type[Options], given: Given) -> Options:
    """Returns the options of what was given on a command line.

    Raises:
      TypeError, ValueError: the sentence names an option of the command line.
    """
    for row in options_of(kind):
        if row.ends is not None and row.name in given:
            check_int(row.flags[-1], given[row.name], *row.ends)
    # The order below matters: drafters depend on the target, the rule on the drafters, and the
    # numbers of drafts on the rule.
    for temperature in given.get("temperatures", ()):
        TEMPERATURE.range.check("--temperature", temperature)
    require(all(given.get("prompts", ())), "the prompt", "not be empty", "")
    _check_target(given)
    # `bench` has its plain decoding beside every K.
    if given.get("ks") == (0,) and kind is not Bench:
        given["drafters"] = (NO_DRAFTS,)
        del given["ks"]  # the config of plain decoding has the default
    _check_drafters(kind, given)
    _choose_rule(kind, given)
    limit = _check_numbers(given)
    if "max_drafts" in given:
        check_int("--max-drafts", given["max_drafts"], 0, limit)
    # What `_fields` makes replaces what was given by the same names.
    return _made(kind, given | _fields(kind, given))


def _check_target(given: Given) -> None:
    """Sets the target, and checks what needs one."""
    if "checkpoint" in given:
        if "target" in given:
            twice = f"{given['checkpoint']!r} and --target {given['target']!r}"
            raise ValueError(f"one target must be given, but there are two: {twice}")
        given["target"] = given["checkpoint"]
    if "target" in given:
        check_target(given["target"])
        given["target"] = Path(given["target"])
    if given.get("chat") and "target" not in given:
        raise ValueError("--chat needs --target, whose tokenizer has the chat template")
    if "dtype" in given and "target" not in given:
        raise ValueError("--dtype needs --target")


def _check_drafters(kind: type[Options], given: Given) -> None:
    """Sets the names of drafters, each once, and checks that the target can have them."""
    has_target = "target" in given
    # Models and heads of the package are for its own target; a lookup is for every one.
    default = ("ngram",) if has_target else ("model", "ngram") if kind is Bench else ("model",)
    drafters = tuple(dict.fromkeys(given.get("drafters", default)))
    given["drafters"] = drafters
    for draft in drafters:
        check_name(draft, has_target=has_target)
    if given.get("history") and not all(is_pair(x) or x == "suffix" for x in drafters):
        raise ValueError("--history needs --draft suffix, or suffix+ before a head or a model")
    if NO_DRAFTS in drafters:
        if kind is Bench or "repeats" in given:
            raise ValueError(f"--draft {NO_DRAFTS} is plain decoding, which is compared anyway")
        # `generate` reads this. `serve`, which has no such field, reads the drafter's name.
        given["max_drafts"] = 0
    if "draft_weights" in given and not any(kind_of_drafter(x).has_weights for x in drafters):
        raise ValueError("--draft-weights needs a draft model or a head")


def _choose_rule(kind: type[Options], given: Given) -> None:
    """Sets the rule, and checks what needs another."""
    # Drafts of lookup have no distribution: agreement accepts as many, and no text depends on them.
    is_lookup = kind is Serve and not any(kind_of_drafter(x).has_weights for x in given["drafters"])
    needs_agreement = "tree" in given or is_lookup or "exact" in given
    # The default alone: a rule that was given stays, and is refused below where it cannot be.
    method = "agreement" if needs_agreement else "standard"
    method = given.setdefault("rejection_sample_method", method)
    for name in ("tree", "prompts_in_steps"):
        if "exact" in given and name in given:
            raise ValueError(f"--exact cannot be given with {flag_of(name)}")
    if "exact" in given and method != "agreement":
        raise ValueError(f"--exact needs --method agreement, but it is {method!r}")


def _check_numbers(given: Given) -> int:
    """Sets the numbers of drafts, and returns the most drafts of a step.

    With trees, checks that drafters propose them, the rule verifies them, and a path fits into one.
    """
    if "tree" not in given:
        given["ks"] = tuple(dict.fromkeys(given.get("ks", (DEFAULT_K,))))
        return int(given["ks"][0])
    # A path holds at most all nodes but the newest token.
    size = given["tree"]
    given["ks"] = tuple(dict.fromkeys(given.get("ks", (min(DEFAULT_K, size - 1),))))
    for draft in given["drafters"]:
        if not proposes_trees(draft):
            wanted = names_of(lambda one: one.has_trees)
            raise ValueError(f"--tree needs --draft {wanted}, but it is {draft!r}")
    method = given["rejection_sample_method"]
    if method != "agreement":
        raise ValueError(f"--tree needs --method agreement, but it is {method!r}")
    for k in given["ks"]:
        must = f"be less than --tree {size}, which counts the newest token and the drafts"
        require(k < size, "--num-speculative-tokens", must, k)
    return int(size) - 1


def _fields(kind: type[Options], given: Given) -> Given:
    """Returns the fields of a command that are not what was given."""
    configs = tuple(_config(given, k) for k in given["ks"])
    # Clients of a server bring the rest with each request.
    if kind is Serve:
        return {"configs": configs}
    # Lists become tuples, since options are frozen; of equal temperatures one is enough.
    fields = {
        "configs": configs,
        "request": _made(RequestOptions, {x: given[x] for x in _OF_A_REQUEST if x in given}),
        "prompts": tuple(given.get("prompts", ())),
        "prompt_files": tuple(given.get("prompt_files", ())),
        "temperatures": tuple(dict.fromkeys(given["temperatures"])),
    }
    if given.get("chat"):
        fields["shows_prompts"] = False
    return fields


def _config(given: Given, k: int) -> SpecDecodeConfig:
    """Returns the config of one K.

    Raises:
      ValueError: a value is out of range, or rates do not go with the rule.
    """
    is_synthetic = given["rejection_sample_method"] == "synthetic"
    # The length and the rates are two ways to say the same: exactly one of them is needed.
    rates = [name for name in given if name.startswith("synthetic_")]
    if rates and not is_synthetic:
        raise ValueError(f"{flag_of(rates[0])} needs --method synthetic")
    if is_synthetic and len(rates) != 1:
        raise ValueError(
            "--method synthetic needs one of --acceptance-length and --acceptance-rates"
        )
    return _made(SpecDecodeConfig, given | {"num_speculative_tokens": k})


def _made(cls: type[_Made], given: Given) -> _Made:
    """Returns an object of those of its fields that were given; errors name options."""
    names = [field.name for field in dataclasses.fields(cls) if field.name in given]
    # The library's errors name fields; a user has options.
    try:
        return cls(**{name: given[name] for name in names})
    except ValueError as error:
        raise ValueError(renamed(error, flag_of(str(argument_of(error))))) from None
