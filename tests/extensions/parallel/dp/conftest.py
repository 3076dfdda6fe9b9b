"""What tests of the old flags take from those of the core."""

from tests.config.conftest import eight_gpus as eight_gpus
