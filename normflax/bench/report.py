"""`normflax bench`: the tables."""

import argparse
import json
import os
import statistics
import subprocess
import sys

COMPILE_DEPTHS = (12, 100, 1000)


def main(words: list[str]) -> int:
    """Print every table. `--rounds` is how often each pair is alternated, `--quick` leaves out the deep shapes."""
    parser = argparse.ArgumentParser(prog="normflax bench", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--fields", action="store_true", help="only what each probe costs")
    parser.add_argument("--compile-cost", type=int, help=argparse.SUPPRESS)  # one row, in a process of its own
    options = parser.parse_args(words)
    from normflax.bench import measure

    if options.compile_cost:
        print(json.dumps(measure.compile_cost(options.compile_cost)))
        return 0
    if options.fields:
        costs = measure.fields(measure.SHAPES[0], options.rounds) | measure.besides(measure.SHAPES[0], options.rounds)
        print(f"\n| field | share of a step at {measure.SHAPES[0]} |\n|---|---|")
        print("\n".join(f"| {name} | {100 * cost:.1f} % |" for name, cost in costs.items()))
        return 0
    shapes = [shape for shape in measure.SHAPES if not options.quick or shape.depth <= 24]
    print(f"{os.cpu_count()} cores; medians of {options.rounds} rounds, alternated; times move with the machine, ratios less\n")
    print("| step at depth/width | normflax ms | range | yardstick ms | normflax/yardstick | tokens/s |\n|---|---|---|---|---|---|")
    for shape in shapes:
        seconds = measure.steps(shape, max(5, options.rounds // 3) if shape.depth > 100 else options.rounds)
        each = {name: [s / shape.updates for s in taken] for name, taken in seconds.items()}
        own, bare = (statistics.median(each[name]) for name in ("normflax", "yardstick"))
        spread = f"{1e3 * min(each['normflax']):.1f} to {1e3 * max(each['normflax']):.1f}"
        print(
            f"| {shape} ({shape.batch} x {shape.tokens}) | {1e3 * own:.1f} | {spread} | {1e3 * bare:.1f} | "
            f"{measure.ratio(seconds, 'normflax', 'yardstick'):.2f} | {shape.batch * shape.tokens / own:,.0f} |",
            flush=True,
        )
    print("\n| probes at every step | cheap/none | all/none |\n|---|---|---|")
    for shape in shapes:
        if shape.depth <= 96:
            seconds = measure.probes(shape, options.rounds)
            cheap, full = (measure.ratio(seconds, name, "none") for name in ("cheap", "all"))
            print(f"| {shape} | {cheap:.3f} | {full:.3f} |", flush=True)
    print("\n| compile at depth (width 32) | init s | step s | step memory MB | peak of the process MB |\n|---|---|---|---|---|")
    for depth in COMPILE_DEPTHS:
        command = [sys.executable, "-m", "normflax", "bench", "--compile-cost", str(depth)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        cost = json.loads(out.strip().splitlines()[-1])
        print(f"| {depth} | {cost['init']:.2f} | {cost['step']:.2f} | {cost['temp']:.0f} | {cost['peak']:.0f} |", flush=True)
    return 0
