"""`rejection_sample` and vLLM's rejection sampler on one GPU, in one process, on the same logits.

Needs PyTorch, Triton, and a folder with files of vLLM's wheel (`vllm_sampler.FILES`; README.md says
how to get them). The ways:

- "ours": one call, from bfloat16 logits, keys and temperatures to token ids. The drafter stored
  each row's log-normalizer, as drafters here do;
- "ours, no normalizer": the same from draft logits alone, which is what vLLM is given;
- "xla": "ours" without the kernel;
- "vllm": all that `RejectionSampler.__call__` of vLLM's second model runner launches between the
  model's logits and token ids: draft ids gathered; at a temperature other than 1 the logits copied
  to float32 and divided by it; offsets of the chunk; the four kernels of `rejection_sample`
  (maxima and sums of all rows by block, acceptance, Gumbel noise and argmax by block, the token
  put into place); counts. No request asks for log-probabilities, penalties, top-k and so on;
- "vllm, rejection_sample": those four kernels alone, on logits that are divided already.

Ours are compiled chains of calls (`chain.py`), which XLA puts into CUDA graphs as it does by
default. vLLM's calls are captured in one CUDA graph, which is replayed; vLLM itself launches them
one by one. The sampler of vLLM's first model runner is not measured.

Both are compared with exact probabilities: how often n draft tokens are kept, and the mean
log-probability of the last token.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import pathlib
import traceback
from collections.abc import Callable
from typing import Any

import chain as chain_lib
import inputs as inputs_lib
import jax
import jax.numpy as jnp
import measure
import numpy as np
import plots
import verify_cases
import vllm_sampler
from bench_verify_gpu import CACHE_BYTES, FIRST_SEED, num_inputs, num_laps, num_trips
from verify_cases import Case, Variant

import jax_specdec as sd

OURS = {
    "ours": ("mosaic_gpu", "normalized"),
    "ours, no normalizer": ("mosaic_gpu", "logits"),
    "xla": ("xla", "normalized"),
}
"""Implementation, and what is stored of the draft distributions."""
VLLM, VLLM_KERNELS = "vllm", "vllm, rejection_sample"
IDENTITY = ("kind", "name", "batch", "k", "vocabulary", "dtype", "temperature", "way")
CALLS_PER_GRAPH = 48
LARGEST_Z = 5.0
"""A right sampler exceeds it once in two million comparisons."""


class Ours:
    """One of our ways at one batch size, compiled. The temperature is data, so it serves all."""

    def __init__(self, way: str, case: Case, sets: list[Any], tiny: bool) -> None:
        implementation, distribution = OURS[way]
        self.case = case._replace(distribution=distribution)
        implementation = "xla" if tiny else implementation
        self._variant = Variant(implementation)
        self.inputs = min(len(sets), inputs_of(sets, implementation))
        laps = num_laps(implementation, self.inputs)
        trips = num_trips(case, implementation, self.inputs * laps, tiny)
        self.calls = self.inputs * laps * trips
        static = {"variant": self._variant, "trips": trips, "laps": laps, "kernel_config": None}
        arguments = self.arguments(case.temperature, sets)
        lowered = chain_lib.chain.lower(arguments=arguments, case=self.case, **static)
        self.program = lowered.compile()

    def arguments(self, temperature: float, sets: list[Any]) -> dict[str, Any]:
        """What the program takes, from inputs made for a temperature."""
        case = self.case._replace(temperature=temperature)
        given = [(logits, self._stored(drafts), None) for logits, drafts, _ in sets[: self.inputs]]
        return chain_lib.arguments(case, self._variant, given)

    def _stored(self, drafts: sd.Drafts) -> sd.Drafts:
        if self.case.distribution == "normalized":
            return drafts
        return dataclasses.replace(drafts, distribution=sd.DraftLogits(drafts.distribution.logits))


def inputs_of(sets: list[Any], implementation: str) -> int:
    return num_inputs(sum(x.nbytes for x in jax.tree.leaves(sets[0])), implementation)


class Theirs:
    """Calls of vLLM on the inputs of a case, at other positions in each lap.

    Args:
      module: from `vllm_sampler.load`.
      case: with its temperature.
      sets: inputs, from `make_sets`. Their memory is shared.
      device: of PyTorch.
    """

    def __init__(self, module: Any, case: Case, sets: list[Any], device: Any) -> None:
        import torch

        self.sampler = vllm_sampler.Sampler(
            module, case.batch, case.k, case.vocabulary, case.temperature, device
        )
        self.tensors = []
        for logits, drafts, _ in sets:
            stored = torch.from_dlpack(drafts.distribution.logits)
            self.tensors.append(
                (
                    torch.from_dlpack(logits),
                    stored.view(case.batch, case.k, case.vocabulary),
                    torch.from_dlpack(drafts.token_ids),
                )
            )
        self.inputs = len(sets)
        self._laps = max(1, CALLS_PER_GRAPH // len(sets))

    def calls(self, way: str) -> list[Callable[[], tuple[Any, Any]]]:
        """A list of calls that take turns on the inputs."""
        first = [self.sampler.input_batch(ids) for _, _, ids in self.tensors]
        function, targets = self.sampler.__call__, [logits for logits, _, _ in self.tensors]
        if way == VLLM_KERNELS:
            function = self.sampler.verify_alone
            targets = list(map(self.sampler.processed, targets, first))
        return [
            functools.partial(function, target, draft, self.sampler.input_batch(ids, lap))
            for lap in range(self._laps)
            for target, (_, draft, ids) in zip(targets, self.tensors, strict=True)
        ]


class Replayed:
    """Calls in a CUDA graph, replayed; without a GPU, called."""

    def __init__(self, calls: list[Callable[[], Any]], least_calls: int, on_gpu: bool) -> None:
        import torch

        self.outputs = [call() for call in calls]  # compiles
        self._replay: Callable[[], Any] = lambda: [call() for call in calls]
        self._wait: Callable[[], Any] = lambda: None
        if on_gpu:
            self._wait = torch.cuda.synchronize
            self._wait()
            graph = torch.cuda.CUDAGraph()
            # JAX has threads of its own, which may allocate meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.outputs = [call() for call in calls]
            self._replay = graph.replay
        self._replays = -(-least_calls // len(calls))
        self.calls = self._replays * len(calls)

    def run(self) -> None:
        for _ in range(self._replays):
            self._replay()
        self._wait()

    def emitted_per_request(self) -> float:
        return float(np.mean([count.cpu().numpy() for _, count in self.outputs]))


def make_sets(case: Case) -> list[Any]:
    """As many inputs as any way rotates over."""
    first = inputs_lib.make(case, FIRST_SEED, with_probs=False)
    count = inputs_of([first], "mosaic_gpu")
    rest = (inputs_lib.make(case, FIRST_SEED + i, with_probs=False) for i in range(1, count))
    return jax.block_until_ready([first, *rest])


def fields(case: Case) -> dict[str, Any]:
    """What of a case names a row."""
    names = ("name", "batch", "k", "vocabulary", "dtype", "temperature")
    return {name: getattr(case, name) for name in names}


def time_case(case: Case, ours: dict[str, Ours], module: Any, options: Any) -> list[dict[str, Any]]:
    """Rows of one case: every way in turn."""
    sets = make_sets(case)
    theirs = Theirs(module, case, sets, options.device)
    least = num_trips(case, "mosaic_gpu", 1, options.tiny)
    replayed = {
        way: Replayed(theirs.calls(way), least, options.on_gpu) for way in (VLLM, VLLM_KERNELS)
    }
    given = {way: one.arguments(case.temperature, sets) for way, one in ours.items()}
    totals = {
        way: jax.device_get(one.program(arguments=given[way])[0]) for way, one in ours.items()
    }
    runs: dict[str, Callable[[], Any]] = {
        way: functools.partial(one.program, arguments=given[way]) for way, one in ours.items()
    }
    runs |= {way: one.run for way, one in replayed.items()}
    samples = measure.alternate(runs, options.repeats, warm_up=1)
    set_bytes = sum(x.nbytes for x in jax.tree.leaves(sets[0]))
    rows = []
    for way in runs:
        if way in ours:
            one, total = ours[way], totals[way]
            emitted, rejected = int(total.emitted.sum()), int(total.rejected.sum())
            per_request = emitted / one.calls / case.batch
            count = one.inputs
            must_read = verify_cases.bytes_read(one.case, one.calls, emitted, rejected)
        else:
            one, must_read, count = replayed[way], None, theirs.inputs
            per_request = one.emitted_per_request()
        rows.append(
            {
                "kind": "vllm",
                **fields(case),
                "way": way,
                "inputs": count,
                "fits_cache": count * set_bytes < CACHE_BYTES,
                "calls": one.calls,
                "emitted_per_request": per_request,
                "bytes_read": must_read,
                "call_us": measure.median(samples[way]) / one.calls * 1e6,
                "kernel_us": None,
                "launches": None,
                "samples": samples[way],
            }
        )
    return rows


def add_kernels(
    rows: list[dict[str, Any]], ours: dict[str, Ours], module: Any, options: Any
) -> None:
    """Kernel times of one case's rows: of vLLM's calls, launched one by one."""
    case = Case(**{name: rows[0][name] for name in fields(Case("", 1))})
    sets = make_sets(case)
    theirs = Theirs(module, case, sets, options.device)
    for row in rows:
        way = row["way"]
        if way in ours:
            arguments = {"arguments": ours[way].arguments(case.temperature, sets)}
            kernels, calls = measure.kernel_times(ours[way].program, arguments), ours[way].calls
        else:
            launched = theirs.calls(way)
            kernels, calls = (
                measure.launched_kernels(functools.partial(_launch, launched)),
                len(launched),
            )
        row["kernels"] = {name: [n / calls, us / calls] for name, (n, us) in kernels.items()}
        row["launches"], row["kernel_us"] = map(sum, zip(*row["kernels"].values(), strict=True))


def _launch(calls: list[Callable[[], Any]]) -> None:
    import torch

    for call in calls:
        call()
    torch.cuda.synchronize()


@functools.partial(jax.jit, static_argnames=("k", "implementation"))
def _verify(
    logits: Any,
    drafts: Any,
    temperature: Any,
    keys: Any,
    positions: Any,
    *,
    k: int,
    implementation: str,
) -> sd.RejectionSampleOutput:
    return sd.rejection_sample(
        logits,
        drafts,
        sampling=sd.SamplingParams(temperature),
        keys=keys,
        positions=positions,
        config=sd.SpecDecodeConfig(num_speculative_tokens=k),
        implementation=implementation,
    )


def draw_ours(case: Case, inputs: Any, draws: int, implementation: str) -> tuple[Any, Any]:
    """Token ids ``[draws, B, K+1]`` and counts ``[draws, B]`` of our sampler, at new positions."""
    temperature = jnp.full((case.batch,), case.temperature, jnp.float32)
    keys = jax.random.split(jax.random.key(case.batch), case.batch)  # no noise twice
    outputs = []
    for draw in range(draws):
        positions = jnp.full((case.batch,), draw * (case.k + 1), jnp.int32)
        output = _verify(
            *inputs[:2], temperature, keys, positions, k=case.k, implementation=implementation
        )
        outputs.append((output.token_ids, output.num_emitted))
    token_ids, emitted = zip(*jax.device_get(outputs), strict=True)
    return np.stack(token_ids), np.stack(emitted)


def draw_theirs(theirs: Theirs, draws: int) -> tuple[Any, Any]:
    """The same of vLLM's, on its first inputs."""
    import torch

    logits, stored, ids = theirs.tensors[0]
    batch = theirs.sampler.input_batch(ids)
    outputs = []
    for _ in range(draws):
        outputs.append(theirs.sampler(logits, stored, batch))
        batch.positions += stored.shape[1] + 1
    token_ids, emitted = zip(*outputs, strict=True)
    return torch.stack(token_ids).cpu().numpy(), torch.stack(emitted).cpu().numpy()


