"""Libraries that torch does not need, and single functions do."""

from typing import Any


def safetensors(need: str) -> Any:
    """Import ``safetensors.torch``. Raises ``ImportError`` that says what ``need``s it."""
    try:
        import safetensors.torch as library
    except ImportError as error:
        raise ImportError(f"{need}: pip install safetensors") from error
    return library
