"""Twin-Boot inside other libraries, a file for each, which needs an extra of its own and is imported only if asked for.

sklearn.py      TwinBootClassifier, TwinBootRegressor
lightning.py    TwinModule
huggingface.py  TwinTrainer, load

What they are made of is in `twinboot.fittings`.
"""
