"""A pretrained backbone with a new head: the twins share what is frozen, so only the head is held twice.

python examples/head.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from twinboot import Twins, fit
from twinboot.experiments import datasets, networks

images = datasets.load("digits")
moments = datasets.moments_of(images.train_x)
train_x, test_x = (datasets.standardised(x, moments) for x in (images.train_x, images.test_x))

# In your own work the backbone comes with its weights; here it learns them from the digits 0 to 4.
known, new = images.train_y < 5, images.train_y >= 5
pretrained = networks.small(classes=5, channels=1)
optimizer = torch.optim.Adam(pretrained.parameters(), lr=3e-3)
for _ in range(40):
    optimizer.zero_grad()
    F.cross_entropy(pretrained(train_x[known]), images.train_y[known]).backward()
    optimizer.step()

# Its two first convolutions, frozen, and a new head for the digits 5 to 9, of which 100 have labels.
torch.manual_seed(0)  # of the head's start
model = nn.Sequential(pretrained[:6].requires_grad_(False), nn.Flatten(), nn.Linear(256, 5))
few = TensorDataset(train_x[new][:100], images.train_y[new][:100] - 5)
found = fit(model, few, epochs=60, batch_size=32, optimizer=lambda p: torch.optim.Adam(p, lr=0.01), progress=False)

asked = images.test_y >= 5
prediction, labels = found.estimate.predict(test_x[asked]), images.test_y[asked] - 5
accuracy = (prediction.labels == labels).float().mean()
print(f"accuracy {accuracy:.3f}, NLL {prediction.nll(labels).mean():.3f} on {len(labels)} test images, from 100 labels")

twins = Twins(model)  # as `fit` makes them
held, whole = (sum(p.numel() for p in module.parameters()) for module in (twins, model))
first, second = (next(twin[0].parameters()).data_ptr() for twin in twins)
print(f"the twins hold {held} parameters, two copies would hold {2 * whole}; backbone shared: {first == second}")
