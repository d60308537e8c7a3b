# SPDX-License-Identifier: Apache-2.0
"""Whether a tenant can tell from answer times what another one has asked for.

The victim saves prompts. The attacker sends the same tokens through its own scope, and tokens that nobody has
sent, in random order, and looks at the times alone. If they tell anything, the area under the curve (how often a
probe of one kind is slower than one of the other) is not one half. That the same clock and the same statistic do
see a difference where there is one is shown on the victim's own hits and misses.

The victim's prompts do not all fit its DRAM, and are asked for in turn: most are on the disk that both tenants
share, where a leak would be likeliest, and a hit of the victim's is a read.
"""

from __future__ import annotations

import math
import random
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from itertools import count, cycle
from pathlib import Path

import numpy as np

from kvtide.bench.case import Case, Setting, Unit
from kvtide.bench.node.common import (
    SMALL,
    Campaign,
    auc,
    done,
    open_client,
    open_node,
    open_scope,
    save_chain,
    wait_spilled,
)
from kvtide.bench.node.crew import Job, Orders, crew
from kvtide.client import Client
from kvtide.keys import Key, chain
from kvtide.tenant import Scope
from kvtide.testing.blocks import chain_keys

_MIB = 1 << 20
_VOCABULARY = 150_000


@dataclass(frozen=True, slots=True)
class Size:
    """`probes` of the attacker, half of each kind; `control_probes` of the victim itself."""

    probes: int = 10_000
    control_probes: int = 400
    prompts: int = 64  # of each kind
    prompt_blocks: int = 256
    dram_bytes: int = 64 * _MIB  # half of it for each: a part of what the victim saves
    disk_bytes: int = 4096 * _MIB


FULL = Size()
QUICK = Size(probes=500, control_probes=60, prompts=32)


@dataclass(frozen=True, slots=True)
class Result:
    """Areas under the curve: of the attacker's probes, and of the victim's own hits against its misses."""

    attack: float
    control: float
    flood_attack: float
    flood_control: float
    probes: int
    seed: int

    def __str__(self) -> str:
        # Of an area of one half by chance alone, by the rank statistic's own variance.
        error = math.sqrt((self.probes + 1) / (3 * self.probes**2))
        return (
            f"{self.probes:,} probes, AUC {self.attack:.4f}, in a flood {self.flood_attack:.4f}"
            f" (standard error {error:.4f}), seed {self.seed}"
        )


class Flood(Job):
    """The victim at work: saves and fetches until it is told to stop."""

    def __init__(self, orders: Orders, socket: str, token: str, blocks: int) -> None:
        super().__init__(orders)
        self._client = open_client(socket, token=token)
        self._shelf = open_scope(self._client, "flood").shelf()
        self._blocks = blocks

    def flood(self, seconds_max: float) -> int:
        """Chains that were saved and fetched."""
        end_s = time.monotonic() + seconds_max
        for number in count():
            if self.orders.are_waiting or time.monotonic() > end_s:
                return number
            # Every second one for the first time.
            keys = chain_keys(f"flood-{number // 2}", self._blocks)
            reservation = done(self._client, self._client.reserve(self._shelf, keys, SMALL))
            done(self._client, self._client.publish(reservation))
            leased = done(self._client, self._client.match_and_lease([self._shelf], keys))
            self._client.release(leased.fetched[0])
        raise AssertionError("count does not end")

    def stop(self) -> None:
        """Does nothing: that it was told is enough."""

    def close(self) -> None:
        self._client.close()


def config_of(tokens: dict[str, str]) -> str:
    """Tenants with a token each, as YAML."""
    lines = ["tenants:"]
    for tenant, token in tokens.items():
        hashed = sha256(token.encode()).hexdigest()
        lines += [f"  {tenant}:", "    clients:", f'      - token_sha256: "{hashed}"']
    return "\n".join(lines) + "\n"


