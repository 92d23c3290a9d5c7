"""# Digits that the model is unsure of

A trained classifier for handwritten digits gets error bars. The pictures show the test images with the largest ones:
each bar is a class probability, with two standard errors.
"""

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from twinboot import error_bars
from twinboot.experiments import datasets, networks

images = datasets.load("digits")  # 8 x 8 pixels; they come with the package
moments = datasets.moments_of(images.train_x)
train = TensorDataset(datasets.standardised(images.train_x, moments), images.train_y)
test_x, test_y = datasets.standardised(images.test_x, moments), images.test_y

torch.manual_seed(0)
model = networks.small(images.classes, channels=1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(15):
    for x, y in DataLoader(train, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

# %%
# Three rounds of a third of the epochs, the default:
estimate = error_bars(model, train, epochs=5, optimizer=lambda p: torch.optim.Adam(p, lr=1e-3), progress=False)
prediction = estimate.predict(test_x)
alone = estimate.predict(test_x, samples=0)  # the trained model, unchanged

# %%
# Do large error bars mark wrong answers?
size = prediction.std.square().sum(1).sqrt()
wrong = alone.labels != test_y
pairs = (size[wrong][:, None] > size[~wrong]).float().mean()
print(f"accuracy of the model: {(~wrong).float().mean():.3f}")
print(f"the error bar of a wrong answer is larger than that of a right one in {pairs:.0%} of all pairs")

# %%
figure, panels = plt.subplots(2, 6, figsize=(10, 3.6), layout="constrained", height_ratios=(1.1, 1))
for (top, bottom), index in zip(panels.T, size.topk(6).indices, strict=True):
    top.imshow(images.test_x[index].squeeze(), cmap="gray_r")
    top.set(title=f"it is a {test_y[index]}", xticks=[], yticks=[])
    bottom.bar(range(10), prediction.probs[index], yerr=2 * prediction.std[index], color="#3b82c4", ecolor="#e08a3c")
    bottom.set(xticks=range(10), ylim=(0, 1), yticks=(0, 0.5, 1))
    bottom.tick_params(labelsize=8)
    bottom.label_outer()
plt.savefig("digits.png", dpi=120)
