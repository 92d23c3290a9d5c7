"""What training leaves: the mean model with sigma, its predictions, calibration, statistics and files."""
