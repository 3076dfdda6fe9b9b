"""Support for importing Lightning's names, each of which is mapped to lockstep's or refused with a reason."""
