"""Twin-Boot inside other libraries: a package for each, which needs an extra of its own and is imported only on demand.

sklearn      TwinBootClassifier, TwinBootRegressor
lightning    TwinModule
huggingface  TwinTrainer, load
"""
