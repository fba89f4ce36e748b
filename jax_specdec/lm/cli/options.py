"""The options of `jax-specdec generate`, `bench` and `serve`, checked before anything runs."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args

import numpy as np

from jax_specdec._src.base.arrays import argument_of, check_int, either, renamed, require
from jax_specdec._src.base.config import (
    DraftSampleMethod,
    RejectionSampleMethod,
    SpecDecodeConfig,
    did_you_mean,
)
from jax_specdec._src.base.sampling import FILTERS, TEMPERATURE
from jax_specdec._src.base.tree import MAX_VISIBLE
from jax_specdec.lm import terminal
from jax_specdec.lm.cli.other_names import OTHER_NAMES
from jax_specdec.lm.decoding.options import PENALTIES, RequestOptions
from jax_specdec.lm.decoding.text import DEFAULT_CONFIG
from jax_specdec.lm.loading import EMBEDDED_HEADS, HEAD_PREFIXES, LOOKUPS, NO_DRAFTS, SUFFIX_PREFIX

DEFAULT_MAX_NEW_TOKENS = 256
DEFAULT_K = DEFAULT_CONFIG.num_speculative_tokens
_TREES = "suffix, eagle3, dflash, dspark, eagle3:DIR or block:DIR"
"""Drafters that propose trees."""
SERVED_LENGTH = 2048
"""Of a request to `serve`: the caches of all slots are this long."""
API_KEY_VARIABLE = "JAX_SPECDEC_API_KEY"
DEFAULT_REPEATS = 5

_Made = TypeVar("_Made")
_DRAFT = "[suffix+]DIR|eagle3:DIR|block:DIR|ngram|suffix|model|eagle3|dflash|dspark|none"
_PREFIX_OF = {"dflash": "block:", "dspark": "block:", "eagle": "eagle3:", "eagle3": "eagle3:"}
"""What stands before the directory of a head, by what it may be called."""
_REQUEST_OPTIONS = (*FILTERS, *PENALTIES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a command line asks for; the help of its options says what a field is.

    Drafters are named as `--draft` names them; `request` holds the filters and penalties of all
    requests, `configs` one config per K, which with a `tree` is its depth. `generate` and `serve`
    have one drafter and one config, `generate` one temperature; `bench` tries every combination.
    None is what a help calls default. A command without the option has the field's default.
    """

    command: str
    prompts: tuple[str, ...] = ()
    prompt_files: tuple[str, ...] = ()
    chat: bool = False
    shows_prompts: bool = True
    request: RequestOptions
    max_new_tokens: int | None = None
    temperatures: tuple[float, ...] = (0.0,)
    seed: int = 0
    json: bool = False
    repeats: int | None = None
    target: Path | None = None
    dtype: str | None = None
    weights: Literal["int8"] | None = None
    draft_weights: Literal["int8"] | None = None
    drafters: tuple[str, ...]
    configs: tuple[SpecDecodeConfig, ...]
    tree: int | None = None
    compilation_cache: bool = True
    host: str = "127.0.0.1"
    port: int = 8000
    num_slots: int = 8
    max_length: int | None = None
    max_queue: int = 64
    client_seconds: int = 30
    drain_seconds: int = 80
    chunk_size: int | None = None
    prompts_in_steps: bool = False
    exact: bool = False
    reuse_prefixes: str = "on"
    max_logprobs: int = 5
    plain_messages: bool = False
    history: int = 0
    model_name: str | None = None
    api_key_file: Path | None = None

    @property
    def config(self) -> SpecDecodeConfig:
        """The first config, `generate`'s only one."""
        return self.configs[0]


