"""Environment variables of ranks, by an allowlist; values of all others are secrets.

A denylist would have to know the name of every key and of every password.
"""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from urllib.parse import quote, quote_plus, unquote

#: Variable with the names of further variables that reach ranks, separated by commas.
PASS = "FCDP_PASS"
#: Names and prefixes of the variables that processes, the loader, compilers of operators, PyTorch,
#: NCCL, CUDA, OpenMP, DeepSpeed and Hugging Face's caches read.
_PASSES = """
PATH HOME USER LOGNAME SHELL TERM PWD OLDPWD HOSTNAME LANG LANGUAGE LC_* TZ TZDIR TMPDIR TEMP TMP
XDG_CACHE_HOME XDG_RUNTIME_DIR LD_* MALLOC_* GLIBC_TUNABLES PYTHON* VIRTUAL_ENV CONDA_PREFIX CC CXX
CFLAGS CXXFLAGS LDFLAGS CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH LIBRARY_PATH MAX_JOBS
TORCH* PYTORCH_* TRITON_* GLOO_* TP_SOCKET_IFNAME NCCL_* RCCL_* UCX_* FI_* IBV_* OFI_* MLX5_*
CUDA* CUDNN_* CUBLAS* NVIDIA_* HIP_* ROCR_* HSA_* OMP_* GOMP_* KMP_* MKL_* NUMBA_* OPENBLAS_* DNNL_*
ONEDNN_* DS_* HF_HOME HF_HUB_* HF_DATASETS_* HF_ENDPOINT HF_XET_* HUGGINGFACE_HUB_CACHE
TRANSFORMERS_* TOKENIZERS_PARALLELISM SAFETENSORS_* SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE
CURL_CA_BUNDLE HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy
FCDP_PASS FCDP_(?!PREFIX|DOCKER_OPTIONS)*
"""
_NAMES = frozenset(_PASSES.split())
_ALLOWED = re.compile("|".join(name.replace("*", r"\w*") for name in _NAMES))
#: Words in the names of keys and passwords: ``HF_HUB_TOKEN`` begins like a variable that passes.
_SECRET = re.compile(
    r"(?:^|_)(?:TOKENS?|(?:API_?|ACCESS_?|SECRET_?)?KEY|PAT|PWD|BEARER|JWT|AUTH|SECRETS?|CREDENTIALS?"
    r"|\w*PASS(?:WORD|WD|PHRASE)?)(?:_|$)",
    re.IGNORECASE,
)
#: A URL, or a proxy without its scheme, with a user's name or password in it.
_LOGIN = re.compile(r"://\S*@|^[^/:\s]+:[^/\s]*@")
#: Passwords in URLs and in lists of settings.
_INSIDE = re.compile(r":([^/:@\s][^\s]*)@|(?i:password|passwd|pwd|key|secret|token)=([^\s;&]+)")
#: Further variables that ``srun`` and ``ssh`` need, and ranks do not.
_OF_LAUNCHERS = re.compile(r"SLURM_(?!JWT)\w*|SSH_AUTH_SOCK|KRB5CCNAME")
#: A value shorter than the first is a switch (``HF_HUB_DISABLE_IMPLICIT_TOKEN=1``), and part of any
#: text; shorter than the second, a password is cut out as a whole word, and any other value stays.
_SHORTEST, _SHORTEST_PART = 4, 8


def named(environment: Mapping[str, str]) -> frozenset[str]:
    """Names in ``FCDP_PASS``."""
    return frozenset(re.split(r"[,\s]+", environment.get(PASS, "")))


def passed_on(environment: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Variables that reach ranks: those that they need, and those in ``names``."""
    return {
        name: value
        for name, value in environment.items()
        if name in names or _is_needed(name, value)
    }


def of_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that a node's launcher sees."""
    return passed_on(environment, [*filter(_OF_LAUNCHERS.fullmatch, environment)])


def _is_needed(name: str, value: str) -> bool:
    if not _ALLOWED.fullmatch(name) or _LOGIN.search(value) or _INSIDE.search(value):
        return False
    return name in _NAMES or len(value) < _SHORTEST or not _SECRET.search(name)


def without_secrets(text: str, environment: Mapping[str, str]) -> str:
    """The text without values that reach no rank, or do so only because they are ``named``.

    Paths that exist on this machine stay: they are no secrets.
    """
    values = {
        part: name
        for name, value in environment.items()
        if not _is_needed(name, value) and not (os.path.isabs(value) and os.path.exists(value))
        for part in _parts(name, value)
    }
    for value in sorted(values, key=len, reverse=True):
        edges = (r"(?<!\w)", r"(?!\w)") if len(value) < _SHORTEST_PART else ("", "")
        pattern, shown = re.escape(value).join(edges), f"<{values[value]}>"
        text = re.sub(pattern, lambda _, shown=shown: shown, text)  # type: ignore[misc]
    return text


def _parts(name: str, value: str) -> set[str]:
    """The value, its lines and the passwords in it, as they are, as in a URL and escaped."""
    inside = {part for groups in _INSIDE.findall(value) for part in groups}
    inside |= set(map(unquote, inside))
    whole = {line.strip() for line in (value, *value.splitlines(), unquote(value))}
    if not _SECRET.search(name):
        whole = {part for part in whole if len(part) >= _SHORTEST_PART}
    parts = {part for part in inside | whole if len(part) >= _SHORTEST}
    return {form for part in parts for form in _forms(part)}


def _forms(part: str) -> Iterator[str]:
    """The text as it is, as in URLs, and with the escapes of Python and JSON."""
    yield part
    for quoted in (quote(part), quote(part, safe=""), quote_plus(part)):
        yield from (quoted, re.sub("%..", lambda escape: escape[0].lower(), quoted))
    yield from (repr(part)[1:-1], ascii(part)[1:-1], repr(part.encode())[2:-1])
    yield from (json.dumps(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1])
