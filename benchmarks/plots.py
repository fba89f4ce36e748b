"""Draw the result files; needs no GPU: `python benchmarks/plots.py`.

`--merge FILE ...` first merges result files of runs made elsewhere into those of the folder.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import measure
import verify_cases
from matplotlib.axes import Axes
from matplotlib.figure import Figure

STYLE: dict[str, dict[str, Any]] = {
    "mosaic_gpu": {"color": "#0b6e4f", "marker": "o"},
    "xla": {"color": "#c8553d", "marker": "s"},
    "plain": {"color": "#5c5c5c", "marker": "^"},
}
NAMES = {"plain": "plain formulation"}


def times(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that were timed from keys, for the figures."""
    return [
        r for r in document["rows"] if r.get("kind") == "time" and r.get("noise_given") is False
    ]


def time_against_batch(document: dict[str, Any]) -> Figure | None:
    """Microseconds per call over B: backends, goals, and what the bytes alone would cost."""
    names = [
        name
        for name in (verify_cases.STANDARD, verify_cases.FLOAT32, "greedy")
        if any(r["name"] == name for r in times(document))
    ]
    if not names:
        return None
    figure, panels = _panels(names)
    for name, ax in panels.items():
        rows = sorted((r for r in times(document) if r["name"] == name), key=lambda r: r["batch"])
        for implementation, style in STYLE.items():
            mine = [r for r in rows if r["implementation"] == implementation and not r["cold"]]
            if mine:
                ax.plot(*_xy(mine, "call_us"), label=NAMES.get(implementation, implementation),
                        **style)  # fmt: skip
        cold = [r for r in rows if r["cold"]]
        if cold:
            ax.plot(*_xy(cold, "call_us"), linestyle="", label="mosaic_gpu, cold cache",
                    **{**STYLE["mosaic_gpu"], "marker": "x"})  # fmt: skip
        goals = [r for r in rows if r["goal"] and r["implementation"] == "mosaic_gpu"]
        goals = [r for r in goals if not r["cold"]]
        if goals:
            ax.plot(*_xy(goals, "goal"), "k:", label="goal")
        floors = [r for r in rows if r["implementation"] == "mosaic_gpu" and not r["cold"]]
        floors = [(r["batch"], f) for r in floors or rows if (f := _floor(document, r))]
        if floors:
            ax.plot(*zip(*floors, strict=True), "k--", linewidth=1,
                    label="bytes at copy bandwidth")  # fmt: skip
        _finish_over_batch(ax, name, rows)
    return figure


def rate_against_bytes(document: dict[str, Any]) -> Figure | None:
    """TB/s over the bytes a call reads, by kernel time and by time per call."""
    rows = [r for r in times(document) if r["implementation"] != "plain" and not r["fits_cache"]]
    if not rows:
        return None
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    ax = figure.subplots()
    for implementation in ("mosaic_gpu", "xla"):
        for time, filled in (("kernel_us", True), ("call_us", False)):
            mine = [r for r in rows if r["implementation"] == implementation and r[time]]
            if not mine:
                continue
            style = STYLE[implementation]
            ax.plot(
                [r["bytes_read"] / 1e6 for r in mine],
                [r["bytes_read"] / r[time] / 1e6 for r in mine],
                linestyle="",
                marker=style["marker"],
                color=style["color"],
                fillstyle="full" if filled else "none",
                label=f"{implementation}, {'kernels' if filled else 'call'}",
            )
    bandwidth = max((r.get("copy_bytes_per_second", 0) for r in document["runs"]), default=0)
    if bandwidth:
        ax.axhline(bandwidth / 1e12, color="k", linestyle="--", linewidth=1, label="copy")
    ax.set(xscale="log", xlabel="MB that a call must read", ylabel="TB/s")
    ax.set_ylim(bottom=0)
    _finish(ax)
    return figure


def vocabularies(document: dict[str, Any]) -> Figure | None:
    """Microseconds per megabyte over V, at 64 requests, and where all V have as many bytes."""
    rows = [
        r
        for r in times(document)
        if r["implementation"] == "mosaic_gpu"
        and not r["cold"]
        and (
            r["name"].startswith("V = ")
            or (r["name"], r["k"]) == (verify_cases.STANDARD, verify_cases.K)
        )
    ]
    sizes = sorted({r["vocabulary"] for r in rows})
    if len(sizes) < 2:
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    ax = figure.subplots()
    usual, cost = (verify_cases.V, 256), {}
    for offset, color, label, batches in (
        (-0.2, "tab:gray", "64 requests", [(size, 64) for size in sizes]),
        (
            0.2,
            STYLE["mosaic_gpu"]["color"],
            "as many bytes as 256 of 128256",
            [usual, *verify_cases.SAME_BYTES],
        ),
    ):
        cost = {
            r["vocabulary"]: r["call_us"] / r["bytes_read"] * 1e6
            for r in rows
            if (r["vocabulary"], r["batch"]) in batches
        }
        ax.bar(
            [sizes.index(v) + offset for v in cost], cost.values(), 0.4, color=color, label=label
        )
    if verify_cases.V in cost:  # of the last bars
        limit = 1.4 * cost[verify_cases.V]
        ax.axhline(limit, color="k", linestyle=":", label="1.4 x that of 128256")
    ax.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    ax.set(xlabel="vocabulary", ylabel="microseconds per MB that a call must read")
    _finish(ax)
    return figure


