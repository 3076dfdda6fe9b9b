"""The engines of a run: what strategies have in common lies here, and each engine in a folder of its own."""
