"""The options of `jax-specdec generate`, `bench` and `serve`, checked before anything runs."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar, get_args

import numpy as np

from jax_specdec._src.arrays import check_int, require
from jax_specdec._src.cli import terminal
from jax_specdec._src.config import (
    DraftSampleMethod,
    RejectionSampleMethod,
    SpecDecodeConfig,
    did_you_mean,
)
from jax_specdec._src.sampling import FILTERS, TEMPERATURE, Parameter
from jax_specdec._src.serving.options import PENALTIES, RequestOptions

DEFAULT_MAX_NEW_TOKENS = 256
DEFAULT_K = 6
LOOKUP_K = 4
"""The default for ngram: on a CPU, more drafts cost more than a lookup usually gains."""
HEAD_PREFIX = "eagle3:"
"""What stands before the directory of an EAGLE-3 head."""
SERVED_LENGTH = 2048
"""Of a request to `serve`: the caches of all slots are this long."""
API_KEY_VARIABLE = "JAX_SPECDEC_API_KEY"
DEFAULT_REPEATS = 5

_Made = TypeVar("_Made")
_REQUEST_OPTIONS = (*FILTERS, *PENALTIES)
_COMMANDS = {
    "generate": (
        "continue a text, or answer a message",
        "Continue a text with the embedded models, or with Hugging Face checkpoints of the Llama, "
        "Qwen2 and Qwen3 families. Each PROMPT and each --prompt-file is one request; several are "
        "decoded as one batch, and their texts are printed one after another, each below a line "
        "that says which it is. A line break at the end of a file or of standard input is not part "
        "of the prompt. The texts go to standard output, everything else to standard error.",
    ),
    "bench": (
        "compare drafters, numbers of drafts and temperatures with plain decoding",
        "Decode the prompts plainly and with every combination of drafter, temperature and number "
        "of drafts, and print a table of acceptance and speed.",
    ),
    "serve": (
        "serve a model over HTTP, as OpenAI's API does",
        "Serve the embedded models, or Hugging Face checkpoints of the Llama, Qwen2 and Qwen3 "
        "families, to clients of OpenAI's API. Ctrl-C finishes what runs and ends; a second one "
        "ends at once.",
    ),
}
"""What the lists of commands, and the help of each, say."""
_TEXTS, _ALL = "generate bench", "generate bench serve"


class _Argument(NamedTuple):
    """An argument of some commands.

    Attributes:
      commands: their names.
      flags: the longest last; none for a positional argument.
      range: the least and the largest value of an integer; None for other values.
      how: the other arguments of `add_argument`.
    """

    commands: str
    flags: tuple[str, ...]
    range: tuple[int, int | None] | None
    how: dict[str, Any]


def _argument(
    commands: str, *flags: str, range: tuple[int, int | None] | None = None, **how: Any
) -> _Argument:
    integer = {} if range is None else {"type": int, "metavar": "N"}
    return _Argument(commands, flags, range, integer | how)


def _set_by(*arguments: _Argument, default: Any = dataclasses.MISSING) -> Any:
    """A field that arguments set, or of which they set parts."""
    return dataclasses.field(default=default, metadata={"arguments": arguments})


def _field(commands: str, *flags: str, default: Any, **how: Any) -> Any:
    """A field that one argument sets."""
    return _set_by(_argument(commands, *flags, **how), default=default)


def _switch(commands: str, flag: str, help: str) -> Any:
    """A field that is false without its option, or true without one that begins with `--no`."""
    default = flag.startswith("--no-")
    action = "store_false" if default else "store_true"
    return _field(commands, flag, default=default, action=action, help=help)


def _sampling(one: Parameter) -> _Argument:
    kind = int if one.dtype is np.int32 else float
    how: dict[str, Any] = dict(type=kind, metavar=kind.__name__[0].upper(), help=one.words)
    return _argument(_TEXTS, _flag(one.name), dest=one.name, default=one.neutral, **how)


def _flag(name: str) -> str:
    """The option of the command line that sets a field of a config or of a request."""
    return "--" + name.removeprefix("synthetic_").replace("_", "-")


def _checked(read: Callable[[str], Any], must: str, hint: str = "") -> Callable[[str], Any]:
    """The type of an option, whose error says what its text must be."""

    def checked(text: str) -> Any:
        try:
            return read(text)
        except ValueError:
            message = f"must be {must}, but it is {text!r}{hint}"
            raise argparse.ArgumentTypeError(message) from None

    return checked


def _numbers(kind: type[int] | type[float], name: str, example: str) -> Callable[[str], Any]:
    must = f"{name} separated by commas, such as {example}"
    return _checked(lambda text: tuple(kind(part) for part in text.split(",")), must)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a command line asks for; the help of its arguments says what a field is.

    Drafters are named as `--draft` names them; `request` holds the filters and penalties of all
    requests, `configs` one config per K. `generate` and `serve` have one drafter and one config,
    `generate` one temperature; `bench` tries every combination. None is what a help calls default.
    A command without the argument has the field's default.
    """

    command: str
    prompts: tuple[str, ...] = _field(
        _TEXTS,
        default=(),
        nargs="*",
        metavar="PROMPT",
        help="a text to continue (the embedded models know Python source); - is standard input, "
        "which is also read if no prompt is given and it is not a terminal",
    )
    prompt_files: tuple[str, ...] = _field(
        _TEXTS,
        "--prompt-file",
        default=(),
        action="append",
        metavar="FILE",
        help="a UTF-8 file that holds one prompt; may be given several times",
    )
    chat: bool = _switch(
        _TEXTS, "--chat", "put each prompt, as a user's message, into the chat template of --target"
    )
    request: RequestOptions = _set_by(*map(_sampling, _REQUEST_OPTIONS))
    max_new_tokens: int | None = _field(
        _TEXTS,
        "-n",
        "--max-new-tokens",
        default=None,
        range=(1, None),
        help="budget of each request; a token of the embedded models is a byte (default: "
        f"{DEFAULT_MAX_NEW_TOKENS}, or as many as fit)",
    )
    seed: int = _field(
        _TEXTS, "--seed", default=0, range=(0, 2**32 - 1), help="seed of the sampling noise"
    )
    json: bool = _switch(_TEXTS, "--json", "print one JSON object instead of text and tables")
    target: Path | None = _field(
        _ALL,
        "--target",
        default=None,
        type=Path,
        metavar="DIR",
        help="the target's checkpoint (default: the embedded target)",
    )
    dtype: str | None = _field(
        _ALL,
        "--dtype",
        default=None,
        choices=("float32", "bfloat16", "float16"),
        help="compute dtype of checkpoints (default: as stored)",
    )
    scan_layers: bool = _switch(
        _ALL, "--scan-layers", "loop over the layers of checkpoints: compiles faster, runs slower"
    )
    drafters: tuple[str, ...] = _set_by(
        _argument(
            "generate serve",
            "--draft",
            type=lambda name: (name,),
            metavar="DIR|eagle3[:DIR]|ngram|model",
            help="where drafts come from: a checkpoint, an EAGLE-3 head (the embedded target's if "
            "no DIR is given), a lookup in the text so far (default with --target), or the "
            "embedded draft model (default without)",
        ),
        _argument(
            "bench",
            "--draft",
            action="append",
            metavar="DIR|eagle3[:DIR]|ngram|model",
            help="where drafts come from, as for generate; may be given several times (default: "
            "ngram, and model too without --target)",
        ),
    )
    configs: tuple[SpecDecodeConfig, ...] = _set_by(
        _argument(
            "generate serve",
            "-k",
            "--num-speculative-tokens",
            dest="ks",
            type=_checked(lambda text: (int(text),), "an integer"),
            metavar="K",
            help=f"drafts per step (default: {DEFAULT_K}, or {LOOKUP_K} with --draft ngram)",
        ),
        _argument(
            "bench",
            "-k",
            "--num-speculative-tokens",
            dest="ks",
            type=_numbers(int, "integers", "2,4,6"),
            default="2,4,6",
            metavar="K,K,...",
            help="drafts per step",
        ),
        _argument(
            _ALL,
            "--method",
            dest="rejection_sample_method",
            choices=get_args(RejectionSampleMethod),
            default="standard",
            help="block judges the drafts of a step jointly, which is as exact and accepts more; "
            "agreement gives the text of plain decoding with the same seed, token for token; "
            "synthetic accepts at given rates, whatever the models say",
        ),
        _argument(
            _ALL,
            "--acceptance-length",
            dest="synthetic_acceptance_length",
            type=float,
            metavar="L",
            help="synthetic: mean tokens per step, 1 to K+1",
        ),
        _argument(
            _ALL,
            "--acceptance-rates",
            dest="synthetic_acceptance_rates",
            type=_numbers(float, "numbers", "0.9,0.5,0.1"),
            metavar="R,R,...",
            help="synthetic: K rates, not increasing; rate i is P(drafts 0..i all accepted)",
        ),
        _argument(
            _ALL,
            "--draft-sample-method",
            dest="draft_sample_method",
            choices=get_args(DraftSampleMethod),
            default="probabilistic",
            help="how the draft model picks tokens at temperature > 0",
        ),
    )
    compilation_cache: bool = _switch(
        _ALL,
        "--no-compilation-cache",
        "do not keep compiled programs for the next run; by default they go to the user's "
        "cache directory, or to $JAX_COMPILATION_CACHE_DIR",
    )
    shows_prompts: bool = _switch(
        "generate", "--no-prompt", "print the text without its prompt, as --chat does"
    )
    temperatures: tuple[float, ...] = _set_by(
        _argument(
            "generate",
            "-t",
            "--temperature",
            type=_checked(lambda text: (float(text),), "a number"),
            default="0",
            metavar="T",
            help="0 is greedy",
        ),
        _argument(
            "bench",
            "-t",
            "--temperature",
            type=_numbers(float, "numbers", "0,0.8"),
            default="0,0.8",
            metavar="T,T,...",
            help="0 is greedy",
        ),
        default=(0.0,),
    )
    repeats: int | None = _set_by(
        _argument(
            "generate",
            "--compare",
            range=(1, None),
            nargs="?",
            type=_checked(
                int,
                "a number of runs",
                f"; a prompt goes before it, or after --compare={DEFAULT_REPEATS}",
            ),
            const=DEFAULT_REPEATS,
            metavar="REPEATS",
            help="afterwards, time speculative against plain decoding, REPEATS runs of each "
            f"(default: no comparison; {DEFAULT_REPEATS} runs if no number is given)",
        ),
        _argument(
            "bench",
            "--repeats",
            range=(1, None),
            default=DEFAULT_REPEATS,
            help="timed runs of each kind; at a temperature, each has a seed of its own",
        ),
        default=None,
    )
    host: str = _field(
        "serve",
        "--host",
        default="127.0.0.1",
        help="address to listen on; any but a loopback address needs a key",
    )
    port: int = _field(
        "serve", "--port", default=8000, range=(0, 65535), help="0 for one that is free"
    )
    num_slots: int = _field(
        "serve", "--num-slots", default=8, range=(1, 4096), help="requests decoded at a time"
    )
    max_length: int | None = _field(
        "serve",
        "--max-length",
        default=None,
        range=(2, 2**20),
        help=f"tokens of a request, prompt included (default: {SERVED_LENGTH}, or what the target "
        "was made for)",
    )
    max_queue: int = _field(
        "serve",
        "--max-queue",
        default=64,
        range=(1, 2**20),
        help="requests that may wait; more are answered with status 429",
    )
    max_logprobs: int = _field(
        "serve",
        "--max-logprobs",
        default=5,
        range=(0, 20),
        help="alternatives of a token that a client may ask for; 0 turns log-probabilities off, "
        "which makes steps faster",
    )
    model_name: str | None = _field(
        "serve",
        "--model-name",
        default=None,
        metavar="NAME",
        help="what clients call the model (default: the name of the target's directory)",
    )
    api_key_file: Path | None = _field(
        "serve",
        "--api-key-file",
        default=None,
        type=Path,
        metavar="FILE",
        help=f"holds the key that clients have to send (default: ${API_KEY_VARIABLE} if it is set)",
    )

    @property
    def config(self) -> SpecDecodeConfig:
        """The first config, `generate`'s only one."""
        return self.configs[0]


