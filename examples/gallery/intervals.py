"""# Intervals with a guarantee

`TwinBootRegressor` is a scikit-learn estimator. `predict_interval` gives conformal intervals for new measurements: on
average over data sets they hold at least as many as they say, however wrong the model is.
"""

import matplotlib.pyplot as plt
import numpy as np

from twinboot.integrations.sklearn import TwinBootRegressor

random = np.random.default_rng(0)


def measure(number: int) -> tuple[np.ndarray, np.ndarray]:
    x = random.uniform(-3, 3, (number, 1))
    return x, np.sin(2 * x[:, 0]) + 0.3 * random.standard_normal(number)


X, y = measure(600)
model = TwinBootRegressor(epochs=60, random_state=0).fit(X, y)

# %%
# The share of 2,000 new measurements inside the intervals:
X_new, y_new = measure(2000)
for level in (0.5, 0.8, 0.9):
    low, high = model.predict_interval(X_new, level)
    print(f"{level:.0%} intervals hold {((low <= y_new) & (y_new <= high)).mean():.0%}")

# %%
grid = np.linspace(-3, 3, 200)[:, None]
figure, axes = plt.subplots(figsize=(9, 3.8), layout="constrained")
for level, alpha in ((0.9, 0.2), (0.5, 0.35)):
    low, high = model.predict_interval(grid, level)
    axes.fill_between(grid[:, 0], low, high, color="#3b82c4", alpha=alpha, lw=0, label=f"{level:.0%} interval")
axes.plot(X_new[:500], y_new[:500], ".", color="#8a8f98", ms=3, label="new measurements")
axes.plot(grid, model.predict(grid), color="#3b82c4", lw=1.5, label="prediction")
axes.set(xlabel="x", ylabel="y", ylim=(-2, 2.8))
axes.legend(frameon=False, loc="upper center", ncols=4, fontsize=9)
plt.savefig("intervals.png", dpi=120)
