"""The result of training: the mean model with sigma, its predictions, calibration, running statistics and files."""