def parse(arguments: Sequence[str] | None, version: str) -> Options:
    """Returns what a command line asks for; if it is wrong, exits with code 2 and one line.

    Args:
      arguments: without the program's name; None for ``sys.argv``.
      version: what `--version` prints.
    """
    parser = _Parser(prog="jax-specdec", description="Speculative decoding for JAX.")
    parser.add_argument("--version", action="version", version=f"jax-specdec {version}")
    commands: dict[str | None, _Parser] = {None: parser}
    parsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (groups, what, description) in _COMMANDS.items():
        commands[name] = parsers.add_parser(
            name,
            help=what,
            description=description,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            argument_default=argparse.SUPPRESS,  # what is not given is absent
        )
        for add_group in groups:
            add_group(commands[name])
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words and words[0].startswith("-") and words[0] not in parser.flags:
        parser.error(f"{words[0]} must come after a command, as in jax-specdec generate {words[0]}")
    given, unknown = parser.parse_known_args(words)
    command = commands[given.command]
    if unknown:
        hints = (_instead_of(name, given.command, commands) for name in unknown)
        hint = next(filter(None, hints), "")
        command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if given.command is None:
        parser.print_help()
        parser.exit()
    try:
        return _check(vars(given), command.ends)
    except (TypeError, ValueError) as error:
        command.error(str(error))


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, and takes no abbreviations."""

    def __init__(self, **how: Any) -> None:
        super().__init__(allow_abbrev=False, **how)
        self.ends: dict[str, tuple[int, int | None]] = {}  # by name, of those that are integers

    def add(self, *flags: str, help: str = "", **how: Any) -> None:
        """Adds an option, whose longest flag is the last, or an argument that has a place."""
        self.add_argument(*flags, help=help or _HELP[flags[-1]], **how)

    def add_integer(self, *flags: str, low: int, high: int | None = None, **how: Any) -> None:
        """Adds an option that is an integer of at least `low`, and at most `high`."""
        self.ends[flags[-1].removeprefix("--").replace("-", "_")] = low, high
        how = {"type": _INTEGER, "metavar": "N", **how}
        self.add(*flags, **how)

    def error(self, message: str) -> NoReturn:
        terminal.log(f"{self.prog}: {' '.join(message.split())}")
        sys.exit(2)

    @property
    def flags(self) -> list[str]:
        """The names of its options."""
        return [flag for action in self._actions for flag in action.option_strings]


def _instead_of(unknown: str, command: str | None, commands: Mapping[str | None, _Parser]) -> str:
    """Returns how a message about an unknown option ends: with what to write instead, if known."""
    name = unknown.partition("=")[0].replace("_", "-")
    wanted = OTHER_NAMES.get(name, name)
    if not wanted.startswith("--"):
        return f"; {wanted}" if wanted != name else ""
    flag = wanted.partition(" ")[0]
    if flag in commands[command].flags:
        return f"; did you mean {wanted!r}?"
    owners = [f"jax-specdec {name}" for name, parser in commands.items() if flag in parser.flags]
    if owners:
        return f"; {either(owners)} has {wanted}"
    return did_you_mean(name, commands[command].flags)


def _checked(read: Callable[[str], _Made], must: str, hint: str = "") -> Callable[[str], _Made]:
    """Returns the type of an option, whose error says what its text must be."""

    def checked(text: str) -> _Made:
        try:
            return read(text)
        except ValueError:
            message = f"must be {must}, but it is {text!r}{hint}"
            raise argparse.ArgumentTypeError(message) from None

    return checked


_INTEGER = _checked(int, "an integer")
_NUMBER = _checked(float, "a number")


def _tuple_of(kind: Callable[[str], _Made], must: str) -> Callable[[str], tuple[_Made, ...]]:
    return _checked(lambda text: tuple(kind(part) for part in text.split(",")), must)


def _add_requests(parser: _Parser) -> None:
    parser.add("prompts", nargs="*", metavar="PROMPT")
    parser.add("--prompt-file", dest="prompt_files", action="append", metavar="FILE")
    parser.add("--chat", action="store_true")
    for one in _REQUEST_OPTIONS:
        is_int = one.dtype is np.int32
        kind = _INTEGER if is_int else _NUMBER
        letter = "I" if is_int else "F"
        parser.add(_flag(one.name), type=kind, default=one.neutral, metavar=letter, help=one.words)
    parser.add_integer("-n", "--max-new-tokens", low=1)
    parser.add_integer("--seed", low=0, high=2**32 - 1, default=Options.seed)
    parser.add("--json", action="store_true")


def _add_models(parser: _Parser) -> None:
    parser.add("--target", type=Path, metavar="DIR")
    parser.add("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add("--weights", choices=("int8",))
    parser.add("--draft-weights", choices=("int8",))
    methods = get_args(RejectionSampleMethod)
    parser.add("--method", dest="rejection_sample_method", choices=methods)
    parser.add("--acceptance-length", dest="synthetic_acceptance_length", type=_NUMBER, metavar="L")
    rates = _tuple_of(float, "numbers separated by commas, such as 0.9,0.5,0.1")
    where = "synthetic_acceptance_rates"
    parser.add("--acceptance-rates", dest=where, type=rates, metavar="R,R,...")
    methods = get_args(DraftSampleMethod)
    parser.add("--draft-sample-method", choices=methods, default="probabilistic")
    parser.add_integer("--tree", low=2, high=MAX_VISIBLE)
    parser.add("--no-compilation-cache", dest="compilation_cache", action="store_false")


def _add_drafter(parser: _Parser) -> None:
    parser.add("--draft", dest="drafters", type=lambda name: (name,), metavar=_DRAFT)
    k = _checked(lambda text: (int(text),), "an integer")
    parser.add("-k", "--num-speculative-tokens", type=k, metavar="K")


def _add_generate(parser: _Parser) -> None:
    parser.add("--no-prompt", dest="shows_prompts", action="store_false")
    parser.add("--exact", action="store_true")
    parser.add("--max-drafts", type=_INTEGER, metavar="N")
    temperature = _checked(lambda text: (float(text),), "a number")
    parser.add("-t", "--temperature", type=temperature, default="0", metavar="T")
    hint = f"; a prompt goes before it, or after --compare={DEFAULT_REPEATS}"
    runs = _checked(int, "a number of runs", hint)
    parser.add_integer(
        "--compare", low=1, nargs="?", type=runs, const=DEFAULT_REPEATS, metavar="REPEATS"
    )


def _add_bench(parser: _Parser) -> None:
    drafts = """where drafts come from, as for generate; may be given several times (default: ngram,
        and model too without --target)"""
    parser.add("--draft", dest="drafters", action="append", metavar=_DRAFT, help=drafts)
    ks = _tuple_of(int, "integers separated by commas, such as 2,4,6")
    how = {"metavar": "K,K,...", "help": "drafts per step"}
    parser.add("-k", "--num-speculative-tokens", type=ks, default="2,4,6", **how)
    temperatures = _tuple_of(float, "numbers separated by commas, such as 0,0.8")
    parser.add("-t", "--temperature", type=temperatures, default="0,0.8", metavar="T,T,...")
    parser.add_integer("--repeats", low=1, default=DEFAULT_REPEATS)


def _add_serve(parser: _Parser) -> None:
    parser.add("checkpoint", nargs="?", metavar="DIR")
    parser.add("--host", default=Options.host)
    parser.add_integer("--port", low=0, high=65535, default=Options.port)
    parser.add_integer("--num-slots", low=1, high=4096, default=Options.num_slots)
    parser.add_integer("--max-length", low=2, high=2**20)
    parser.add_integer("--max-queue", low=1, high=2**20, default=Options.max_queue)
    parser.add_integer("--client-seconds", low=1, high=2**20, default=Options.client_seconds)
    parser.add_integer("--drain-seconds", low=0, high=2**20, default=Options.drain_seconds)
    parser.add_integer("--chunk-size", low=1, high=2**20)
    parser.add("--prompts-in-steps", action="store_true")
    parser.add("--exact", action="store_true")
    parser.add("--reuse-prefixes", choices=("on", "off"), default=Options.reuse_prefixes)
    parser.add_integer("--max-logprobs", low=0, high=20, default=Options.max_logprobs)
    parser.add("--plain-messages", action="store_true")
    parser.add_integer("--history", low=0, high=2**24, default=Options.history)
    parser.add("--model-name", metavar="NAME")
    parser.add("--api-key-file", type=Path, metavar="FILE")


_HELP = {
    "checkpoint": "the same as --target DIR",
    "prompts": """a text to continue (the embedded models know Python source); - is standard
        input, which is also read if no prompt is given and it is not a terminal""",
    "--prompt-file": "a UTF-8 file that holds one prompt; may be given several times",
    "--chat": "put each prompt, as a user's message, into the chat template of --target",
    "--max-new-tokens": f"""budget of each request; a token of the embedded models is a byte
        (default: {DEFAULT_MAX_NEW_TOKENS}, or as many as fit)""",
    "--seed": "seed of the sampling noise",
    "--json": "print one JSON object instead of text and tables",
    "--target": "the target's checkpoint (default: the embedded target)",
    "--dtype": "compute dtype of checkpoints (default: as stored)",
    "--weights": """hold the target's matrices in 8 bits, half the bytes of a step; on a CPU, where
        that is slower, as without it (default: in the compute dtype)""",
    "--draft-weights": "the same of the draft model or head; texts keep the target's distribution",
    "--method": """block judges the drafts of a step jointly, which is as exact and accepts more;
        agreement gives the text of plain decoding with the same seed, token for token; synthetic
        accepts at given rates, whatever the models say (default: standard; agreement with --tree,
        and in serve with --draft ngram, suffix or none)""",
    "--tree": f"""verify trees of N nodes, the newest token and N - 1 drafts, and paths of at most K
        drafts, where --draft is {_TREES}; 2 to 64 (default: chains of K drafts)""",
    "--acceptance-length": "synthetic: mean tokens of a step with K drafts, 1 to K+1",
    "--acceptance-rates": """synthetic: K rates, not increasing; rate i is P(drafts 0..i all
        accepted)""",
    "--draft-sample-method": "how the draft model picks tokens at temperature > 0",
    "--no-compilation-cache": """do not keep compiled programs for the next run; by default they go
        to the user's cache directory, or to $JAX_COMPILATION_CACHE_DIR""",
    "--draft": """where drafts come from: a checkpoint, an EAGLE-3 head, a DFlash or DSpark head
        (block:), a lookup in the text so far (ngram, default with --target, or suffix, with
        counts), the embedded draft model (default without), or a head of the embedded target;
        suffix+ before a head or a model takes, in each step, what is likely to have more drafts
        accepted; none, in generate and serve, decodes plainly""",
    "--num-speculative-tokens": f"drafts per step; 0 is --draft none (default: {DEFAULT_K})",
    "--no-prompt": "print the text without its prompt, as --chat does",
    "--max-drafts": """the most drafts that a step verifies, at most K; 0 for none, which is plain
        decoding (default: K)""",
    "--temperature": "0 is greedy",
    "--compare": f"""afterwards, time speculative against plain decoding, REPEATS runs of each
        (default: no comparison; {DEFAULT_REPEATS} runs if no number is given)""",
    "--repeats": "timed runs of each kind; at a temperature, each has a seed of its own",
    "--host": "address to listen on; any but a loopback address needs a key",
    "--port": "0 for one that is free",
    "--num-slots": "requests decoded at a time",
    "--max-length": f"""tokens of a request, prompt included (default: {SERVED_LENGTH}, or what the
        target was made for)""",
    "--max-queue": "choices that may wait for a slot; more are answered with status 429",
    "--client-seconds": """for a client to send a request, to read anything of its answer, and
        between two requests of a connection: more than a load balancer keeps its own open""",
    "--drain-seconds": """after Ctrl-C or SIGTERM, for requests that run or wait; what is not
        finished by then is answered with status 503""",
    "--chunk-size": """tokens of prompts read between two steps while others run: 64, 128 or 256
        (default: the most that take about as long as a step, measured at the start)""",
    "--prompts-in-steps": """read prompts in the target's pass of a step, which then takes little
        longer; the last bits of sums, and so near ties of sampled texts, depend on the load""",
    "--exact": """change no bit of a text: it is that of plain decoding with --exact and the same K.
        The rule is then agreement""",
    "--reuse-prefixes": """begin a prompt with what an earlier one left in a slot, if both begin
        alike; the time to the first token then shows whether somebody asked for the same""",
    "--max-logprobs": """alternatives of a token that a client may ask for; 0 turns
        log-probabilities off, which makes steps faster""",
    "--plain-messages": """encode what spells a special token in a message of a chat as text; by
        default it becomes that token, and so may begin another role's message""",
    "--history": """tokens of earlier answers in which --draft suffix looks, too; then all requests
        have to be greedy, unless --method is agreement, and clients must be of one tenant""",
    "--model-name": "what clients call the model (default: the name of the target's directory)",
    "--api-key-file": f"""holds the key that clients have to send (default: ${API_KEY_VARIABLE} if
        it is set)""",
}
_COMMANDS = {
    "generate": (
        (_add_requests, _add_models, _add_drafter, _add_generate),
        "continue a text, or answer a message",
        """Continue a text with the embedded models, or with Hugging Face checkpoints of the Llama,
        Qwen2 and Qwen3 families. Each PROMPT and each --prompt-file is one request; several are
        decoded as one batch, and their texts are printed one after another, each below a line that
        says which it is. A line break at the end of a file or of standard input is not part of the
        prompt. The texts go to standard output, everything else to standard error.""",
    ),
    "bench": (
        (_add_requests, _add_models, _add_bench),
        "compare drafters, numbers of drafts and temperatures with plain decoding",
        """Decode the prompts plainly and with every combination of drafter, temperature and number
        of drafts, and print a table of acceptance and speed.""",
    ),
    "serve": (
        (_add_models, _add_drafter, _add_serve),
        "serve a model over HTTP, as OpenAI's API does",
        """Serve the embedded models, or Hugging Face checkpoints of the Llama, Qwen2 and Qwen3
        families, to clients of OpenAI's API. Ctrl-C and SIGTERM finish what runs and end; a second
        one ends at once.""",
    ),
}
"""The options of each command, its line in the list of commands, and its own description."""


