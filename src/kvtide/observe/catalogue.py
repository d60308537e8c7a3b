# SPDX-License-Identifier: Apache-2.0
"""Every series that kvtide exports: name, kind, meaning, labels. What does not stand here is not exported.

`CATALOGUE` is what the node service exports, `ENGINE_CATALOGUE` what `kvtide engine` does.

Labels come from closed sets, so the number of series has a bound. docs/metrics.md is made from this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import fill
from typing import Literal

from kvtide import errors
from kvtide.errors import KvtideError
from kvtide.outcome import Outcome

Kind = Literal["counter", "gauge", "histogram"]
Values = tuple[str, ...]

# The words of all errors, for results and reasons.
KINDS: Values = tuple(
    sorted({each.kind for each in vars(errors).values() if isinstance(each, type) and issubclass(each, KvtideError)})
)
TIERS: Values = ("dram", "disk")
LOWER_TIERS: Values = ("disk",)
OPS: Values = (
    "bye",
    "clear",
    "fetch",
    "keep",
    "match",
    "match_and_lease",
    "open_scope",
    "prefetch",
    "publish",
    "report_prefill",
    "reserve",
    "return",
    "stats",
)
ROLES: Values = ("engine", "operator", "reader")
OUTCOMES: Values = tuple(outcome.value for outcome in Outcome)
FINISHES: Values = ("stop", "length", "abort", "error")
STATUSES: Values = ("400", "401", "404", "405", "408", "413", "415", "421", "429", "500", "503")
# Known only when the service has started: one value each for the version, and for each tenant in the settings.
FROM_SETTINGS: Values = ()


@dataclass(frozen=True, slots=True)
class Series:
    """One series. `labels`: the values that each may have; FROM_SETTINGS stands for the names in the settings."""

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, Values] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()  # of a histogram: upper bounds, without the last, which is infinite


# From a tenth of a millisecond, where a request in DRAM should be, to where an operator should look.
_REQUEST_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0)
# From a short prompt of which all is in the cache, to a long one that a CPU computes.
_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
_TOKEN_GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_TIER = {"tier": TIERS}
_LOWER = {"tier": LOWER_TIERS}
_TARGET = {"target": LOWER_TIERS}
_TENANT = {"tenant": FROM_SETTINGS}

CATALOGUE: dict[str, Series] = {
    series.name: series
    for series in (
        Series("kvtide_build_info", "gauge", "1, with the version that runs.", {"version": FROM_SETTINGS}),
        Series("kvtide_start_time_seconds", "gauge", "When the service started, in seconds since 1970."),
        # Sessions and requests
        Series(
            "kvtide_requests_total",
            "counter",
            "Requests on the socket: ok, or the kind of the error.",
            {"op": OPS, "result": ("ok", *KINDS)},
        ),
        Series(
            "kvtide_request_seconds",
            "histogram",
            "Time from taking up a request to its answer; of fetches with what they wait for.",
            {"op": OPS},
            _REQUEST_BUCKETS,
        ),
        Series("kvtide_sessions", "gauge", "Clients that are logged in.", {"role": ROLES}),
        Series("kvtide_logins_total", "counter", "Clients that have logged in."),
        Series("kvtide_sessions_cut_off_total", "counter", "Sessions that the service ended.", {"reason": KINDS}),
        Series("kvtide_sessions_lingering", "gauge", "Sessions that are over, while their process may still copy."),
        # The cache
        Series("kvtide_asked_blocks_total", "counter", "Blocks that a match was asked for."),
        Series("kvtide_matched_blocks_total", "counter", "Blocks that a match found."),
        Series("kvtide_published_blocks_total", "counter", "Blocks that engines saved."),
        Series("kvtide_rejected_blocks_total", "counter", "Blocks for which there was no room, or no right to more."),
        Series("kvtide_stale_publishes_total", "counter", "Blocks whose publish came too late."),
        Series("kvtide_shared_flights_total", "counter", "Reads from below that served one more fetch."),
        Series("kvtide_leases", "gauge", "Leases that clients hold."),
        Series("kvtide_pinned_bytes", "gauge", "Bytes of DRAM that are pinned."),
        Series("kvtide_quarantined_bytes", "gauge", "Bytes of DRAM under leases that are past their time."),
        Series("kvtide_quarantines_total", "counter", "Leases that were not returned in time."),
        # Tiers
        Series("kvtide_tier_blocks", "gauge", "Blocks on a tier.", _TIER),
        Series("kvtide_tier_used_bytes", "gauge", "Bytes in use on a tier.", _TIER),
        Series("kvtide_tier_max_bytes", "gauge", "The bound of a tier.", _TIER),
        Series("kvtide_tier_evicted_blocks_total", "counter", "Blocks that left a tier to make room.", _TIER),
        Series("kvtide_tier_bypassed", "gauge", "1 while an operator has taken a tier out of use.", _LOWER),
        Series(
            "kvtide_tier_operations_total",
            "counter",
            "Blocks read from and written to a tier below DRAM.",
            {**_LOWER, "op": ("read", "write"), "result": OUTCOMES},
        ),
        Series("kvtide_tier_read_bytes_total", "counter", "Bytes read from a tier below DRAM.", _LOWER),
        Series("kvtide_tier_written_bytes_total", "counter", "Bytes written to a tier below DRAM.", _LOWER),
        # Spilling
        Series("kvtide_spill_queued_bytes", "gauge", "Bytes in DRAM that wait to be written below.", _TARGET),
        Series("kvtide_spilled_blocks_total", "counter", "Blocks written below.", _TARGET),
        Series("kvtide_spilled_bytes_total", "counter", "Bytes written below.", _TARGET),
        Series(
            "kvtide_spill_dropped_blocks_total",
            "counter",
            "Blocks not written below: the queue was full, the tier refused, or they had to leave DRAM first.",
            {**_TARGET, "reason": ("queue_full", "refused", "evicted")},
        ),
        # Tenants
        Series("kvtide_tenant_used_bytes", "gauge", "Bytes that a tenant uses of a tier.", {**_TENANT, **_TIER}),
        Series(
            "kvtide_tenant_byte_seconds_total",
            "counter",
            "Bytes that a tenant used, summed over the seconds it used them.",
            {**_TENANT, **_TIER},
        ),
        Series("kvtide_tenant_blocks_served_total", "counter", "Blocks that were leased to be read.", _TENANT),
        Series("kvtide_tenant_tokens_served_total", "counter", "Tokens of these blocks.", _TENANT),
        Series(
            "kvtide_tenant_compute_seconds_saved_total",
            "counter",
            "Seconds these tokens would have taken; there only where engines report how long theirs take.",
            _TENANT,
        ),
    )
}

ENGINE_CATALOGUE: dict[str, Series] = {
    series.name: series
    for series in (
        Series(
            "kvtide_engine_info",
            "gauge",
            "1, with what runs.",
            {"version": FROM_SETTINGS, "model": FROM_SETTINGS, "dtype": FROM_SETTINGS},
        ),
        Series("kvtide_engine_start_time_seconds", "gauge", "When the server started, in seconds since 1970."),
        Series(
            "kvtide_engine_requests_total",
            "counter",
            "Answers that ended: at a stop, at their length, because the client left, with an error.",
            {"finish": FINISHES},
        ),
        Series("kvtide_engine_refused_total", "counter", "Calls that were refused.", {"status": STATUSES}),
        Series("kvtide_engine_running", "gauge", "Requests that take turns in the model."),
        Series("kvtide_engine_waiting", "gauge", "Requests before those."),
        Series("kvtide_engine_prompt_tokens_total", "counter", "Tokens of prompts, reused and computed."),
        Series("kvtide_engine_computed_tokens_total", "counter", "Tokens of prompts that the model computed."),
        Series("kvtide_engine_reused_tokens_total", "counter", "Tokens of prompts that came from the cache.", _TIER),
        Series("kvtide_engine_generated_tokens_total", "counter", "Tokens of answers."),
        Series("kvtide_engine_saved_blocks_total", "counter", "Blocks that the engine saved, or found there."),
        Series("kvtide_engine_dropped_blocks_total", "counter", "Blocks that the cache did not take."),
        Series(
            "kvtide_engine_first_token_seconds",
            "histogram",
            "Time from taking up a request to its first token.",
            buckets=_FIRST_TOKEN_BUCKETS,
        ),
        Series(
            "kvtide_engine_token_gap_seconds",
            "histogram",
            "Time from one token of an answer to the next.",
            buckets=_TOKEN_GAP_BUCKETS,
        ),
    )
}

_INTRO = """\
# Metrics

