"""The options of `jax-specdec generate`, `bench` and `serve`, checked before anything runs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

import numpy as np

from jax_specdec._src.arrays import check_int, require
from jax_specdec._src.cli import terminal
from jax_specdec._src.config import RejectionSampleMethod, SpecDecodeConfig, did_you_mean
from jax_specdec._src.sampling import FILTERS, PENALTIES, TEMPERATURE
from jax_specdec._src.serving.options import RequestOptions

DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_MAX_NEW_TOKENS = 256
DEFAULT_K = 6
LOOKUP_K = 4
"""The default for ngram: on a CPU, more drafts cost more than a lookup usually gains."""
HEAD_PREFIX = "eagle3:"
"""What stands before the directory of an EAGLE-3 head."""
BENCH_K = (2, 4, 6)
BENCH_TEMPERATURES = (0.0, 0.8)
SERVED_LENGTH = 2048
"""Of a request to `serve`: the caches of all slots are this long."""
API_KEY_VARIABLE = "JAX_SPECDEC_API_KEY"
DEFAULT_REPEATS = 5
BENCH_REPEATS = 5


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """What `jax-specdec serve` asks for besides its models.

    Attributes:
      host: address or name to listen on.
      port: 0 for one that is free.
      num_slots: requests that are decoded at a time.
      max_queue: requests that may wait.
      max_logprobs: the most alternatives of a token; 0 for no log-probabilities.
      max_length: tokens of a request, prompt included; None for the default.
      model_name: what clients call the target; None for the name of its directory.
      api_key_file: holds the key that clients need; None if a variable may hold it.
    """

    host: str
    port: int
    num_slots: int
    max_queue: int
    max_logprobs: int
    max_length: int | None = None
    model_name: str | None = None
    api_key_file: Path | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a command line asks for: requests, and the ways to decode them.

    `generate` and `serve` have one drafter and one config, `generate` one temperature; `bench`
    tries every combination. The defaults are those of options whose help does not show one.

    Attributes:
      command: "generate", "bench" or "serve".
      prompts: from the command line; "-" is standard input.
      prompt_files: each holds one prompt; "-" is standard input.
      chat: prompts are messages, put into the tokenizer's chat template.
      target: directory of the target's checkpoint; None for the embedded target.
      drafters: each "model" (the embedded draft model), "ngram", "eagle3" (the embedded head),
        "eagle3:" and the directory of a head, or the directory of a checkpoint.
      dtype: compute dtype of checkpoints; None for the stored one.
      scan_layers: loop over a checkpoint's layers, to compile faster; see `Llama`.
      temperatures: 0 is greedy.
      max_new_tokens: budget of each request; None for the default, or as many as fit.
      seed: of the sampling noise.
      shows_prompts: whether a prompt is printed before its continuation.
      json: print one JSON object instead of text and tables.
      repeats: timed runs of each kind of decoding; None if nothing is compared.
      configs: how drafts are made and verified, one per K.
      request: filters and penalties of all requests.
      compilation_cache: whether to keep compiled programs on disk.
      server: of `serve`; None for the other commands.
    """

    command: str
    prompts: tuple[str, ...] = ()
    prompt_files: tuple[str, ...] = ()
    chat: bool = False
    target: Path | None = None
    drafters: tuple[str, ...]
    dtype: str | None = None
    scan_layers: bool = False
    temperatures: tuple[float, ...] = (0.0,)
    max_new_tokens: int | None = None
    seed: int = 0
    shows_prompts: bool = True
    json: bool = False
    repeats: int | None = None
    configs: tuple[SpecDecodeConfig, ...]
    request: RequestOptions
    compilation_cache: bool = True
    server: ServerOptions | None = None

    @property
    def config(self) -> SpecDecodeConfig:
        """The first config, `generate`'s only one."""
        return self.configs[0]


_REQUEST_OPTIONS = (*FILTERS, *PENALTIES)

