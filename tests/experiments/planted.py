"""Secrets as people have them in their environment."""

import re
from collections.abc import Mapping

import pytest

#: Values by variable; "marker" and what follows it is the part that no rank may see.
PLANTED: Mapping[str, str] = {
    "PGPASSWORD": "marker1",
    "GH_PAT": "ghp_marker2marker2",
    "DATABASE_URL": "postgres://somebody:marker3@db.example.org/things",
    "https_proxy": "http://somebody:marker4@proxy.example.org:3128",
    "HTTP_PROXY": "somebody:marker5@proxy.example.org:3128",
    "HF_ENDPOINT": "https://:marker6@hub.example.org",
    "HF_TOKEN": "hf_marker7marker7",
    "HUGGING_FACE_HUB_TOKEN": "hf_marker8marker8",
    "HF_HUB_TOKEN": "hf_marker9marker9",
    "WANDB_API_KEY": "marker10" * 5,
    "AWS_SECRET_ACCESS_KEY": "marker11/marker11+x",
    "AZURE_STORAGE_CONNECTION_STRING": "AccountName=x;AccountKey=marker12==;Endpoint=y",
    "GOOGLE_CREDENTIALS": '{"private_key": "marker13marker13"}',
    "SSH_PRIVATE_KEY": "-----BEGIN KEY-----\nmarker14marker14\n-----END KEY-----",
    "SLURM_JWT": "ey.marker15.marker15",
    "FCDP_PREFIX": "docker run --env A=marker16",
    "FCDP_API_KEY": "marker17marker17",
    "NCCL_PASSWORD": "marker18",
    "PYTHON_KEYRING_SECRET": "marker19",
    "MY_THING": "marker20marker20",
}


def plant(patch: pytest.MonkeyPatch) -> None:
    """Put them into the environment, with one more secret that is to pass."""
    variables = {**PLANTED, "FCDP_PASS": "MY_TOKEN", "MY_TOKEN": "a gated model's"}
    for name, value in variables.items():
        patch.setenv(name, value)


def markers(text: str) -> list[str]:
    return re.findall(r"marker\d+", text)
