"""Models and exported programs can be deleted, unless a job still needs them."""

from __future__ import annotations

import pytest

from ondevice.models import save_tiny
from ondevice.server.client import RefusedError
from tests.server.running import refused, settings


def test_a_model_is_deleted_once_no_job_needs_it(served, tmp_path) -> None:
    client, folder = served.client, served.daemon.store / "models" / "mine"
    source = save_tiny(tmp_path / "m", "llama")
    # Other tests of this daemon leave uploads that were begun: these are not this test's.
    uploads = set((served.daemon.store / "uploads").iterdir())
    assert client.upload("model", source, name="mine")["id"] == "mine"
    job = client.create_job(model="mine", dataset=served.dataset, config=settings(steps=1_000_000))[
        "id"
    ]
    try:
        with refused(409) as caught:
            client.delete_model("mine")
        assert job in caught.value.message and (folder / "config.json").is_file()
    finally:
        client.cancel(job)
        client.wait(job, 120)
    client.delete_model("mine")
    assert not folder.exists() and "mine" not in [model["id"] for model in client.models()]
    assert set((served.daemon.store / "uploads").iterdir()) <= uploads
    # Another one of the same name is another model, also for the process that answers questions.
    client.upload("model", source, name="mine")
    assert client.generate("mine", "a", max_new_tokens=1)["base"] is not None
    client.delete_model("mine")


def test_an_artifact_is_deleted_and_what_is_not_there_is_not(served) -> None:
    client, folder = served.client, served.daemon.store / "artifacts" / "old"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    client.delete_artifact("old")
    assert not folder.exists()
    for delete in (client.delete_artifact, client.delete_model):
        with pytest.raises(RefusedError) as refused:
            delete("old")
        assert refused.value.status == 404
    with pytest.raises(RefusedError):
        client.delete_model("tiny:llama")