_PROMPTS = """\
Each PROMPT and each --prompt-file is one request; several are decoded as one batch, and their
texts are printed one after another, each below a line that says which it is. A line break at the
end of a file or of standard input is not part of the prompt. The texts go to standard output,
everything else to standard error."""


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        terminal.write(f"{self.prog}: {' '.join(message.split())}\n", stream=sys.stderr)
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
    form: dict[str, Any] = dict(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter, argument_default=argparse.SUPPRESS
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    generate = commands.add_parser(
        "generate",
        help="continue a text, or answer a message",
        description="Continue a text with the embedded models, or with Hugging Face checkpoints "
        f"of the Llama, Qwen2 and Qwen3 families. {_PROMPTS}",
        **form,
    )
    bench = commands.add_parser(
        "bench",
        help="compare drafters, numbers of drafts and temperatures with plain decoding",
        description="Decode the prompts plainly and with every combination of drafter, temperature "
        "and number of drafts, and print a table of acceptance and speed.",
        **form,
    )
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI's API does",
        description="Serve the embedded models, or Hugging Face checkpoints of the Llama, Qwen2 "
        "and Qwen3 families, to clients of OpenAI's API. Ctrl-C finishes what runs and ends; a "
        "second one ends at once.",
        **form,
    )
    for command in (generate, bench):
        _add_texts(command)
    for command in (generate, bench, serve):
        _add_models(command)
    for command in (generate, serve):
        _add_one_drafter(command)
    _add_generate(generate)
    _add_bench(bench)
    _add_serve(serve)
    given, unknown = parser.parse_known_args(arguments)
    command = {"generate": generate, "bench": bench, "serve": serve, None: parser}[given.command]
    command.refuse_unknown(unknown)
    if given.command is None:
        parser.print_help()
        parser.exit()
    try:
        return _check(vars(given))
    except (TypeError, ValueError) as error:
        command.error(str(error))


def _add_texts(command: argparse.ArgumentParser) -> None:
    """What `generate` and `bench` decode."""
    command.add_argument(
        "prompts",
        nargs="*",
        metavar="PROMPT",
        help="a text to continue (the embedded models know Python source); - is standard input, "
        "which is also read if no prompt is given and it is not a terminal",
    )
    command.add_argument(
        "--prompt-file",
        dest="prompt_files",
        action="append",
        metavar="FILE",
        help="a UTF-8 file that holds one prompt; may be given several times",
    )
    command.add_argument(
        "--chat",
        action="store_true",
        help="put each prompt, as a user's message, into the chat template of --target",
    )
    for one in _REQUEST_OPTIONS:
        kind = int if one.dtype is np.int32 else float
        command.add_argument(
            _option(one.name),
            type=kind,
            default=one.neutral,
            metavar=kind.__name__[0].upper(),
            help=one.words,
        )
    command.add_argument(
        "-n",
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="budget of each request; a token of the embedded models is a byte (default: "
        f"{DEFAULT_MAX_NEW_TOKENS}, or as many as fit)",
    )
    command.add_argument("--seed", type=int, default=0, help="seed of the sampling noise")
    command.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object instead of text and tables",
    )


def _add_models(command: argparse.ArgumentParser) -> None:
    """The models, and how drafts are made and verified."""
    command.add_argument(
        "--target",
        type=Path,
        metavar="DIR",
        help="the target's checkpoint (default: the embedded target)",
    )
    command.add_argument(
        "--dtype",
        choices=DTYPES,
        help="compute dtype of checkpoints (default: as stored)",
    )
    command.add_argument(
        "--scan-layers",
        action="store_true",
        help="loop over the layers of checkpoints: compiles faster, runs slower",
    )
    command.add_argument(
        "--method",
        choices=get_args(RejectionSampleMethod),
        default="standard",
        help="block judges the drafts of a step jointly, which is as exact and accepts more; "
        "agreement gives the text of plain decoding with the same seed, token for token; "
        "synthetic accepts at given rates, whatever the models say",
    )
    command.add_argument(
        "--acceptance-length",
        type=float,
        metavar="L",
        help="synthetic: mean tokens per step, 1 to K+1",
    )
    command.add_argument(
        "--acceptance-rates",
        type=_numbers(float, "numbers", "0.9,0.5,0.1"),
        metavar="R,R,...",
        help="synthetic: K rates, not increasing; rate i is P(drafts 0..i all accepted)",
    )
    command.add_argument(
        "--draft-sample-method",
        choices=("greedy", "probabilistic"),
        default="probabilistic",
        help="how the draft model picks tokens at temperature > 0",
    )
    command.add_argument(
        "--no-compilation-cache",
        dest="compilation_cache",
        action="store_false",
        help="do not keep compiled programs for the next run; by default they go to the user's "
        "cache directory, or to $JAX_COMPILATION_CACHE_DIR",
    )