def _arguments(command: str) -> Iterator[tuple[dataclasses.Field[Any], _Argument]]:
    """Each argument of a command, and the field that it sets."""
    for field in dataclasses.fields(Options):
        for argument in field.metadata.get("arguments", ()):
            if command in argument.commands.split():
                yield field, argument


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        terminal.log(f"{self.prog}: {' '.join(message.split())}")
        sys.exit(2)

    def refuse_unknown(self, arguments: Sequence[str]) -> None:
        """Report arguments that it does not know, with the option that the first one is near."""
        if arguments:
            known = [name for action in self._actions for name in action.option_strings]
            near = did_you_mean(arguments[0].partition("=")[0], known)
            self.error(f"unrecognized arguments: {' '.join(arguments)}{near}")


def parse(arguments: Sequence[str] | None, version: str) -> Options:
    """Parse a command line; if it is wrong, exit with code 2 and one line.

    Args:
      arguments: without the program's name; None for ``sys.argv``.
      version: what `--version` prints.

    Returns:
      Checked options.
    """
    parser = _Parser(prog="jax-specdec", description="Speculative decoding for JAX.")
    parser.add_argument("--version", action="version", version=f"jax-specdec {version}")
    commands: dict[str | None, _Parser] = {None: parser}
    parsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (what, description) in _COMMANDS.items():
        commands[name] = parsers.add_parser(
            name,
            help=what,
            description=description,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            argument_default=argparse.SUPPRESS,
        )
        for field, argument in _arguments(name):
            how = {"dest": field.name, **argument.how}
            if type(field.default) in (int, str):  # the help shows it
                how.setdefault("default", field.default)
            commands[name].add_argument(*argument.flags, **how)
    given, unknown = parser.parse_known_args(arguments)
    command = commands[given.command]
    command.refuse_unknown(unknown)
    if given.command is None:
        parser.print_help()
        parser.exit()
    try:
        return _check(vars(given))
    except (TypeError, ValueError) as error:
        command.error(str(error))


