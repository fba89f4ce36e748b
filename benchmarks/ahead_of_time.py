"""Compiles programs for devices that are not there, and says what they take. Nothing is run.

    python benchmarks/ahead_of_time.py '{"device": "v5e", "rule": "standard", "kind": "probs"}'

prints a report as JSON; fields that are left out are those of `Case`. Several cases print one each,
compiled in one process. With `--without-cycles` first, libtpu writes no bundles, which can take it
three times as long as to compile. TPUs need the extra `tpu`, with which libtpu comes; GPUs what
benchmarks/README.md says. Temporaries are real, and so is "does not fit"; bytes and cycles are
counted in the compiled program (`hlo_text`), loops by their trips: good for comparing two forms,
and no measurement. Of `implementation="mosaic_gpu"` the report is what ptxas says of the kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import bundles
import hlo_text

VOCAB, K = 128256, 4

LISTED = {"map": 32000, "candidates": 32}
"""Ids that a draft row lists, of a map that all rows share or of its own."""

TPUS = {"v5e": ("v5e:2x2", "v5litepod-4"), "v6e": ("v6e:2x2", "v6e-4")}
"""A slice of four chips of each kind, and what libtpu calls it."""

GPUS = {path.stem: path for path in sorted((Path(__file__).parent / "gpus").glob("*.txtpb"))}
"""Descriptions of GPUs, as XLA reads them."""


ADAPTERS = ("verify_flat", "verify_chains")
"""Of `jax_specdec.adapters`."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A program to compile.

    Attributes:
      device: "v5e", "v6e", "t4", "l4", "a100", "h200", "b200", "b300" or "rtx6000".
      function: which of the library's.
      rule: "greedy", "standard", "block", "agreement" or "synthetic".
      kind: of draft distribution: "none", "probs", "logits", "normalized" (with log_normalizer
        and row_max).
      batch: requests.
      implementation: as `rejection_sample` takes it.
      parts: devices that the vocabulary is split over.
      processed: whether there are min-p, top-k, top-p and a bitmask.
      filtered: whether there are top-k and top-p alone.
      has_bonus: whether bonus tokens are given, instead of drawn.
      ids: "map" or "candidates" where the draft distribution is on a list of ids, else None.
    """

    device: str
    function: str = "rejection_sample"
    rule: str = "standard"
    kind: str = "none"
    batch: int = 64
    implementation: str | None = None
    parts: int = 1
    processed: bool = False
    filtered: bool = False
    has_bonus: bool = False
    ids: str | None = None

    def __str__(self) -> str:
        changed = [
            f"{field.name}={value}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        ]
        return ",".join(changed)

    @property
    def groups(self) -> int:
        """Parts of the requests, which a mesh of adapters has."""
        return 2 if self.function in ADAPTERS else 1

    @property
    def logits_bytes(self) -> int:
        """Of the bfloat16 target logits that one device holds: the unit of a report."""
        rows = self.batch * (K if self.has_bonus else K + 1)
        return rows * VOCAB * 2 // (self.parts * self.groups)


def compile_apart(case: Case) -> dict[str, Any]:
    """The report of a case, compiled in a process of its own.

    Attributes of the report: ``temporaries``, ``hbm_bytes``, ``bytes`` (in any memory) and
    ``cost_model_bytes`` (XLA's own, loops once) and ``largest_exchange`` (what the largest of the
    collectives leaves on a device) in units of the logits; ``reads``, the cycles of a TPU (see
    `bundles`) in units of those in which the logits are read once; ``largest``, the operations that
    take more than ``LEAST`` (0.05) of them; ``loops``, ``ops`` and ``compile_s``. Searches for
    thresholds count with as many rounds as they may take; ``reads_listed`` is without the search of
    all entries, for rows whose largest entries decide their thresholds. Where it cannot be
    compiled, ``error`` alone. Of a kernel: see `kernel_report`.
    """
    (found,) = compile_all_apart([case])
    return found


def compile_all_apart(cases: list[Case], cycles: bool = True) -> list[dict[str, Any]]:
    """The same of cases for one device, all compiled in one process.

    Without `cycles`, ``reads`` and ``reads_listed`` are None and ``largest`` is empty.
    """
    case = cases[0]
    command = [sys.executable, __file__, *([] if cycles else ["--without-cycles"])]
    command += [json.dumps(dataclasses.asdict(x)) for x in cases]
    environment = environment_of(case.device)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{case}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()[-len(cases) :]]


def environment_of(device: str) -> dict[str, str]:
    """The environment of a process that compiles for a device."""
    given = {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    given |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    given |= {"TPU_LOG_DIR": "disabled", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    given["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # a program from disk has no bundles
    if device in TPUS:
        given["TPU_ACCELERATOR_TYPE"] = TPUS[device][1]
    toolkit = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13"
    if toolkit.exists():  # ptxas
        given["PATH"] = f"{toolkit / 'bin'}{os.pathsep}{os.environ['PATH']}"
        given["XLA_FLAGS"] = f"--xla_gpu_cuda_data_dir={toolkit}"
    return os.environ | given


def devices_of(name: str) -> Any:
    """Described devices: four chips of a TPU, or one GPU."""
    from jax.experimental import topologies

    if name in TPUS:
        return topologies.get_topology_desc(platform="tpu", topology_name=TPUS[name][0]).devices
    described = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology="1x1x1", target_config=GPUS[name].read_text()
    )
    return described.devices


ATTENTIONS = {
    "decode_attention": (128, None, 4096),
    "decode_attention, pages": (128, 16, 4096),
    "decode_attention, 256": (256, None, 4096),
    "decode_attention, small": (128, None, 1024),
}
"""Of each kind D, the positions of a page, and T."""


def attention(case: Case) -> tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]:
    """`program` of K + 1 rows of Llama 3 8B over a cache, or of larger heads."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    import jax_specdec as sd

    where, batch = SingleDeviceSharding(devices_of(case.device)[0]), case.batch
    dim, page, room = ATTENTIONS[case.function]
    shapes: dict[str, tuple[int, ...]] = {
        "query": (batch, K + 1, 32, dim),
        "keys": (batch * 8, dim, room),
        "values": (batch * 8, room, dim),
        "start": (batch,),
    }
    if page is not None:
        shapes["keys"] = shapes["values"] = (batch * room // page, page, 8, dim)
        shapes["pages"] = batch, room // page
    arrays = {
        name: jax.ShapeDtypeStruct(
            shape, jnp.int32 if name in ("start", "pages") else jnp.bfloat16, sharding=where
        )
        for name, shape in shapes.items()
    }

    def run(a: dict[str, Any]) -> Any:
        return sd.decode_attention(
            **a, finite_cache=not case.processed, implementation=case.implementation
        )

    return run, arrays


def int8_product(case: Case) -> tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]:
    """`program` of the kernel for int8 weights, of `batch` rows and a matrix ``[4096, 4096]``."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from jax_specdec.lm.models import int8_kernel

    where = SingleDeviceSharding(devices_of(case.device)[0])
    arrays = {
        "x": jax.ShapeDtypeStruct((case.batch, 4096), jnp.bfloat16, sharding=where),
        "values": jax.ShapeDtypeStruct((4096, 4096), jnp.int8, sharding=where),
        "scale": jax.ShapeDtypeStruct((4096,), jnp.float32, sharding=where),
    }
    return lambda a: int8_kernel.product(**a), arrays


def rotation(case: Case) -> tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]:
    """`program` of the kernel that rotates K + 1 rows of Llama 3 8B, and writes them."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from jax_specdec.lm.models import rotate_kernel as kernel

    where, rows, room = SingleDeviceSharding(devices_of(case.device)[0]), case.batch * (K + 1), 1024
    shape = kernel.RotateShape(
        num_rows=rows,
        each=K + 1,
        num_query=32,
        num_kv=8,
        head_dim=128,
        num_requests=case.batch,
        room=room,
        has_bias=True,
    )
    width = (shape.num_query + 2 * shape.num_kv) * shape.head_dim
    size = case.batch * shape.num_kv * room * shape.head_dim
    shapes: dict[str, tuple[Any, Any]] = {
        "heads": ((rows, width), jnp.bfloat16),
        "cos": ((rows, shape.half), jnp.float32),
        "sin": ((rows, shape.half), jnp.float32),
        "places": ((rows,), jnp.int32),
        "owners": ((rows,), jnp.int32),
        "keys": ((size,), jnp.bfloat16),
        "values": ((size,), jnp.bfloat16),
        "bias": ((width,), jnp.bfloat16),
    }
    arrays = {name: jax.ShapeDtypeStruct(*each, sharding=where) for name, each in shapes.items()}
    return lambda a: kernel.rotate_and_write(kernel.RotateOperands(None, **a), shape), arrays


