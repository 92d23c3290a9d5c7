"""Twin-Boot for other libraries. Each module needs the extra of its name, and is imported only on demand.

sklearn      TwinBootClassifier, TwinBootRegressor
lightning    TwinModule
huggingface  TwinTrainer, load
"""
