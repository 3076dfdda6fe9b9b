"""Support for importing Lightning's names. Each name is mapped to lockstep's, or refused with a reason."""