def _check(given: dict[str, Any]) -> Options:
    for field, argument in _arguments(given["command"]):
        if argument.range is not None and field.name in given:
            check_int(argument.flags[-1], given[field.name], *argument.range)
    for temperature in given.get("temperatures", ()):
        TEMPERATURE.range.check("--temperature", temperature)
    require(all(given.get("prompts", ())), "the prompt", "not be empty", "")
    has_target, chat = "target" in given, given.get("chat", False)
    if chat and not has_target:
        raise ValueError("--chat needs --target, whose tokenizer has the chat template")
    for name in ("dtype", "scan_layers"):
        if name in given and not has_target:
            raise ValueError(f"{_flag(name)} needs --target")
    drafters = _drafters(given, has_target)
    ks = given.get("ks") or (LOOKUP_K if drafters == ("ngram",) else DEFAULT_K,)
    made = given | dict(
        drafters=drafters,
        configs=tuple(_config(given, k) for k in dict.fromkeys(ks)),
        request=_made(RequestOptions, given, [one.name for one in _REQUEST_OPTIONS]),
        shows_prompts=given.get("shows_prompts", True) and not chat,
    )
    for name in ("prompts", "prompt_files"):
        made[name] = tuple(given.get(name, ()))
    if "temperatures" in given:
        made["temperatures"] = tuple(dict.fromkeys(given["temperatures"]))
    return _made(Options, made, [field.name for field in dataclasses.fields(Options)])


