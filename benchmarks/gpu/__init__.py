"""One command that tries and measures everything about an accelerator: `scripts/gpu`."""
