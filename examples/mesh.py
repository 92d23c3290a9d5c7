"""Twins on devices of their own: handwritten digits, with one twin in one half of the processes and one in the other.

torchrun --nproc-per-node 2 examples/mesh.py         # or 4, 6, ...: those of one twin share its batches
"""

import torch
import torch.nn.functional as F
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from twinboot import Apart, Bootstrap, PairedLoader
from twinboot.experiments import datasets, networks

distributed.init_process_group("gloo")  # or "nccl", and then "cuda" instead of "cpu" below, and .to(device)
ranks = distributed.get_world_size()
mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("twin", "data"))

images = datasets.load("digits")
moments = datasets.moments_of(images.train_x)
train = TensorDataset(datasets.standardised(images.train_x, moments), images.train_y)
test_x, test_y = datasets.standardised(images.test_x, moments), images.test_y

# Sigma from 61 numbers per tensor at each step, and from all weights at every hundredth.
twins = Apart(networks.small(images.classes, channels=1), mesh, exchange=100, sketch=61)
model = DistributedDataParallel(twins, process_group=mesh.get_group("data"))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
bootstrap = Bootstrap(len(train))
loader = PairedLoader(train, bootstrap, batch_size=128 // ranks, share=twins.share, twin=twins.twin)

for _ in range(6):
    for [(x, y)] in loader:  # a batch for the twin of this process
        # Weights + N(0, sigma^2), drawn by each process for itself; lean: in what operations read of the weights, which
        # needs no copy of them.
        with twins.sampled(lean=True):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        twins.update()  # sigma, the same in all processes
    twins.reset()  # both drawn anew around their mean: each process gets the weights of its twin

estimate = twins.estimate()  # the mean weights and sigma, in all processes
if distributed.get_rank() == 0:
    accuracy = (estimate.predict(test_x, task="classification").labels == test_y).float().mean()
    sent = twins.bytes_sent()
    print(f"{ranks} processes, accuracy {accuracy:.3f}")
    print(f"sent for sigma: {sent['update']:.0f} bytes a step, of {sent['exchange']} bytes of weights")
distributed.barrier()
del model, twins  # which hold on to the processes' group
distributed.destroy_process_group()