def _add_one_drafter(command: argparse.ArgumentParser) -> None:
    """The drafter of `generate` and `serve`, which have one."""
    command.add_argument(
        "--draft",
        dest="drafters",
        type=lambda name: (name,),
        metavar="DIR|eagle3[:DIR]|ngram|model",
        help="where drafts come from: a checkpoint, an EAGLE-3 head (the embedded target's if no "
        "DIR is given), a lookup in the text so far (default with --target), or the embedded "
        "draft model (default without)",
    )
    command.add_argument(
        "-k",
        "--num-speculative-tokens",
        dest="ks",
        type=_checked(lambda text: (int(text),), "an integer"),
        metavar="K",
        help=f"drafts per step (default: {DEFAULT_K}, or {LOOKUP_K} with --draft ngram)",
    )


def _add_generate(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--no-prompt",
        dest="shows_prompts",
        action="store_false",
        help="print the text without its prompt, as --chat does",
    )
    command.add_argument(
        "-t",
        "--temperature",
        dest="temperatures",
        type=_checked(lambda text: (float(text),), "a number"),
        default="0",
        metavar="T",
        help="0 is greedy",
    )
    command.add_argument(
        "--compare",
        dest="repeats",
        nargs="?",
        type=_checked(
            int,
            "a number of runs",
            f"; a prompt goes before it, or after --compare={DEFAULT_REPEATS}",
        ),
        const=DEFAULT_REPEATS,
        metavar="REPEATS",
        help="afterwards, time speculative against plain decoding, REPEATS runs of each (default: "
        f"no comparison; {DEFAULT_REPEATS} runs if no number is given)",
    )


def _add_bench(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--draft",
        dest="drafters",
        action="append",
        metavar="DIR|eagle3[:DIR]|ngram|model",
        help="where drafts come from, as for generate; may be given several times (default: "
        "ngram, and model too without --target)",
    )
    command.add_argument(
        "-t",
        "--temperature",
        dest="temperatures",
        type=_numbers(float, "numbers", "0,0.8"),
        default=",".join(f"{t:g}" for t in BENCH_TEMPERATURES),
        metavar="T,T,...",
        help="0 is greedy",
    )
    command.add_argument(
        "-k",
        "--num-speculative-tokens",
        dest="ks",
        type=_numbers(int, "integers", "2,4,6"),
        default=",".join(map(str, BENCH_K)),
        metavar="K,K,...",
        help="drafts per step",
    )
    command.add_argument(
        "--repeats",
        type=int,
        default=BENCH_REPEATS,
        metavar="N",
        help="timed runs of each kind; at a temperature, each has a seed of its own",
    )


def _add_serve(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; any but a loopback address needs a key",
    )
    command.add_argument(
        "--port", type=int, default=8000, metavar="N", help="0 for one that is free"
    )
    command.add_argument(
        "--num-slots", type=int, default=8, metavar="N", help="requests decoded at a time"
    )
    command.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="tokens of a request, prompt included (default: "
        f"{SERVED_LENGTH}, or what the target was made for)",
    )
    command.add_argument(
        "--max-queue",
        type=int,
        default=64,
        metavar="N",
        help="requests that may wait; more are answered with status 429",
    )
    command.add_argument(
        "--max-logprobs",
        type=int,
        default=5,
        metavar="N",
        help="alternatives of a token that a client may ask for; 0 turns log-probabilities off, "
        "which makes steps faster",
    )
    command.add_argument(
        "--model-name",
        metavar="NAME",
        help="what clients call the model (default: the name of the target's directory)",
    )
    command.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"holds the key that clients have to send (default: ${API_KEY_VARIABLE} if it is set)",
    )


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


