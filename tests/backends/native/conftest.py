"""The kernels, compiled for this CPU and with its newer instructions masked off."""

from __future__ import annotations

import platform

import pytest

from quaver.backends import native
from quaver.backends.native.build import MARCH, SWITCH

# with all that this CPU has, with AVX512 masked off, and with what every such CPU has
MARCHES = ["native", *{"x86_64": ["x86-64-v3", "x86-64-v2"], "aarch64": ["armv8-a"]}.get(platform.machine(), [])]


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory):
    """One cache for all tests of this folder, so that each instruction set is compiled once."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def paths(monkeypatch, kernel_cache):
    """Switches between the paths in one process: `paths("off")`, `paths("native")`, `paths("x86-64-v2")`."""
    monkeypatch.setenv("QUAVER_CACHE", str(kernel_cache))
    monkeypatch.delenv("CXX", raising=False)

    def switch(path):
        monkeypatch.setenv(SWITCH, "off" if path == "off" else "on")
        monkeypatch.setenv(MARCH, "" if path == "off" else path)
        native.forget()
        assert native.status().path == ("torch" if path == "off" else "native"), native.status()

    yield switch
    native.forget()


@pytest.fixture(params=MARCHES)
def compiled(request, paths):
    """The kernels are loaded, for one instruction set."""
    if native.find_compiler() is None:
        pytest.skip("no C++ compiler")
    paths(request.param)
    return request.param


@pytest.fixture(autouse=True)
def environment_read_anew():
    """No test leaves its library to the next file."""
    yield
    native.forget()