def _check(given: dict[str, Any], ends: dict[str, tuple[int, int | None]]) -> Options:
    """Returns the options of what was given on a command line, which has the names of fields.

    Raises:
      TypeError, ValueError: the sentence names an option of the command line.
    """
    for name, (low, high) in ends.items():
        if name in given:
            check_int(_flag(name), given[name], low, high)
    for temperature in given.get("temperature", ()):
        TEMPERATURE.range.check("--temperature", temperature)
    require(all(given.get("prompts", ())), "the prompt", "not be empty", "")
    if "checkpoint" in given:
        if "target" in given:
            twice = f"{given['checkpoint']!r} and --target {str(given['target'])!r}"
            raise ValueError(f"one target must be given, but there are two: {twice}")
        given["target"] = Path(given["checkpoint"])
    is_chat = given.get("chat", False)
    if is_chat and "target" not in given:
        raise ValueError("--chat needs --target, whose tokenizer has the chat template")
    if "dtype" in given and "target" not in given:
        raise ValueError("--dtype needs --target")
    compares = given["command"] == "bench"
    if given.get("num_speculative_tokens") == (0,) and not compares:
        given["drafters"] = (NO_DRAFTS,)
        del given["num_speculative_tokens"]  # the config of plain decoding has the default
    drafters = _drafters(given)
    if NO_DRAFTS in drafters:
        if compares or "compare" in given:
            raise ValueError(f"--draft {NO_DRAFTS} is plain decoding, which is compared anyway")
        given["max_drafts"] = 0
    if "draft_weights" in given and set(drafters) <= {*LOOKUPS, NO_DRAFTS}:
        raise ValueError("--draft-weights needs a draft model or a head")

    # Drafts of lookup have no distribution: agreement accepts as many, and no text depends on them.
    is_lookup = given["command"] == "serve" and set(drafters) <= {*LOOKUPS, NO_DRAFTS}
    needs_agreement = "tree" in given or is_lookup or "exact" in given
    method = "agreement" if needs_agreement else "standard"
    given.setdefault("rejection_sample_method", method)
    for name in ("tree", "prompts_in_steps"):
        if "exact" in given and name in given:
            raise ValueError(f"--exact cannot be given with --{name.replace('_', '-')}")
    method = given["rejection_sample_method"]
    if "exact" in given and method != "agreement":
        raise ValueError(f"--exact needs --method agreement, but it is {method!r}")
    if "tree" in given:
        ks = given.get("num_speculative_tokens", (min(DEFAULT_K, given["tree"] - 1),))
        most = given["tree"] - 1
        _check_trees(given, drafters, ks)
    else:
        ks = given.get("num_speculative_tokens", (DEFAULT_K,))
        most = ks[0]
    if "max_drafts" in given:
        check_int("--max-drafts", given["max_drafts"], 0, most)

    names = [*[one.name for one in _REQUEST_OPTIONS], "max_drafts"]
    given |= dict(
        prompts=tuple(given.get("prompts", ())),
        prompt_files=tuple(given.get("prompt_files", ())),
        shows_prompts=given.get("shows_prompts", True) and not is_chat,
        request=_made(RequestOptions, given, names),
        temperatures=tuple(dict.fromkeys(given.get("temperature", Options.temperatures))),
        repeats=given.get("compare", given.get("repeats")),
        drafters=drafters,
        configs=tuple(_config(given, k) for k in dict.fromkeys(ks)),
    )
    return _made(Options, given, [field.name for field in dataclasses.fields(Options)])


