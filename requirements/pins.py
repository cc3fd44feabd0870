"""Prints the pins of requirements/dev.txt: every package of this environment, at its version.

The CUDA libraries are left out: the torch wheel pins them itself, where it needs them.
"""

from __future__ import annotations

from importlib.metadata import distributions

OWN = {"ondevice-train", "pip"}
LEFT_TO_TORCH = ("nvidia-", "cuda-", "triton")


def pins() -> list[str]:
    """`name==version` for every installed package, sorted by name."""
    found = {}
    for distribution in distributions():
        name = distribution.metadata["Name"].lower().replace("_", "-").replace(".", "-")
        if name not in OWN and (name == "nvidia-ml-py" or not name.startswith(LEFT_TO_TORCH)):
            found[name] = distribution.version
    return [f"{name}=={version}" for name, version in sorted(found.items())]


if __name__ == "__main__":
    print("# Every package of the development environment; `make pins` writes this file.")
    print("# Used as constraints: `pip install -c requirements/dev.txt -e '.[dev]'`.")
    print("\n".join(pins()))
