# SPDX-License-Identifier: Apache-2.0
"""The catalogue is all there is: a used service exports every series of it, nothing else, and the page shows it."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtide import wire
from kvtide.errors import KvtideError
from kvtide.node.meter import BUCKETS_S
from kvtide.node.service import OPS
from kvtide.observe.catalogue import CATALOGUE, FROM_SETTINGS, KINDS, reference
from kvtide.observe.catalogue import OPS as DECLARED_OPS
from kvtide.observe.metrics import Distribution, Sample, expose
from kvtide.testing.node import ServedNode
from test_admin import CONFIG, NAMESPACE, Api, Engine, blocks

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
REGENERATE = ".venv/bin/python -m kvtide.observe.catalogue > docs/metrics.md"

Exported = dict[str, dict[tuple[str, ...], float]]


def read(text: str) -> Exported:
    """Series of a page, by name and then by the values of their labels; histograms by what counts them."""
    found: Exported = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith(("_bucket", "_sum")):
                continue
            name = sample.name.removesuffix("_count") if family.type == "histogram" else sample.name
            declared = CATALOGUE[name].labels
            assert set(sample.labels) == set(declared), name
            found.setdefault(name, {})[tuple(sample.labels[label] for label in declared)] = sample.value
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exported]:
    """What a service says after a bit of everything."""
    with ServedNode(tmp_path_factory.mktemp("used"), config=CONFIG) as node:
        api = Api(node, (node.folder / "admin.token").read_text().strip())
        with node.connect() as client, api.http:
            engine = Engine(client)
            client.report_prefill(NAMESPACE, 1000, 1.0)
            for number in range(20):  # more than the arena holds
                engine.save(f"prompt {number}", 60)
                api.post("/v1/tiers/disk/drain", {})
            scope = client.open_scope(NAMESPACE).result
            assert scope is not None
            ticket = client.match_and_lease([scope.shelf()], engine.keys("prompt 19", 60))
            assert client.wait(ticket, 30)
            client.release(ticket.result.fetched[0])
            client.stats()
            _be_cut_off(node)
            api.post("/v1/pins", blocks(engine.keys("prompt 0", 60), ttl_s=60), 201)  # from disk
            text = api.http.get("/metrics").text
        yield read(text)


def _be_cut_off(node: ServedNode) -> None:
    """Say what no client says, and read the refusal."""
    with socket.socket(socket.AF_UNIX) as rude:
        rude.connect(str(node.socket))
        rude.sendall(b"\xff" * 64)
        assert rude.recv(4096)


def test_a_used_service_exports_every_series_and_nothing_else(exported: Exported) -> None:
    assert sorted(exported) == sorted(CATALOGUE)


def test_labels_come_from_their_closed_sets(exported: Exported) -> None:
    for name, series in exported.items():
        for labels in series:
            for values, word in zip(CATALOGUE[name].labels.values(), labels, strict=True):
                assert values == FROM_SETTINGS or word in values
    tenants = {labels[0] for labels in exported["kvtide_tenant_tokens_served_total"]}
    assert tenants == {"default", "group:prompts"}


def test_what_was_done_is_what_is_counted(exported: Exported) -> None:
    assert exported["kvtide_published_blocks_total"][()] == 1200
    assert exported["kvtide_requests_total"]["reserve", "ok"] == 20
    assert exported["kvtide_request_seconds"]["reserve",] == 20
    assert exported["kvtide_asked_blocks_total"][()] == exported["kvtide_matched_blocks_total"][()] == 60
    assert exported["kvtide_sessions"]["operator",] == 1
    assert exported["kvtide_sessions_cut_off_total"]["protocol",] == 1
    assert exported["kvtide_tier_max_bytes"]["dram",] == 8 << 20
    assert exported["kvtide_tier_operations_total"]["disk", "read", "hit"] == 60
    assert exported["kvtide_tenant_blocks_served_total"]["default",] == 60
    assert exported["kvtide_pinned_bytes"][()] > 0


def test_the_operations_of_the_catalogue_are_those_of_the_service() -> None:
    assert frozenset(DECLARED_OPS) == OPS
    assert len(OPS) == len(wire.Request.__args__)


def test_every_kind_of_error_is_a_word_of_the_catalogue() -> None:
    def kinds(error: type[KvtideError]) -> Iterator[str]:
        if error.__module__ == "kvtide.errors":
            yield error.kind
            for each in error.__subclasses__():
                yield from kinds(each)

    assert set(kinds(KvtideError)) == set(KINDS)


def test_names_say_unit_and_kind() -> None:
    for series in CATALOGUE.values():
        assert re.fullmatch(r"kvtide_[a-z_]+", series.name)
        assert series.name.endswith("_total") == (series.kind == "counter")
        assert series.help.endswith(".")
        assert not set(series.labels) & {"key", "user", "path", "request", "le"}


def test_the_page_of_metrics_is_made_from_the_catalogue() -> None:
    assert PAGE.read_text() == reference(), f"docs/metrics.md is old; make it again: {REGENERATE}"


def test_an_undeclared_series_or_label_is_refused() -> None:
    with pytest.raises(AssertionError, match="not in the catalogue"):
        expose(lambda: [Sample("kvtide_surprise", 1)])
    with pytest.raises(AssertionError, match="is no role"):
        expose(lambda: [Sample("kvtide_sessions", 1, ("king",))])
    with pytest.raises(AssertionError, match="labels"):
        expose(lambda: [Sample("kvtide_sessions", 1)])


def test_buckets_add_up_and_end_at_infinity() -> None:
    bounds = CATALOGUE["kvtide_request_seconds"].buckets
    distribution = Distribution(bounds, [2, 3, *([0] * (len(bounds) - 2)), 4], 12.5)
    text = expose(lambda: [Sample("kvtide_request_seconds", distribution, ("fetch",))]).decode()
    assert 'kvtide_request_seconds_bucket{le="0.0001",op="fetch"} 2.0' in text
    assert 'kvtide_request_seconds_bucket{le="10.0",op="fetch"} 5.0' in text
    assert 'kvtide_request_seconds_bucket{le="+Inf",op="fetch"} 9.0' in text
    assert 'kvtide_request_seconds_count{op="fetch"} 9.0' in text
    assert 'kvtide_request_seconds_sum{op="fetch"} 12.5' in text


def test_other_buckets_than_the_declared_ones_are_refused() -> None:
    assert CATALOGUE["kvtide_request_seconds"].buckets == BUCKETS_S
    with pytest.raises(AssertionError):
        expose(lambda: [Sample("kvtide_request_seconds", Distribution((1.0,), [1, 2], 3.0), ("fetch",))])
