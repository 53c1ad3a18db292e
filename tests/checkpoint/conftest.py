"""The micro DeepSeek-V3 of the training tests, and small runs with every odd kind of parameter."""

from training.conftest import corpus, micro  # noqa: F401
