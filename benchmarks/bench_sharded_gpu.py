"""`rejection_sample` over a split vocabulary, against one GPU and against gathering first.

For each batch size: microseconds per call in one compiled chain of many calls, each fed by the one
before (see `chain.py` for the traps). All ways take turns in one process:

- "split": logits stay where they are, `VerifySharding(vocab_axis=...)`;
- "gathered": an all-gather of target and draft logits, then verification on every device, by the
  implementation that is the default there;
- "one": all logits on one device;
- "empty": the collectives of "split" and nothing else;
- "split in graphs", and so on: the same in CUDA graphs.

The library itself gathers the rows of a few requests (`MOST_GATHERED`): where "gathered" and
"split" cross. Here "split" never gathers.

What is compared also gives the same tokens: "split" against "one", with the same keys.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import disagreements
import inputs as inputs_lib
import jax
import jax.numpy as jnp
import measure
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from verify_cases import STANDARD, Case

import jax_specdec as sd
from jax_specdec._src.rows.tiles import tiles_of_part
from jax_specdec._src.verify import sharding

AXIS = "vocabulary"
KINDS = "split", "gathered", "one", "empty"
WAYS = *KINDS, *(f"{kind} in graphs" for kind in KINDS)
GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,COLLECTIVES"
COMPILER_OPTIONS = {
    "": {},
    "graphs": {"xla_gpu_enable_command_buffer": GRAPHS, "xla_gpu_graph_min_graph_size": 1},
}
IDENTITY = ("kind", "name", "batch", "k", "vocabulary", "dtype", "devices", "way")
FIRST_SEED = 9
LEAST_CALLS = {64: 400, 256: 200}
TINY_CALLS = 4


def cases(tiny: bool, batches: list[int]) -> list[Case]:
    return [Case(STANDARD, batch, **({"vocabulary": 4096} if tiny else {})) for batch in batches]


def gathered(logits: jax.Array, drafts: sd.Drafts) -> tuple[jax.Array, sd.Drafts]:
    """Whole rows on every device."""
    gather = functools.partial(lax.all_gather, axis_name=AXIS, axis=1, tiled=True)
    stored = dataclasses.replace(drafts.distribution, logits=gather(drafts.distribution.logits))
    return gather(logits), dataclasses.replace(drafts, distribution=stored)


def call(way: str, case: Case, inputs: Any, temperature: Any, keys: Any, positions: Any) -> Any:
    """One verification on one device's part of the inputs."""
    logits, drafts = gathered(*inputs) if way == "gathered" else inputs
    return sd.rejection_sample(
        logits,
        drafts,
        sampling=sd.SamplingParams(temperature),
        keys=keys,
        positions=positions,
        config=case.config,
        sharding=sd.VerifySharding(vocab_axis=AXIS if way == "split" else None),
    )


