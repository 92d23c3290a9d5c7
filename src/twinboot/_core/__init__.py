"""Private building blocks: noise, copies of models, sharding, ranks, seeds, checks of arguments, files."""
