"""What an experiment is, and how its parts are computed, kept and read again."""
