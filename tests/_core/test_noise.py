import copy
import math
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import assert_same_bits, classes, mlp, pairs, snapshot, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twinboot import Twins
from twinboot._core.noise import normals
from twinboot._core.tensors import in_order


@pytest.fixture
def twins() -> Twins:
    """Twins with a sigma, after a few steps."""
    twins = Twins(mlp())
    train(twins, pairs(), torch.optim.Adam(twins.parameters(), 1e-2))
    return twins


def weights(twins: Twins) -> list[Tensor]:
    return [p.detach().clone() for p in twins.parameters()]


def loss_of(twins: Twins) -> Tensor:
    x, y = classes().tensors
    return sum((F.cross_entropy(out, y) for out in twins(x, x)), torch.zeros(()))


def test_restore_is_bit_exact(twins: Twins) -> None:
    before = weights(twins)
    with twins.sampled():
        assert not any(torch.equal(a, b) for a, b in zip(weights(twins), before, strict=True))
        loss_of(twins).backward()
    assert_same_bits(weights(twins), before)


def test_restore_is_bit_exact_after_an_exception(twins: Twins) -> None:
    before = weights(twins)
    with pytest.raises(KeyboardInterrupt), twins.sampled():
        raise KeyboardInterrupt
    assert_same_bits(weights(twins), before)
    with twins.sampled():  # the twins know that the block has ended
        pass


