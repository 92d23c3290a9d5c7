"""Twin-Boot in a plain PyTorch loop: handwritten digits, ten lines more than without it.

python examples/loop.py
"""

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from twinboot import Bootstrap, PairedLoader, Twins, resets
from twinboot.experiments import datasets, networks

images = datasets.load("digits")
moments = datasets.moments_of(images.train_x)
train = TensorDataset(datasets.standardised(images.train_x, moments), images.train_y)
test_x, test_y = datasets.standardised(images.test_x, moments), images.test_y

bootstrap = Bootstrap(len(train))
loader = PairedLoader(train, bootstrap, batch_size=64)
twins = Twins(networks.small(images.classes, channels=1))
optimizer = torch.optim.Adam(twins.parameters(), lr=2e-3)
due = resets.every(1)

for epoch in range(1, 6):
    total = 0.0
    for pair in loader:  # one batch for each twin
        with twins.sampled():  # weights + N(0, sigma^2); put back on exit
            for twin, (x, y) in zip(twins, pair, strict=True):
                loss = F.cross_entropy(twin(x), y)
                loss.backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        twins.update()  # sigma: how far the twins stand apart
    largest = max(sigma.item() for sigma in twins.sigma.values())
    print(f"epoch {epoch}: loss {total / len(loader) / len(twins):.3f}, sigma up to {largest:.3f}", flush=True)
    if due(epoch):
        twins.reset()  # both drawn anew around their mean

estimate = twins.estimate()  # the mean weights and sigma: what you keep
for name, samples in (("mean", 0), ("32 draws", 32)):
    prediction = estimate.predict(test_x, samples, task="classification")
    accuracy = (prediction.labels == test_y).float().mean()
    print(f"{name}: accuracy {accuracy:.3f}, NLL {prediction.nll(test_y).mean():.3f}")
