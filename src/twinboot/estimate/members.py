"""Members: models of one class that differ in some weights, held as one stack per tensor, [members, ...]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from .._core.copies import Places, held


class Members(nn.Module):
    """The weights in which some models differ from a common one, and the buffers, such as BatchNorm statistics.

    What they have in common, such as a frozen backbone, is held once, by the model itself.

    Args:
        values: name of a parameter or buffer of the model -> its values in all members, [members, ...].
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        require_same_number(values)
        self.names = tuple(values)
        for number, stack in enumerate(values.values()):  # names have dots, which those of buffers may not
            self.register_buffer(str(number), stack)

    @staticmethod
    def of(model: nn.Module, copies: Sequence[nn.Module], parameters: Iterable[str]) -> dict[str, Tensor]:
        """The values of these parameters in some copies of a model, stacked, and of the buffers that training has
        changed, such as the running statistics of BatchNorm."""
        names = list(parameters)
        found = dict(zip(names, zip(*(Places(copy, names).read() for copy in copies), strict=True), strict=True))
        for name, before in model.named_buffers():
            now = tuple(copy.get_buffer(name) for copy in copies)
            counts_steps = name.rpartition(".")[2] == "num_batches_tracked"
            if not counts_steps and not all(torch.equal(value, before.to(value.device)) for value in now):
                found[name] = now
        return {name: torch.stack([value.detach() for value in own]) for name, own in found.items()}

    @classmethod
    def joined(cls, model: nn.Module, parts: Sequence[Mapping[str, Tensor]]) -> Members:
        """Members from the results of several calls of `of`. What is missing in some is there as in the model."""
        own = held(model)
        names = dict.fromkeys(name for part in parts for name in part)
        sizes = [len(next(iter(part.values()))) for part in parts]

        def values(name: str, part: Mapping[str, Tensor], size: int) -> Tensor:
            return part[name] if name in part else own[name].detach().expand(size, *own[name].shape)

        return cls({n: torch.cat([values(n, p, k) for p, k in zip(parts, sizes, strict=True)]) for n in names})

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

    def like(self, model: nn.Module) -> Members:
        """These members with the dtypes, devices and order of a model. Refuses one that they do not fit."""
        self.require_fit(model)
        stacks = self.stacks()
        return Members({name: stacks[name].to(own) for name, own in held(model).items() if name in stacks})


def require_same_number(values: Mapping[str, Tensor]) -> None:
    sizes = {len(stack) if stack.ndim else 0 for stack in values.values()}
    if len(sizes) != 1 or min(sizes) < 2:
        raise ValueError("members need the same number of values for each weight, and at least two.")