@pytest.mark.parametrize("where", ["torch.addcmul", "twinboot._core.noise.NoisyBlock.watch"])
def test_restore_is_bit_exact_when_the_noise_itself_fails(
    twins: Twins, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    before = weights(twins)
    with monkeypatch.context() as patch:
        patch.setattr(where, fail)
        with pytest.raises(KeyboardInterrupt), twins.sampled():
            pass
    assert_same_bits(weights(twins), before)
    twins.update()


@pytest.mark.parametrize("call", ["update", "reset", "estimate", "half"])
def test_calls_that_need_clean_weights_are_refused_inside(twins: Twins, call: str) -> None:
    before = weights(twins)
    with (
        pytest.raises(RuntimeError, match=r"was called inside sampled\(\), where the weights are noisy"),
        twins.sampled(),
    ):
        getattr(twins, call)()
    assert_same_bits(weights(twins), before)


def test_nested_blocks_are_refused(twins: Twins) -> None:
    with (
        pytest.raises(RuntimeError, match=r"sampled\(\) was called inside sampled\(\)"),
        twins.sampled(),
        twins.sampled(),
    ):
        pass


def test_backward_after_the_block_is_refused(twins: Twins) -> None:
    with twins.sampled():
        loss = loss_of(twins)
    with pytest.raises(RuntimeError, match=r"backward\(\) was called after sampled\(\) .* inside the block"):
        loss.backward()


def test_backward_after_the_block_is_refused_where_pytorch_itself_would_not_notice() -> None:
    class Recomputing(nn.Module):
        """Activations are computed again in the backward pass: outside the block with other weights."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    for model in (Recomputing(), nn.Linear(4, 3)):
        twins = Twins(model)
        with twins.sampled():
            loss = loss_of(twins)
        with pytest.raises(RuntimeError, match=r"call loss.backward\(\) inside the block"):
            loss.backward()
        with twins.sampled():
            loss_of(twins).backward()


def test_backward_after_the_block_is_refused_for_outputs_of_any_form() -> None:
    @dataclass
    class Output:
        logits: Tensor

    class Own(dict[str, Tensor]):
        pass

    class Structured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Any:
            logits = self.inner(x)
            return {"dict": {"logits": logits}, "dict of one's own": Own(logits=logits)}.get(form, Output(logits))

    for form in ("dict", "dict of one's own", "dataclass"):
        twins = Twins(Structured())
        with twins.sampled():
            output = twins[0](torch.ones(2, 4))
        with pytest.raises(RuntimeError, match="inside the block"):
            (output.logits if form == "dataclass" else output["logits"]).sum().backward()


def test_passes_outside_any_block_are_as_usual(twins: Twins) -> None:
    loss_of(twins).backward()
    gradient = [p.grad for p in twins.parameters()]
    plain = mlp()
    plain.load_state_dict(twins[0].state_dict())
    x, y = classes().tensors
    F.cross_entropy(plain(x), y).backward()
    torch.testing.assert_close(gradient[:4], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_that_steps_inside_is_refused_and_nothing_is_lost(twins: Twins, kind: Any, options: Any) -> None:
    optimizer = kind(twins.parameters(), lr=0.1, **options)
    other = torch.optim.SGD(mlp().parameters(), 0.1)
    before = weights(twins)
    loss_of(twins).backward()
    with pytest.raises(RuntimeError, match=r"optimizer.step\(\) was called inside sampled\(\)"), twins.sampled():
        optimizer.step()
    assert_same_bits(weights(twins), before)
    with twins.sampled():
        other.step()  # of other weights
    optimizer.step()
    assert not torch.equal(weights(twins)[0], before[0])


def test_weights_that_are_set_inside_are_refused_and_put_back(twins: Twins) -> None:
    before, other = weights(twins), mlp(seed=5).state_dict()
    with pytest.raises(RuntimeError, match=r"the weights were changed inside sampled\(\)"), twins.sampled():
        twins[0].load_state_dict(other)
    assert_same_bits(weights(twins), before)


def test_blocks_that_are_made_before_they_are_entered_are_refused_when_nested(twins: Twins) -> None:
    before = weights(twins)
    first, second = twins.sampled(), twins.sampled()
    with pytest.raises(RuntimeError, match=r"sampled\(\) was called inside sampled\(\)"), first, second:
        pass
    assert_same_bits(weights(twins), before)
    with twins.sampled():
        pass


def test_copies_and_pickles_inside_are_refused(twins: Twins) -> None:
    for call in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match=r"copy or pickle was called inside sampled\(\)"), twins.sampled():
            call(twins)
        with pytest.raises(RuntimeError, match=r"a twin was copied or pickled inside sampled\(\)"), twins.sampled():
            call(twins[0])
    pickle.loads(pickle.dumps(twins)).update()


def test_a_copy_of_compiled_twins_is_a_copy(twins: Twins) -> None:
    twins.compile(backend="eager")
    again = copy.deepcopy(twins)
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
    x, _ = classes().tensors
    assert (again(x, x)[0] == 0).all()
    assert (twins(x, x)[0] != 0).any()


def test_saving_inside_stores_clean_tied_weights_under_all_their_names() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    twins = Twins(model)
    twins.partition.sigma.fill_(0.5)
    before = snapshot(twins[0])
    with twins.sampled():
        assert_same_bits(dict(twins[0].state_dict()), dict(before))


def test_autocast_around_blocks_sees_each_draw_and_then_the_clean_weights(twins: Twins) -> None:
    x, _ = classes().tensors
    with torch.autocast("cpu", torch.bfloat16):
        clean = twins[0](x)
        draws = []
        for _ in range(2):
            with twins.sampled(scale=3.0):
                draws.append(twins[0](x))
        assert torch.equal(twins[0](x), clean)
    assert not torch.equal(draws[0], clean)
    assert not torch.equal(draws[0], draws[1])


def test_a_block_in_inference_mode_leaves_training_possible(twins: Twins) -> None:
    twins = Twins(twins[0])
    with torch.inference_mode(), twins.sampled():
        loss_of(twins)
    with twins.sampled():
        loss_of(twins).backward()


def test_a_restore_that_fails_leaves_no_hook_and_no_block_behind(twins: Twins) -> None:
    with pytest.raises(RuntimeError), twins.sampled():
        twins[0][0].weight.data = torch.zeros(1, 2, 3)
    assert not twins[0]._forward_hooks
    torch.optim.SGD(twins.parameters(), 0.1).step()  # no hook of the block is left
    with pytest.raises(RuntimeError, match="size of tensor"):
        twins.update()  # the error of update, not that of an open block


def test_saving_inside_never_stores_noisy_weights(twins: Twins) -> None:
    outside, first = snapshot(twins), snapshot(twins[0])
    with twins.sampled():
        inside, inside_first = twins.state_dict(), twins[0].state_dict()
        assert_same_bits(twins[0][2].state_dict()["weight"], first["2.weight"])
        assert not torch.equal(twins[0][0].weight, first["0.weight"])
    del outside["_extra_state"], inside["_extra_state"]  # the count of draws, which has gone up
    assert_same_bits(dict(inside), dict(outside))
    assert_same_bits(dict(inside_first), dict(first))
    twins.update()  # the saved state does not change with the twins
    with twins.sampled():
        assert_same_bits(dict(inside_first), dict(first))


def test_no_hook_is_left_behind(twins: Twins) -> None:
    with twins.sampled():
        loss_of(twins).backward()
    for module in twins.modules():
        assert not module._forward_hooks
        assert not module._state_dict_hooks


def test_a_draw_is_new_in_each_block_and_the_same_from_the_same_generator(twins: Twins) -> None:
    def draw(seed: int | None = None) -> list[Tensor]:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        with twins.sampled(generator=generator):
            return weights(twins)

    first, second = draw(), draw()
    assert not torch.equal(first[0], second[0])
    assert_same_bits(draw(3), draw(3))


def test_scale_zero_is_no_noise(twins: Twins) -> None:
    before = weights(twins)
    with twins.sampled(scale=0.0):
        assert_same_bits(weights(twins), before)


def test_weights_loaded_in_another_dtype_are_restored_to_the_bit(twins: Twins) -> None:
    with twins.sampled():
        pass
    state = {k: v.double() if k.startswith("copies.") else v for k, v in twins.state_dict().items()}
    twins.load_state_dict(state, assign=True)
    with torch.no_grad():
        for p in twins.parameters():
            p.add_(1e-12)  # lost in float32
    before = weights(twins)
    with twins.sampled():
        pass
    assert_same_bits(weights(twins), before)


def test_a_generator_on_another_device_is_refused(twins: Twins) -> None:
    class Elsewhere:
        device = torch.device("cuda")

    with (
        pytest.raises(TypeError, match="generator must be a Generator or None, not an Elsewhere"),
        twins.sampled(generator=Elsewhere()),  # type: ignore[arg-type]
    ):
        pass
    with pytest.raises(ValueError, match="the generator is on cuda, but there are weights on cpu"):
        normals(0, Elsewhere())(torch.zeros(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("make", ["contiguous", "channels_last", "transposed", "slice"])
def test_normals_fill_every_entry_whatever_the_strides(make: str) -> None:
    whole = torch.zeros(40, 60, 5, 5)
    t = {
        "contiguous": whole,
        "channels_last": whole.to(memory_format=torch.channels_last),
        "transposed": whole.permute(3, 1, 0, 2),
        "slice": whole[:, ::2],
    }[make]
    normals(0)(t)
    assert t.std().item() == pytest.approx(1, abs=4 / math.sqrt(2 * t.numel()))
    assert len(t.unique()) > 0.99 * t.numel()
    assert whole[:, 1::2].count_nonzero() == (0 if make in ("slice", "channels_last") else whole[:, 1::2].numel())


def test_noise_of_channels_last_weights_is_drawn_as_they_lie_in_memory() -> None:
    # In the strides of channels_last PyTorch takes ten times as long for each number.
    weight = torch.empty(8, 4, 3, 3).to(memory_format=torch.channels_last)
    assert in_order(weight).is_contiguous()
    assert in_order(weight).data_ptr() == weight.data_ptr()
    assert in_order(weight[:, ::2]).stride() == weight[:, ::2].stride()  # no order makes these contiguous
