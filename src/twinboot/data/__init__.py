"""How often each twin sees each sample (`bootstrap`), and one batch per twin (`loader`)."""