def _check(given: dict[str, Any]) -> Options:
    method, chat = given["method"], given.get("chat", False)
    synthetic = [name for name in ("acceptance_length", "acceptance_rates") if name in given]
    if synthetic and method != "synthetic":
        raise ValueError(f"{_option(synthetic[0])} needs --method synthetic")
    if method == "synthetic" and len(synthetic) != 1:
        raise ValueError(
            "--method synthetic needs one of --acceptance-length and --acceptance-rates"
        )
    for temperature in given.get("temperatures", ()):
        TEMPERATURE.range.check("--temperature", temperature)
    prompts = tuple(given.get("prompts", ()))
    require(all(prompts), "the prompt", "not be empty", "")
    if chat and "target" not in given:
        raise ValueError("--chat needs --target, whose tokenizer has the chat template")
    drafters = _drafters(given)
    ks = given.get("ks") or (LOOKUP_K if drafters == ("ngram",) else DEFAULT_K,)
    repeats = "--repeats" if given["command"] == "bench" else "--compare"
    for name, option, least, most in (
        ("seed", "--seed", 0, 2**32 - 1),
        ("max_new_tokens", "--max-new-tokens", 1, None),
        ("repeats", repeats, 1, None),
    ):
        if given.get(name) is not None:
            check_int(option, given[name], least, most)
    made = dict(
        prompts=prompts,
        prompt_files=tuple(given.get("prompt_files", ())),
        drafters=drafters,
        shows_prompts=given.get("shows_prompts", True) and not chat,
        configs=tuple(_config(given, k) for k in dict.fromkeys(ks)),
        request=_request(given),
        server=_server(given) if given["command"] == "serve" else None,
    )
    if "temperatures" in given:
        made["temperatures"] = tuple(dict.fromkeys(given["temperatures"]))
    return Options(**_fields_of(Options, given | made))


def _fields_of(cls: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(cls)]
    return {name: values[name] for name in names if name in values}


def _server(given: dict[str, Any]) -> ServerOptions:
    for name, least, most in (
        ("port", 0, 65535),
        ("num_slots", 1, 4096),
        ("max_length", 2, 2**20),
        ("max_queue", 1, 2**20),
        ("max_logprobs", 0, 20),
    ):
        if name in given:
            check_int(_option(name), given[name], least, most)
    return ServerOptions(**_fields_of(ServerOptions, given))


def _drafters(given: dict[str, Any]) -> tuple[str, ...]:
    """Where drafts come from; a checkpoint can draft only for another checkpoint."""
    has_target = "target" in given
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
    for name in ("dtype", "scan_layers"):
        if name in given and not has_target:
            raise ValueError(f"{_option(name)} needs --target")
    return drafters


def _option(field: str) -> str:
    """The option of the command line that sets a field."""
    return "--" + field.removeprefix("synthetic_").replace("_", "-")


@contextlib.contextmanager
def _errors_of_options(*names: str) -> Iterator[None]:
    """Errors name the options of the command line, not these fields."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        for name in names:
            message = message.replace(name, _option(name))
        raise ValueError(message) from None


def _request(given: dict[str, Any]) -> RequestOptions:
    """The options of the requests; errors name the options of the command line."""
    names = [one.name for one in _REQUEST_OPTIONS]
    with _errors_of_options(*names):
        return RequestOptions(**{name: given[name] for name in names if name in given})


def _config(given: dict[str, Any], k: int) -> SpecDecodeConfig:
    """The config; its errors name the options of the command line."""
    names = "num_speculative_tokens", "synthetic_acceptance_rates", "synthetic_acceptance_length"
    with _errors_of_options(*names):
        return SpecDecodeConfig(
            num_speculative_tokens=k,
            rejection_sample_method=given["method"],
            draft_sample_method=given["draft_sample_method"],
            synthetic_acceptance_rates=given.get("acceptance_rates"),
            synthetic_acceptance_length=given.get("acceptance_length"),
        )
