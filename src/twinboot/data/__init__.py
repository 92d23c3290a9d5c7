"""Who sees which sample how often (`bootstrap`), and batches for each twin (`loader`)."""
