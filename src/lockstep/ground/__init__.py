"""Basic modules that all other parts of lockstep build on."""