def run_timing(folder: Path, size: Size, seed: int, tell: Callable[[str], None]) -> Result:
    draw = np.random.Generator(np.random.PCG64(seed))
    tokens = {"victim": secrets.token_hex(16), "attacker": secrets.token_hex(16)}
    prompts = [
        draw.integers(0, _VOCABULARY, size.prompt_blocks * SMALL.block_tokens, np.int32)
        for _ in range(2 * size.prompts)
    ]
    with ExitStack() as stack:
        node = stack.enter_context(
            open_node(folder / "node", dram_bytes=size.dram_bytes, disk_bytes=size.disk_bytes, config=config_of(tokens))
        )
        victim = stack.enter_context(open_client(node.socket, token=tokens["victim"]))
        attacker = stack.enter_context(open_client(node.socket, token=tokens["attacker"]))
        known, unknown = prompts[: size.prompts], prompts[size.prompts :]
        victims, attackers = open_scope(victim, "customer"), open_scope(attacker, "customer")
        for keys in _keys(victims, known):
            save_chain(victim, victims.shelf(), keys, SMALL)
            wait_spilled(victim)

        def attack(name: str) -> float:
            pair = _keys(attackers, known), _keys(attackers, unknown)
            return _probe(attacker, attackers, *pair, size.probes, seed, lambda part: tell(f"{name}: {part}"))

        def control(name: str) -> float:
            pair = _keys(victims, unknown), _keys(victims, known)
            return _probe(victim, victims, *pair, size.control_probes, seed, lambda part: tell(f"{name}: {part}"))

        quiet = attack("probes"), control("control")
        flood = {"socket": str(node.socket), "token": tokens["victim"], "blocks": size.prompt_blocks}
        with crew("kvtide.bench.node.timing:Flood", [flood]) as (worker,):
            worker.tell("flood", seconds_max=600.0)
            flooded = attack("probes in a flood"), control("control in a flood")
            worker.tell("stop")
            assert worker.hear() > 0, "there was no flood"
            worker.hear()
        return Result(*quiet, *flooded, size.probes, seed)


def _keys(scope: Scope, prompts: Sequence[np.ndarray[tuple[int], np.dtype[np.int32]]]) -> list[list[Key]]:
    return [chain(scope.root, prompt, SMALL.block_tokens) for prompt in prompts]


def _probe(
    client: Client,
    scope: Scope,
    lower: list[list[Key]],
    higher: list[list[Key]],
    probes: int,
    seed: int,
    tell: Callable[[str], None],
) -> float:
    """How well times tell prompts of one kind from those of the other. Half of the probes each, in random order."""
    times: tuple[list[float], list[float]] = ([], [])
    order = [number % 2 for number in range(probes)]
    drawn = random.Random(seed)
    drawn.shuffle(order)
    shelves = [scope.shelf()]
    turns = cycle(lower), cycle(higher)
    for number, kind in enumerate(order):
        keys = next(turns[kind])
        start_s = time.perf_counter()
        ticket = client.match_and_lease(shelves, keys)
        client.wait(ticket)
        times[kind].append(time.perf_counter() - start_s)
        for fetched in ticket.result.fetched:
            client.release(fetched)
        if number % 500 == 0:
            tell(f"{number:,} of {probes:,}")
    return auc(*times)


def _run(setting: Setting) -> Result:
    seed = secrets.randbelow(1 << 31)
    return run_timing(setting.folder, QUICK if setting.is_quick else FULL, seed, setting.tell)


_campaign = Campaign(_run, str)
_AUC = Unit("AUC")
_OFF = Unit("|AUC-0.5|")
CASES: tuple[Case, ...] = (
    _campaign.case("timing-attack", _OFF, lambda result: abs(result.attack - 0.5)),
    _campaign.case("timing-control", _AUC, lambda result: result.control),
    _campaign.case("timing-flood-attack", _OFF, lambda result: abs(result.flood_attack - 0.5)),
    _campaign.case("timing-flood-control", _AUC, lambda result: result.flood_control),
)
