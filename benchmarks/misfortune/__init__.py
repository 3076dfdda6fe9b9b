"""The parts of `benchmarks/failures.py`: scripts whose ranks fail or stray, who watches them, and the verdicts."""
