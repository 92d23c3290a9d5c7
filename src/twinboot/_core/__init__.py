"""What the rest is built on: noise, copies of models, sharding, ranks, seeds, checks of arguments, files."""
