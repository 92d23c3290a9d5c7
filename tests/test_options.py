from typing import Any

import pytest

from twinboot.options import require_known, require_one_of, require_whole


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


def test_a_value_must_be_one_of_those_known() -> None:
    require_one_of(("a", "b", "c"), "letter", "b")
    with pytest.raises(ValueError, match=r"""^unknown letter 'd': use "a", "b" or "c"\.$"""):
        require_one_of(("a", "b", "c"), "letter", "d")


@pytest.mark.parametrize("value", [1, 2.0, True, "2", None])
def test_a_number_must_be_whole_and_large_enough(value: object) -> None:
    require_whole("copies", 2, 2)
    with pytest.raises(ValueError, match=rf"^copies must be a whole number of at least 2, not {value!r}; a hint\.$"):
        require_whole("copies", value, 2, "; a hint")
