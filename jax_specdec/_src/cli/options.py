"""The options of `jax-specdec generate`, checked before anything runs."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, get_args

from jax_specdec._src.config import RejectionSampleMethod, SpecDecodeConfig
from jax_specdec._src.serving.options import RequestOptions

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Options:
    """A request to a target and a drafter.

    Attributes:
      prompt: the text to continue.
      target: directory of the target's checkpoint; None for the embedded target.
      draft: "model" (the embedded draft model), "ngram", or the directory of a checkpoint.
      dtype: compute dtype of checkpoints; None for the stored one.
      temperature: 0 is greedy.
      max_new_tokens: budget.
      seed: of the sampling noise.
      json: print one JSON object instead of text and table.
      repeats: timed runs of each kind of decoding.
      config: how drafts are made and verified.
      request: what else the tokens are sampled by.
    """

    prompt: str
    target: Path | None
    draft: str
    dtype: str | None
    temperature: float
    max_new_tokens: int
    seed: int
    json: bool
    repeats: int
    config: SpecDecodeConfig
    request: RequestOptions


_REQUEST_OPTIONS = {
    "min_p": (float, "leave out tokens less likely than this times the likeliest"),
    "top_k": (int, "only the k likeliest tokens; 0 for all"),
    "top_p": (float, "only the likeliest tokens that together have this probability"),
    "frequency_penalty": (float, "off a token's logit for every occurrence in the output"),
    "presence_penalty": (float, "off the logit of a token that occurs in the output"),
    "repetition_penalty": (float, "divides positive logits of tokens so far, multiplies others"),
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parse(arguments: Sequence[str] | None, version: str) -> Options:
    """Parse a command line; exits with code 2 and one line where it makes no sense.

    Args:
      arguments: without the program's name; None for ``sys.argv``.
      version: what `--version` prints.

    Returns:
      Checked options.
    """
    parser = _Parser(prog="jax-specdec", description="Speculative decoding for JAX.")
    parser.add_argument("--version", action="version", version=f"jax-specdec {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser(
        "generate",
        help="continue a text, and compare with plain decoding",
        description="Continue a text with the embedded models, or with Hugging Face checkpoints "
        "of the Llama, Qwen2 and Qwen3 families, and compare with plain decoding.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_options(command)
    values = parser.parse_args(arguments)
    try:
        return _check(values)
    except (TypeError, ValueError) as error:
        command.error(str(error))


def _add_options(command: argparse.ArgumentParser) -> None:
    command.set_defaults(target=None, draft=None, dtype=None)
    command.add_argument(
        "prompt", help="the text to continue; for the embedded models, Python source by preference"
    )
    command.add_argument(
        "--target",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="the target's checkpoint (default: the embedded target)",
    )
    command.add_argument(
        "--draft",
        default=argparse.SUPPRESS,
        metavar="DIR|ngram|model",
        help="where drafts come from: a checkpoint, lookup in the text so far (default with "
        "--target), or the embedded draft model (default without)",
    )
    command.add_argument(
        "--dtype",
        choices=DTYPES,
        default=argparse.SUPPRESS,
        help="compute dtype of checkpoints (default: as stored)",
    )
    command.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    for name, (kind, help_) in _REQUEST_OPTIONS.items():
        command.add_argument(
            "--" + name.replace("_", "-"),
            type=kind,
            default=getattr(RequestOptions, name),
            metavar=kind.__name__[0].upper(),
            help=help_,
        )
    command.add_argument(
        "--num-speculative-tokens", type=int, default=6, metavar="K", help="drafts per step"
    )
    command.add_argument(
        "--method",
        choices=get_args(RejectionSampleMethod),
        default="standard",
        help="block judges the drafts of a step jointly and keeps more, as exactly; synthetic "
        "accepts at given rates, whatever the models say",
    )
    command.add_argument(
        "--acceptance-length",
        type=float,
        metavar="L",
        help="synthetic: mean tokens per step, 1 to K+1",
    )
    command.add_argument(
        "--acceptance-rates",
        type=_rates,
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
        "--max-new-tokens",
        type=int,
        default=256,
        metavar="N",
        help="budget; a token of the embedded models is a byte",
    )
    command.add_argument("--seed", type=int, default=0, help="seed of the sampling noise")
    command.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="timed runs of each kind"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object instead")


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        message = f"must be numbers separated by commas, such as 0.9,0.5,0.1, but is {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def _check(values: argparse.Namespace) -> Options:
    for name, used in (
        ("--acceptance-length", values.acceptance_length is not None),
        ("--acceptance-rates", values.acceptance_rates is not None),
    ):
        if used and values.method != "synthetic":
            raise ValueError(f"{name} needs --method synthetic")
    if values.method == "synthetic" and (values.acceptance_length is None) == (
        values.acceptance_rates is None
    ):
        raise ValueError(
            "--method synthetic needs one of --acceptance-length and --acceptance-rates"
        )
    if not (math.isfinite(values.temperature) and values.temperature >= 0):
        raise ValueError(
            f"--temperature must be finite and not negative, but is {values.temperature}"
        )
    if not values.prompt:
        raise ValueError("the prompt must not be empty")
    draft = _draft(values)
    if not 0 <= values.seed < 2**32:
        raise ValueError(f"--seed must be in [0, 2**32), but is {values.seed}")
    if values.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, but is {values.repeats}")
    return Options(
        prompt=values.prompt,
        target=values.target,
        draft=draft,
        dtype=values.dtype,
        temperature=values.temperature,
        max_new_tokens=values.max_new_tokens,
        seed=values.seed,
        json=values.json,
        repeats=values.repeats,
        config=_config(values),
        request=_request(values),
    )


def _draft(values: argparse.Namespace) -> str:
    """Where drafts come from; a checkpoint as the drafter needs one as the target."""
    draft: str | None = values.draft
    if values.target is None:
        if draft not in (None, "model", "ngram"):
            raise ValueError(f"--draft must be model or ngram without --target, but is {draft!r}")
        if values.dtype is not None:
            raise ValueError("--dtype needs --target")
        return draft or "model"
    if draft == "model":
        raise ValueError("--draft must be a directory or ngram with --target, but is 'model'")
    return "ngram" if draft is None else draft


def _request(values: argparse.Namespace) -> RequestOptions:
    """The request's options; errors in the words of the command line."""
    try:
        return RequestOptions(**{name: getattr(values, name) for name in _REQUEST_OPTIONS})
    except ValueError as error:
        name, rule = str(error).split(" ", 1)
        rule = rule.replace("but it is", "but is")
        raise ValueError(f"--{name.replace('_', '-')} {rule}") from None


def _config(values: argparse.Namespace) -> SpecDecodeConfig:
    """The config; its errors in the words of the command line."""
    try:
        return SpecDecodeConfig(
            num_speculative_tokens=values.num_speculative_tokens,
            rejection_sample_method=values.method,
            draft_sample_method=values.draft_sample_method,
            synthetic_acceptance_rates=values.acceptance_rates,
            synthetic_acceptance_length=values.acceptance_length,
        )
    except ValueError as error:
        message = str(error)
        for field in ("num_speculative_tokens", "acceptance_rates", "acceptance_length"):
            option = "--" + field.replace("_", "-")
            message = message.replace(f"synthetic_{field}", option).replace(field, option)
        raise ValueError(message) from None
