"""The drafters of the embedded target: how many drafts are accepted, and what that gains.

    python benchmarks/bench_drafters.py

`jax-specdec bench` on functions of held-out files as one batch, those of
`training/evaluate_embedded.py` and the running Python.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile

import measure

import jax_specdec as sd

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "training"))

WEIGHTS = pathlib.Path(sd.__file__).parent / "lm" / "weights"


def main(command_line: list[str] | None = None) -> None:
    import stdlib_text

    parser = measure.parser(__doc__, repeats=3)
    parser.add_argument("--prompts", type=int, default=24, help="functions")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("-k", default="2,4,6", help="numbers of drafts")
    parser.add_argument("-t", default="0,0.8", help="temperatures")
    parser.add_argument("--draft", action="append", help="drafters (default: all that are shipped)")
    options = parser.parse_args(command_line)
    shipped = ["ngram", "model", "eagle3", f"eagle3:{WEIGHTS / 'eagle3-64'}", "dflash", "dspark"]
    command = [sys.executable, "-m", "jax_specdec", "bench", "--json"]
    command += [f"--draft={draft}" for draft in options.draft or shipped]
    command += ["-k", options.k, "-t", options.t, "--repeats", str(options.repeats)]
    command += ["-n", str(options.max_new_tokens)]
    with tempfile.TemporaryDirectory() as folder:
        functions = stdlib_text.function_heads(stdlib_text.read_text().held_out, options.prompts)
        for i, (context, head) in enumerate(functions):
            path = pathlib.Path(folder, f"{i}.txt")
            path.write_text(context + head, encoding="utf-8")
            command += ["--prompt-file", str(path)]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    results = measure.Results("drafters_cpu")
    results.add(found["rows"])
    measure.show(
        f"{options.prompts} functions",
        [
            {
                "drafter": row["draft"] or "plain",
                "K": "" if row["config"] is None else row["config"]["num_speculative_tokens"],
                "T": f"{row['temperature']:g}",
                "acceptance length": f"{row['mean_acceptance_length']:.2f}",
                "speed-up": f"{row['speedup']:.2f}",
            }
            for row in results.rows
        ],
    )


if __name__ == "__main__":
    main()
