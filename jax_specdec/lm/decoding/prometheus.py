"""`PrometheusExporter`: acceptance and serving statistics for Prometheus.

The server publishes `AcceptanceStats` and `ServingStats`, which are counted elsewhere, and a scrape
reads the last pair. `_METRICS` says which of their fields are shown, as what, and with which text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from jax_specdec._src.base.arrays import require
from jax_specdec._src.stats.acceptance import AcceptanceStats
from jax_specdec.lm.decoding.metrics import END_REASONS, ServingStats
from jax_specdec.lm.extras import extra

_METRICS = {
    "spec_decode": {
        "num_drafts": ("counter", "Verifications of a request that had at least one draft."),
        "num_draft_tokens": ("counter", "Drafts offered."),
        "num_accepted_tokens": ("counter", "Drafts accepted."),
        "num_verifications": ("counter", "Target passes of a request that emitted tokens."),
        "num_tokens": ("counter", "Tokens, without those that a stop token or the budget cut off."),
        "num_fallbacks": ("counter", "Requests verified one-hot, without a valid distribution."),
        "num_offered_tokens_per_pos": ("positions", "Verifications offered draft i."),
        "num_accepted_tokens_per_pos": ("positions", "Those that accepted drafts 0..i."),
    },
    "serving": {
        "num_steps": ("counter", "Steps whose results were read."),
        "num_busy_slots": ("counter", "Requests that took part in them, summed over steps."),
        "num_steps_ahead": ("counter", "Steps under way when one was read, summed over steps."),
        "host_wait_seconds": ("counter", "Time that the host waited for results."),
        "num_admitted": ("counter", "Requests that have taken part in a step."),
        "queue_seconds": ("counter", "Time that they had waited, summed over requests."),
        "num_failed_calls": ("counter", "Calls that failed on the device."),
        "num_prompt_tokens": ("counter", "Tokens of the prompts of admitted requests."),
        "num_reused_tokens": ("counter", "Those of them that an earlier request had left."),
        "num_ended": ("reasons", "Requests that have ended."),
        "num_slots": ("gauge", "Requests that a step has room for."),
        "num_running": ("gauge", "Requests in a slot."),
        "num_queued": ("gauge", "Requests that wait for a slot."),
        "weights_version": (
            "gauge",
            "How often the weights were changed; acceptance is counted anew.",
        ),
        "time_to_first_token_seconds": ("histogram", "From submit until the first token."),
        "inter_token_latency_seconds": ("histogram", "Between two tokens of a request."),
    },
}
"""The kind and the text of each metric, by its name; "positions" is a counter for each position,
"reasons" one for each of `END_REASONS`."""
_FIELDS = {
    "num_offered_tokens_per_pos": "offered_per_position",
    "num_accepted_tokens_per_pos": "accepted_per_position",
}
"""The fields that hold metrics of another name."""


class PrometheusExporter:
    """Exports statistics to Prometheus; needs ``prometheus_client``.

    `AcceptanceStats` become counters ``jax_specdec:spec_decode_NAME_total``, named as vLLM's where
    vLLM has such; ``num_offered_tokens_per_pos`` and ``num_accepted_tokens_per_pos`` have a label
    ``position``. `ServingStats`, if published too, become counters, gauges and histograms
    ``jax_specdec:serving_NAME``; ``num_ended`` has a label ``reason``. For the last five minutes,

    - the mean acceptance length (of verifications that had drafts) is
      ``1 + rate(..._num_accepted_tokens_total[5m]) / rate(..._num_drafts_total[5m])``,
    - the tokens per target pass (of all verifications) are
      ``rate(..._num_tokens_total[5m]) / rate(..._num_verifications_total[5m])``,
    - the unconditional acceptance rates per position are
      ``rate(..._num_accepted_tokens_per_pos_total[5m]) /
      rate(..._num_offered_tokens_per_pos_total[5m])``, and
    - the 99th percentile of the time between tokens is ``histogram_quantile(0.99,
      rate(..._inter_token_latency_seconds_bucket[5m]))``.

    A scrape reads what was published last; it never waits for the device. This is a collector,
    because prometheus_client's own counters and histograms cannot be set to what a device counted.

    Args:
      registry: a ``prometheus_client.CollectorRegistry``, or None for the global one.
      labels: added to every counter, such as ``{"model": "..."}``.

    Raises:
      ImportError: prometheus_client is not installed.
      TypeError: `registry` is none.
      ValueError: `labels` has ``position`` or ``reason``, which the exporter sets itself; or
        `registry` has an exporter already, so that a scrape would show each counter twice.

    Example:
      >>> import prometheus_client
      >>> registry = prometheus_client.CollectorRegistry()
      >>> exporter = PrometheusExporter(registry)
      >>> exporter.publish(
      ...     AcceptanceStats((2, 2), (2, 1), (1, 1), num_tokens=4, num_verifications=2))
      >>> registry.get_sample_value("jax_specdec:spec_decode_num_accepted_tokens_total")
      2
    """

    def __init__(
        self, registry: Any = None, *, labels: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        with extra("serve"):
            import prometheus_client
        self._labels = dict(labels)
        for name in ("position", "reason"):
            if name in self._labels:
                raise ValueError(f"labels must not have {name}, but they are {self._labels}")
        is_registry = registry is None or hasattr(registry, "register")
        must = "be a CollectorRegistry of prometheus_client"
        require(is_registry, "registry", must, registry, error=TypeError)
        # One attribute for both, replaced by one assignment: a scrape in another thread reads both.
        # It is there before `register`, after which a scrape may come at once.
        self._published: tuple[AcceptanceStats, ServingStats | None] | None = None
        try:
            (prometheus_client.REGISTRY if registry is None else registry).register(self)
        except ValueError:  # of names that it has
            raise ValueError(
                "registry has a PrometheusExporter already: use that one, or one registry for each"
            ) from None

    def publish(self, stats: AcceptanceStats, serving: ServingStats | None = None) -> None:
        """Sets what the next scrapes see; safe to call during a scrape.

        Args:
          stats: since the server began, not of an interval: Prometheus computes the differences.
          serving: since the server began; None to export none.
        """
        self._published = stats, serving

    def describe(self) -> Iterator[Any]:
        """Yields metrics without values; prometheus_client calls this when it registers them."""
        no_stats = AcceptanceStats((0,), (0,), (0,), num_tokens=0, num_verifications=0)
        return self._families(no_stats, ServingStats(num_slots=0))

    def collect(self) -> Iterator[Any]:
        """Yields metrics; prometheus_client calls this for every scrape. None before `publish`."""
        if self._published is not None:
            yield from self._families(*self._published)

    def _families(self, stats: AcceptanceStats, serving: ServingStats | None) -> Iterator[Any]:
        """Yields a metric of prometheus_client for each entry of the table."""
        for prefix, of in (("spec_decode", stats), ("serving", serving)):
            if of is None:
                continue
            for name, (kind, text) in _METRICS[prefix].items():
                value = getattr(of, _FIELDS.get(name, name))
                yield self._family(f"jax_specdec:{prefix}_{name}", kind, text, value)

    def _family(self, name: str, kind: str, text: str, value: Any) -> Any:
        """Returns a metric of prometheus_client with all its samples."""
        from prometheus_client import core, utils

        labels = list(self._labels)
        values = list(self._labels.values())
        family: Any
        # The labels that were given, and for a counter of several entries one more
        if kind in ("positions", "reasons"):
            family = core.CounterMetricFamily(name, text, labels=[*labels, kind[:-1]])
            entries = END_REASONS if kind == "reasons" else itertools.count()
            for entry, count in zip(entries, value, strict=False):
                family.add_metric([*values, str(entry)], count)
        elif kind == "histogram":
            family = core.HistogramMetricFamily(name, text, labels=labels)
            # a bucket of Prometheus also counts what is in the buckets below it
            bounds = map(utils.floatToGoString, (*value.bounds, math.inf))
            buckets = zip(bounds, itertools.accumulate(value.counts), strict=True)
            family.add_metric(values, [*buckets], value.total_seconds)
        else:
            families = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
            family = families[kind](name, text, labels=labels)
            family.add_metric(values, value)
        return family
