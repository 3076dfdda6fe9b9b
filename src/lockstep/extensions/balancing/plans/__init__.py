"""Plans for a Trainer: profiles of training steps, the choice under strategy="auto", and checks of saved plans."""
