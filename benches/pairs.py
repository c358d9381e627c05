"""Compare two builds of the step bench in alternating rounds.

`pairs.py OLD NEW [--out FILE] [--rows 1,16] -- ARGUMENTS OF BOTH`. Both processes load the same model; each
round measures one, then the other, in alternating order. For each number of rows it prints the medians of the
rounds' ratios old/new (above 1: new is faster) of the step and of each kind of op. They are followed by the
microseconds of NEW. `--out` appends the raw rounds as a line of JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys


class Build:
    """One running step bench process."""

    def __init__(self, path: str, arguments: list[str]) -> None:
        command = [path, *arguments, "--rows", "-", "--json"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, n_rows: int) -> dict[str, float]:
        """Return one measurement of `n_rows`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{n_rows}\n")
        self.process.stdin.flush()
        result: dict[str, float] = json.loads(self.process.stdout.readline())
        return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--rows", default="1,4,16,512")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out")
    parser.add_argument("--note", default="")
    own, _, of_both = " ".join(sys.argv[1:]).partition(" -- ")
    args, arguments = parser.parse_args(own.split()), of_both.split()
    old, new = Build(args.old, arguments), Build(args.new, arguments)
    print(of_both)
    for n_rows in (int(n) for n in args.rows.split(",")):
        pairs = []
        for i in range(args.rounds + 1):
            results = {build: build.ask(n_rows) for build in ((old, new) if i % 2 else (new, old))}
            pairs.append((results[old], results[new]))
        pairs = pairs[1:]  # the first round warms both up
        table = {
            kind: (
                statistics.median(a[kind] / max(b[kind], 0.1) for a, b in pairs),
                statistics.median(b[kind] for _, b in pairs),
            )
            for kind in pairs[0][0]
            if kind not in ("rows", "read_gb_s", "tokens_per_second")
        }
        rates = [
            statistics.median(result["tokens_per_second"] for result in side)
            for side in zip(*pairs, strict=True)
        ]
        reads = [result["read_gb_s"] for pair in pairs for result in pair]
        print(
            f"{n_rows} rows: {rates[0]:.1f} -> {rates[1]:.1f} tokens/s, x{table['step_us'][0]:.3f};"
            f" memory {min(reads):.0f}-{max(reads):.0f} GB/s"
        )
        print(
            "   "
            + "  ".join(f"{kind} x{ratio:.2f} {us:.0f}" for kind, (ratio, us) in table.items() if us >= 5)
        )
        if args.out:
            with open(args.out, "a", encoding="utf-8") as file:
                line = {"note": args.note, "arguments": arguments, "rows": n_rows, "old_new": pairs}
                file.write(json.dumps(line) + "\n")
    for build in (old, new):
        assert build.process.stdin is not None
        build.process.stdin.close()
        build.process.wait()


if __name__ == "__main__":
    main()
