"""The update inside a block program is torch's AdamW or SGD, with its decay, over the flat vector."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ondevice.core.registry import method_config  # noqa: E402
from ondevice.methods.mesp.block_functions import BlockFunctions  # noqa: E402
from ondevice.models.load import tiny_model  # noqa: E402

RATE = 0.03


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_an_update_is_that_of_torch(optimizer: str, decay: float) -> None:
    betas = {"beta1": 0.8, "beta2": 0.95, "eps": 1e-3}
    settings = {"rank": 3, "optimizer": optimizer, "weight_decay": decay, **betas}
    functions = BlockFunctions(tiny_model("llama"), method_config("mesp", settings))
    random = torch.Generator().manual_seed(0)
    size = functions.layer_size
    value = torch.randn(size, generator=random)
    moments = (torch.zeros(size), torch.zeros(size)) if optimizer == "adamw" else ()
    wanted = torch.nn.Parameter(value.double())
    if optimizer == "adamw":
        torch_s = torch.optim.AdamW(
            [wanted], RATE, (betas["beta1"], betas["beta2"]), betas["eps"], decay
        )
    else:  # decoupled, too
        torch_s = torch.optim.SGD([wanted], RATE)
    for step in range(3):
        flat = torch.zeros(size)
        gradients: dict[str, list[torch.Tensor]] = {}
        for entry in functions.entries():
            part = functions.dims.traits.part(entry.parameters.target)
            shapes = entry.parameters
            a = torch.randn(shapes.inputs, shapes.rank, generator=random)
            b = torch.randn(shapes.rank, shapes.outputs, generator=random)
            gradients[part] = [a, b]
            flat[entry.a : entry.a + a.numel()] = a.reshape(-1)
            flat[entry.b : entry.b + b.numel()] = b.reshape(-1)
        wanted.grad = flat.double()
        if optimizer == "sgd":
            wanted.data.mul_(1 - RATE * decay)
        torch_s.step()
        one_vector = functions.gradient(gradients)
        assert torch.equal(one_vector, flat)
        value, *moments = functions.updated(
            one_vector, (value, *moments), torch.tensor([step]), torch.tensor([RATE])
        )
        torch.testing.assert_close(value.double(), wanted.detach(), rtol=1e-5, atol=1e-6)