def _drafters(given: dict[str, Any], has_target: bool) -> tuple[str, ...]:
    """Where drafts come from; a checkpoint can draft only for another checkpoint."""
    default = ("model", "ngram") if given["command"] == "bench" else ("model",)
    drafters = tuple(dict.fromkeys(given.get("drafters", ("ngram",) if has_target else default)))
    for draft in drafters:
        is_head = draft.startswith(HEAD_PREFIX)
        if not has_target and not (is_head or draft in ("model", "ngram", "eagle3")):
            raise ValueError(
                "--draft must be model, ngram, eagle3 or eagle3:DIR without --target, but it is "
                f"{draft!r}"
            )
        if has_target and draft in ("model", "eagle3"):
            raise ValueError(
                f"--draft must be DIR, eagle3:DIR or ngram with --target, but it is {draft!r}"
            )
        if draft == HEAD_PREFIX:
            raise ValueError("--draft eagle3: must be followed by the directory of a head")
    return drafters


def _config(given: dict[str, Any], k: int) -> SpecDecodeConfig:
    is_synthetic = given["rejection_sample_method"] == "synthetic"
    rates = [name for name in given if name.startswith("synthetic_")]
    if rates and not is_synthetic:
        raise ValueError(f"{_flag(rates[0])} needs --method synthetic")
    if is_synthetic and len(rates) != 1:
        raise ValueError(
            "--method synthetic needs one of --acceptance-length and --acceptance-rates"
        )
    names = [field.name for field in dataclasses.fields(SpecDecodeConfig)]
    return _made(SpecDecodeConfig, given | {"num_speculative_tokens": k}, names)


def _made(cls: type[_Made], given: dict[str, Any], names: list[str]) -> _Made:
    """An object of some of what was given; errors name the options of the command line."""
    try:
        return cls(**{name: given[name] for name in names if name in given})
    except ValueError as error:
        message = str(error)
        for name in names:
            message = message.replace(name, _flag(name))
        raise ValueError(message) from None
