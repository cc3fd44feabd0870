"""One small artifact a method, exported once; runs on one thread."""

from __future__ import annotations

from pathlib import Path

import pytest

from ondevice.core.config import ExportConfig, ModelConfig
from ondevice.core.registry import method_config
from ondevice.core.registry import target as find_target
from ondevice.exporters.base import ExportJob
from ondevice.models import save_tiny

SEED = 3


@pytest.fixture(autouse=True)
def one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("source") / "model", "llama")


@pytest.fixture(scope="session")
def artifact_of(tmp_path_factory, source):
    """(method, quantize) -> a folder with the artifact."""
    pytest.importorskip("bitsandbytes")
    folders: dict[tuple[str, str], Path] = {}

    def artifact(method: str = "prge", quantize: str = "nf4") -> Path:
        if (method, quantize) not in folders:
            out = tmp_path_factory.mktemp("artifact") / "a"
            config = method_config(
                method, {"rank": 4, **({"queries": 2} if method == "prge" else {})}
            )
            export = ExportConfig(
                target="jetson",
                lengths_tokens=(16, 32),
                batch_size=2,
                check_steps=1,
                quantize=quantize,
            )
            job = ExportJob(ModelConfig(source=str(source), dtype="float32"), config, export, SEED)
            find_target("jetson").export(job, out)
            folders[method, quantize] = out
        return folders[method, quantize]

    return artifact
