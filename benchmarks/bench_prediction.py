"""Tokens per pass of a target that edits a file, with and without the file as its prediction.

    python benchmarks/bench_prediction.py --target DIR [--file FILE] [--edits "Rename ..."]

The file stands in the prompt, and the model is asked to write it again with one change. Each text
is decoded once, greedily, by n-gram lookup with the file as its prediction. It is the target's own,
so what the target accepts of the drafts of any lookup follows from it: rows of way "replayed" take
the steps again without the target. `--check` decodes without a prediction too, and compares texts.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.lm.loading import Models, TargetText, load_models, read_target_text

ROOT = pathlib.Path(__file__).parents[1]
FILE = ROOT / "jax_specdec" / "lm" / "text" / "chat.py"
EDITS = (
    "Rename the variable `messages` to `conversation` everywhere.",
    "Rename the function `check_messages` to `validate_messages` everywhere.",
    "Remove every docstring.",
    "Add a function `count_messages(messages)` with type hints, which returns their number.",
)
LOOKUPS = {"ngram": lm.NGramDrafter(), "suffix": lm.SuffixDrafter()}
Row = dict[str, Any]
IDENTITY = ("file", "edit", "drafter", "k", "prediction", "way")


def replayed(
    drafter: lm.Drafter, prompt: list[int], text: list[int], k: int, prediction: list[int] | None
) -> int:
    """Returns how many passes a greedy text takes: those whose drafts agree are one pass."""
    config = sd.SpecDecodeConfig(num_speculative_tokens=k)
    whole = np.array([*prompt, *text, *[0] * (k + 1)], np.int32)[None]
    given: dict[str, Any] = {}
    if prediction is not None:
        given["predictions"] = jnp.asarray(prediction, jnp.int32)[None]
        given["prompt_lengths"] = jnp.full((1,), len(prompt), jnp.int32)
    context = lm.DraftContext(
        token_ids=jnp.asarray(whole),
        lengths=jnp.zeros((1,), jnp.int32),
        sampling=sd.SamplingParams(jnp.zeros((1,))),
        keys=jax.random.split(jax.random.key(0), 1),
        config=config,
        **given,
    )

    @jax.jit
    def drafts(context: lm.DraftContext, length: jax.Array) -> jax.Array:
        # What comes after the text so far is not known yet.
        is_known = jnp.arange(whole.shape[1])[None, :] < length[:, None]
        ids = jnp.where(is_known, context.token_ids, 0)
        context = dataclasses.replace(context, token_ids=ids, lengths=length)
        return drafter.propose(None, context, (), None)[0].token_ids

    end = len(prompt) + len(text)
    at = len(prompt)
    passes = 0
    while at < end:
        proposed = np.asarray(drafts(context, jnp.full((1,), at, jnp.int32)))[0]
        agrees = proposed == whole[0, at : at + k]
        accepted = int(np.cumprod(agrees & (proposed >= 0)).sum())
        at += accepted + 1
        passes += 1
    return passes


@dataclasses.dataclass(frozen=True)
class Case:
    """What decodes, and the file that is edited."""

    models: Models
    prediction: list[int]
    budget: int
    ks: list[int]

    def prompt(self, file: str, edit: str) -> list[int]:
        """Returns the ids of a request to edit; without a template, of the file alone."""
        text = self.models.text
        if text.tokenizer is None:
            return text.encode(file)
        asked = f"```python\n{file}```\n\n{edit} Write the whole file again, in one block of code."
        return text.tokenizer.encode_chat([{"role": "user", "content": asked}])

    def decode(self, prompt: list[int], prediction: list[int] | None) -> tuple[list[int], Row]:
        """Returns a text, and the row of it."""
        begin = time.perf_counter()
        k = max(self.ks)
        # Step by step: XLA moves conversions of weights out of a loop, and keeps all of them.
        steps = lm.generate_stream(
            *self.models.target,
            [prompt],
            drafter=LOOKUPS["ngram"],
            config=sd.SpecDecodeConfig(num_speculative_tokens=k),
            max_new_tokens=self.budget,
            stop_token_ids=self.models.text.stop_token_ids,
            prediction=prediction,
        )
        text: list[int] = []
        passes = 0
        for step in steps:
            text += step.token_ids[0, : step.num_kept[0]].tolist()
            passes += 1
        seconds = round(time.perf_counter() - begin, 1)  # compiling and the prompt, too
        return text, row_of("ngram", k, prediction, "decoded", len(text), passes, seconds=seconds)

    def rows(self, prompt: list[int], *, check: bool) -> Iterator[Row]:
        """Yields the rows of one edit."""
        text, row = self.decode(prompt, self.prediction)
        yield {**row, "text": text_of(self.models.text, text)}
        if check:
            other, row = self.decode(prompt, None)
            assert other == text, "a text depends on its prediction"
            yield row
        for name, lookup in LOOKUPS.items():
            for k in self.ks:
                for prediction in (None, self.prediction):
                    passes = replayed(lookup, prompt, text, k, prediction)
                    yield row_of(name, k, prediction, "replayed", len(text), passes)


def row_of(
    drafter: str,
    k: int,
    prediction: list[int] | None,
    way: str,
    num_tokens: int,
    passes: int,
    **more: Any,
) -> Row:
    return {
        "drafter": drafter,
        "k": k,
        "prediction": prediction is not None,
        "way": way,
        "num_tokens": num_tokens,
        "passes": passes,
        "tokens_per_pass": round(num_tokens / passes, 3),
        **more,
    }


def text_of(text: TargetText, token_ids: list[int]) -> str:
    """Returns what tokens stand for."""
    if text.tokenizer is None:
        return lm.decode_bytes(token_ids)
    return text.tokenizer.decode(token_ids)


def main(arguments: list[str] | None = None) -> None:
    parser = measure.parser(__doc__, repeats=1)
    parser.add_argument("--target", type=pathlib.Path)
    parser.add_argument("--file", type=pathlib.Path, default=FILE)
    parser.add_argument("--edits", nargs="+", default=EDITS)
    parser.add_argument("--max-new-tokens", type=int, help="default: those of the file, and 100")
    parser.add_argument("-k", type=int, nargs="+", default=[4, 8, 16], help="the largest decodes")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    text = read_target_text(options.target)
    file = options.file.read_text()
    prediction = text.encode(file, add_special_tokens=False)
    budget = options.max_new_tokens or len(prediction) + 100
    case = Case(load_models(text, ["ngram"]), prediction, budget, options.k)
    name = "embedded" if options.target is None else options.target.name
    results = measure.Results(f"prediction_{name}", IDENTITY, lines=file.count("\n"))
    for edit in options.edits:
        for row in case.rows(case.prompt(file, edit), check=options.check):
            results.add([{"file": options.file.name, "edit": edit, **row}])
    shown = ("edit", "drafter", "k", "prediction", "way", "num_tokens", "tokens_per_pass")
    measure.show("tokens per pass", [{x: row[x] for x in shown} for row in results.rows])


if __name__ == "__main__":
    main()
