"""Callbacks that show the progress of a run: plain lines, or bars drawn with tqdm or rich."""
