"""More than one device: the loop of examples/loop.py, as PyTorch's own engine runs it on several.

    python examples/torchrun.py                                    one process
    torchrun --nproc-per-node 2 examples/torchrun.py               each process has the twins whole (DDP)
    torchrun --nproc-per-node 2 examples/torchrun.py --shard       each has a part of them (FSDP2)

A run that is stopped goes on from its last checkpoint, with as many processes as before or another number that divides
the batch. With `--max-restarts 3`, torchrun starts it again by itself when a process dies; set then
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which new processes may look for those that died (PyTorch issue 135712).
"""

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from twinboot import Bootstrap, PairedLoader, Twins, resets
from twinboot.experiments import datasets


def main(shard: bool, folder: Path, epochs: int, batch: int = 64) -> None:
    digits = datasets.load("digits")
    moments = datasets.moments_of(digits.train_x)
    train = TensorDataset(datasets.standardised(digits.train_x, moments), digits.train_y)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    twins = Twins(model)
    if shard:
        for layer in twins.modules():
            if isinstance(layer, nn.Linear) and layer.weight.requires_grad:  # what is frozen belongs to both twins
                fully_shard(layer)
        wrapped = fully_shard(twins)
    else:
        wrapped = DistributedDataParallel(twins)
    optimizer = torch.optim.Adam(twins.parameters(), lr=3e-3)
    loader = PairedLoader(train, Bootstrap(len(train)), batch // distributed.get_world_size())  # its rank's share

    def state():
        weights, of_optimizer = get_state_dict(twins, optimizer)
        return {"twins": weights, "optimizer": of_optimizer, "loader": loader.state_dict()}

    done = [path.parent for path in folder.glob("epoch-*/.metadata")]  # which is written last
    if done:
        saved = state()
        checkpoint.load(saved, checkpoint_id=max(done, key=lambda path: int(path.name.split("-")[1])))
        set_state_dict(twins, optimizer, model_state_dict=saved["twins"], optim_state_dict=saved["optimizer"])
        loader.load_state_dict(saved["loader"])

    due = resets.every(1)
    for epoch in range(loader.epoch, epochs + 1):
        for pair in loader:
            with twins.sampled():  # with DDP, noise of this rank's own; with FSDP2, of the weights that it holds
                outputs = wrapped(*(x for x, _ in pair))
                sum(F.cross_entropy(out, y) for out, (_, y) in zip(outputs, pair, strict=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
            twins.update()  # the same sigma on all ranks
        if due(epoch):
            twins.reset()  # the same draw on all ranks
        checkpoint.save(state(), checkpoint_id=folder / f"epoch-{epoch}")

    estimate = twins.estimate(model)  # whole, on each rank
    if distributed.get_rank() == 0:
        test_x = datasets.standardised(digits.test_x, moments)
        prediction = estimate.predict(test_x, samples=8, task="classification")
        accuracy = (prediction.labels == digits.test_y).float().mean()
        print(f"processes: {distributed.get_world_size()}, {len(loader)} steps an epoch: accuracy {accuracy:.3f}")
        estimate.save(folder / "estimate.safetensors")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", action="store_true", help="FSDP2 instead of DDP")
    parser.add_argument("--folder", type=Path, default=Path("out/torchrun"), help="for checkpoints and the estimate")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    # Which torchrun says to its processes; without it, this one is alone.
    alone = {} if "RANK" in os.environ else {"store": distributed.HashStore(), "rank": 0, "world_size": 1}
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo", **alone)
    main(options.shard, options.folder, options.epochs)
    distributed.barrier()  # none leaves while another still needs it
    distributed.destroy_process_group()
