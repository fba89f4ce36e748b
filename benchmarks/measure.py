"""Run things in turn, take medians, keep every sample."""

from __future__ import annotations

import datetime
import json
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jaxlib
import numpy as np

_PAUSE = 0.03
"""Seconds before each run: XLA frees the last run's buffers after its results are ready, and the
next run would pay for it."""

RESULTS = pathlib.Path(__file__).parent / "results"


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


def environment() -> dict[str, Any]:
    """What a figure depends on."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
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


def save(name: str, rows: list[dict[str, Any]]) -> pathlib.Path:
    """Write `results/NAME.json`: environment and rows, raw samples included."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
    return path
