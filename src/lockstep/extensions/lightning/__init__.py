"""Tools for users of Lightning: unchanged scripts under lockstep, `lockstep migrate`, and LightningCLI."""
