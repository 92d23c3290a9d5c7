"""Options and samples that a DataLoader does not take get a sentence."""

import numpy as np
import pytest
import torch

from twinboot._core.batches import collate, loader_of


def test_options_that_a_dataloader_does_not_take_get_a_sentence() -> None:
    assert len(loader_of([1, 2, 3], batch_size=2)) == 2
    with pytest.raises(TypeError, match="num_workers must be a whole number, not 'x'"):
        loader_of([1], num_workers="x")
    with pytest.raises(ValueError, match=r"^the options of the DataLoader do not fit together: [^\n]*\.$"):
        loader_of([1], num_workers=-1)


def test_samples_that_cannot_be_collated_get_a_sentence() -> None:
    assert collate([1, 2]).tolist() == [1, 2]
    for odd in ([object(), object()], [torch.zeros(2), torch.zeros(3)], list(np.zeros(2, ">f4").reshape(2, 1))):
        with pytest.raises(TypeError, match=r"^the samples cannot be collated into a batch, give a collate_fn: .*\.$"):
            collate(odd)
