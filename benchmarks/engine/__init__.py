"""The parts of `benchmarks/ddp.py`, each a file with a function that one rank runs and one that starts the ranks."""
