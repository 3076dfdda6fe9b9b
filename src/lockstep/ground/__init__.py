"""The ground floor: what every other part stands on."""
