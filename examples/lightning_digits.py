"""Twin-Boot with Lightning: a module as anyone writes it, the usual Trainer, and no split of the data.

python examples/lightning_digits.py (needs the extra lightning)
"""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import TensorDataset

from twinboot.experiments import datasets, networks
from twinboot.integrations.lightning import TwinModule


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = networks.small(10, channels=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


images = datasets.load("digits")
moments = datasets.moments_of(images.train_x)
train = TensorDataset(datasets.standardised(images.train_x, moments), images.train_y)
test_x, test_y = datasets.standardised(images.test_x, moments), images.test_y

pl.seed_everything(0, verbose=False)
twins = TwinModule(Digits(), train)
stopping = EarlyStopping("unseen_loss", patience=2)  # by the images that no twin saw
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = pl.Trainer(max_epochs=5, accelerator="cpu", gradient_clip_val=1.0, callbacks=[stopping], **quiet)
trainer.fit(twins)

prediction = twins.estimate().predict(test_x, task="classification")
accuracy = (prediction.labels == test_y).float().mean()
print(f"unseen loss {trainer.callback_metrics['unseen_loss']:.3f}, sigma {trainer.callback_metrics['sigma']:.4f}")
print(f"accuracy {accuracy:.3f}, NLL {prediction.nll(test_y).mean():.3f} on {len(test_y)} test images")