What `GET /metrics` of the admin side exports, in the text format of Prometheus. Counters begin at 0 when the service
starts. Every label has a closed set of values; `tenant` has the names in the settings (`group:NAME` for a share group,
`default` where there are no tenants), and a kind of error is one of
%s.
Series are there once they have something to say.

Made from `kvtide.observe.catalogue`; change it there.

"""

_TABLE = """\
| Series | Kind | Labels | Meaning |
|---|---|---|---|
"""

_ENGINE = """
## The engine's

What `GET /metrics` of `kvtide engine` exports.

"""

_EXAMPLES = """
## Useful questions

```promql
# share of the asked blocks that were found
rate(kvtide_matched_blocks_total[5m]) / rate(kvtide_asked_blocks_total[5m])

# 99th percentile of a match with its leases
histogram_quantile(0.99, sum by (le) (rate(kvtide_request_seconds_bucket{op="match_and_lease"}[5m])))

# what the disk does not keep up with
sum by (reason) (rate(kvtide_spill_dropped_blocks_total[5m]))

# seconds of GPU time saved, for each second, by tenant
rate(kvtide_tenant_compute_seconds_saved_total[1h])

# share of an engine's prompt tokens that it did not have to compute
sum without (tier) (rate(kvtide_engine_reused_tokens_total[5m])) / rate(kvtide_engine_prompt_tokens_total[5m])
```
"""


def reference() -> str:
    """docs/metrics.md."""
    kinds = fill(", ".join(f"`{kind}`" for kind in KINDS), 120)
    return _INTRO % kinds + _table(CATALOGUE) + _ENGINE + _table(ENGINE_CATALOGUE) + _EXAMPLES


def _table(catalogue: Mapping[str, Series]) -> str:
    rows = [
        f"| `{each.name}` | {each.kind} | {'; '.join(_label(*label) for label in each.labels.items()) or 'none'} "
        f"| {each.help} |\n"
        for each in catalogue.values()
    ]
    return _TABLE + "".join(rows)


def _label(name: str, values: Values) -> str:
    if values == FROM_SETTINGS:
        return f"`{name}`"
    words = (
        [word for word in values if word not in KINDS] + ["a kind of error"] if set(values) >= set(KINDS) else values
    )
    return f"`{name}`: {', '.join(words)}"


if __name__ == "__main__":
    print(reference(), end="")
