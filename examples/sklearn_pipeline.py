"""Twin-Boot in a scikit-learn pipeline: intervals that hold at least as many new values as they say, on average over
training sets. These five vary by some points.

python examples/sklearn_pipeline.py (needs the extra sklearn)
"""

import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.impute import SimpleImputer
from sklearn.model_selection import ShuffleSplit
from sklearn.pipeline import make_pipeline

from twinboot.integrations.sklearn import TwinBootRegressor

X, y = load_diabetes(return_X_y=True)  # 442 patients; y is how far their disease went in a year
levels = (0.5, 0.8, 0.9)
scores, held, widths = [], [], []
for train, test in ShuffleSplit(5, test_size=142, random_state=0).split(X):
    model = make_pipeline(SimpleImputer(), TwinBootRegressor(epochs=30, random_state=0)).fit(X[train], y[train])
    scores.append(model.score(X[test], y[test]))
    intervals = [model[-1].predict_interval(model[:-1].transform(X[test]), level) for level in levels]
    held.append([((low <= y[test]) & (y[test] <= high)).mean() for low, high in intervals])
    widths.append([(high - low).mean() for low, high in intervals])

print(f"R^2 {np.mean(scores):.2f}, mean over {len(scores)} splits into 300 training and 142 test rows")
for level, shares, width in zip(levels, np.transpose(held), np.mean(widths, 0), strict=True):
    print(f"{level:.0%} intervals hold {shares.mean():.0%} of the test values; mean width {width:.0f}", end="")
    print(f" ({shares.min():.0%} to {shares.max():.0%} in single splits)")
