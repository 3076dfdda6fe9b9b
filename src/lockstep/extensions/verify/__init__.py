"""Does a script train on N ranks what it trains as one process? The command `lockstep verify`, part by part."""