@functools.partial(jax.jit, static_argnames=("k",))
def expected(
    target_logits: jax.Array, draft_logits: jax.Array, ids: jax.Array, temperature: Any, *, k: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """What the standard rule says, by softmax of all rows.

    Args:
      target_logits: ``[B*(K+1), V]``.
      draft_logits: ``[B*K, V]``.
      ids: draft tokens ``[B*K]``.
      temperature: of all requests.
      k: K.

    Returns:
      The probability of n kept draft tokens ``[B, K+1]``; of the token after n kept ones, the mean
      and the variance ``[B, K+1]`` of log p; log p ``[B, K+1, V]``.
    """
    rows = target_logits.reshape(-1, k + 1, target_logits.shape[1])
    log_p = jax.nn.log_softmax(rows.astype(jnp.float32) / temperature)
    p = jnp.exp(log_p)
    q = jax.nn.softmax(draft_logits.reshape(-1, k, rows.shape[2]).astype(jnp.float32) / temperature)
    ids = ids.reshape(-1, k, 1)
    p_x, q_x = (jnp.take_along_axis(x, ids, axis=2)[..., 0] for x in (p[:, :k], q))
    accept = jnp.pad(jnp.minimum(1, p_x / q_x), ((0, 0), (0, 1)))
    reached = jnp.cumprod(jnp.pad(accept[:, :k], ((0, 0), (1, 0)), constant_values=1), axis=1)
    weight = jnp.concatenate([jnp.maximum(p[:, :k] - q, 0), p[:, k:]], axis=1)
    weight /= weight.sum(axis=2, keepdims=True)
    finite = jnp.where(weight > 0, log_p, 0)
    mean = (weight * finite).sum(axis=2)
    variance = (weight * (finite - mean[..., None]) ** 2).sum(axis=2)
    return reached * (1 - accept), mean, variance, log_p


def compare(case: Case, inputs: Any, token_ids: Any, emitted: Any) -> dict[str, Any]:
    """How far draws are from what they should be.

    Args:
      case: with its temperature.
      inputs: target logits and drafts that were verified.
      token_ids: ``[draws, B, K+1]``.
      emitted: ``[draws, B]``.

    Returns:
      Mean counts, drawn and expected; standard deviations ``z`` of how often n draft tokens were
      kept, n = 0 to K, and of the sum of log p of the last tokens; whether the kept tokens are the
      draft tokens; ``ok``, whether all of this agrees.
    """
    logits, drafts = inputs[:2]
    probability, mean, variance, log_p = expected(
        logits, drafts.distribution.logits, drafts.token_ids, case.temperature, k=case.k
    )
    draws, kept = len(emitted), emitted - 1
    request = np.broadcast_to(np.arange(case.batch), kept.shape)
    last = np.take_along_axis(token_ids, kept[..., None], axis=2)[..., 0]
    score = np.asarray(log_p[request, kept, last], np.float64)
    probability, mean, variance = (np.asarray(x, np.float64) for x in (probability, mean, variance))
    counts = (kept[..., None] == np.arange(case.k + 1)).sum(axis=(0, 1))
    spread = np.sqrt(draws * (probability * (1 - probability)).sum(axis=0))
    difference = counts - draws * probability.sum(axis=0)
    z = list(difference / np.maximum(spread, 1e-9))
    z.append((score - mean[request, kept]).sum() / np.sqrt(variance[request, kept].sum() + 1e-9))
    is_kept = np.arange(case.k) < kept[..., None]
    ids = np.asarray(drafts.token_ids).reshape(-1, case.k)
    right = bool((token_ids[..., : case.k] == ids)[is_kept].all())
    return {
        "draws": draws,
        "emitted_per_request": float(emitted.mean()),
        "expected": float(1 + (probability * np.arange(case.k + 1)).sum(axis=1).mean()),
        "z": [round(float(x), 2) for x in z],
        "drafts_kept": right,
        "ok": bool(right and np.abs(z).max() < LARGEST_Z),
    }


def agreement(case: Case, module: Any, options: Any) -> list[dict[str, Any]]:
    """Rows that compare both with exact probabilities."""
    sets = [inputs_lib.make(case, FIRST_SEED, with_probs=False)]
    draws = -(-options.draws // case.batch)
    drawn = {
        "ours": draw_ours(case, sets[0], draws, "mosaic_gpu" if options.on_gpu else "xla"),
        VLLM: draw_theirs(Theirs(module, case, sets, options.device), draws),
    }
    return [
        {"kind": "agreement", **fields(case), "way": way, **compare(case, sets[0], *outputs)}
        for way, outputs in drawn.items()
    ]


def cells(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Times of a result file, each with its ratio to ours."""
    rows = [row for row in document["rows"] if row["kind"] == "vllm"]
    base = {(r["temperature"], r["batch"]): r["call_us"] for r in rows if r["way"] == "ours"}

    def number(x: float | None, digits: int = 1) -> str:
        return "-" if x is None else f"{x:.{digits}f}"

    return [
        {
            "T": f"{row['temperature']:g}",
            "B": row["batch"],
            "way": row["way"],
            "emitted": number(row["emitted_per_request"], 2),
            "call us": number(row["call_us"]),
            "to ours": number(row["call_us"] / base[row["temperature"], row["batch"]], 2),
            "kernels us": number(row["kernel_us"]),
            "launches": number(row["launches"]),
        }
        for row in rows
    ]


def main(command_line: list[str] | None = None) -> int:
    parser = measure.gpu_parser(__doc__, repeats=7, seconds=3600)
    add = parser.add_argument
    add("--vllm-files", type=pathlib.Path, metavar="DIR", help="has files of its wheel")
    add("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    add("--temperatures", type=float, nargs="+", default=[0.8, 1.0])
    add("--draws", type=int, default=4096, help="verifications compared per case; 0 for none")
    options = parser.parse_args(command_line)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too
    clock = measure.begin(options)
    if clock is None:
        return 0
    if options.vllm_files is None:  # as in `make bench`
        print("nothing to measure, --vllm-files names no folder")
        return 0
    options.on_gpu = jax.default_backend() == "gpu"
    if not options.on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch
    import triton

    results = measure.Results(
        "vllm_gpu",
        IDENTITY,
        options.output,
        torch=torch.__version__,
        triton=triton.__version__,
        **vllm_sampler.provenance(options.vllm_files),
    )
    command = results.run["command"].replace(str(options.vllm_files), "DIR")
    results.run["command"] = command
    options.device = torch.device("cuda" if options.on_gpu else "cpu")
    module = vllm_sampler.load(options.vllm_files)
    vocabulary = 300 if options.tiny else verify_cases.V
    cases = [
        Case(verify_cases.STANDARD, batch, vocabulary=vocabulary, temperature=temperature)
        for temperature, batch in itertools.product(options.temperatures, options.batches)
    ]
    ours = compile_ours(cases[: len(options.batches)], options)
    clock.say("compiled")
    for case in cases if options.draws else ():
        results.add(agreement(case, module, options))
        for row in results.rows[-2:]:
            clock.say(label(row), f"emitted {row['emitted_per_request']:.3f},",
                      f"expected {row['expected']:.3f}, z", *row["z"])  # fmt: skip
    timed = []
    for case in cases:
        if clock.is_late(case.label):
            continue
        timed.append(time_case(case, ours[case.batch], module, options))
        results.add(timed[-1])
        clock.say(*(f"{label(row)} {row['call_us']:.1f} us," for row in timed[-1]))
    if options.on_gpu:  # last: all else is saved should a profiler fail
        try:
            for of_case in timed:
                add_kernels(of_case, ours[of_case[0]["batch"]], module, options)
                results.add()
            results.run["copy_bytes_per_second"] = measure.copy_bandwidth()
            results.add()
        except Exception:
            print("no kernel times:", traceback.format_exc(limit=-3), flush=True)
        clock.say("profiled")
    print("wrote", results.path.name, *(drawn.name for drawn in plots.draw(results.path)))
    for row in results.rows:
        if row["way"] == VLLM and row.get("kernels"):
            kernels = sorted(row["kernels"].items(), key=lambda item: -item[1][1])
            print(label(row), *(f"{us:.1f} us {name[:40]};" for name, (_, us) in kernels))
    measure.show("us per call; ratios to ours", cells(results.document))
    bad = [row for row in results.rows if row["kind"] == "agreement" and not row["ok"]]
    for row in bad:
        print(f"FAILED: {label(row)} differs from the rule: z = {row['z']}")
    return 1 if bad else 0


def compile_ours(cases: list[Case], options: Any) -> dict[int, dict[str, Ours]]:
    """Our ways, by batch size and by name."""
    sets = {case: make_sets(case) for case in cases}
    return {
        case.batch: {way: Ours(way, case, sets[case], options.tiny) for way in OURS}
        for case in cases
    }


def label(row: dict[str, Any]) -> str:
    return f"{row['way']}, T = {row['temperature']:g}, B = {row['batch']}:"


if __name__ == "__main__":
    raise SystemExit(main())
