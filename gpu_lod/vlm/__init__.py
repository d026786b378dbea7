"""From a picture to the tokens of a vision encoder, and what tells which tokens to take."""

__all__: list[str] = []
