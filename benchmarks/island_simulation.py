"""Simulates islands behind slow links: the share of time that trains (docs/reference/islands-replicas-shares.md).

    python -m benchmarks.island_simulation

8 to 64 islands, links of 100 Mbit/s to 100 Gbit/s and 1 to 200 ms, a model of 1B parameters, local steps of 1 s, 100
steps between exchanges; and data parallelism over the same links. Nothing is measured: the results are computed from
these inputs.
"""

from __future__ import annotations

from itertools import product

from benchmarks.island_simulator.island_exchange import Exchange, Island, data_parallel_step_s
from benchmarks.island_simulator.island_simulation import Failures, simulate_islands
from pipeline.plan.predict.links import Link

PARAMETERS = 1e9
INT8_BYTES = 1 + 4 / 256
"""Bytes per value in int8, with an fp32 scale per 256 values."""
COUNTS = (8, 64)
LINKS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "100 Gbit/s": 1e11}
LATENCIES_S = (0.001, 0.2)
DAY = 86_400.0


def main() -> None:
    """Prints the table in Markdown."""
    kinds = {
        "int8": Exchange(100, INT8_BYTES * PARAMETERS, state_bytes=8 * PARAMETERS),
        "fp32": Exchange(100, 4 * PARAMETERS, state_bytes=8 * PARAMETERS),
        "fp32, beside 50 steps": Exchange(100, 4 * PARAMETERS, delay=50, state_bytes=8 * PARAMETERS),
    }
    print(f"| islands | link | latency | {' | '.join(kinds)} | fp32, a failure a day | data parallelism |")
    print(f"|---|---|---|{'---|' * (len(kinds) + 2)}")
    for count, (name, bits), latency_s in product(COUNTS, LINKS.items(), LATENCIES_S):
        islands = [Island(1.0, Link(bits / 8, latency_s))] * count
        shares = [simulate_islands(islands, exchange, seconds=10 * DAY).efficiency for exchange in kinds.values()]
        shares.append(simulate_islands(islands, kinds["fp32"], seconds=10 * DAY, failures=Failures(DAY)).efficiency)
        shares.append(1.0 / data_parallel_step_s(islands, 4 * PARAMETERS))
        print(f"| {count} | {name} | {1000 * latency_s:g} ms | {' | '.join(f'{share:.1%}' for share in shares)} |")


if __name__ == "__main__":
    main()
