from typing import Any

import pytest

from twinboot.options import require_known


def asked(epochs: int, **options: Any) -> None: ...


def passed_on(num_workers: int) -> None: ...


def test_options_of_all_takers_are_known() -> None:
    require_known(["epochs", "num_workers"], asked, passed_on)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("epoch", r"asked has no option 'epoch': did you mean 'epochs'\?$"),
        ("num_worker", r"did you mean 'num_workers'\?$"),
        ("quiet", r"asked has no option 'quiet'\.$"),
        ("options", r"asked has no option 'options'"),  # the name of what is passed on is none itself
    ],
)
def test_others_are_refused_with_what_may_have_been_meant(name: str, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        require_known([name], asked, passed_on)
