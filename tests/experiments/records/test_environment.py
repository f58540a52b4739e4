"""Variables on a list reach ranks; the values of all others are cut out of texts."""

import json
from urllib.parse import quote, quote_plus

import pytest

from experiments.records.environment import named, of_launchers, passed_on, without_secrets
from tests.experiments.golden import tables
from tests.experiments.planted import PLANTED, markers

VARIABLES = tables(__file__)


def test_what_ranks_need_passes_and_no_secret() -> None:
    assert len(PLANTED) == 20
    assert passed_on({**PLANTED, "EDITOR": "vi"}, ()) == {}
    assert passed_on(VARIABLES["plain"], ()) == VARIABLES["plain"]


@pytest.mark.parametrize(("name", "value"), VARIABLES["secret"].items())
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


@pytest.mark.parametrize(("name", "value", "text"), VARIABLES["ordinary"])
def test_ordinary_words_and_paths_stay(name: str, value: str, text: str) -> None:
    assert without_secrets(text, {name: value}) == text