def _flag(name: str) -> str:
    """Returns the option of the command line that sets a field of a config or of a request."""
    return "--" + name.removeprefix("synthetic_").replace("_", "-")


def _drafters(given: dict[str, Any]) -> tuple[str, ...]:
    """Returns the names of drafters, each once, after checking that the target can have them."""
    has_target = "target" in given
    if has_target:
        default: tuple[str, ...] = ("ngram",)
    else:
        default = ("model", "ngram") if given["command"] == "bench" else ("model",)
    drafters = tuple(dict.fromkeys(given.get("drafters", default)))
    for draft in drafters:
        name = draft.removeprefix(SUFFIX_PREFIX)
        is_alone_or_pair = name == draft or name not in ("", *LOOKUPS, NO_DRAFTS)
        must = "be followed by a head or a model, as in suffix+eagle3"
        require(is_alone_or_pair, "--draft suffix+", must, draft)
        hint = _head_hint(draft, name)
        if has_target:
            fits = hint is None and name != "model"
            must = "be DIR, eagle3:DIR, block:DIR, ngram, suffix or none with --target"
        else:
            own = ("model", *LOOKUPS, *EMBEDDED_HEADS, NO_DRAFTS)
            fits = name in own or name.startswith(HEAD_PREFIXES)
            must = f"be {', '.join(own)}, eagle3:DIR or block:DIR without --target"
        require(fits, "--draft", must, draft, hint)
        if name in HEAD_PREFIXES:
            raise ValueError(f"--draft {name} must be followed by the directory of a head")
    if given.get("history") and not all(draft.startswith("suffix") for draft in drafters):
        raise ValueError("--history needs --draft suffix, or suffix+ before a head or a model")
    return drafters


