# SPDX-License-Identifier: Apache-2.0
"""Samples to the text format of Prometheus. Everything is asked for when somebody scrapes; nothing is kept here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtide.observe.catalogue import CATALOGUE, FROM_SETTINGS, Series

CONTENT_TYPE = CONTENT_TYPE_LATEST


@dataclass(frozen=True, slots=True)
class Distribution:
    """Counts by bucket, one more for everything above the last bound, and the sum of what was counted."""

    bounds: Sequence[float]
    counts: Sequence[int]
    sum: float


@dataclass(frozen=True, slots=True)
class Sample:
    """A value of a series, with a word for each of its labels, in their order."""

    series: str
    value: float | Distribution
    labels: tuple[str, ...] = ()


class _Scrape(Collector):
    def __init__(self, take: Callable[[], Iterable[Sample]], catalogue: Mapping[str, Series]) -> None:
        self._take = take
        self._catalogue = catalogue

    def collect(self) -> Iterator[Metric]:
        by_series: dict[str, list[Sample]] = {}
        for sample in self._take():
            by_series.setdefault(sample.series, []).append(sample)
        unknown = by_series.keys() - self._catalogue.keys()
        assert not unknown, f"not in the catalogue: {unknown}"
        for series in self._catalogue.values():
            yield _family(series, by_series.get(series.name, []))


def expose(take: Callable[[], Iterable[Sample]], catalogue: Mapping[str, Series] = CATALOGUE) -> bytes:
    """All samples of this moment as text."""
    registry = CollectorRegistry()
    registry.register(_Scrape(take, catalogue))
    return generate_latest(registry)


def _family(series: Series, samples: list[Sample]) -> Metric:
    names = list(series.labels)
    family: Metric
    if series.kind == "histogram":
        family = HistogramMetricFamily(series.name, series.help, labels=names)
    elif series.kind == "counter":
        family = CounterMetricFamily(series.name, series.help, labels=names)
    else:
        family = GaugeMetricFamily(series.name, series.help, labels=names)
    for sample in samples:
        _check_labels(series, sample)
        if isinstance(family, HistogramMetricFamily):
            assert isinstance(sample.value, Distribution) and tuple(sample.value.bounds) == series.buckets
            family.add_metric(sample.labels, _cumulative(sample.value), sample.value.sum)
        elif isinstance(family, CounterMetricFamily | GaugeMetricFamily):
            assert not isinstance(sample.value, Distribution)
            family.add_metric(sample.labels, sample.value)
    return family


def _check_labels(series: Series, sample: Sample) -> None:
    assert len(sample.labels) == len(series.labels), f"{series.name}: labels {sample.labels}"
    for (name, values), word in zip(series.labels.items(), sample.labels, strict=True):
        assert values == FROM_SETTINGS or word in values, f"{series.name}: {word!r} is no {name} of the catalogue"


def _cumulative(distribution: Distribution) -> list[tuple[str, float]]:
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*distribution.bounds, float("inf")), distribution.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
    return buckets
