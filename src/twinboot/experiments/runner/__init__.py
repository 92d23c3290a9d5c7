"""What an experiment is, and how its runs are computed, stored and read again."""
