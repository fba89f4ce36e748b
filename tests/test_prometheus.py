"""The Prometheus exporter, scraped over HTTP as a server would be."""

import sys
import urllib.request
from collections.abc import Iterator

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

import jax_specdec as sd
from jax_specdec import lm

pytestmark = pytest.mark.newest

STATS = sd.AcceptanceStats((5, 4, 4), (5, 3, 1), (4, 2, 0), 12, 6, num_fallbacks=1)


@pytest.fixture
def registry() -> prometheus_client.CollectorRegistry:
    return prometheus_client.CollectorRegistry()


@pytest.fixture
def url(registry: prometheus_client.CollectorRegistry) -> Iterator[str]:
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()
    thread.join()


def key(labels: dict[str, str]) -> str | None:
    """The position or reason of a counter, the bound of a bucket."""
    where = labels.get("position", labels.get("reason"))
    return str(float(labels["le"])) if "le" in labels else where


def scrape(url: str) -> dict[tuple[str, str | None], float]:
    """What there is, by name, and position or bound."""
    with urllib.request.urlopen(url, timeout=30) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    assert {family.type for family in families} <= {"counter", "gauge", "histogram"}
    return {
        (sample.name, key(sample.labels)): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_scrape_shows_what_was_published_last(
    registry: prometheus_client.CollectorRegistry, url: str
) -> None:
    exporter = lm.PrometheusExporter(registry)
    assert scrape(url) == {}
    exporter.publish(sd.AcceptanceStats((1,), (1,), (0,), num_tokens=1, num_verifications=1))
    exporter.publish(STATS)
    prefix = "jax_specdec:spec_decode_"
    expected = {
        (f"{prefix}num_drafts_total", None): 5,
        (f"{prefix}num_draft_tokens_total", None): 13,
        (f"{prefix}num_accepted_tokens_total", None): 6,
        (f"{prefix}num_verifications_total", None): 6,
        (f"{prefix}num_tokens_total", None): 12,
        (f"{prefix}num_fallbacks_total", None): 1,
    }
    for position, (offered, accepted) in enumerate([(5, 4), (4, 2), (4, 0)]):
        name = f"{prefix}num_offered_tokens_per_pos_total"
        expected[name, str(position)] = offered
        name = f"{prefix}num_accepted_tokens_per_pos_total"
        expected[name, str(position)] = accepted
    assert scrape(url) == expected


def test_a_scrape_shows_how_busy_the_engine_was(
    registry: prometheus_client.CollectorRegistry, url: str
) -> None:
    exporter = lm.PrometheusExporter(registry)
    first = lm.Histogram().observe([(0.3, 2)])
    others = lm.Histogram().observe([(0.002, 4), (200, 1)])
    ended = (3, 2, 1, 0)
    serving = lm.ServingStats(8, 5, 7, 4, 24, 3, 0.5, 2, 0.25, 1, first, others, 70, ended, 2, 9)
    exporter.publish(STATS, serving)
    prefix = "jax_specdec:serving_"
    expected = {
        (f"{prefix}num_slots", None): 8,
        (f"{prefix}num_running", None): 5,
        (f"{prefix}num_queued", None): 7,
        (f"{prefix}weights_version", None): 2,
        (f"{prefix}time_to_first_token_seconds_count", None): 2,
        (f"{prefix}time_to_first_token_seconds_sum", None): 0.6,
        (f"{prefix}inter_token_latency_seconds_count", None): 5,
        (f"{prefix}inter_token_latency_seconds_sum", None): 200.008,
        (f"{prefix}num_steps_total", None): 4,
        (f"{prefix}num_busy_slots_total", None): 24,
        (f"{prefix}num_steps_ahead_total", None): 3,
        (f"{prefix}host_wait_seconds_total", None): 0.5,
        (f"{prefix}num_admitted_total", None): 2,
        (f"{prefix}queue_seconds_total", None): 0.25,
        (f"{prefix}num_failed_calls_total", None): 1,
        (f"{prefix}num_prompt_tokens_total", None): 70,
        (f"{prefix}num_reused_tokens_total", None): 9,
        (f"{prefix}num_ended_total", "length"): 3,
        (f"{prefix}num_ended_total", "stop"): 2,
        (f"{prefix}num_ended_total", "failed"): 1,
        (f"{prefix}num_ended_total", "cancelled"): 0,
    }
    found = scrape(url)
    for name, bound, count in (
        ("time_to_first_token", 0.2, 0),
        ("time_to_first_token", 0.5, 2),
        ("inter_token_latency", 0.001, 0),
        ("inter_token_latency", 0.002, 4),
        ("inter_token_latency", 100.0, 4),
        ("inter_token_latency", float("inf"), 5),
    ):
        assert found.pop((f"{prefix}{name}_seconds_bucket", str(bound))) == count
    found = {name: found[name] for name in found if "_bucket" not in name[0]}
    assert {name: found[name] for name in found if name[0].startswith(prefix)} == expected
    assert len(found) == len(expected) + 12
    exporter.publish(STATS)
    assert len(scrape(url)) == 12


def test_every_counter_carries_the_labels(registry: prometheus_client.CollectorRegistry) -> None:
    lm.PrometheusExporter(registry, labels={"model": "a"}).publish(STATS)
    samples = [sample for family in registry.collect() for sample in family.samples]
    assert len(samples) == 12
    assert {sample.labels["model"] for sample in samples} == {"a"}


def test_it_registers_globally_by_default() -> None:
    exporter = lm.PrometheusExporter()
    try:
        exporter.publish(STATS)
        name = "jax_specdec:spec_decode_num_drafts_total"
        assert prometheus_client.REGISTRY.get_sample_value(name) == 5
    finally:
        prometheus_client.REGISTRY.unregister(exporter)


def test_without_the_client_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match="^prometheus_client is not installed: .*extra serve"):
        lm.PrometheusExporter()


def test_the_label_of_positions_is_not_the_callers(
    registry: prometheus_client.CollectorRegistry,
) -> None:
    for name in ("position", "reason"):
        with pytest.raises(ValueError, match=f"labels must not have {name}, but they are"):
            lm.PrometheusExporter(registry, labels={name: "left"})


def test_a_second_exporter_of_one_registry_is_refused(
    registry: prometheus_client.CollectorRegistry,
) -> None:
    lm.PrometheusExporter(registry, labels={"model": "a"})
    with pytest.raises(ValueError, match="registry has a PrometheusExporter already"):
        lm.PrometheusExporter(registry, labels={"model": "b"})
    lm.PrometheusExporter(prometheus_client.CollectorRegistry(), labels={"model": "b"})
