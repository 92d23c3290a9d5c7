"""`invert`: a field behind measurements, the operators it is seen through, and what a prior leaves of it."""
