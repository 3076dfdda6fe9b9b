"""Support for Lightning's names, which are mapped to lockstep's or refused with a reason."""
