"""Twin-Boot inside other libraries. Each needs an extra of its own, and is imported only when asked for."""
