"""Twin-Boot inside other libraries. Each needs an extra of its own, and is imported only when asked for.

sklearn.py      TwinBootClassifier, TwinBootRegressor    with estimator.py, rows.py, conformal.py
lightning.py    TwinModule                               with wrapper.py, lending.py, means.py, epochs.py, limits.py
huggingface.py  TwinTrainer, load                        with pairs.py, pretrained.py, resuming.py, trainers.py
"""
