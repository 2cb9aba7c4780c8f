"""What `python -m penstock.bench` was is `python -m benchmarks`, in a checkout of the source."""

import sys

if __name__ == "__main__":
    print(
        "error: the benchmarks come with the source: in a checkout, run python -m benchmarks", file=sys.stderr
    )
    sys.exit(2)
