"""Start of ranks: the script once per rank, or a call in spawned processes."""
