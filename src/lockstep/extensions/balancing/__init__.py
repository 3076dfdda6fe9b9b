"""Work that follows the speed of devices: shares of batches, pipelines, and plans that predict memory and time."""