WAYS = {
    "split": ("logits stay split", STYLE["mosaic_gpu"]),
    "gathered": ("gathered first", STYLE["xla"]),
    "one": ("all on one device", STYLE["plain"]),
    "empty": ("the collectives alone", {"color": "k", "linestyle": ":"}),
}


def against_devices(document: dict[str, Any]) -> Figure | None:
    """Microseconds per call over the devices that share a vocabulary."""
    rows = [r for r in document["rows"] if r.get("kind") == "time" and "way" in r]
    if not rows:
        return None
    figure, panels = _panels(sorted({r["batch"] for r in rows}))
    for batch, ax in panels.items():
        for way, (label, style) in WAYS.items():
            mine = [r for r in rows if (r["batch"], r["way"]) == (batch, way)]
            mine.sort(key=lambda r: r["devices"])
            ax.plot(
                [r["devices"] for r in mine], [r["call_us"] for r in mine], label=label, **style
            )
        ax.set(title=f"B = {batch}", xlabel="devices", ylabel="microseconds per call")
        ax.set_yscale("log")
        ax.set_xticks(sorted({r["devices"] for r in rows}))
        _finish(ax)
    return figure


BESIDE_VLLM: dict[str, dict[str, Any]] = {
    "ours": STYLE["mosaic_gpu"],
    "ours, no normalizer": {**STYLE["mosaic_gpu"], "marker": "x", "linestyle": "--"},
    "xla": STYLE["xla"],
    "vllm": STYLE["plain"],
    "vllm, rejection_sample": {**STYLE["plain"], "marker": "v", "linestyle": "--"},
}


def beside_vllm(document: dict[str, Any]) -> Figure | None:
    """Microseconds per call over B, a panel for each temperature."""
    rows = [r for r in document["rows"] if r.get("kind") == "vllm"]
    if not rows:
        return None
    figure, panels = _panels(sorted({r["temperature"] for r in rows}))
    for temperature, ax in panels.items():
        for way, style in BESIDE_VLLM.items():
            mine = [r for r in rows if (r["temperature"], r["way"]) == (temperature, way)]
            ax.plot(*_xy(sorted(mine, key=lambda r: r["batch"]), "call_us"), label=way, **style)
        _finish_over_batch(ax, f"temperature {temperature:g}", rows)
    return figure


def passes_against_tokens(document: dict[str, Any]) -> Figure | None:
    """Milliseconds of a target's pass over the tokens that each request has in its cache."""
    passes = [row for row in document["rows"] if "bytes ms" in row]
    if not passes:
        return None
    figure, panels = _panels(sorted({(row["batch"], row["room"]) for row in passes}))
    for (batch, room), ax in panels.items():
        rows = [row for row in passes if (row["batch"], row["room"]) == (batch, room)]
        rows.sort(key=lambda row: row["used"])
        used = [row["used"] for row in rows]
        before, now = ([row[form] for row in rows] for form in ("xla", "kernel"))
        ax.plot(used, before, label="before: one product (XLA)", **STYLE["xla"])
        ax.plot(used, now, label="now: by length (kernel)", **STYLE["mosaic_gpu"])
        floors = [row["bytes ms"] for row in rows]
        ax.plot(used, floors, "k--", linewidth=1, label="bytes at copy bandwidth")
        ax.set(title=f"B = {batch}, max_length = {room}")
        ax.set(xlim=(0, 1.05 * room), ylim=(0, 1.1 * max(before)))
        ax.set(xlabel="tokens of each request", ylabel="milliseconds of a pass")
        ax.locator_params(axis="x", nbins=5)
        _finish(ax)
    return figure


