"""Two wells: whether twins stay in one of them, with and without resets."""
