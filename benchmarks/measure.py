"""What the benchmarks share: options, cells, runs in turn, medians, kernel times, tables, files.

Two things on a GPU make every ratio to a plain step wrong, and plain decoding suffers most:

- The profiler of `kernel_times` stays on in its process. Each kernel launched after it takes 1 to 2
  us longer, so that a plain step of the shape of Llama 3 8B, of some 560 small kernels, takes 6.6
  to 6.9 ms in place of 5.9 (one H100, one process, before and after). So it comes last, or its
  times are the only ones that a process takes.
- XLA times several ways of each product on the GPU when it compiles. What compiles or runs there
  meanwhile disturbs it. So programs are compiled one after another.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import pathlib
import platform
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jaxlib
import numpy as np
from rich.console import Console
from rich.table import Table

_PAUSE = 0.03
"""Seconds before each run: XLA frees the last run's buffers after its results are ready, and the
next run would pay for it."""

RESULTS = pathlib.Path(__file__).parent / "results"


def parser(doc: str | None, repeats: int) -> argparse.ArgumentParser:
    """Options of every benchmark."""
    result = argparse.ArgumentParser(allow_abbrev=False, description=(doc or "").partition("\n")[0])
    result.add_argument("--repeats", type=int, default=repeats)
    return result


def gpu_parser(doc: str | None, repeats: int, seconds: float) -> argparse.ArgumentParser:
    """Options of every benchmark of a GPU, besides its own."""
    result = parser(doc, repeats)
    add = result.add_argument
    add("--seconds", type=float, default=seconds, help="begin nothing after these")
    add("--output", type=pathlib.Path, help="folder of results and plots (default: results)")
    add("--tiny", action="store_true", help="small shapes on any device: does it work?")
    return result


def begin(options: argparse.Namespace) -> Clock | None:
    """Returns the clock of a benchmark of a GPU; None, and says so, if there is no GPU."""
    if jax.default_backend() != "gpu" and not options.tiny:
        print(f"nothing to measure, JAX runs on {jax.default_backend()}")
        return None
    return Clock(options.seconds)


class Clock:
    """Says what has happened, and leaves out what would begin too late."""

    def __init__(self, seconds: float = math.inf) -> None:
        self._begin, self._seconds = time.perf_counter(), seconds

    def say(self, *words: Any) -> None:
        print(f"{time.perf_counter() - self._begin:4.0f} s ", *words, flush=True)

    def is_late(self, *what: Any) -> bool:
        late = time.perf_counter() - self._begin > self._seconds
        if late:
            self.say("left out:", *what)
        return late


def alternate(
    runs: Mapping[str, Callable[[], Any]], repeats: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Wall seconds of each run, in turn, `repeats` times after `warm_up` times uncounted."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(warm_up + repeats):
        for name, run in runs.items():
            time.sleep(_PAUSE)
            begin = time.perf_counter()
            jax.block_until_ready(run())
            if repeat >= warm_up:
                samples[name].append(time.perf_counter() - begin)
    return samples


def median(samples: list[float]) -> float:
    return statistics.median(samples)


def read_bandwidth(megabytes: int = 256) -> float:
    """Bytes per second at which this machine reads an array once (the maximum of each row)."""
    x = jax.numpy.ones((64, megabytes * 2**20 // 4 // 64), jax.numpy.float32)
    read = jax.jit(lambda x: x.max(axis=1))
    return x.nbytes / median(alternate({"read": lambda: read(x)}, repeats=7)["read"])


def kernel_times(compiled: Any, arguments: dict[str, Any]) -> dict[str, tuple[int, float]]:
    """Launches and microseconds of each GPU kernel of one run of a compiled program, by name.

    The profiler stays on: wall times that this process takes afterwards are too long.

    Raises:
      RuntimeError: the profiler saw no kernel.
    """
    from jax.experimental.mosaic.gpu import profiler

    _, times = profiler.measure(compiled, aggregate=False)(**arguments)
    return _by_name(times)


def launched_kernels(launch: Callable[[], Any]) -> dict[str, tuple[int, float]]:
    """The same, by the same profiler, of what a function launches without JAX and waits for."""
    from jax.experimental.mosaic.gpu import profiler

    launch()
    cupti = profiler.mosaic_gpu_lib._mosaic_gpu_ext
    cupti._cupti_init()
    try:
        launch()
    finally:
        times = cupti._cupti_get_timings(True)
    return _by_name(times)


def _by_name(times: list[tuple[str, float]] | None) -> dict[str, tuple[int, float]]:
    if not times:
        raise RuntimeError("the profiler saw no kernel")
    kernels: dict[str, tuple[int, float]] = {}
    for name, milliseconds in times:
        count, total = kernels.get(name, (0, 0.0))
        kernels[name] = count + 1, total + milliseconds * 1e3
    return kernels


def collectives(program: str) -> dict[str, int]:
    """Each collective in the text of a compiled program, and the bytes it leaves on a device."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-(?:permute|broadcast)"
    found = {}
    for name, result in re.findall(rf"%(\S+) = (.*?) (?:{kinds})(?:-start)?\(", program):
        arrays = re.findall(r"([a-z]+)(\d+)\[([\d,]*)\]", result)
        found[name] = sum(
            math.prod(int(n) for n in shape.split(",") if n) * int(bits) // 8
            for _, bits, shape in arrays
        )
    return found