def tokens_against_length(document: dict[str, Any]) -> Figure | None:
    """Tokens per second over tokens emitted per step, by drafter."""
    rows = [row for row in document["rows"] if "plain_bytes" in row]
    if not rows:
        return None
    rows.sort(key=lambda row: (row["prompt"], row["batch"]))
    lengths = {row["prompt"] for row in rows}
    figure, panels = _panels([(row["batch"], row["prompt"]) for row in rows], len(lengths))
    for row, ax in zip(rows, panels.values(), strict=True):
        emitted = [1.0, 1.0 + row["k"]]  # one token, to all drafts and one more
        requests = row["batch"]
        bandwidth = document["runs"][row["run"]]["copy_bytes_per_second"]
        roofline = [requests * n * bandwidth / row["plain_bytes"] for n in emitted]
        ax.plot(emitted, roofline, "k--", linewidth=1, label="the target's bytes at copy bandwidth")
        for way, ms in row["ms"].items():
            if way.endswith(", step"):
                rates = [requests * n / ms * 1e3 for n in emitted]
                ax.plot(emitted, rates, label=way.removesuffix(", step"))
        plain = requests / row["ms"]["plain"] * 1e3
        ax.axhline(plain, color="#5c5c5c", linestyle=":", label="plain decoding")
        ax.set(title=f"B = {requests}, {row['prompt']} tokens", ylim=(0, None))
        ax.set(xlabel="tokens emitted per step of a request", ylabel="tokens per second")
        _finish(ax)
    return figure


def speed_against_nodes(document: dict[str, Any]) -> Figure | None:
    """Speed-up over plain decoding by the nodes of trees, a panel for each number of requests.

    Times of steps are the document's, tokens per pass those of the embedded target.
    """
    rows = [row for row in document["rows"] if row.get("candidates")]
    lengths = measure.load(measure.RESULTS / "trees_cpu.json")
    if not rows or lengths is None:
        return None
    figure, panels = _panels(sorted({row["batch"] for row in rows}))
    emitted = {
        (row["temperature"], row["nodes"]): row["tokens_per_pass"]
        for row in lengths["rows"]
        if row["drafter"] == "dspark"
    }
    for batch, ax in panels.items():
        for temperature, style in ((0.0, STYLE["xla"]), (0.8, STYLE["mosaic_gpu"])):
            speed = {
                row["nodes"]: emitted[temperature, row["nodes"]]
                * row["ms"]["plain"]
                / row["ms"]["step"]
                for row in sorted(rows, key=lambda row: row["nodes"])
                if row["batch"] == batch
            }
            chain = speed.pop(0)
            ax.plot(
                [*speed], [*speed.values()], label=f"trees, temperature {temperature:g}", **style
            )
            ax.axhline(chain, color=style["color"], linestyle=":", label="chain of 7")
        ax.set(title=f"B = {batch}", xlabel="nodes", ylim=(0, None))
        ax.set(ylabel="times plain decoding")
        _finish(ax)
    return figure


def steps_by_weights(document: dict[str, Any]) -> Figure | None:
    """Milliseconds of a step by drafter and weights, and what its weights alone would cost."""
    rows = [row for row in document["rows"] if "weight_bytes_ms" in row]
    if not rows:
        return None
    figure, panels = _panels(sorted({row["batch"] for row in rows}))
    kinds = list(dict.fromkeys(row["weights"] for row in rows))
    drafters = list(dict.fromkeys(row["drafter"] for row in rows))
    colors = dict(zip(kinds, ("#5c5c5c", "#c8553d", "#0b6e4f"), strict=False))
    for batch, ax in panels.items():
        for row in (row for row in rows if row["batch"] == batch):
            place = drafters.index(row["drafter"]) + 0.27 * (kinds.index(row["weights"]) - 1)
            ax.bar(place, row["ms"], 0.25, color=colors[row["weights"]])
            ax.plot([place - 0.12, place + 0.12], [row["weight_bytes_ms"]] * 2, "w-", linewidth=2)
        for kind in kinds:
            ax.bar(0, 0, color=colors[kind], label=kind)
        ax.plot([], [], color="#bbbbbb", label="white: its weights at 3.35 TB/s")
        names = ["plain" if name == "none" else name for name in drafters]
        ax.set_xticks(range(len(drafters)), names)
        ax.set(title=f"B = {batch}", ylabel="milliseconds per step")
        _finish(ax)
    return figure


WHOLE = {
    "plain": "nothing",
    "eagle3": "an EAGLE-3 head",
    "draft": "a draft model",
    "ngram": "n-grams",
}
WHOLE_STYLE = {
    "ours": STYLE["mosaic_gpu"],
    "vLLM": STYLE["xla"],
    "transformers": STYLE["plain"],
}


def _slots(row: dict[str, Any]) -> int:
    return int(row["slots"])


