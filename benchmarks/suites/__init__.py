"""One module a suite: its options, its workload and its numbers. See `benchmarks.cli.SUITES`."""
