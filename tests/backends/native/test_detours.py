"""What kernels leave to torch is told, not guessed."""

from __future__ import annotations

from quaver.backends import native
from quaver.backends.native import experts, packing


def test_here_nothing_is_left_but_what_this_torch_lacks(compiled):
    assert experts.sigmoids_serve()
    assert bool(native.detours()) is not packing.supported()
    assert native.described()["detours"] == native.detours()
    assert native.described()["path"] == "native"


def test_each_detour_is_a_sentence(compiled, monkeypatch):
    monkeypatch.setattr(packing, "supported", lambda: False)
    monkeypatch.setattr(experts, "_sigmoids", lambda: None)
    packed, swiglu = native.detours()
    assert "packed" in packed
    assert "SwiGLU" in swiglu


def test_without_kernels_there_is_one_path(paths):
    paths("off")
    assert native.detours() == []
    assert native.described()["path"] == "torch"
