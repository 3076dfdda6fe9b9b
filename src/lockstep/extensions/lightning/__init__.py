"""For who comes from Lightning: scripts that run unchanged, `lockstep migrate`, and LightningCLI."""