def copy_bandwidth() -> float:
    """Bytes read and written per second by large copies on the GPU, by the wall clock."""
    x = jax.numpy.ones((2**29,), jax.numpy.float32)
    copy = jax.jit(lambda x: x + 1)

    def copies() -> Any:
        for _ in range(20):  # one after another on the device, while the host is ahead
            last = copy(x)
        return last

    return 20 * 2 * x.nbytes / median(alternate({"copy": copies}, repeats=3)["copy"])


def environment() -> dict[str, Any]:
    """What a figure depends on."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": re.sub(r" --output[ =]\S+", "", " ".join(["python", *sys.argv])),
        "device": f"{device.platform}: {device.device_kind}",
        "processor": _processor(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "numpy": np.__version__,
    }


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def show(title: str, rows: Sequence[Mapping[str, Any]], width: int = 120) -> None:
    """Print a table; each row has a cell for every heading."""
    table = Table(title=title)
    for heading in rows[0] if rows else ():
        cells = [str(row[heading]) for row in rows]
        is_number = all(cell[:1] in "-0123456789" for cell in cells)
        table.add_column(heading, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=width).print(table)


def merge(
    document: dict[str, Any] | None,
    run: dict[str, Any],
    rows: list[dict[str, Any]],
    identity: tuple[str, ...],
) -> dict[str, Any]:
    """Add a run to a result file that several runs share.

    Args:
      document: ``{"runs": [...], "rows": [...]}``, each row naming its run by index; or None.
      run: what the new rows depend on, an `environment`.
      rows: new rows; they replace those that agree with them in `identity`.
      identity: keys of a row, or of its run.

    Returns:
      The merged document. Runs that no row is left of are dropped.
    """
    document = document or {"runs": [], "rows": []}
    runs = [*document["runs"], run]

    def name(row: dict[str, Any], of: dict[str, Any]) -> str:
        return json.dumps([row.get(key, of.get(key)) for key in identity])

    new = {name(row, run) for row in rows}
    merged = [row for row in document["rows"] if name(row, runs[row["run"]]) not in new]
    merged += [{**row, "run": len(runs) - 1} for row in rows]
    kept = sorted({row["run"] for row in merged})
    return {
        "runs": [runs[i] for i in kept],
        "rows": [{**row, "run": kept.index(row["run"])} for row in merged],
        "identity": identity,
    }


def load(path: pathlib.Path) -> dict[str, Any] | None:
    """A file that `merge` made, or None where there is none."""
    document = json.loads(path.read_text()) if path.exists() else {}
    return document if "runs" in document else None


def write(path: pathlib.Path, document: dict[str, Any]) -> None:
    """Write it whole or not at all: a run may be killed at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(document, indent=1) + "\n")
    unfinished.replace(path)


class Results:
    """A result file that several runs share: what each of them depends on, and their rows.

    Args:
      name: of the file.
      identity: keys of a row or its run. New rows replace those in the file that agree with them in
        all of these, so all of them if there are none.
      folder: None for `RESULTS`.
      about: what this run depends on, besides `environment`.
    """

    def __init__(
        self,
        name: str,
        identity: tuple[str, ...] = (),
        folder: pathlib.Path | None = None,
        **about: Any,
    ) -> None:
        self.path = (folder or RESULTS) / f"{name}.json"
        self.run = environment() | about
        self.rows: list[dict[str, Any]] = []
        self._identity, self._before = identity, load(self.path)

    @property
    def document(self) -> dict[str, Any]:
        """What is in the file."""
        return merge(self._before, self.run, self.rows, self._identity)

    def add(self, rows: Sequence[dict[str, Any]] = ()) -> None:
        """Save some more rows of this run."""
        self.rows += rows
        write(self.path, self.document)


def measure_cells(
    results: Results,
    clock: Clock,
    measured: Callable[..., Sequence[dict[str, Any]]],
    cells: Mapping[str, Sequence[Any]],
) -> int:
    """Measures one cell after another, and saves the rows of each when they are there.

    A cell that would begin too late is left out, and one that fails costs no other.

    Args:
      results: to which rows are added.
      clock: says what has happened.
      measured: returns the rows of a cell.
      cells: the arguments of `measured` for each cell, by what the cell is called.

    Returns:
      The exit status: 1 if a cell failed.
    """
    status = 0
    for name, arguments in cells.items():
        if clock.is_late(name):
            continue
        try:
            results.add(measured(*arguments))
            clock.say(f"{name}: measured")
        except Exception:
            clock.say(f"{name}: FAILED\n{traceback.format_exc(limit=-3)}")
            status = 1
    return status
