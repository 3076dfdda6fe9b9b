"""The parts of `scripts/gpu`, one a file: each has a function ``run`` that takes a `benchmarks.gpu.checks.Part`."""