def whole_engines(document: dict[str, Any]) -> Figure | None:
    """Tokens a second of whole engines over B, a panel for each way to draft."""
    rows = [r for r in document["rows"] if r.get("kind") == "batch" and "with_ends" in r]
    # Of engines of several sizes the largest; a later one replaces what is there.
    rows = list({(r["engine"], r["way"], r["batch"]): r for r in sorted(rows, key=_slots)}.values())
    if not rows:
        return None
    figure, panels = _panels([way for way in WHOLE if any(r["way"] == way for r in rows)])
    for way, ax in panels.items():
        for name, style in WHOLE_STYLE.items():
            mine = [r for r in rows if (r["way"], r["engine"]) == (way, name)]
            mine.sort(key=lambda r: r["batch"])
            for part, line in (("steady", "-"), ("with_ends", "--")):
                rates = [(r["batch"], r[part]["tokens_per_second"]) for r in mine]
                if rates and not (name == "transformers" and way != "plain"):
                    label = f"{name}, {part.replace('_', ' ')}"
                    ax.plot(*zip(*rates, strict=True), label=label, **style | {"linestyle": line})
        _finish_over_batch(ax, f"drafts by {WHOLE[way]}", rows)
        ax.set_ylabel("tokens per second")
    return figure


FIGURES: dict[str, Callable[[dict[str, Any]], Figure | None]] = {
    "time": time_against_batch,
    "rate": rate_against_bytes,
    "vocabulary": vocabularies,
    "devices": against_devices,
    "call": beside_vllm,
    "pass": passes_against_tokens,
    "tokens": tokens_against_length,
    "speed": speed_against_nodes,
    "weights": steps_by_weights,
    "tokens_per_second": whole_engines,
}


def draw(path: pathlib.Path) -> list[pathlib.Path]:
    """Draw what a result file has into PNGs beside it."""
    document = measure.load(path)
    drawn = []
    for name, figure_of in FIGURES.items():
        figure = None if document is None else figure_of(document)
        if figure is not None:
            drawn.append(path.with_name(f"{path.stem}_{name}.png"))
            figure.suptitle(_where(document), fontsize="small")
            # No date in it: the same results give the same file.
            figure.savefig(drawn[-1], dpi=120, metadata={"Software": None})
    return drawn


def _where(document: Any) -> str:
    devices = sorted({f"{r['device'].split(': ')[-1]}, JAX {r['jax']}" for r in document["runs"]})
    return "; ".join(devices)


def _panels(titles: Sequence[Any], lines: int = 1) -> tuple[Figure, dict[Any, Axes]]:
    """Panels by what each of them is about, beside each other in so many lines."""
    columns = -(-len(titles) // lines)
    figure = Figure(figsize=(4.6 * columns, 4.4 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    return figure, dict(zip(titles, axes, strict=False))


def _finish_over_batch(ax: Axes, title: str, rows: list[dict[str, Any]]) -> None:
    """Logarithmic axes, microseconds over the numbers of requests."""
    ax.set(xscale="log", yscale="log", title=title)
    ax.set(xlabel="requests B", ylabel="microseconds per call")
    batches = sorted({r["batch"] for r in rows})
    ax.set_xticks(batches, [str(b) for b in batches])
    ax.minorticks_off()
    _finish(ax)


def _xy(rows: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    return [r["batch"] for r in rows], [r[key] for r in rows]


def _floor(document: dict[str, Any], row: dict[str, Any]) -> float | None:
    bandwidth = document["runs"][row["run"]].get("copy_bytes_per_second")
    return None if bandwidth is None else row["bytes_read"] / bandwidth * 1e6


def _finish(ax: Axes) -> None:
    ax.grid(alpha=0.3)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize="small")


def merge(folder: pathlib.Path, file: pathlib.Path) -> None:
    """Merge a result file into the one of the same name in a folder."""
    new, target = measure.load(file), folder / file.name
    if new is None:
        raise SystemExit(f"plots: {file} is not a result file with runs and rows")
    document = measure.load(target)
    for index, run in enumerate(new["runs"]):
        rows = [row for row in new["rows"] if row["run"] == index]
        document = measure.merge(document, run, rows, tuple(new["identity"]))
    if document is not None:
        measure.write(target, document)


def main(command_line: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path, nargs="?", default=measure.RESULTS)
    parser.add_argument("--merge", type=pathlib.Path, nargs="+", default=[], metavar="FILE")
    options = parser.parse_args(command_line)
    for file in options.merge:
        merge(options.folder, file)
    for path in sorted(options.folder.glob("*.json")):
        for drawn in draw(path):
            print(drawn.name)


if __name__ == "__main__":
    main()
