"""The options of `jax-specdec generate`, `bench` and `serve`: a dataclass a command.

A field has the flags, the bounds and the help of its option in its metadata. `parsing` adds these
options to a parser, checks what was given, and makes the dataclass of it: an option's value is the
field of its name, and a few fields (`configs`, `request`) are made of several options. All other
files of the command line read the dataclass alone.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args

import numpy as np

from jax_specdec._src.base.config import (
    DraftSampleMethod,
    RejectionSampleMethod,
    SpecDecodeConfig,
)
from jax_specdec._src.base.tree import TREE_MASK_BITS
from jax_specdec.lm import drafters as table
from jax_specdec.lm.decoding.options import FLAGS, RequestOptions
from jax_specdec.lm.decoding.text import DEFAULT_CONFIG
from jax_specdec.lm.formats.families import FAMILY_NAMES

DEFAULT_MAX_NEW_TOKENS = 256
DEFAULT_K = DEFAULT_CONFIG.num_speculative_tokens
SERVED_LENGTH = 2048
"""Of a request to `serve`: the caches of all slots are this long."""
API_KEY_VARIABLE = "JAX_SPECDEC_API_KEY"
DEFAULT_REPEATS = 5
# Llama, Qwen2 and so on.
_FAMILIES = f"{', '.join(FAMILY_NAMES[:-1])} and {FAMILY_NAMES[-1]}"

_Read = TypeVar("_Read")


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a command line, or, without flags, an argument that has a place.

    Attributes:
      name: of its value; that of its field, if it is empty.
      flags: the last of them is its name in messages.
      help: what it does.
      ends: the least and the most that an integer may be.
      arguments: further arguments of `ArgumentParser.add_argument`.
    """

    name: str
    flags: tuple[str, ...]
    help: str
    ends: tuple[int, int | None] | None
    arguments: Mapping[str, Any]

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Adds it to a parser."""
        arguments = {"help": self.help, **self.arguments}
        # argparse takes no `dest` for an argument that has a place: its name is the first argument.
        if self.flags:
            arguments["dest"] = self.name
        parser.add_argument(*self.flags or (self.name,), **arguments)


def flag_of(name: str) -> str:
    """Returns the option of the command line that sets a field of a config or of a request."""
    return "--" + name.removeprefix("synthetic_").replace("_", "-")


def read_as(read: Callable[[str], _Read], must: str, hint: str = "") -> Callable[[str], _Read]:
    """Returns the type of an option, whose error says what its text must be."""

    def checked(text: str) -> _Read:
        try:
            return read(text)
        except ValueError:
            message = f"must be {must}, but it is {text!r}{hint}"
            raise argparse.ArgumentTypeError(message) from None

    return checked


def tuple_of(read: Callable[[str], _Read], must: str) -> Callable[[str], tuple[_Read, ...]]:
    """Returns the type of an option that has values separated by commas."""
    return read_as(lambda text: tuple(read(part) for part in text.split(",")), must)


def one_of(read: Callable[[str], _Read], must: str) -> Callable[[str], tuple[_Read, ...]]:
    """Returns the type of an option that has one value, where that of another has several."""
    return read_as(lambda text: (read(text),), must)


_INTEGER = read_as(int, "an integer")
_NUMBER = read_as(float, "a number")


def _option(
    name: str,
    *flags: str,
    help: str,
    low: int | None = None,
    high: int | None = None,
    **arguments: Any,
) -> Option:
    """Returns an option; one of an integer, if that has a least value."""
    if low is None:
        return Option(name, flags, help, None, arguments)
    return Option(name, flags, help, (low, high), {"type": _INTEGER, "metavar": "N", **arguments})


def option(*flags: str, default: Any = None, shows_default: bool = False, **arguments: Any) -> Any:
    """Returns the field of one option.

    Args:
      *flags: of the option; none for an argument that has a place.
      default: where it is not given.
      shows_default: whether the help says so; else the option's own text may.
    """
    # argparse shows the default that it has, and takes it for given. A tuple stands there as on a
    # command line: argparse reads a default that is text by the option's type.
    if shows_default:
        is_one = not isinstance(default, tuple)
        arguments["default"] = default if is_one else ",".join(f"{x:g}" for x in default)
    return dataclasses.field(
        default=default, metadata={"options": [_option("", *flags, **arguments)]}
    )


def options(*several: Option) -> Any:
    """Returns a field whose value is made of several options, and of others."""
    return dataclasses.field(metadata={"options": several})


def options_of(command: type[Any]) -> list[Option]:
    """Returns the options of a command, in the order of its help."""
    return [
        dataclasses.replace(row, name=row.name or field.name)
        for field in dataclasses.fields(command)
        for row in field.metadata.get("options", ())
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Requests:
    """What `generate` and `bench` decode."""

    prompts: tuple[str, ...] = option(
        default=(),
        nargs="*",
        metavar="PROMPT",
        help="""a text to continue (the embedded models know Python source); - is standard input,
            which is also read if no prompt is given and it is not a terminal""",
    )
    prompt_files: tuple[str, ...] = option(
        "--prompt-file",
        default=(),
        action="append",
        metavar="FILE",
        help="a UTF-8 file that holds one prompt; may be given several times",
    )
    chat: bool = option(
        "--chat",
        default=False,
        action="store_true",
        help="put each prompt, as a user's message, into the chat template of --target",
    )
    prediction: str | None = option(
        "--prediction",
        metavar="FILE",
        help="""a UTF-8 file that holds what each text is expected to be, or to be near, such as a
            file before an edit: a lookup takes drafts from it""",
    )
    # An option for each row of a table: filters and penalties.
    request: RequestOptions = options(
        *(
            _option(
                row.name,
                flag_of(row.name),
                type=_INTEGER if row.dtype is np.int32 else _NUMBER,
                metavar="I" if row.dtype is np.int32 else "F",
                default=row.neutral,
                help=row.words,
            )
            for row in FLAGS
        )
    )
    max_new_tokens: int | None = option(
        "-n",
        "--max-new-tokens",
        low=1,
        help=f"""budget of each request; a token of the embedded models is a byte (default:
            {DEFAULT_MAX_NEW_TOKENS}, or as many as fit)""",
    )
    seed: int = option(
        "--seed",
        default=0,
        shows_default=True,
        low=0,
        high=2**32 - 1,
        help="seed of the sampling noise",
    )
    json: bool = option(
        "--json",
        default=False,
        action="store_true",
        help="print one JSON object instead of text and tables",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Models:
    """What models every command loads, and how drafts are verified."""

    target: Path | None = option(
        "--target",
        metavar="DIR",
        help="the target's checkpoint (default: the embedded target)",
    )
    dtype: str | None = option(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="compute dtype of checkpoints (default: as stored)",
    )
    weights: Literal["int8"] | None = option(
        "--weights",
        choices=("int8",),
        help="""hold the target's matrices in 8 bits, half the bytes of a step; on a CPU, where that
            is slower, as without it (default: in the compute dtype)""",
    )
    draft_weights: Literal["int8"] | None = option(
        "--draft-weights",
        choices=("int8",),
        help="the same of the draft model or head; texts keep the target's distribution",
    )
    # One for each K: options of this field are the other fields of a `SpecDecodeConfig`.
    configs: tuple[SpecDecodeConfig, ...] = options(
        _option(
            "rejection_sample_method",
            "--method",
            choices=get_args(RejectionSampleMethod),
            help=f"""block judges the drafts of a step jointly, which is as exact and accepts more;
                agreement gives the text of plain decoding with the same seed, token for token;
                synthetic accepts at given rates, whatever the models say (default: standard;
                agreement with --tree, and in serve with --draft
                {table.names_of(lambda one: not one.has_weights)})""",
        ),
        _option(
            "synthetic_acceptance_length",
            "--acceptance-length",
            type=_NUMBER,
            metavar="L",
            help="synthetic: mean tokens of a step with K drafts, 1 to K+1",
        ),
        _option(
            "synthetic_acceptance_rates",
            "--acceptance-rates",
            type=tuple_of(float, "numbers separated by commas, such as 0.9,0.5,0.1"),
            metavar="R,R,...",
            help="synthetic: K rates, not increasing; rate i is P(drafts 0..i all accepted)",
        ),
        _option(
            "draft_sample_method",
            "--draft-sample-method",
            choices=get_args(DraftSampleMethod),
            default="probabilistic",
            help="how the draft model picks tokens at temperature > 0",
        ),
    )
    tree: int | None = option(
        "--tree",
        low=2,
        high=TREE_MASK_BITS,
        help=f"""verify trees of N nodes, the newest token and N - 1 drafts, and paths of at most K
            drafts, where --draft is {table.names_of(lambda one: one.has_trees)}; 2 to 64 (default:
            chains of K drafts)""",
    )
    compilation_cache: bool = option(
        "--no-compilation-cache",
        default=True,
        action="store_false",
        help="""do not keep compiled programs for the next run; by default they go to the user's
            cache directory, or to $JAX_COMPILATION_CACHE_DIR""",
    )

    @property
    def config(self) -> SpecDecodeConfig:
        """The first config, `generate`'s and `serve`'s only one; with a `tree`, K is its depth."""
        return self.configs[0]


_DRAFT = "[suffix+]" + "|".join(row.name for row in table.DRAFTERS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OneDrafter:
    """The drafter of `generate` and `serve`, and how much it drafts."""

    # Tuples of one: `bench` has several, and all else reads both alike.
    drafters: tuple[str, ...] = option(
        "--draft",
        default=(),
        type=lambda name: (name,),
        metavar=_DRAFT,
        help=f"""where drafts come from: {table.described()}; suffix+ before a head or a model
            takes, in each step, what is likely to have more drafts accepted (default: ngram with
            --target, model without)""",
    )
    ks: tuple[int, ...] = option(
        "-k",
        "--num-speculative-tokens",
        default=(),
        type=one_of(int, "an integer"),
        metavar="K",
        help=f"drafts per step; 0 is --draft none (default: {DEFAULT_K})",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(_OneDrafter, _Models, _Requests):
    """The options of `jax-specdec generate`."""

    command: ClassVar = "generate"
    summary: ClassVar = "continue a text, or answer a message"
    description: ClassVar = f"""Continue a text with the embedded models, or with Hugging Face
        checkpoints of {_FAMILIES}. Each PROMPT and each --prompt-file is one request; several are
        decoded as one batch, and their texts are printed one after another, each below a line that
        says which it is. A line break at the end of a file or of standard input is not part of the
        prompt. The texts go to standard output, everything else to standard error."""

    shows_prompts: bool = option(
        "--no-prompt",
        default=True,
        action="store_false",
        help="print the text without its prompt, as --chat does",
    )
    exact: bool = option(
        "--exact",
        default=False,
        action="store_true",
        help="""change no bit of a text: it is that of plain decoding with --exact and the same K.
            The rule is then agreement""",
    )
    # Goes into `request`, too. Its bounds depend on K and --tree, so `parsing` checks them.
    max_drafts: int | None = option(
        "--max-drafts",
        type=_INTEGER,
        metavar="N",
        help="""the most drafts that a step verifies, at most K; 0 for none, which is plain decoding
            (default: K)""",
    )
    temperatures: tuple[float, ...] = option(
        "-t",
        "--temperature",
        default=(0.0,),
        shows_default=True,
        type=one_of(float, "a number"),
        metavar="T",
        help="0 is greedy",
    )
    # `nargs="?"` takes what follows for its number, also where that is a prompt: so its message
    # says where a prompt goes.
    repeats: int | None = option(
        "--compare",
        low=1,
        nargs="?",
        type=read_as(
            int,
            "a number of runs",
            f"; a prompt goes before it, or after --compare={DEFAULT_REPEATS}",
        ),
        const=DEFAULT_REPEATS,
        metavar="REPEATS",
        help=f"""afterwards, time speculative against plain decoding, REPEATS runs of each (default:
            no comparison; {DEFAULT_REPEATS} runs if no number is given)""",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench(_Models, _Requests):
    """The options of `jax-specdec bench`."""

    command: ClassVar = "bench"
    summary: ClassVar = "compare drafters, numbers of drafts and temperatures with plain decoding"
    description: ClassVar = """Decode the prompts plainly and with every combination of drafter,
        temperature and number of drafts, and print a table of acceptance and speed."""
    exact: ClassVar = False

    drafters: tuple[str, ...] = option(
        "--draft",
        default=(),
        action="append",
        metavar=_DRAFT,
        help="""where drafts come from, as for generate; may be given several times (default: ngram,
            and model too without --target)""",
    )
    ks: tuple[int, ...] = option(
        "-k",
        "--num-speculative-tokens",
        default=(2, 4, 6),
        shows_default=True,
        type=tuple_of(int, "integers separated by commas, such as 2,4,6"),
        metavar="K,K,...",
        help="drafts per step",
    )
    temperatures: tuple[float, ...] = option(
        "-t",
        "--temperature",
        default=(0.0, 0.8),
        shows_default=True,
        type=tuple_of(float, "numbers separated by commas, such as 0,0.8"),
        metavar="T,T,...",
        help="0 is greedy",
    )
    repeats: int = option(
        "--repeats",
        default=DEFAULT_REPEATS,
        shows_default=True,
        low=1,
        help="timed runs of each kind; at a temperature, each has a seed of its own",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve(_OneDrafter, _Models):
    """The options of `jax-specdec serve`."""

    command: ClassVar = "serve"
    summary: ClassVar = "serve a model over HTTP, as OpenAI's API does"
    description: ClassVar = f"""Serve the embedded models, or Hugging Face checkpoints of
        {_FAMILIES}, to clients of OpenAI's API. Ctrl-C and SIGTERM finish what runs and end; a
        second one ends at once."""

    # `parsing` makes --target of it.
    checkpoint: str | None = option(nargs="?", metavar="DIR", help="the same as --target DIR")
    host: str = option(
        "--host",
        default="127.0.0.1",
        shows_default=True,
        help="address to listen on; any but a loopback address needs a key",
    )
    port: int = option(
        "--port", default=8000, shows_default=True, low=0, high=65535, help="0 for one that is free"
    )
    num_slots: int = option(
        "--num-slots",
        default=8,
        shows_default=True,
        low=1,
        high=4096,
        help="requests decoded at a time",
    )
    max_length: int | None = option(
        "--max-length",
        low=2,
        high=2**20,
        help=f"""tokens of a request, prompt included (default: {SERVED_LENGTH}, or what the target
            was made for)""",
    )
    max_queue: int = option(
        "--max-queue",
        default=64,
        shows_default=True,
        low=1,
        high=2**20,
        help="choices that may wait for a slot; more are answered with status 429",
    )
    client_seconds: int = option(
        "--client-seconds",
        default=30,
        shows_default=True,
        low=1,
        high=2**20,
        help="""for a client to send a request, to read anything of its answer, and between two
            requests of a connection: more than a load balancer keeps its own open""",
    )
    drain_seconds: int = option(
        "--drain-seconds",
        default=80,
        shows_default=True,
        low=0,
        high=2**20,
        help="""after Ctrl-C or SIGTERM, for requests that run or wait; what is not finished by then
            is answered with status 503""",
    )
    chunk_size: int | None = option(
        "--chunk-size",
        low=1,
        high=2**20,
        help="""tokens of prompts read between two steps while others run: 64, 128 or 256 (default:
            the most that take about as long as a step, measured at the start)""",
    )
    prompts_in_steps: bool = option(
        "--prompts-in-steps",
        default=False,
        action="store_true",
        help="""read prompts in the target's pass of a step, which then takes little longer; the
            last bits of sums, and so near ties of sampled texts, depend on the load""",
    )
    exact: bool = option(
        "--exact",
        default=False,
        action="store_true",
        help="""change no bit of a text: it is that of plain decoding with --exact and the same K.
            The rule is then agreement""",
    )
    prefix_caching: str = option(
        "--prefix-caching",
        default="on",
        shows_default=True,
        choices=("on", "off"),
        help="""begin a prompt with what an earlier one left in a slot, if both begin alike; the
            time to the first token then shows whether somebody asked for the same""",
    )
    max_logprobs: int = option(
        "--max-logprobs",
        default=5,
        shows_default=True,
        low=0,
        high=20,
        help="""alternatives of a token that a client may ask for; 0 turns log-probabilities off,
            which makes steps faster""",
    )
    plain_messages: bool = option(
        "--plain-messages",
        default=False,
        action="store_true",
        help="""encode what spells a special token in a message of a chat as text; by default it
            becomes that token, and so may begin another role's message""",
    )
    history: int = option(
        "--history",
        default=0,
        shows_default=True,
        low=0,
        high=2**24,
        help="""tokens of earlier answers in which --draft suffix looks, too; then all requests have
            to be greedy, unless --method is agreement, and clients must be of one tenant""",
    )
    model_name: str | None = option(
        "--model-name",
        metavar="NAME",
        help="what clients call the model (default: the name of the target's directory)",
    )
    api_key_file: Path | None = option(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"""holds the key that clients have to send (default: ${API_KEY_VARIABLE} if it is
            set)""",
    )


Decoding = Generate | Bench
Options = Generate | Bench | Serve
COMMANDS: tuple[type[Options], ...] = (Generate, Bench, Serve)
