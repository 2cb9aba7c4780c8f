"""`python -m penstock.bench` is what `python -m benchmarks` was called; it still runs them, in a checkout."""

import sys

if __name__ == "__main__":
    from penstock.frontends.cli import main

    print("warning: python -m penstock.bench is now python -m benchmarks", file=sys.stderr)
    sys.argv.insert(1, "bench")
    main()
