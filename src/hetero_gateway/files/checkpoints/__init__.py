"""From the files of a checkpoint to the shape of its model: families, layers, storage."""
