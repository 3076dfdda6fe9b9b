"""For users who come from Lightning: scripts that run unchanged, `lockstep migrate`, and LightningCLI."""
