# SPDX-License-Identifier: Apache-2.0
"""What `kvtide bench ...` runs. One form for all benchmarks, so that their numbers can be compared.

    case.py      what a benchmark is made of: cases, their units, what one round runs
    row.py       what comes out of a case: medians, and how far the paired ratio can be trusted
    bars.py      what a benchmark promises, as data, and whether it held
    harness.py   runs the cases
    machine.py   where it ran; progress.py and report.py: how people and scripts see it
    registry.py  the benchmarks by name

A benchmark itself is a module beside these that defines a `Benchmark`.
"""
