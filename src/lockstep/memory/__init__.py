"""Memory of a step: what is recomputed, and how much is used."""