def empty_call(case: Case, last: jax.Array) -> jax.Array:
    """Messages of the sizes of those of "split", each made from the one before."""

    def words(x: jax.Array, count: int) -> jax.Array:  # no two alike: equal ones are not sent
        return x[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]

    def gathered(x: jax.Array, count: int) -> jax.Array:
        return lax.all_gather(words(x, count), AXIS).sum((0, 2), dtype=jnp.int32)

    parts = lax.axis_size(AXIS)
    masses = 2 * tiles_of_part(case.vocabulary // parts, parts)
    statistics = gathered(last, 4 * (case.k + 1) + case.k)
    return lax.rem(lax.psum(gathered(statistics, masses), AXIS), jnp.int32(5))


def chain(way: str, case: Case, trips: int, sets: Any, temperature: Any, key_data: Any) -> Any:
    """``trips * len(sets)`` calls: tokens emitted and sums of first tokens, per request."""

    def trip(index: jax.Array, state: Any) -> Any:
        last, emitted, first = state
        keys = jax.random.wrap_key_data(key_data ^ jnp.full_like(key_data, index))
        for inputs in sets:
            if way == "empty":
                last = empty_call(case, last)
                continue
            # Else XLA would read logits, and gather them, once before the loop.
            inputs, _ = lax.optimization_barrier((inputs, last))
            output = call(way, case, inputs, temperature, keys, last)
            last = output.num_emitted
            if way == "split":  # where tokens come by an exchange of their own, which is to be over
                last += (jnp.min(output.token_ids, axis=1) < -1).astype(jnp.int32)
            emitted, first = emitted + last, first + output.token_ids[:, 0]
        return last, emitted, first

    zero = jnp.zeros((case.batch,), jnp.int32)
    return lax.fori_loop(0, trips, trip, (zero, zero, zero))


class Study:
    """The programs of one case, compiled, and what they run on."""

    def __init__(self, case: Case, mesh: Mesh, options: Any) -> None:
        self.case, self.mesh, self.options = case, mesh, options
        sets = [
            inputs_lib.make(case, FIRST_SEED + i, with_probs=False)[:2]
            for i in range(options.inputs)
        ]
        self.rest = (
            jnp.full((case.batch,), case.temperature, jnp.float32),
            jnp.asarray(np.random.default_rng(0).integers(2**32, size=(case.batch, 2)), jnp.uint32),
        )
        least = TINY_CALLS if options.tiny else LEAST_CALLS.get(case.batch, 600)
        self.trips = math.ceil(least / options.inputs)
        self.sets = {"one": sets, "split": [self._split(inputs) for inputs in sets]}
        compared = ("split", "one") if options.draws else ()
        self.chains = self._compiled(self._compile_chain, options.ways)
        self.once = self._compiled(self._compile_once, compared)

    def _compiled(self, compile_: Callable[[str], Any], ways: Sequence[str]) -> dict[str, Any]:
        """Returns the programs that compile; one that does not must not cost the others."""
        done = {}
        for way in ways:
            try:
                done[way] = compile_(way)
            except Exception:
                print(f"{self.case.label}, {way}:", traceback.format_exc(limit=-2), flush=True)
        return done

    def run(self, way: str) -> Any:
        return self.chains[way](self._sets(way), *self.rest)

    def rows(self) -> list[dict[str, Any]]:
        samples = measure.alternate(
            {way: functools.partial(self.run, way) for way in self.chains}, self.options.repeats, 1
        )
        calls = self.trips * self.options.inputs
        return [
            self._row("time", way=way)
            | {
                "call_us": measure.median(seconds) / calls * 1e6,
                "calls": calls,
                "emitted_per_request": int(self.run(way)[1].sum()) / calls / self.case.batch,
                "collective_bytes": measure.collectives(self.chains[way].as_text()),
                "samples": seconds,
            }
            for way, seconds in samples.items()
        ]

    def disagreements(self) -> dict[str, Any]:
        """Requests that "split" and "one" answer differently, with their margins."""
        margins, decisions = [], 0
        for draw in range(self.options.draws):
            index, keys = (
                draw % self.options.inputs,
                jax.random.split(jax.random.key(draw), self.case.batch),
            )
            one, split = (
                jax.device_get(self.once[way](self._sets(way)[index], self.rest[0], keys))
                for way in ("one", "split")
            )
            differs = (one.token_ids != split.token_ids).any(axis=1) | (one.status != split.status)
            inputs = self.sets["one"][index]
            margins += [
                disagreements.margin(self.case, *inputs, keys, int(b))
                for b in np.flatnonzero(differs)
            ]
            decisions += int((one.num_emitted + 2).sum())  # drafts looked at, tile and token
        return self._row("disagreements", way="split and one") | {
            "draws": self.options.draws,
            "decisions": decisions,
            "margins": margins,
            "ok": all(m <= disagreements.LARGEST_MARGIN for m in margins),
        }

    def _row(self, kind: str, way: str) -> dict[str, Any]:
        case = self.case
        shape = {"name": case.name, "batch": case.batch, "k": case.k}
        shape |= {"vocabulary": case.vocabulary, "dtype": case.dtype, "devices": self.mesh.size}
        return {"kind": kind, **shape, "way": way}

    def _split(self, inputs: Any) -> Any:
        return jax.tree.map(
            lambda x, spec: jax.device_put(x, NamedSharding(self.mesh, spec)), inputs, specs(inputs)
        )

    def _sets(self, way: str) -> Any:
        return self.sets["one" if way.startswith("one") else "split"]

    def _mapped(self, function: Any, way: str, inputs_specs: Any, *rest: P) -> Any:
        if way == "one":
            return jax.jit(function)
        return jax.jit(
            jax.shard_map(
                function,
                mesh=self.mesh,
                in_specs=(inputs_specs, *rest),
                out_specs=P(),
                check_vma=False,  # kernels say nothing of it
            )
        )

    def _compile_chain(self, way: str) -> Any:
        sets = self._sets(way)
        kind, _, options = way.partition(" in ")
        function = functools.partial(chain, kind, self.case, self.trips)
        mapped = self._mapped(function, kind, [specs(inputs) for inputs in sets], P(), P())
        return mapped.lower(sets, *self.rest).compile(COMPILER_OPTIONS[options])

    def _compile_once(self, way: str) -> Any:
        zero = jnp.zeros((self.case.batch,), jnp.int32)

        def function(inputs: Any, temperature: Any, keys: Any) -> Any:
            return call(way, self.case, inputs, temperature, keys, zero)

        inputs = self._sets(way)[0]
        keys = jax.random.split(jax.random.key(0), self.case.batch)
        mapped = self._mapped(function, way, specs(inputs), P(), P())
        return mapped.lower(inputs, self.rest[0], keys).compile()


def specs(inputs: Any) -> Any:
    """Logits split over the vocabulary; everything else on every device."""
    return jax.tree.map(lambda x: P(None, AXIS) if x.ndim == 2 else P(), inputs)


def main(command_line: list[str] | None = None) -> int:
    parser = measure.gpu_parser(__doc__, repeats=7, seconds=200)
    add = parser.add_argument
    add("--devices", type=int, help="of this machine; all of them if not given")
    add("--batches", type=int, nargs="+", default=[1, 4, 8, 16, 64, 256])
    add("--ways", nargs="+", choices=WAYS, default=WAYS)
    add("--draws", type=int, default=20, help="batches compared; 0 for none")
    add("--inputs", type=int, default=2, help="different inputs; each is a call to compile")
    options = parser.parse_args(command_line)
    clock = measure.begin(options)
    if clock is None:
        return 0
    devices = jax.devices()[: options.devices]
    if not options.tiny and len(devices) < 2:
        print("nothing to measure, it takes two GPUs")
        return 0
    results = measure.Results("sharded_gpu", IDENTITY, options.output, devices=len(devices))
    mesh = Mesh(np.array(devices), (AXIS,))

    def study(case: Case) -> list[dict[str, Any]]:
        found = Study(case, mesh, options)
        return found.rows() + ([found.disagreements()] if len(found.once) == 2 else [])

    chosen = {case.label: (case,) for case in cases(options.tiny, options.batches)}
    with mock.patch.object(sharding, "MOST_GATHERED", 0):  # nothing is gathered by "split"
        status = measure.measure_cells(results, clock, study, chosen)
    shown = [
        {
            "B": row["batch"],
            "way": row["way"],
            "us a call": f"{row['call_us']:.1f}",
            "emitted": f"{row['emitted_per_request']:.2f}",
        }
        for row in results.rows
        if row["kind"] == "time"
    ]
    measure.show(f"{len(devices)} x {results.run['device']}", shown)
    bad = [row for row in results.rows if not row.get("ok", True)]
    for row in bad:
        print(f"FAILED: B = {row['batch']}: margins {row['margins']}")
    return 1 if bad or not shown else status


if __name__ == "__main__":
    raise SystemExit(main())