def program(case: Case) -> tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]:
    """A function of a dict of arrays, and their shapes and places."""
    if case.function in ATTENTIONS:
        return attention(case)
    if case.function == "int8_matmul":
        return int8_product(case)
    if case.function == "rotate_and_write":
        return rotation(case)
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
    from jax.sharding import PartitionSpec as P

    import jax_specdec as sd
    from jax_specdec.adapters import sglang_jax, tpu_inference

    devices, batch, n = devices_of(case.device), case.batch, case.batch * K
    sharding: sd.VerifySharding | None = None
    whole: Any = SingleDeviceSharding(devices[0])
    split = whole
    if case.function in ADAPTERS:
        shape = np.array(devices[: case.groups * case.parts]).reshape(case.groups, case.parts)
        mesh = Mesh(shape, ("data", "vocab"), axis_types=(AxisType.Explicit,) * 2)
        whole, split = NamedSharding(mesh, P("data")), NamedSharding(mesh, P("data", "vocab"))
        sharding = sd.VerifySharding(mesh, vocab_axis="vocab", batch_axis="data")
    elif case.parts > 1:
        mesh = Mesh(devices[: case.parts], ("vocab",))
        whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "vocab"))
        sharding = sd.VerifySharding(mesh, vocab_axis="vocab")

    def array(shape: tuple[int, ...], dtype: Any, where: Any = whole) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    settings: dict[str, Any] = {"num_speculative_tokens": K}
    if case.rule not in ("standard", "greedy"):
        settings["rejection_sample_method"] = case.rule
    if case.rule == "synthetic":
        settings["synthetic_acceptance_length"] = 3.0
    config = sd.SpecDecodeConfig(**settings)

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
    rows = n if case.has_bonus else n + batch
    floats, ids = array((batch,), jnp.float32), array((batch,), jnp.int32)
    arrays = {
        "logits": array((rows, VOCAB), jnp.bfloat16, split),
        "draft_ids": array((n,), jnp.int32),
        "offsets": array((batch + 1,), jnp.int32),
        "temperature": floats,
        "keys": array(keys.shape, keys.dtype),
        "positions": ids,
    }
    if case.kind != "none":
        dtype = jnp.float32 if case.kind == "probs" else jnp.bfloat16
        width, where = (VOCAB, split) if case.ids is None else (LISTED[case.ids], whole)
        arrays["q"] = array((n, width), dtype, where)
    if case.ids is not None:
        width = LISTED[case.ids]
        arrays["ids"] = array((width,) if case.ids == "map" else (n, width), jnp.int32)
    if case.kind == "normalized":
        arrays |= {name: array((n,), jnp.float32) for name in ("log_normalizer", "row_max")}
    if case.processed or case.filtered:
        arrays |= {"top_k": ids, "top_p": floats}
    if case.has_bonus:
        arrays["bonus"] = ids
    if case.processed:
        arrays["min_p"] = floats
        arrays["token_bitmask"] = array((rows, -(-VOCAB // 32)), jnp.int32)
    if case.function in ADAPTERS:
        arrays |= {"lengths": ids, "draft_tokens": array((batch, K + 1), jnp.int32)}
        del arrays["offsets"]
    if case.function == "token_logprobs":
        tokens = array((batch, K + 1), jnp.int32)
        arrays["output"] = sd.RejectionSampleOutput(tokens, ids, ids, ids)
    if case.function == "process_logits":
        counts = array((batch, VOCAB), jnp.int32, split)
        in_prompt = array((batch, VOCAB), jnp.bool_, split)
        arrays["penalties"] = sd.Penalties(floats, floats, floats, counts, in_prompt)
    if case.function == "sample_draft_tokens":
        arrays["logits"] = array((batch, VOCAB), jnp.bfloat16, split)

    def run(a: dict[str, Any]) -> Any:
        q: sd.DraftProbs | sd.DraftLogits | None = None
        if case.kind == "probs":
            q = sd.DraftProbs(a["q"], ids=a.get("ids"))
        elif case.kind != "none":
            numbers = {name: a.get(name) for name in ("log_normalizer", "row_max", "ids")}
            q = sd.DraftLogits(a["q"], **numbers)
        temperature, mask = a["temperature"], a.get("token_bitmask")
        match case.function:
            case "verify_flat":
                return tpu_inference.verify_flat(
                    a["logits"],
                    a["draft_ids"],
                    a["lengths"],
                    config=config,
                    temperature=temperature,
                    top_k=a.get("top_k"),
                    top_p=a.get("top_p"),
                    keys=a["keys"],
                    positions=a["positions"],
                    token_bitmask=mask,
                    sharding=sharding,
                )
            case "verify_chains":
                return sglang_jax.verify_chains(
                    a["logits"],
                    a["draft_tokens"],
                    a["lengths"],
                    config=config,
                    temperatures=temperature,
                    top_ks=a.get("top_k"),
                    top_ps=a.get("top_p"),
                    keys=a["keys"],
                    token_bitmask=mask,
                    sharding=sharding,
                )
        drafts = sd.Drafts(a["draft_ids"], a["offsets"], q)
        sampling = sd.SamplingParams(
            jnp.zeros_like(temperature) if case.rule == "greedy" else temperature,
            **{name: a.get(name) for name in ("min_p", "top_k", "top_p")},
        )
        drawn = {"sampling": sampling, "keys": a["keys"], "positions": a["positions"]}
        match case.function:
            case "sample_draft_tokens":
                by: Any = {"sharding": sharding, "implementation": case.implementation}
                return sd.sample_draft_tokens(a["logits"], **drawn, offset=0, **by)
            case "process_logits":
                processors = sd.LogitsProcessors(penalties=a["penalties"])
                return sd.process_logits(a["logits"], drafts, processors, config=config)
            case "token_logprobs":
                return sd.token_logprobs(
                    a["logits"],
                    drafts,
                    a["output"],
                    sampling=sampling,
                    config=config,
                    num_top=5,
                    distribution="processed" if case.processed else "raw",
                    token_bitmask=mask,
                )
        return sd.rejection_sample(
            a["logits"],
            drafts,
            **drawn,
            config=config,
            bonus_token_ids=a.get("bonus"),
            token_bitmask=mask,
            implementation=case.implementation,
            sharding=sharding,
        )

    return run, arrays


def report(case: Case, folder: Path | None) -> dict[str, Any]:
    """What `compile_apart` gives, compiled in this process; libtpu writes bundles to `folder`.

    Without a folder cycles are not known.
    """
    import jax
    import measure

    from jax_specdec._src.verify.backends.largest import ALL_ENTRIES

    run, arrays = program(case)
    if case.implementation == "mosaic_gpu":
        return kernel_report(case, run, arrays)
    platform = "tpu" if case.device in TPUS else "cuda"
    begin = time.perf_counter()
    lowered = jax.jit(run).trace(arrays).lower(lowering_platforms=(platform,))
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        return {"error": str(error).splitlines()[0][:200]}
    seconds = time.perf_counter() - begin
    unit = case.logits_bytes
    text = compiled.as_text() or ""
    if path := os.environ.get("HLO"):
        Path(path).write_text(text)
    trips = K + 1  # of a loop over positions, at most
    if case.processed or case.filtered:
        # Of a search for thresholds: a split vocabulary tests 15 candidates at once, a TPU 3.
        trips = 4 if case.parts > 1 else 8 if case.device in TPUS else 16
    unit_cycles, is_known = 1.0, folder is not None
    if case.device in TPUS and folder is not None:
        code = bundles.Code.taken(folder, case.device, text)
        found = hlo_text.Program.of(text, trips, code.cycles)
        unit_cycles, is_known = unit / code.bytes_per_cycle, code.is_known
    else:
        found = hlo_text.Program.of(text, trips)
    of_listed = dataclasses.replace(found, skipped=ALL_ENTRIES).count()
    ops, counted, least = found.ops(), found.count(), float(os.environ.get("LEAST", "0.05"))
    largest = [
        [it.name, round(times * each.cycles / unit_cycles, 3), times, _source(it)]
        for it, each, times in found.operations()
        if each.cycles and times * each.cycles >= least * counted.cycles
    ]
    cost = compiled.cost_analysis() or {}
    cost = cost[0] if isinstance(cost, list) else cost
    return {
        "temporaries": round(compiled.memory_analysis().temp_size_in_bytes / unit, 3),
        "hbm_bytes": round(counted.hbm_bytes / unit, 2),
        "bytes": round(counted.bytes / unit, 2),
        "cost_model_bytes": round(cost.get("bytes accessed", 0) / unit, 2),
        "reads": round(counted.cycles / unit_cycles, 2) if is_known else None,
        "reads_listed": round(of_listed.cycles / unit_cycles, 2) if is_known else None,
        "largest": largest,
        "largest_exchange": round(max(measure.collectives(text).values(), default=0) / unit, 4),
        "loops": [trips for _, trips in found.loops()],
        "ops": {name: ops[name] for name in ("fusion", "while", "conditional") if ops[name]},
        "compile_s": round(seconds, 1),
    }


def kernel_report(case: Case, run: Callable[..., Any], arrays: dict[str, Any]) -> dict[str, Any]:
    """What ptxas says of the kernel of a program.

    Returns:
      ``architecture``, as "sm_90a"; ``registers`` of a thread; ``spills``, bytes stored and loaded;
      ``shared``, bytes of a block; ``compile_s``.
    """
    import jax

    device = devices_of(case.device)[0]
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
        os.environ |= {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTXAS": "1"}
        with mock.patch.object(jax, "devices", lambda: [device]):  # what the plan is made for
            traced = jax.jit(run).trace(arrays)
        traced.lower(lowering_platforms=("cuda",)).compile()
        (said,) = (path.read_text() for path in Path(folder).glob("*.ptxas"))
        (resources,) = (path.read_text() for path in Path(folder).glob("*.resources.txt"))
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    patterns = {"registers": r"Used (\d+) registers", "architecture": r"for '(sm_\w+)'"}
    found = {name: re.search(pattern, said) for name, pattern in patterns.items()}
    shared = re.search(r"smem_scratch_bytes=(\d+)", resources)
    assert spilled and shared and found["registers"] and found["architecture"], said
    return {
        "architecture": found["architecture"][1],
        "registers": int(found["registers"][1]),
        "spills": int(spilled[1]) + int(spilled[2]),
        "shared": int(shared[1]),
        "compile_s": round(time.perf_counter() - begin, 1),
    }


def _source(it: hlo_text.Instruction) -> str:
    """The operation of JAX that an instruction comes from."""
    found = re.search(r'op_name="[^"]*?([^"/]*/?[^"/]*)"', it.line)
    return found[1] if found else it.op


if __name__ == "__main__":
    with_cycles = sys.argv[1] != "--without-cycles"
    with bundles.dumped() if with_cycles else contextlib.nullcontext() as folder:
        for given in sys.argv[1 if with_cycles else 2 :]:
            print(json.dumps(report(Case(**json.loads(given)), folder)), flush=True)
