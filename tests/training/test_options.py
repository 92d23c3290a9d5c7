from typing import Any

import pytest
import torch

from twinboot.training.options import require_amp, require_gradient_steps, require_options


def front(model: Any, epochs: int = 1, **options: Any) -> None:
    """Takes what a loader takes, too."""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": 0.1}, r"front has no option 'lr': give optimizer=lambda p: torch.optim.Adam\(p, lr=0.1\)\."),
        ({"learning_rate": 1}, r"front has no option 'learning_rate': give optimizer=lambda p: .*lr=1\)\."),
        ({"twin": 0}, r"front has no option 'twin': it trains all twins on every rank, and divides batches itself\."),
        ({"gradient_clip_val": 1}, r"front has no option 'gradient_clip_val': .* write the loop, with Twins\."),
        ({"epoch": 1}, r"front has no option 'epoch': did you mean 'epochs'\?"),
        ({"pin_memory": "x"}, r"pin_memory must be True or False, not 'x'\."),
    ],
)
def test_a_wrong_option_gets_a_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=f"^{said}$"):
        require_options(front, options)


def test_options_of_the_loader_pass() -> None:
    require_options(front, {"num_workers": 2, "pin_memory": True, "collate_fn": list, "epochs": 2})


def test_autocast_needs_a_dtype_of_fewer_bits() -> None:
    for amp in (None, torch.bfloat16, torch.float16):
        require_amp(amp)
    for wrong in (torch.float32, "bf16", True):
        with pytest.raises(TypeError, match=r"^amp must be a dtype, torch\.bfloat16 or torch\.float16, not "):
            require_amp(wrong)


def test_an_optimizer_that_needs_several_gradients_is_refused() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1))]
    require_gradient_steps("front", torch.optim.SGD(weights))
    with pytest.raises(TypeError, match=r"^front takes one gradient for each step, which LBFGS is not made for"):
        require_gradient_steps("front", torch.optim.LBFGS(weights))