def _head_hint(draft: str, name: str) -> str | None:
    """Returns how the directory of a head is named, if `name`, the end of `draft`, may mean one."""
    kind, colon, directory = name.partition(":")
    if colon and kind in _PREFIX_OF and not name.startswith(HEAD_PREFIXES):
        return f"did you mean {draft.removesuffix(name) + _PREFIX_OF[kind] + directory!r}?"
    if name in EMBEDDED_HEADS:
        return f"a head of another target is {_PREFIX_OF[name]}DIR"
    return None


def _check_trees(given: dict[str, Any], drafters: tuple[str, ...], ks: tuple[int, ...]) -> None:
    """Checks that drafters propose trees, the rule verifies them, and a path fits into one."""
    for draft in drafters:
        if not (draft in ("suffix", *EMBEDDED_HEADS) or draft.startswith(HEAD_PREFIXES)):
            raise ValueError(f"--tree needs --draft {_TREES}, but it is {draft!r}")
    method = given["rejection_sample_method"]
    if method != "agreement":
        raise ValueError(f"--tree needs --method agreement, but it is {method!r}")
    for k in ks:
        must = f"be less than --tree {given['tree']}, which counts the newest token and the drafts"
        require(k < given["tree"], "--num-speculative-tokens", must, k)


def _config(given: dict[str, Any], k: int) -> SpecDecodeConfig:
    """Returns the config of one K.

    Raises:
      ValueError: a value is out of range, or rates do not go with the rule.
    """
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
    """Returns an object of some of what was given; errors name options of the command line."""
    try:
        return cls(**{name: given[name] for name in names if name in given})
    except ValueError as error:
        raise ValueError(renamed(error, _flag(str(argument_of(error))))) from None
