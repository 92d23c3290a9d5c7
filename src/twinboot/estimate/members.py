"""Members: models of one class that differ in some weights, held as one stack per tensor, [members, ...]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from .._core.copies import Places, held


class Members(nn.Module):
    """The weights in which some models differ from a common one, and their BatchNorm statistics.

    What they have in common, such as a frozen backbone, is held once, by the model itself.

    Args:
        values: name of a parameter or buffer of the model -> its values in all members, [members, ...].
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        if not values or len({len(stack) for stack in values.values()}) != 1:
            raise ValueError("members need the same number of values for each weight.")
        self.names = tuple(values)
        for number, stack in enumerate(values.values()):  # names have dots, which those of buffers may not
            self.register_buffer(str(number), stack)

    @staticmethod
    def of(copies: Sequence[nn.Module], parameters: Iterable[str]) -> dict[str, Tensor]:
        """The values of these parameters in some copies of a model, stacked, and of the statistics that go with them:
        the running statistics of layers that were in training mode."""
        names = list(parameters)
        found = dict(zip(names, zip(*(Places(copy, names).read() for copy in copies), strict=True), strict=True))
        for place, layer in copies[0].named_modules():
            if isinstance(layer, _NormBase) and layer.running_mean is not None and layer.training:
                for name in (f"{place}.running_mean".lstrip("."), f"{place}.running_var".lstrip(".")):
                    found[name] = tuple(copy.get_buffer(name) for copy in copies)
        return {name: torch.stack([value.detach() for value in own]) for name, own in found.items()}

    def __len__(self) -> int:
        return len(self.values()[0])

    def values(self) -> list[Tensor]:
        """The stacks, in the order of `names`."""
        return [self.get_buffer(str(number)) for number in range(len(self.names))]

    def stacks(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.values(), strict=True))

    def __getitem__(self, which: int | slice) -> dict[str, Tensor]:
        """The values of one member, or of several, stacked."""
        return {name: stack[which] for name, stack in self.stacks().items()}

    def require_fit(self, model: nn.Module) -> None:
        """Refuse a model that these are no members of."""
        own = held(model)
        for name, stack in self.stacks().items():
            if name not in own or own[name].shape != stack.shape[1:]:
                raise ValueError(f"the members do not fit the model: {name!r} is missing or has another shape.")
