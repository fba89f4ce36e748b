"""The options of `jax-specdec generate`, checked before anything runs."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from typing import NoReturn

from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.models.bytes import encode

MAX_LENGTH = 1024
"""Longest sequence of the embedded models, prompt included."""


@dataclasses.dataclass(frozen=True)
class Options:
    """A request to the embedded pair of models.

    Attributes:
      prompt: the text to continue.
      draft: "model" or "ngram".
      temperature: 0 is greedy.
      max_new_tokens: budget; a token is a byte.
      seed: of the sampling noise.
      json: print one JSON object instead of text and table.
      repeats: timed runs of each kind of decoding.
      config: how drafts are made and verified.
    """

    prompt: str
    draft: str
    temperature: float
    max_new_tokens: int
    seed: int
    json: bool
    repeats: int
    config: SpecDecodeConfig


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
        help="continue a text with the embedded models, and compare with plain decoding",
        description="Continue a text with the embedded models, and compare with plain decoding.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_options(command)
    values = parser.parse_args(arguments)
    try:
        return _check(values)
    except (TypeError, ValueError) as error:
        command.error(str(error))


def _add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("prompt", help="the text to continue, Python source by preference")
    command.add_argument(
        "--draft", choices=("model", "ngram"), default="model", help="where drafts come from"
    )
    command.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    command.add_argument(
        "--num-speculative-tokens", type=int, default=6, metavar="K", help="drafts per step"
    )
    command.add_argument(
        "--method",
        choices=("standard", "synthetic"),
        default="standard",
        help="synthetic accepts at given rates, whatever the models say",
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
        "--max-new-tokens", type=int, default=256, metavar="N", help="budget; a token is a byte"
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
    room = MAX_LENGTH - len(encode(values.prompt))
    if not values.prompt:
        raise ValueError("the prompt must not be empty")
    if not 1 <= values.max_new_tokens <= room:
        raise ValueError(
            f"--max-new-tokens must be in [1, {room}], which is {MAX_LENGTH} less the prompt, but "
            f"is {values.max_new_tokens}"
            if room > 0
            else f"the prompt must be shorter than {MAX_LENGTH} bytes, but has {MAX_LENGTH - room}"
        )
    if not 0 <= values.seed < 2**32:
        raise ValueError(f"--seed must be in [0, 2**32), but is {values.seed}")
    if values.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, but is {values.repeats}")
    return Options(
        prompt=values.prompt,
        draft=values.draft,
        temperature=values.temperature,
        max_new_tokens=values.max_new_tokens,
        seed=values.seed,
        json=values.json,
        repeats=values.repeats,
        config=_config(values),
    )


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
