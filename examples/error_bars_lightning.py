"""Error bars for a model that Lightning has trained: the usual module and Trainer, then one call.

python examples/error_bars_lightning.py (needs the extra lightning)
"""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from twinboot import error_bars
from twinboot.experiments import datasets, networks


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = networks.small(10, channels=1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.network(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


images = datasets.load("digits")
moments = datasets.moments_of(images.train_x)
train = TensorDataset(datasets.standardised(images.train_x, moments), images.train_y)
test_x, test_y = datasets.standardised(images.test_x, moments), images.test_y

pl.seed_everything(0, verbose=False)
module = Digits()
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
pl.Trainer(max_epochs=10, accelerator="cpu", **quiet).fit(module, DataLoader(train, batch_size=64, shuffle=True))

# The network inside, not the LightningModule: a Trainer belongs to that.
estimate = error_bars(module.network, train, epochs=3, optimizer=lambda p: torch.optim.Adam(p, lr=1e-3))

prediction = estimate.predict(test_x)
accuracy = (prediction.labels == test_y).float().mean()
print(f"{len(estimate.members)} members: accuracy {accuracy:.3f}, NLL {prediction.nll(test_y).mean():.3f}")
doubtful = torch.topk(prediction.std.square().sum(1), 5).indices
print(f"largest error bars: images {doubtful.tolist()}")
