"""An artifact's README: what the program takes and gives, and how to run it."""

from __future__ import annotations

from ondevice.core.manifest import JOIN, Manifest, TensorPort


def readme(manifest: Manifest) -> str:
    """Return text for a person who has only the folder."""
    ops = ", ".join(manifest.custom_ops) or "none: a stock runtime runs it"
    return f"""# A training program for {manifest.model.source}

`program.pte` holds whole {manifest.method["name"]} steps for {manifest.runtime}.
Made by `ondevice export --target {manifest.target}`.

- Train here: `ondevice run DIR --data train.jsonl --steps 100`
- Check here: `ondevice verify DIR`
{_blocks(manifest) if manifest.program_spec.shape == "blocks" else _step(manifest)}
Kernels of this project that the runtime must link: {ops}.
`manifest.json` lists every method, tensor, kernel and checksum.
"""


def _step(manifest: Manifest) -> str:
    step = manifest.program_spec.methods["train_step"]
    return f"""- On a phone: `ondevice push DIR` puts it into the app. In an app of your own, load `program.pte` with
  the ExecuTorch runtime and call `train_step` in a loop.

`train_step` takes {_listed(step.inputs)} and gives {_listed(step.outputs)}. {_state(manifest)};
{_counts(manifest)}. Labels are token ids, -100 if nothing is trained.
{_copies(manifest)}"""


def _blocks(manifest: Manifest) -> str:
    """How a host calls functions of one block."""
    program = manifest.program_spec
    return f"""- On a phone: `ondevice push DIR` puts it into the app. In an app of your own, load
  `{manifest.program}` with the ExecuTorch runtime and call its functions.

A step calls `embed`, `block_forward` for layers 0 to {program.layers - 1}, `head_sums` and then `head_gradient`
for each tile of the vocabulary's {program.vocab} rows, and `block_backward` from the last layer to the first. Inputs
of role `frozen` lie in `{program.weights}`, aligned to 64 bytes: map the file and hand them in where they are, with
the layer's number for `{{layer}}`. A layer's part of a state tensor is one of {program.layers} equal ranges; put it
back as it comes out. {_starts(manifest)}; {_counts(manifest)}.
{_kinds(manifest)}{_experts(manifest)}{_layer_files(manifest)}{_loss_scale(manifest)}"""


def _kinds(manifest: Manifest) -> str:
    """Say which layer is called by which name, if blocks differ."""
    kinds = manifest.program_spec.kinds
    if not kinds:
        return ""
    listed = [f"`_{kind}` for layers {', '.join(str(i) for i, one in enumerate(kinds) if one == kind)}"
              for kind in sorted(set(kinds) - {0})]  # fmt: skip
    return f"""
Blocks differ by layer: the names of a block's functions end in {" and in ".join(listed)}, and in nothing for the
others.
"""


def _experts(manifest: Manifest) -> str:
    """Describe how a host computes a mixture's experts."""
    experts = manifest.program_spec.experts
    if not experts:
        return ""
    return f"""
`block_forward` gives `routing`, the weight of each of {experts} experts for each token. Call `expert_forward` once for
each expert with tokens of weight above 0, with the expert's number for `{{expert}}`, and add what it gives to `hidden`.
Before `block_backward` call `expert_backward` with the same tokens, and put its outputs into `normed_gradient` and
`routing_gradient`, which are zeros elsewhere.
{_join(manifest)}"""


def _join(manifest: Manifest) -> str:
    """Describe how a host joins an MLP and the experts next to it."""
    if not any(name.startswith(JOIN) for name in manifest.program_spec.methods):
        return ""
    return """
Experts stand next to an MLP: sum what `expert_forward` gives to zeros, and hand the sum to `block_join` as
`experts_sum`, with `hidden` and `dense` of `block_forward`; it gives the block's output. `block_join_backward` gives
the gradient that `expert_backward` takes, and `block_backward` takes `experts_sum`, too.
"""


def _layer_files(manifest: Manifest) -> str:
    """Describe functions that are in a file for each layer."""
    places = {
        method.program: name
        for name, method in manifest.program_spec.methods.items()
        if method.program
    }
    if not places:
        return ""
    where = f" and run on the NPU of {manifest.soc}" if manifest.soc else ""
    files = " and ".join(f"`{file}`" for file in places)
    return f"""
The functions of a block hold a layer's weights{where}: load them, under the same names, from {files}, and let them go.
"""


def _loss_scale(manifest: Manifest) -> str:
    """Describe what a host does if gradients are in float16."""
    scale = manifest.program_spec.loss_scale
    if scale is None:
        return ""
    return f"""
Multiply `token_scale` by a number that begins at {scale:g}, and pass it as `loss_scale`, too. Keep a copy of the state
while a step runs: if a number of the new adapter is not finite, take the copy back, halve that number and go on.
"""


def _listed(ports: tuple[TensorPort, ...]) -> str:
    return ", ".join(f"`{port.name}` {port.dtype} {list(port.shape)}" for port in ports)


def _state(manifest: Manifest) -> str:
    """Describe how the state is kept."""
    state = manifest.program_spec.state
    if any(tensor.kept == "program" for tensor in state):
        return (
            "The program keeps the adapter; `get_adapter` and `set_adapter` take it out and put it in.\n"
            "Load every method before `set_adapter`: loading one writes zeros into the state"
        )
    names = " and ".join(f"`{tensor.name}`" for tensor in state)
    return f"Feed {names} back in as they come out;\n{_starts(manifest)}"


def _starts(manifest: Manifest) -> str:
    state = manifest.program_spec.state
    starts = [
        f"`{tensor.name}` starts as the tensor in `{tensor.first}`"
        for tensor in state
        if tensor.first
    ]
    starts += [f"`{tensor.name}` starts as zeros" for tensor in state if not tensor.first]
    return ", ".join(starts)


def _counts(manifest: Manifest) -> str:
    counts = " and ".join(f"`{counter.name}`" for counter in manifest.program_spec.counters)
    inputs = {
        port.role for method in manifest.program_spec.methods.values() for port in method.inputs
    }
    return f"count {counts} up from 0" + ("; keep `seed` as it is" if "seed" in inputs else "")


def _copies(manifest: Manifest) -> str:
    """Describe how a program that trains and evaluates with one method is called."""
    program = manifest.program_spec
    if program.evaluates_with != "train_step":
        return ""
    train = ", ".join(f"`{constant.name}` {constant.train:g}" for constant in program.constants)
    evaluate = ", ".join(
        f"`{constant.name}` {constant.evaluate:g}" for constant in program.constants
    )
    where = ""
    if manifest.soc:
        where = f"The blocks run on the NPU of {manifest.soc}, everything else on the CPU. "
    return f"""
{where}Training: repeat the batch of {manifest.batch_size} for each of the {program.batch_copies} copies, copy
after copy, and pass {train}. Evaluation: other rows for every copy and {evaluate}; then `nll_sum` and `tokens` are
those of the adapter itself; the rest means nothing.
"""
