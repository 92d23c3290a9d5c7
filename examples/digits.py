"""Handwritten digits with `fit`: one call, an entropy that finds most errors, and no split of the data.

python examples/digits.py
"""

import torch
from torch.utils.data import TensorDataset

from twinboot import fit
from twinboot.experiments import datasets, networks

images = datasets.load("digits")
moments = datasets.moments_of(images.train_x)
train = TensorDataset(datasets.standardised(images.train_x, moments), images.train_y)
test_x, test_y = datasets.standardised(images.test_x, moments), images.test_y

found = fit(networks.small(images.classes, channels=1), train, epochs=15, patience=5, seed=0)

prediction = found.estimate.predict(test_x)
wrong = prediction.labels != test_y
entropy = prediction.entropy
pairs = (entropy[wrong][:, None] > entropy[~wrong]).float().mean()  # the AUROC of the entropy for errors
print(f"accuracy {(~wrong).float().mean():.3f}, NLL {prediction.nll(test_y).mean():.3f} on {len(test_y)} test images")
print(f"the entropy of a wrong answer is higher than that of a right one in {pairs:.0%} of all pairs")
print(f"highest entropy: images {torch.topk(entropy, 5).indices.tolist()}")
