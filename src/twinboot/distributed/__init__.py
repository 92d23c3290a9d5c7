"""One twin per group of devices: `Apart`, and what travels between them."""
