"""TwinModule equals a plain loop bit for bit, with any option of the Trainer, and adds noise only in training."""

import copy
import importlib
import math
import os
import subprocess
import sys
import threading
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from loops import assert_same_bits, classes, mlp, seeded, snapshot
from processes import together
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from twinboot import Bootstrap, PairedLoader, Protocol, Twins, pool_gradients, resets
from twinboot._core.seeds import derive
from twinboot.estimate.spread import DRAWS
from twinboot.integrations import lightning as integration
from twinboot.integrations.lightning import (
    TwinModule,
    _require_strategy,
    copy_attributes,
    merge_optimizers,
    use_weights,
    using_weights,
)
from twinboot.resets import steps_and_epochs
from twinboot.training.rounds import falling

AFTER_EACH = resets.every(1)
DATA = classes(64)  # seven batches of ten per twin and epoch; the last one is smaller


class Net(pl.LightningModule):
    """An ordinary LightningModule that knows nothing about twins."""

    def __init__(self, rate: float = 0.01, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        first, activation, last = mlp()
        self.net = nn.Sequential(first, nn.BatchNorm1d(8) if norm else activation, nn.Dropout(dropout), last)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.rate)


def trainer(**options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(**{"accelerator": "cpu", "enable_model_summary": False, **quiet, **options})


def fitted(module: pl.LightningModule | None = None, options: Any = None, **of_trainer: Any) -> TwinModule:
    found = TwinModule(module or Net(), DATA, **{"batch_size": 10, **(options or {})})
    trainer(**{"max_epochs": 3, **of_trainer}).fit(found)
    return found


def by_hand(
    epochs: int = 3,
    *,
    mode: Any = "sample",
    reset: resets.Schedule = AFTER_EACH,
    clip: float | None = None,
    accumulate: int = 1,
    amp: bool = False,
    steps: int | None = None,
    noise: float = 1.0,
    pooled: float = 0.0,
) -> Twins:
    """The loop of the README, with resets at the start of the next epoch."""
    loader, twins = PairedLoader(DATA, Bootstrap(64), 10), Twins(Net())
    optimizer, (by_step, by_epoch), done = torch.optim.Adam(twins.parameters(), lr=0.01), steps_and_epochs(reset), 0
    stepped = False
    for epoch in range(1, epochs + 1):
        if epoch > 1 and by_epoch(epoch - 1):
            twins.reset(mode)
        for step, pair in enumerate(loader, start=1):
            if stepped and by_step(done):
                twins.reset(mode)
            stepped = False
            with twins.sampled(noise):
                for twin, (x, y) in zip(twins, pair, strict=True):
                    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                        loss = F.cross_entropy(twin(x), y)
                    (loss / accumulate).backward()
            if step % accumulate and step < len(loader):
                continue
            pool_gradients(twins, pooled)
            for twin in twins:
                if clip is not None:
                    nn.utils.clip_grad_norm_(twin.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            twins.update()
            done, stepped = done + 1, True
            if done == steps:
                return twins
    return twins


def assert_differ(first: nn.Module, second: nn.Module) -> None:
    assert any((a != b).any() for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_twins_of_a_split_bootstrap_have_the_sigma_of_their_mean(tmp_path: Path) -> None:
    halves = Bootstrap(64, kind="split")
    found = fitted(options={"bootstrap": halves})
    torch.testing.assert_close(found.estimate().partition.sigma, found.twins.partition.sigma / 2**0.5)
    found.trainer.save_checkpoint(tmp_path / "halves.ckpt")
    restored = TwinModule(Net(), DATA, batch_size=10, bootstrap=halves).restore(tmp_path / "halves.ckpt")
    assert_same_bits(restored.estimate().sigma, found.estimate().sigma)
    with pytest.raises(ValueError, match="so sigma would be wrong: give TwinModule the bootstrap of the checkpoint"):
        TwinModule(Net(), DATA, batch_size=10).restore(tmp_path / "halves.ckpt")


@pytest.mark.parametrize("mode", ["sample", "mean", "centered"])
def test_training_equals_the_plain_loop_bit_for_bit(mode: Any) -> None:
    found = fitted(options={"protocol": Protocol(mode=mode, reset=resets.every(2))}, max_epochs=4, val_check_interval=3)
    assert_same_bits(snapshot(found.twins), snapshot(by_hand(4, mode=mode, reset=resets.every(2))))


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_resets_may_count_steps(accumulate: int) -> None:
    often = resets.steps(resets.growing(2, 1.5, most=5))
    found = fitted(
        options={"protocol": Protocol(reset=often)}, accumulate_grad_batches=accumulate, val_check_interval=3
    )
    assert_same_bits(snapshot(found.twins), snapshot(by_hand(reset=often, accumulate=accumulate)))
    assert_differ(found.twins, by_hand(accumulate=accumulate))


class Leaving(Net):
    """Ends each epoch after four batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 4 else None


def test_a_step_causes_at_most_one_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    reset = Twins.reset

    def noted(self: Twins, mode: Any = "sample") -> None:
        found.append(self._counts["updates"])
        reset(self, mode)

    monkeypatch.setattr(Twins, "reset", noted)
    fitted(Leaving(), {"protocol": Protocol(reset=resets.steps(resets.every(4)))})
    assert found == [4, 8, 12]


def test_long_epochs_have_early_resets_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    early = resets.steps(resets.every(3))
    usual = {
        7: early,
        4: resets.every(1),
    }  # steps per epoch -> schedule; there are four steps if two batches are accumulated
    monkeypatch.setattr(resets, "usual", usual.__getitem__)
    assert_same_bits(snapshot(fitted().twins), snapshot(by_hand(reset=early)))
    assert_same_bits(snapshot(fitted(accumulate_grad_batches=2).twins), snapshot(by_hand(accumulate=2)))


@pytest.mark.parametrize(
    ("of_trainer", "of_loop"),
    [
        ({"gradient_clip_val": 0.1}, {"clip": 0.1}),
        ({"accumulate_grad_batches": 3}, {"accumulate": 3}),
        ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {"accumulate": 2, "clip": 0.1}),
        ({"precision": "bf16-mixed"}, {"amp": True}),
        ({"max_epochs": -1, "max_steps": 10}, {"steps": 10}),
    ],
)
def test_trainer_options_equal_the_plain_loop(of_trainer: Any, of_loop: Any) -> None:
    assert_same_bits(snapshot(fitted(**of_trainer).twins), snapshot(by_hand(**of_loop)))
    assert_differ(by_hand(**of_loop), by_hand())


@pytest.mark.parametrize(
    ("of_trainer", "of_loop"),
    [({}, {}), ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {"accumulate": 2, "clip": 0.1})],
)
def test_pooled_gradients_and_larger_noise_equal_the_plain_loop(of_trainer: Any, of_loop: Any) -> None:
    options = {"pooled": 0.7, "noise": 4.0}
    found = fitted(options={"protocol": Protocol(**options)}, **of_trainer)
    assert_same_bits(snapshot(found.twins), snapshot(by_hand(**options, **of_loop)))
    assert_differ(found.twins, by_hand(pooled=0.7, **of_loop))
    assert_differ(found.twins, by_hand(noise=4.0, **of_loop))


class Looking(Net):
    """Records the weights that it validates with."""

    seen: list[list[Tensor]]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append([p.detach().clone() for p in self.parameters()])
        super().validation_step(batch, batch_idx)


def test_validation_and_checkpoints_have_the_mean_from_before_a_reset(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True)
    found = fitted(Looking(), enable_checkpointing=True, callbacks=[saving], num_sanity_val_steps=0)
    for epoch in (1, 2, 3):
        twins = by_hand(epoch)
        mean = twins.estimate().module
        assert_same_bits(found.module.seen[epoch - 1], list(mean.parameters()))
        [path] = tmp_path.glob(f"epoch={epoch - 1}-*.ckpt")
        saved = torch.load(path, weights_only=True)
        assert_same_bits(dict(saved["state_dict"]), snapshot(mean))
        assert_same_bits(dict(saved["twins"]), snapshot(twins))
        assert_same_bits(snapshot(Net.load_from_checkpoint(path)), snapshot(mean))  # your own class, your own names
        restored = TwinModule(Net(), DATA, batch_size=10).restore(path).estimate()
        assert_same_bits(snapshot(restored), snapshot(twins.estimate()))
    assert_same_bits(snapshot(found.module), snapshot(mean))  # after training, the module has the mean


def test_a_checkpoint_in_mid_epoch_has_no_noise(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=5)
    fitted(enable_checkpointing=True, callbacks=[saving])
    for steps in (5, 10, 15, 20):
        [path] = tmp_path.glob(f"*-step={steps}.ckpt")
        saved = torch.load(path, weights_only=True)
        assert_same_bits(dict(saved["twins"]), snapshot(by_hand(steps=steps)))
        assert_same_bits(dict(saved["state_dict"]), snapshot(by_hand(steps=steps).estimate().module))


class Drawing(Net):
    """Has dropout, and a scheduler with a state."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5, norm=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


RESUMED = [  # when checkpoints come, whether there is validation, and how the run ends
    ({"every_n_train_steps": 4}, {"max_epochs": 3}),
    ({"every_n_train_steps": 4}, {"max_epochs": -1, "max_steps": 19, "limit_val_batches": 0}),
    ({"every_n_train_steps": 7}, {"max_epochs": 3}),  # at the end of each epoch
    ({"save_on_train_epoch_end": True, "every_n_epochs": 1}, {"max_epochs": 3}),
    (
        {"save_on_train_epoch_end": True, "every_n_epochs": 1},
        {"max_epochs": -1, "max_steps": 19, "limit_val_batches": 0},
    ),
    ({"save_on_train_epoch_end": False, "every_n_epochs": 1}, {"max_epochs": 3}),  # at the end of validation
]


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # two runs side by side
@pytest.mark.parametrize(("saving", "limits"), RESUMED)
def test_a_run_resumed_from_a_checkpoint_equals_the_uninterrupted_one(saving: Any, limits: Any, tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path / "whole", save_top_k=-1, **saving)
    whole = fitted(Drawing(), enable_checkpointing=True, callbacks=[callback], **limits)
    for path in sorted((tmp_path / "whole").glob("*.ckpt"))[:2]:
        torch.manual_seed(7)  # global generators must not matter
        resumed = TwinModule(Drawing(), DATA, batch_size=10)
        again = ModelCheckpoint(tmp_path / path.stem, save_top_k=-1, **saving)
        trainer(enable_checkpointing=True, callbacks=[again], **limits).fit(resumed, ckpt_path=path)
        assert_same_bits(snapshot(resumed.twins), snapshot(whole.twins))
        assert resumed.loader.state_dict() == whole.loader.state_dict()


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_run_stopped_by_max_steps_in_mid_epoch_resumes(tmp_path: Path) -> None:
    limits = {"max_epochs": -1, "enable_checkpointing": True}
    fitted(Drawing(), max_steps=10, callbacks=[ModelCheckpoint(tmp_path, save_last=True)], **limits)
    resumed = TwinModule(Drawing(), DATA, batch_size=10)
    again = ModelCheckpoint(tmp_path / "again", save_last=True)
    trainer(max_steps=25, callbacks=[again], **limits).fit(resumed, ckpt_path=tmp_path / "last.ckpt")
    whole = fitted(Drawing(), max_epochs=-1, max_steps=25)
    assert_same_bits(snapshot(resumed.twins), snapshot(whole.twins))


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_run_with_resets_by_steps_resumes(tmp_path: Path) -> None:
    often = {"protocol": Protocol(reset=resets.steps(resets.every(2)))}
    saving = {"save_top_k": -1, "every_n_train_steps": 1}
    whole = fitted(Drawing(), often, enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path, **saving)])
    for step in (3, 4, 7, 8):  # with a reset before the next batch and without, in mid-epoch and at the end of one
        [path] = tmp_path.glob(f"*-step={step}.ckpt")
        resumed = TwinModule(Drawing(), DATA, batch_size=10, **often)
        again = ModelCheckpoint(tmp_path / path.stem, **saving)
        trainer(max_epochs=3, enable_checkpointing=True, callbacks=[again]).fit(resumed, ckpt_path=path)
        assert_same_bits(snapshot(resumed.twins), snapshot(whole.twins))


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize(
    ("name", "other", "said"),
    [
        ("noise", 2.0, "noise was 1.0 and is 2.0 here"),
        ("pooled", 0.5, "pooled was 0.0 and is 0.5 here"),
        ("mode", "mean", "mode was sample and is mean here"),
        ("reset", resets.every(2), r"reset was the usual one and is every\(interval=2\) here"),
    ],
)
def test_resuming_needs_the_same_options_but_restoring_does_not(
    tmp_path: Path, name: str, other: Any, said: str
) -> None:
    found, path = fitted(Predicting(), max_epochs=1), tmp_path / "one.ckpt"
    found.trainer.save_checkpoint(path)
    changed = TwinModule(Predicting(), DATA, batch_size=10, protocol=Protocol(**{name: other}))
    with pytest.raises(
        ValueError, match=rf"^the checkpoint does not fit: {said}; use the options of the original run\.$"
    ):
        trainer(max_epochs=2).fit(changed, ckpt_path=path)
    assert_same_bits(snapshot(changed.restore(path).estimate()), snapshot(found.estimate()))
    trainer().test(changed, DataLoader(DATA, 64), ckpt_path=path, verbose=False)


def test_a_checkpoint_without_options_can_be_restored_but_not_resumed(tmp_path: Path) -> None:
    found, path = fitted(max_epochs=1), tmp_path / "one.ckpt"
    found.trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    del saved["twin_options"]
    torch.save(saved, path)
    with pytest.raises(ValueError, match=r"^the checkpoint does not fit: it says nothing of 'reset'; use the options"):
        trainer(max_epochs=2).fit(TwinModule(Net(), DATA, batch_size=10), ckpt_path=path)
    restored = TwinModule(Net(), DATA, batch_size=10).restore(path)
    assert_same_bits(snapshot(restored.twins), snapshot(found.twins))


DAMAGED = "is damaged or not a checkpoint: use another one"


def test_damaged_and_foreign_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    found, path = TwinModule(Net(), DATA), tmp_path / "bad.ckpt"
    with pytest.raises(TypeError, match=r"^path must be the path of a checkpoint, not 5\.$"):
        found.restore(5)  # type: ignore[arg-type]
    for missing in (path, tmp_path):
        with pytest.raises(FileNotFoundError, match=rf"^there is no checkpoint at '{missing}'\.$"):
            found.restore(missing)
    torch.save(mlp().state_dict(), path)
    whole = path.read_bytes()
    for content in (b"", b"text", whole[:-1], whole[: len(whole) // 2], whole[:100]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"^'{path}' {DAMAGED}\.$"):
            found.restore(path)
    for other in (mlp().state_dict(), [1, 2], {"state_dict": {}}, {"twins": {}, "pairs": {}}):
        torch.save(other, path)
        with pytest.raises(ValueError, match=r"^this is not a checkpoint of a TwinModule"):
            found.restore(path)
    torch.save({"hyper_parameters": Path("a")}, path)
    with pytest.raises(ValueError, match=r"contains pickled objects, .* torch.serialization.add_safe_"):
        found.restore(path)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:Detected pickle protocol")
def test_a_flipped_bit_in_a_checkpoint_never_changes_the_twins(tmp_path: Path) -> None:
    """PyTorch itself reads most of these files without an error."""
    found, path, bad = fitted(Predicting(), max_epochs=1), tmp_path / "one.ckpt", tmp_path / "bad.ckpt"
    found.trainer.save_checkpoint(path)
    content = path.read_bytes()
    other, said = TwinModule(Predicting(), DATA, batch_size=10), list[str]()
    for bit in torch.randint(8 * len(content), (200,)).tolist():
        bad.write_bytes(content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :])
        try:
            restored = other.restore(bad)
        except ValueError as error:
            said.append(str(error))
        else:
            assert_same_bits(snapshot(restored.twins), snapshot(found.twins))
    assert set(said) == {f"{str(bad)!r} {DAMAGED}."}
    assert len(said) > 100
    start = content.index(found.twins[0].net[0].weight.detach().numpy().tobytes())  # the same flip for Lightning itself
    bad.write_bytes(content[:start] + bytes([content[start] ^ 1]) + content[start + 1 :])
    with pytest.raises(ValueError, match=DAMAGED):
        trainer(max_epochs=2).fit(TwinModule(Predicting(), DATA, batch_size=10), ckpt_path=bad)
    with pytest.raises(ValueError, match=DAMAGED):
        trainer().test(other, DataLoader(DATA, 64), ckpt_path=bad, verbose=False)


def test_early_stopping_and_the_best_checkpoint_use_the_out_of_bag_loss(tmp_path: Path) -> None:
    stopping = EarlyStopping("unseen_loss", patience=2)
    saving = ModelCheckpoint(tmp_path, monitor="val_loss")  # of the user's own step, on the same samples
    run = trainer(max_epochs=100, enable_checkpointing=True, callbacks=[stopping, saving])
    found = TwinModule(Net(rate=0.1), DATA, batch_size=10)
    run.fit(found)
    assert run.current_epoch < 100
    best = TwinModule(Net(), DATA, batch_size=10).restore(saving.best_model_path)
    x, y = DATA[found.bootstrap.unseen]
    loss = F.cross_entropy(best.estimate()(x), y)
    torch.testing.assert_close(loss, saving.best_model_score)
    torch.testing.assert_close(loss, stopping.best_score.float())


def test_sigma_and_the_unseen_loss_are_logged_and_in_the_progress_bar(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    run = trainer(max_epochs=2, logger=logger, log_every_n_steps=1)
    run.fit(TwinModule(Net(), DATA, batch_size=10))
    assert {"sigma", "unseen_loss"} <= run.progress_bar_metrics.keys()
    header, *rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert {"sigma", "sigma/net.0", "sigma/net.3", "unseen_loss", "train_loss", "val_loss"} <= set(header.split(","))
    assert len(rows) >= 14
    assert Path(logger.log_dir, "hparams.yaml").read_text().startswith("dropout: 0.0")  # the user's own


class Counting(Net):
    """Logs and counts in all ways, and records the arguments of its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.told: list[Any] = []
        self.sizes: list[int] = []

    def on_train_epoch_start(self) -> None:
        self.told.append(("epoch", self.current_epoch))
        self.factor = 1 + self.current_epoch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.told.append(len(batch))

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        self.sizes.append(len(x))
        loss = F.cross_entropy(self(x), y)
        self.accuracy(self(x), y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log_dict({"own": loss, "count": len(self.sizes)}, on_step=True, on_epoch=False)
        return {"loss": loss * self.factor, "plain": loss.item()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.told.append((outputs["plain"], self.trainer.callback_metrics.get("own")))

    def on_train_epoch_end(self) -> None:
        self.updates = self.accuracy.update_count

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 0, batch[1]]


def test_one_module_serves_all_twins_and_logs_their_mean() -> None:
    given = Counting()
    before = snapshot(given)
    run = trainer(max_epochs=1, limit_train_batches=2)
    run.fit(found := TwinModule(given, DATA, batch_size=10))
    assert found.module.told[0] == ("epoch", 0)
    assert found.module.sizes == [10] * 4  # without those of validation and of the out-of-bag loss
    assert [told for told in found.module.told if isinstance(told, int)] == [2] * 4  # a batch is x and y
    first, second = (told[0] for told in found.module.told[-2:])
    assert first != second
    assert run.callback_metrics["own"] == pytest.approx((first + second) / 2)
    assert run.callback_metrics["count"] == 3.5
    assert found.module.updates == 4  # over both twins
    assert 0 < run.callback_metrics["accuracy"] < 1
    assert not given.told
    assert_same_bits(snapshot(given), before)


def test_every_hook_of_lightning_reaches_the_module() -> None:
    hooks = [name for name in dir(pl.LightningModule) if name.startswith("on_") and callable(getattr(Net, name))]
    overridden = type("Overriding", (Net,), {name: lambda self, *args: None for name in hooks})
    found = TwinModule(overridden(), DATA)
    assert all(name in vars(TwinModule) or name in vars(found) for name in hooks)


class Remembering(Net):
    def on_validation_model_train(self) -> None:
        self.modes = [*getattr(self, "modes", []), self.training]
        super().on_validation_model_train()


def test_on_validation_model_train_may_be_overridden() -> None:
    assert fitted(Remembering()).module.modes


class Freezing(Net):
    """Removes all gradients of its first layer in the hook named `where`."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.losses, self.norms = where, list[float](), list[Tensor]()

    def drop(self, here: str) -> None:
        if here == self.where:
            for p in self.net[0].parameters():
                p.grad = None

    def on_before_backward(self, loss: Tensor) -> None:
        self.losses.append(loss.item())

    def on_after_backward(self) -> None:
        self.drop("on_after_backward")
        self.norms.append(self.net[3].weight.grad.norm())
        self.log("norm", self.norms[-1], on_step=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.drop("on_before_optimizer_step")
        if self.where == "optimizer":
            assert optimizer.defaults["lr"] == 0.01
            for p in optimizer.param_groups[0]["params"][:2]:
                p.grad = None

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        for p in self.parameters():
            p.grad = None


@pytest.mark.parametrize("where", ["on_after_backward", "on_before_optimizer_step", "optimizer"])
def test_gradient_hooks_are_called_for_each_twin(where: str) -> None:
    run = trainer(max_epochs=1, accumulate_grad_batches=2)
    run.fit(found := TwinModule(Freezing(where), DATA, batch_size=10))
    start = Net()
    for twin in found.twins:
        assert_same_bits(snapshot(twin.net[0]), snapshot(start.net[0]))
        assert (twin.net[3].weight != start.net[3].weight).any()
    assert len(found.module.losses) == 14
    halves = sum(found.module.losses[-2:])  # as two batches make a step
    assert halves == pytest.approx(run.callback_metrics["train_loss"].item())
    first, second = found.module.norms[-2:]
    assert first != second
    torch.testing.assert_close(run.callback_metrics["norm"], (first + second) / 2)


def test_optimizer_zero_grad_may_be_overridden() -> None:
    assert_same_bits(snapshot(fitted(Freezing("nowhere")).twins), snapshot(by_hand()))


class Grouped(Net):
    """Has two parameter groups, an optimizer with an initial state, and a scheduler that monitors a metric."""

    def configure_optimizers(self) -> Any:
        slow, fast = {"params": self.net[0].parameters(), "lr": 0.0}, {"params": self.net[3].parameters()}
        optimizer = torch.optim.Adagrad([slow, fast], lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=10.0)
        return [optimizer], [{"scheduler": scheduler, "monitor": "unseen_loss"}]


def test_optimizers_and_schedulers_of_the_module_train_all_twins() -> None:
    run = trainer(max_epochs=3)
    run.fit(
        found := TwinModule(
            Grouped(), DATA, batch_size=10, protocol=Protocol(mode="mean"), bootstrap=Bootstrap(64, replicas=3)
        )
    )
    [optimizer] = run.optimizers
    assert [len(group["params"]) for group in optimizer.param_groups] == [6, 6]
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.0001)  # three epochs without enough progress
    start = Net()
    for twin in found.twins:
        assert_same_bits(twin.net[0].weight.detach(), start.net[0].weight.detach())
        assert (twin.net[3].weight != start.net[3].weight).any()


def test_the_mean_has_its_own_batchnorm_statistics() -> None:
    found = fitted(Looking(norm=True), max_epochs=2)
    estimate, seen = found.estimate(), DATA[found.bootstrap.seen][0]
    assert not estimate.module.training
    inputs = estimate.module.net[0](seen)
    torch.testing.assert_close(estimate.module.net[1].running_mean, inputs.mean(0), rtol=0.2, atol=0.02)
    for twin in found.twins:
        assert (estimate.module.net[1].running_mean - twin.net[1].running_mean).abs().max() > 0.02
    assert_same_bits(found.module.net[1].running_mean, found._current_mean().module.net[1].running_mean)
    before = torch.get_rng_state()
    assert_same_bits(snapshot(found.estimate()), snapshot(estimate))
    assert torch.equal(torch.get_rng_state(), before)


class Stacked(Net):
    """Its forward pass uses references to its own parts."""

    def __init__(self) -> None:
        super().__init__(norm=True)
        self.stack = list(self.net)
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.stack:
            x = layer(x)
        return x / self.temperature

    def setup(self, stage: str) -> None:
        self.accuracy = MulticlassAccuracy(3)  # has no weights, so setup may add it

    def on_train_epoch_start(self) -> None:
        self.temperature = 2.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.accuracy(self(batch[0]), batch[1])
        return super().training_step(batch, batch_idx)


def test_the_mean_refers_to_its_own_parts_and_has_what_hooks_have_set() -> None:
    plain, found = fitted(Net(norm=True), max_epochs=2), fitted(Stacked(), max_epochs=2)
    estimate = found.estimate()
    [norm] = [layer for layer in estimate.module.net if isinstance(layer, nn.BatchNorm1d)]
    assert norm.num_batches_tracked > 0
    assert estimate.module.stack[1] is norm
    assert estimate.module.temperature == 2.0
    assert found.module.stack[1] is found.module.net[1]
    x = DATA[:][0]
    spread = [e.predict(x, task="regression").std.mean().item() for e in (estimate, plain.estimate())]
    assert spread[0] > spread[1] / 10 > 0


class Adapted(Net):
    """A frozen layer with trained factors of low rank beside it, and a frozen BatchNorm layer."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(norm=True)
        torch.manual_seed(seed)
        self.net[0] = nn.Linear(4, 8)
        for part in self.net[:2]:
            part.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.zeros(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.net[1:](self.net[0](x) + x @ self.down @ self.up)


def storages(module: nn.Module, trained: bool) -> set[int]:
    return {p.data_ptr() for p in module.parameters() if p.requires_grad == trained}


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_twins_share_frozen_weights_and_loading_does_not_change_the_users_module(tmp_path: Path) -> None:
    def saving(name: str) -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / name, save_top_k=-1, every_n_train_steps=10)

    given = Adapted()
    before = snapshot(given)
    whole = fitted(given, enable_checkpointing=True, callbacks=[saving("whole")])
    assert_same_bits(snapshot(given), before)
    first, second = whole.twins
    assert len(storages(first, False)) == 4
    assert storages(first, False) == storages(second, False) == storages(whole.estimate().module, False)
    assert storages(first, False).isdisjoint(storages(given, False))
    assert storages(first, True).isdisjoint(storages(second, True))
    for twin in whole.twins:
        assert_same_bits(snapshot(twin.net[0]), snapshot(given.net[0]))
        assert (twin.up != given.up).any()
    assert set(whole.twins.sigma) == {"(model)", "net.3"}

    [path] = (tmp_path / "whole").glob("*-step=10.ckpt")
    saved = torch.load(path, weights_only=True)
    held = {t.data_ptr() for part in ("twins", "state_dict") for n, t in saved[part].items() if n.endswith("0.weight")}
    assert len(held) == 1  # the file has it once, too
    other = Adapted(seed=2)  # with other frozen weights
    before = snapshot(other)
    restored = TwinModule(other, DATA, batch_size=10).restore(path)
    assert_same_bits(dict(restored.state_dict()), dict(saved["twins"]))
    resumed = TwinModule(other, DATA, batch_size=10)
    trainer(max_epochs=3, enable_checkpointing=True, callbacks=[saving("again")]).fit(resumed, ckpt_path=path)
    assert_same_bits(snapshot(resumed.twins), snapshot(whole.twins))
    assert_same_bits(snapshot(other), before)


class Predicting(Net):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test_loss", F.cross_entropy(self(x), y))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_test_and_predict_use_the_mean() -> None:
    found = fitted(Predicting(), max_epochs=1)
    (x, y), mean, run = DATA[:], found.twins.estimate(), trainer()
    [scores] = run.test(found, DataLoader(DATA, 64), verbose=False)
    assert scores["test_loss"] == pytest.approx(F.cross_entropy(mean(x), y).item())
    assert_same_bits(run.predict(found, DataLoader(DATA, 64))[0], mean(x).detach())
    assert_same_bits(found(x).detach(), mean(x).detach())
    assert len(run.validate(found, verbose=False)) == 1
    assert_same_bits(snapshot(found.twins), snapshot(by_hand(1)))


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*ckpt_path")
def test_outside_of_fit_the_module_has_the_mean(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, save_last=True)
    found = fitted(Predicting(norm=True), enable_checkpointing=True, callbacks=[saving])
    mean = snapshot(found.module)
    assert not torch.equal(mean["net.1.running_mean"], found.twins.estimate().module.net[1].running_mean)
    path = tmp_path / "last.ckpt"
    trainer().test(found, DataLoader(DATA, 64), verbose=False)
    assert_same_bits(snapshot(found.module), mean)
    assert_same_bits(snapshot(found.double().float().module), mean)
    assert_same_bits(snapshot(found.restore(path).module), mean)
    restored = TwinModule(Predicting(norm=True), DATA, batch_size=10).restore(path)
    assert_same_bits(snapshot(restored.module), mean)
    assert_same_bits(snapshot(restored.estimate()), snapshot(found.estimate()))
    other = TwinModule(Predicting(norm=True), DATA, batch_size=10)
    trainer().test(other, DataLoader(DATA, 64), ckpt_path=path, verbose=False)
    assert_same_bits(snapshot(other.module), mean)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*ckpt_path")
def test_fit_after_restore_or_test_starts_from_the_first_epoch(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=10)  # in mid-epoch
    fitted(Predicting(), enable_checkpointing=True, callbacks=[saving])
    [path] = tmp_path.glob("*-step=10.ckpt")
    steps = []
    for look in ("restore", "test"):
        found = TwinModule(Predicting(), DATA, batch_size=10)
        if look == "restore":
            found.restore(path)
        else:
            trainer().test(found, DataLoader(DATA, 64), ckpt_path=path, verbose=False)
        run = trainer(max_epochs=1)
        run.fit(found)
        steps.append((run.global_step, found.loader.state_dict()["epoch"]))
    assert steps == [(7, 2), (7, 2)]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_given_validation_data_replace_the_out_of_bag_samples() -> None:
    run = trainer(max_epochs=1)
    run.fit(found := TwinModule(Net(), DATA, batch_size=10), val_dataloaders=DataLoader(classes(30, seed=5), 30))
    x, y = classes(30, seed=5)[:]
    assert run.callback_metrics["val_loss"] == pytest.approx(F.cross_entropy(found.estimate()(x), y).item())
    x, y = DATA[found.bootstrap.unseen]
    assert run.callback_metrics["unseen_loss"] == pytest.approx(F.cross_entropy(found.estimate()(x), y).item())


class Failing(Net):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def fail(self, here: str) -> None:
        if here == self.where and self.global_step == 3:
            raise KeyError(here)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.fail("training_step")
        return super().training_step(batch, batch_idx)

    def on_before_backward(self, loss: Tensor) -> None:
        self.fail("on_before_backward")

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self.fail("backward")


@pytest.mark.filterwarnings("ignore:.*ckpt_path")  # Lightning looks for a checkpoint of this callback to go on from
@pytest.mark.parametrize("where", ["training_step", "on_before_backward", "backward"])
def test_after_an_error_in_a_step_neither_weights_nor_checkpoint_have_noise(where: str, tmp_path: Path) -> None:
    found = TwinModule(Failing(where), DATA, batch_size=10)
    with pytest.raises(KeyError, match=where):
        trainer(max_epochs=1, enable_checkpointing=True, callbacks=[OnExceptionCheckpoint(tmp_path)]).fit(found)
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    assert_same_bits(dict(saved["state_dict"]), snapshot(by_hand(steps=3).estimate().module))
    assert_same_bits(
        [p.detach() for p in found.twins.parameters()], [p.detach() for p in by_hand(steps=3).parameters()]
    )
    assert not found.twins._store.inside


class Skipping(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_a_skipped_step_leaves_no_noise() -> None:
    found = fitted(Skipping(), max_epochs=1)
    assert not found.twins._store.inside
    assert all(sigma > 0 for sigma in found.twins.sigma.values())


def test_counts_need_a_loss_per_sample_and_weight_it() -> None:
    with pytest.raises(ValueError, match=r'^resample="counts" needs a loss for each sample, but a '):
        TwinModule(Net(), DATA, protocol=Protocol(resample="counts"))

    def each(module: Any, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(module(x), y, reduction="none")

    found = fitted(options={"protocol": Protocol(resample="counts"), "loss": each}, max_epochs=1)
    loader, twins = PairedLoader(DATA, Bootstrap(64), 10, "counts"), Twins(Net())
    optimizer = torch.optim.Adam(twins.parameters(), lr=0.01)
    for pair in loader:
        with twins.sampled():
            for twin, (x, y, weight) in zip(twins, pair, strict=True):
                (weight * F.cross_entropy(twin(x), y, reduction="none")).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        twins.update()
    assert_same_bits(snapshot(found.twins), snapshot(twins))


BACKWARDS = list[bool]()  # for each graph that was compiled, whether it is for training


def counted(graph: Any, inputs: Any) -> Any:
    BACKWARDS.append(torch.is_grad_enabled())
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


class Compiled(Net):
    def __init__(self, how: str) -> None:
        super().__init__()
        if how == "part":
            self.net = torch.compile(self.net, backend=counted)
        elif how == "call of a part":
            self.net.compile(backend="aot_eager")
        elif how == "call":
            self.compile(backend="aot_eager")
        elif how == "method":
            self.quick = torch.compile(self.net.forward, backend="aot_eager")


def test_a_module_with_a_compiled_part_trains_the_same() -> None:
    torch.compiler.reset()
    BACKWARDS.clear()
    found = fitted(Compiled("part"))
    assert len(BACKWARDS) <= 4  # for the mean and for training; other weights need no new graph
    assert any(BACKWARDS)  # at least one graph was compiled for training
    for ours, plain in zip(found.twins.parameters(), by_hand().parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    estimates = found.estimate(), by_hand().estimate()
    spread = [e.predict(DATA[:][0], task="classification").std.mean().item() for e in estimates]
    assert spread[0] == pytest.approx(spread[1], rel=1e-3)


def test_other_ways_to_compile_are_refused() -> None:
    for how, what in [("call of a part", "'net'"), ("call", "the module"), ("method", "'quick'")]:
        with pytest.raises(TypeError, match=rf"^{what} is compiled for this module only, .* torch.compile\(self.net\)"):
            TwinModule(Compiled(how), DATA)
    with pytest.raises(TypeError, match=r"^the module is compiled as a whole: compile a part of your module instead"):
        TwinModule(torch.compile(Net(), backend="aot_eager"), DATA)
    with pytest.raises(TypeError, match=r"^TwinModule itself cannot be compiled: compile a part of your module"):
        trainer(max_epochs=1).fit(torch.compile(TwinModule(Net(), DATA), backend="aot_eager"))


class Late(Net):
    def setup(self, stage: str) -> None:
        self.more = nn.Linear(1, 1)


class ByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Newton(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Listing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.chosen = list(self.parameters())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.chosen)


REFUSED: list[tuple[str, Any, str]] = [
    *(("bootstrap", v, rf"^bootstrap must be a Bootstrap, .*, not {v!r}\.$") for v in (5, 0, "split", False)),
    ("bootstrap", Bootstrap(10), r"^the dataset has 64 samples, but the bootstrap draws from 10\.$"),
    *(("batch_size", v, rf"^batch_size must be a whole number of at least 1, not {v!r}\.$") for v in (0, 2.5, None)),
    *(("seed", v, rf"^seed must be an integer, not {v!r}\.$") for v in (None, "a", 1.5)),
    *(("options", v, r"^options must map names to values, such as ") for v in (5, "num_workers", [("a", 1)], {1: 2})),
    (
        "options",
        {"batch_size": 3},
        r"^options must not contain 'batch_size': TwinModule passes it to the load",
    ),
    ("options", {"twin": 0}, r"^options must not contain 'twin'"),
    ("options", {"control": True}, r"^TwinModule has no control: use fit\(\.\.\., control=True\)"),
    ("options", {"worker": 2}, r"^PairedLoader has no option 'worker'"),
    ("protocol", Protocol(average=1.0), r"^TwinModule has no setting 'average': leave it out of the protocol"),
    ("protocol", {"noise": 2.0}, r"^protocol must be a Protocol, such as "),
    ("loss", "mse", r"^loss must be a function of \(module, batch\), not 'mse'\.$"),
]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_mistakes_get_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^module must be a LightningModule of the package lightning, not Sequential"):
        TwinModule(mlp(), DATA)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^the module uses manual optimization"):
        TwinModule(ByHand(), DATA)
    with pytest.raises(ValueError, match=r"^unknown reset mode 'none'"):
        TwinModule(Net(), DATA, protocol=Protocol(mode="none"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^noise must be a finite number of at least 0, not -1"):
        TwinModule(Net(), DATA, protocol=Protocol(noise=-1))
    with pytest.raises(ValueError, match="is pooled must be below 1, not 1"):
        TwinModule(Net(), DATA, protocol=Protocol(pooled=1))
    with pytest.raises(TypeError, match=r"^reset must be a schedule such as twinboot.resets.every\(1\), not 1"):
        TwinModule(Net(), DATA, protocol=Protocol(reset=1))  # type: ignore[arg-type]
    for name, value, said in REFUSED:
        with pytest.raises((TypeError, ValueError), match=said):
            TwinModule(Net(), DATA, **{name: value})
    with pytest.raises(TypeError, match=r"^'more.weight' was made in setup\(\)"):
        fitted(Late())
    with pytest.raises(TypeError, match=r"^LBFGS needs several gradients per step"):
        fitted(Newton())
    with pytest.raises(TypeError, match=r"^configure_optimizers used weights that belong to no twin"):
        fitted(Listing())
    with pytest.raises(TypeError, match=r"^the Trainer got training data"):
        trainer(max_epochs=1).fit(TwinModule(Net(), DATA), DataLoader(DATA, 10))
    run = trainer(max_epochs=1)
    run.fit(Net(), DataLoader(DATA, 10), DataLoader(DATA, 10))
    run.save_checkpoint(tmp_path / "single.ckpt")
    with pytest.raises(ValueError, match=r"^this is not a checkpoint of a TwinModule"):
        TwinModule(Net(), DATA).restore(tmp_path / "single.ckpt")


def test_strategies_that_shard_are_refused_before_they_start() -> None:
    sentence = r'^TwinModule trains in one process or with strategy="ddp", not with '
    run = trainer(max_epochs=1, strategy=ModelParallelStrategy(), devices=1)
    with pytest.raises(TypeError, match=sentence + "ModelParallelStrategy: "):
        run.fit(TwinModule(Net(), DATA))
    assert not torch.distributed.is_initialized()
    # These do not start on a CPU, or need another package.
    for refused in (FSDPStrategy(), object.__new__(DeepSpeedStrategy)):
        with pytest.raises(TypeError, match=sentence + type(refused).__name__):
            _require_strategy(refused)


def two_ranks(folder: str) -> Any:
    saving = {"save_top_k": -1, "every_n_train_steps": 4}
    options = {"devices": 2, "max_epochs": 2, "enable_checkpointing": True, "use_distributed_sampler": False}

    def fit(name: str, path: Path | None = None) -> tuple[TwinModule, pl.Trainer]:
        strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment())
        run = trainer(strategy=strategy, callbacks=[ModelCheckpoint(Path(folder) / name, **saving)], **options)
        run.fit(found := TwinModule(Net(norm=True, dropout=0.2), DATA, batch_size=5), ckpt_path=path)
        return found, run

    whole, run = fit("whole")
    warnings.filterwarnings("ignore", "The dirpath has changed")
    [path] = Path(folder, "whole").glob("*-step=4.ckpt")
    resumed, _ = fit("again", path)
    metrics = {name: value.item() for name, value in run.callback_metrics.items()}
    return [snapshot(whole.twins), snapshot(whole.module), snapshot(resumed.module), run.global_step, metrics]


def test_two_processes_train_the_same_twins_and_can_be_resumed(tmp_path: Path) -> None:
    first, second = together(two_ranks, str(tmp_path))
    weights = {name: t for name, t in first[0].items() if ".running_" not in name}  # each rank has its own statistics
    assert_same_bits(weights, {name: second[0][name] for name in weights})
    assert_same_bits(first[1], second[1])  # the mean, with its own statistics
    assert_same_bits(first[2], first[1])
    assert first[3] == second[3] == 14  # they share an epoch of batches of ten
    assert first[4]["unseen_loss"] == second[4]["unseen_loss"]


BY_NAME = """
import sys, torch
import lightning.pytorch as pl
from test_lightning import DATA, Net
from twinboot.integrations.lightning import TwinModule

quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
run = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, **quiet)
run.fit(found := TwinModule(Net(), DATA, batch_size=5))
torch.save({"steps": torch.tensor(run.global_step), **found.twins.state_dict()}, f"{sys.argv[1]}/{run.global_rank}.pt")
"""


def test_the_strategy_ddp_by_name(tmp_path: Path) -> None:
    """A user's script, which Lightning starts again for the second process."""
    script = tmp_path / "script.py"
    script.write_text(BY_NAME)
    here = Path(__file__).parent
    known = os.pathsep.join([*map(str, (here, here.parent)), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": known}
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert first["steps"] == 14  # they share an epoch of batches of ten
    assert_same_bits(first, second)


# One module with the weights of several copies


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.outer.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))


def models() -> list[nn.Module]:
    normed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    return [
        mlp(outputs=4),
        nn.LSTM(4, 4),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        normed,
        Tied(),
        nn.MultiheadAttention(4, 1),
    ]


@pytest.mark.parametrize("which", range(len(models())))
def test_a_module_with_the_weights_of_a_copy_computes_and_learns_as_the_copy(which: int) -> None:
    source = models()[which]
    module = copy.deepcopy(source)
    with torch.no_grad():
        for p in source.parameters():
            p.normal_(generator=seeded(3))
    alone = copy.deepcopy(source)
    x = torch.randn(6, 4, generator=seeded(4))
    inputs = (x, x, x) if isinstance(source, nn.MultiheadAttention) else (x,)

    def run(model: nn.Module) -> Any:
        output = model(*inputs)
        (output[0] if isinstance(output, tuple) else output).square().sum().backward()
        return output

    with using_weights(module, source):
        assert_same_bits(run(module), run(alone))
    assert_same_bits([p.grad for p in source.parameters()], [p.grad for p in alone.parameters()])
    assert_same_bits(dict(source.state_dict()), dict(alone.state_dict()))  # BatchNorm's statistics, too
    assert {id(p) for p in module.parameters()} == {id(p) for p in source.parameters()}


def test_a_buffer_that_the_module_replaces_goes_back_to_the_copy() -> None:
    source = nn.Module()
    source.register_buffer("count", torch.tensor(1))
    module = copy.deepcopy(source)
    with using_weights(module, source):
        module.count = module.count + 1  # type: ignore[operator]
    assert source.count == 2
    with using_weights(module, copy.deepcopy(source)):
        module.count = module.count + 1
    assert source.count == 2


def test_merged_optimizers_train_all_weights_in_the_groups_of_the_first() -> None:
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    twins = [mlp(seed=seed) for seed in (1, 2, 3)]
    made: list[Any] = []
    for twin in twins:
        groups = [{"params": [*twin[0].parameters(), frozen], "lr": 0.5}, {"params": list(twin[2].parameters())}]
        optimizer = torch.optim.Adagrad(groups, lr=0.1)
        made.append({"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)})
    merge_optimizers(made)
    groups = made[0]["optimizer"].param_groups
    assert [len(group["params"]) for group in groups] == [7, 6]
    assert [group["lr"] for group in groups] == [0.5, 0.1]
    before = [p.detach().clone() for twin in twins for p in twin.parameters()]
    for twin in twins:
        twin(torch.ones(1, 4)).sum().backward()
    made[0]["optimizer"].step()
    made[0]["lr_scheduler"].step()
    assert [group["lr"] for group in groups] == [0.45, pytest.approx(0.09)]
    after = [p.detach() for twin in twins for p in twin.parameters()]
    assert all((a != b).any() for a, b in zip(before, after, strict=True))


def test_optimizers_of_named_parameters_keep_their_names() -> None:
    twins = [mlp(seed=seed) for seed in (1, 2)]
    made = [torch.optim.SGD(twin.named_parameters(), lr=0.1) for twin in twins]
    merge_optimizers(made)
    [group] = made[0].param_groups
    assert len(group["params"]) == len(group["param_names"]) == 8


def test_all_return_values_of_configure_optimizers_are_understood() -> None:
    for form in (
        lambda o: o,
        lambda o: [o],
        lambda o: ([o], []),
        lambda o: {"optimizer": o},
        lambda o: ({"optimizer": o},),
    ):
        twins = [mlp(seed=seed) for seed in (1, 2)]
        optimizers = [torch.optim.SGD(twin.parameters(), lr=0.1) for twin in twins]
        merge_optimizers([form(optimizer) for optimizer in optimizers])
        assert len(optimizers[0].param_groups[0]["params"]) == 8
    merge_optimizers([None, None])


def test_use_weights_is_permanent() -> None:
    source, module = mlp(seed=1), mlp(seed=2)
    use_weights(module, source)
    assert all(p is q for p, q in zip(module.parameters(), source.parameters(), strict=True))


class Helper:
    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner


class Holding(nn.Module):
    """It refers to its own parts in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.again = self.layer
        self.stack = [self.layer, nn.ReLU()]
        self.method = self.layer.forward
        self.half = partial(torch.mul, self.layer.weight)
        self.helper = Helper(self)


def test_copied_attributes_refer_to_the_parts_of_the_copy() -> None:
    module = Holding()
    other = copy.deepcopy(module)
    module.rate, module.seen = 3, [torch.ones(1)]
    copy_attributes(module, other)
    assert other.stack[0] is other.layer
    assert other.stack[1] is not module.stack[1]
    assert other.method.__self__ is other.layer
    assert other.half.args[0] is other.layer.weight
    assert other.helper.owner is other
    assert other.rate == 3
    other.seen[0] += 1  # type: ignore[operator, index]
    assert module.seen == [torch.ones(1)]


def test_attributes_that_cannot_be_copied_are_shared_or_copied_in_part() -> None:
    module = Holding()
    other = copy.deepcopy(module)
    module.late, module.lock, module.owner = nn.Dropout(), threading.Lock(), object()
    loss = module.layer(torch.ones(1, 2)).sum()
    module.mixed = [loss, module.lock, {"inner": [loss, module.layer]}]
    module.secret = "not for copies"
    copy_attributes(module, other, shared=[module.owner], skip=["secret"])
    assert isinstance(other.late, nn.Dropout)
    assert other.late is not module.late
    assert other.lock is module.lock
    assert other.owner is module.owner
    assert other.mixed[0].grad_fn is None  # type: ignore[index]
    assert other.mixed[2]["inner"][0] == loss  # type: ignore[index]
    assert other.mixed[2]["inner"][1] is other.layer  # type: ignore[index]
    assert not hasattr(other, "secret")


def test_without_lightning_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "twinboot.integrations.lightning")
    with pytest.raises(ImportError, match=r'pip install "twinboot\[lightning\]"$'):
        importlib.import_module("twinboot.integrations.lightning")


def test_forwarded_methods_are_looked_up_at_each_call() -> None:
    found = TwinModule(Predicting(), DATA)
    found.module.predict_step = lambda batch: batch + 1
    assert found.predict_step(1) == 2


def test_an_import_error_of_twinboot_itself_does_not_blame_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "twinboot.integrations.resuming", None)
    monkeypatch.delitem(sys.modules, "twinboot.integrations.lightning")
    with pytest.raises(ImportError, match=r"twinboot\.integrations\.resuming"):
        importlib.import_module("twinboot.integrations.lightning")


def continued() -> Twins:
    """A second `fit` has a new optimizer and continues to count epochs."""
    found = fitted(max_epochs=1)
    trainer(max_epochs=1).fit(found)
    return found.twins


def test_a_deep_copy_is_complete_and_independent() -> None:
    found = fitted(max_epochs=1)
    other = copy.deepcopy(found)
    assert_same_bits(snapshot(other.twins), snapshot(found.twins))
    assert {id(p) for p in other.parameters()}.isdisjoint(map(id, found.parameters()))
    trainer(max_epochs=1).fit(other)
    assert_same_bits(snapshot(found.twins), snapshot(by_hand(1)))
    assert_same_bits(snapshot(other.twins), snapshot(continued()))


def test_the_package_itself_does_not_load_lightning() -> None:
    code = "import sys, twinboot; print([m for m in sys.modules if m.split('.')[0] in ('lightning', 'torchmetrics')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


QUICK: dict[str, Any] = {"max_epochs": 2, "gradient_clip_val": 1.0}


def test_draws_spread_as_the_twins_that_settled_and_the_mean_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = list[Any](), integration._Settling.__init__
    monkeypatch.setattr(integration._Settling, "__init__", lambda self, *args: made.append(self) or make(self, *args))
    twins = fitted(max_epochs=3)
    plain, before = twins.estimate(), {name: t.clone() for name, t in twins.state_dict().items()}
    estimate = twins.settle(trainer(**QUICK), task="classification")
    assert_same_bits(estimate.module.state_dict(), plain.module.state_dict())
    assert_same_bits(twins.state_dict(), before)
    assert (estimate.task, plain.scale) == ("classification", 1)
    [settling] = made
    assert settling.protocol.noise == 0
    assert settling.trainer.optimizers[0].param_groups[0]["lr"] == 0
    x = DATA.tensors[0][twins.bootstrap.unseen]
    with torch.no_grad():
        first, second = (twin.eval()(x).softmax(1) for twin in settling.twins)
    drawn = estimate.predict(x, samples=400).std.square().mean()
    assert abs(drawn / ((first - second).square() / 2).mean() - 1) < 4 * math.sqrt(2 / (DRAWS - 1))


def settled_together() -> Any:
    def ddp(**options: Any) -> pl.Trainer:
        strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment())
        return trainer(strategy=strategy, devices=2, use_distributed_sampler=False, **options)

    made, make = list[Any](), integration._Settling.__init__
    integration._Settling.__init__ = lambda self, *args: made.append(self) or make(self, *args)  # in its own process
    twins = TwinModule(Net(norm=True, dropout=0.2), DATA, batch_size=5)
    ddp(max_epochs=3).fit(twins)
    trained = twins.estimate()
    estimate = twins.settle(ddp(**QUICK), task="classification")
    [settling] = made
    return {
        "settled": snapshot(settling.twins),
        "module": snapshot(estimate.module),
        "before": snapshot(trained.module),
        "sigma": estimate.sigma,
        "of training": trained.sigma,
        "scale": estimate.scale,
        "std": estimate.predict(DATA.tensors[0], 4).std,
    }


def test_processes_that_share_twins_end_with_one_sigma_and_scale_of_settled_twins() -> None:
    first, second = together(settled_together)
    for name in ("settled", "module", "sigma"):
        assert_same_bits(first[name], second[name])
    assert_same_bits(first["module"], first["before"])
    assert first["scale"] == second["scale"]
    assert 0 < first["scale"] < math.inf
    assert first["scale"] != 1
    for group, sigma in first["sigma"].items():
        assert sigma.isfinite().all()
        assert (sigma > 0).all()
        assert not torch.equal(sigma, first["of training"][group])
    assert torch.equal(first["std"], second["std"])


def test_settling_equals_the_plain_loop() -> None:
    """The optimizer's rate, whatever the module's scheduler has made of it, times the factor, and falling to 0."""

    class Warming(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)]

    of = TwinModule(Warming(), DATA, batch_size=10, seed=3)
    settling = integration._Settling(of, of.estimate().module, factor=2.0)
    trainer(max_epochs=2).fit(settling)

    seed = derive(3, "settle")
    plain = Twins(of.estimate().module, seed=seed)
    loader = PairedLoader(DATA, Bootstrap(64, seed=3), 10, seed=seed)
    optimizer = torch.optim.SGD(plain.parameters(), 0.2)
    schedule = falling(optimizer, 2 * len(loader))
    plain.train()
    for _ in range(2):
        for pair in loader:
            optimizer.zero_grad()
            sum(F.cross_entropy(twin(x), y) for twin, (x, y) in zip(plain, pair, strict=True)).backward()
            optimizer.step()
            schedule.step()
            plain.update()
    for name, t in plain.state_dict().items():
        if t.is_floating_point():
            torch.testing.assert_close(settling.state_dict()[name], t)


def test_twins_that_unlearn_while_they_settle_get_a_warning_at_the_line_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("twinboot.estimate.spread.match_spread_", lambda *args: None)  # it would warn, too
    twins = fitted(max_epochs=3)
    with pytest.warns(UserWarning, match="training loss of .* lower the factor, or give the Trainer more ep") as found:
        twins.settle(trainer(max_epochs=1), task="classification", factor=1000.0)
    assert __file__ in [warning.filename for warning in found]


def test_mistakes_in_settling_get_one_sentence() -> None:
    twins = fitted(max_epochs=1)
    with pytest.raises(ValueError, match=r"^this Trainer has been used: give a new one, such as Trainer"):
        twins.settle(twins.trainer)
    with pytest.raises(TypeError, match=r"^trainer must be a Trainer of the package lightning, not 3\.$"):
        twins.settle(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^unknown task 'x': use"):
        twins.settle(trainer(**QUICK), task="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^factor must be"):
        twins.settle(trainer(**QUICK), factor=0.0)
    with pytest.raises(TypeError, match=r"^a batch is a dict: give settle inputs=, a function"):
        integration._all_but_last({"x": 1})
