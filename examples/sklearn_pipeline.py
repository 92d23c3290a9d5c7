"""Twin-Boot in a scikit-learn pipeline: intervals that hold as many new values as they say, with no data set aside.

.venv/bin/python examples/sklearn_pipeline.py (needs the extra sklearn)
"""

from sklearn.datasets import load_diabetes
from sklearn.impute import SimpleImputer
from sklearn.model_selection import cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline

from twinboot.integrations.sklearn import TwinBootRegressor

X, y = load_diabetes(return_X_y=True, as_frame=True)  # 442 patients; y is how far their disease went in a year
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=142, random_state=0)

model = make_pipeline(SimpleImputer(), TwinBootRegressor(epochs=30, random_state=0)).fit(X_train, y_train)
print(f"R^2 {model.score(X_test, y_test):.2f} on {len(y_test)} test rows")
print(f"R^2 {cross_val_score(model, X_train, y_train, cv=3).mean():.2f} by cross-validation")

inputs = model[:-1].transform(X_test)
for level in (0.5, 0.8, 0.9):
    low, high = model[-1].predict_interval(inputs, level)
    held = ((low <= y_test) & (y_test <= high)).mean()
    print(f"{level:.0%} intervals hold {held:.0%} of the test values; mean width {(high - low).mean():.0f}")
