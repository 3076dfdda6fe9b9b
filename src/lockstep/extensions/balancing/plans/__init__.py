"""Plans for a Trainer: profile of its step, choice of strategy="auto", check of a saved plan."""
