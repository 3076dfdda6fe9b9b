"""Launchers, which start the ranks: by running the script once per rank, or one call in spawned processes."""
