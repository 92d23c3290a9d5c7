"""Error bars for a model that is already trained: handwritten digits with plain PyTorch, then one call.

python examples/error_bars.py
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from twinboot import error_bars
from twinboot.experiments import datasets, networks

images = datasets.load("digits")
moments = datasets.moments_of(images.train_x)
train = TensorDataset(datasets.standardised(images.train_x, moments), images.train_y)
test_x, test_y = datasets.standardised(images.test_x, moments), images.test_y

# An ordinary training, which knows nothing of twins.
torch.manual_seed(0)
model = networks.small(images.classes, channels=1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(15):
    for x, y in DataLoader(train, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
model.eval()

# Three rounds of a third of its epochs, with the optimizer of the training.
estimate = error_bars(model, train, epochs=5, optimizer=lambda p: torch.optim.Adam(p, lr=1e-3))

print(f"the model itself is unchanged: {torch.equal(estimate(test_x), model(test_x))}")
alone, members = estimate.predict(test_x, samples=0), estimate.predict(test_x)
for name, found in (("model", alone), (f"{len(estimate.members)} members", members)):
    accuracy = (found.labels == test_y).float().mean()
    print(f"{name}: accuracy {accuracy:.3f}, NLL {found.nll(test_y).mean():.3f} on {len(test_y)} test images")

wrong = alone.labels != test_y
spread = members.std.square().sum(1).sqrt()  # the error bar of the probabilities
pairs = (spread[wrong][:, None] > spread[~wrong]).float().mean()
print(f"the error bar of a wrong answer is larger than that of a right one in {pairs:.0%} of all pairs")
