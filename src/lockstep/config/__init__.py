"""What the Trainer's flags mean, decided before anything is started."""
