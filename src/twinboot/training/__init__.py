"""`fit`: the loop in one call, with validation, selection, checkpoints and logs."""
