"""Tools for users of Lightning: running scripts unchanged, ``lockstep migrate``, and LightningCLI."""
