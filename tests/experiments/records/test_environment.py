"""Variables on a list reach ranks; the values of all others are cut out of texts."""

import json
from urllib.parse import quote, quote_plus

import pytest

from experiments.records.environment import named, of_launchers, passed_on, without_secrets
from tests.experiments.planted import PLANTED, markers

PLAIN = {
    "PATH": "/opt/python@3/bin:/usr/bin",
    "PYTHONPATH": "/home/somebody/policies",
    "LC_ALL": "C.UTF-8",
    "TOKENIZERS_PARALLELISM": "false",
    "NCCL_IB_PKEY": "0x8001",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "HF_HOME": "/data/hub",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "OMP_NUM_THREADS": "4",
    "LD_PRELOAD": "/usr/lib/libjemalloc.so",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "https_proxy": "http://proxy.example.org:3128",
    "no_proxy": "localhost,.example.org",
    "FCDP_INTERFACE": "eth1",
}


def test_what_ranks_need_passes_and_no_secret() -> None:
    assert len(PLANTED) == 20
    assert passed_on({**PLANTED, "EDITOR": "vi"}, ()) == {}
    assert passed_on(PLAIN, ()) == PLAIN


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_ENDPOINT", "https://hub.example.org/?token=hidden123"),
        ("CFLAGS", "-DPASSWORD=hidden123"),
        ("DS_CONN", "host;Pwd=hidden123"),
        ("NCCL_SECRETKEY", "hidden123"),
        ("PYTHON_PWD", "hidden123"),
        ("TRITON_BEARER", "hidden123"),
    ],
)
def test_a_secret_does_not_pass_by_the_beginning_of_its_name(name: str, value: str) -> None:
    assert passed_on({name: value}, ()) == {}
    assert "hidden123" not in without_secrets(f"failed with {value}", {name: value})


def test_what_is_named_passes_and_is_cut_out_of_texts_all_the_same() -> None:
    environment = {**PLANTED, "FCDP_PASS": "HF_TOKEN, GH_PAT"}
    seen = passed_on(environment, named(environment))
    assert sorted(seen) == ["FCDP_PASS", "GH_PAT", "HF_TOKEN"]
    assert without_secrets(f"401 for {seen['HF_TOKEN']}", environment) == "401 for <HF_TOKEN>"


def test_launchers_have_what_srun_and_ssh_need() -> None:
    needed = {"SLURM_JOB_ID": "1", "SSH_AUTH_SOCK": "/tmp/agent"}
    assert of_launchers({**PLANTED, **needed}) == needed


def test_secrets_are_cut_out_of_texts_whole_and_in_parts() -> None:
    texts = [*PLANTED.values(), repr(PLANTED["SSH_PRIVATE_KEY"]), "denied: 'marker3'", "(marker4)"]
    for text in texts:
        assert markers(without_secrets(text, PLANTED)) == []
    assert without_secrets("it was marker1.", PLANTED) == "it was <PGPASSWORD>."
    secret = "p@ss w/\u00f6\"rd\\1'x"
    urls = (quote(secret), quote(secret, safe=""), quote_plus(secret), quote(secret).lower())
    dumped = (json.dumps(secret), json.dumps(secret, ensure_ascii=False))
    for text in (secret, *urls, *dumped, repr(secret), ascii(secret), repr(secret.encode())):
        assert "<PGPASSWORD>" in without_secrets(f"denied: {text}", {"PGPASSWORD": secret}), text
    assert "<API_TOKEN>" in without_secrets("a/bcdefgh", {"API_TOKEN": "a%2Fbcdefgh"})


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1", "1 of 2"),
        ("GITHUB_REF_NAME", "main", "line 3, in main"),
        ("GITHUB_WORKSPACE", "/usr/lib", "/usr/lib/x.so"),
        ("DB_PASSWORD", "worker", "a coworker"),
        ("PGUSER", "", "nobody"),
    ],
)
def test_ordinary_words_and_paths_stay(name: str, value: str, text: str) -> None:
    assert without_secrets(text, {name: value}) == text
