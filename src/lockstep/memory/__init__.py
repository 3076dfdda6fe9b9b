"""Memory of a step: what is recomputed, what is offloaded, and how much is used."""
