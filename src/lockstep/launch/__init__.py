"""Launchers, which start ranks by running the script once per rank, or by running one call in new processes."""
