"""Plans for a Trainer: its step as the planner knows it, the strategy that "auto" takes, and a saved plan's check."""
