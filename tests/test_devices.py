"""The EGL device of a CUDA device, on machines made up of what drivers say and of what they keep to themselves."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_lod.bridge import devices as enumerate_devices
from gpu_lod.bridge import egl
from gpu_lod.bridge.devices import Device, Gpu, gpu, match
from gpu_lod.errors import GLUnavailableError

SOFTWARE = ("EGL_MESA_device_software", "EGL_EXT_device_drm_render_node")
NVIDIA = ("EGL_NV_device_cuda", "EGL_EXT_device_drm", "EGL_EXT_device_persistent_id")
REPORTS = ("everything", "uuid", "pci", "masked", "unmasked", "nothing")


def uuid_of(number: int) -> str:
    """Of physical GPU `number`; the first digits differ, so that a short prefix names one GPU."""
    return f"{number:x}b{random.Random(number).getrandbits(120):030x}"


def pci_of(number: int) -> str:
    return f"0000:{0x41 + 7 * number:02x}:00.0"


def dashed(uuid: str) -> str:
    return f"{uuid[:8]}-{uuid[8:12]}-{uuid[12:16]}-{uuid[16:20]}-{uuid[20:]}"


@dataclass
class Machine:
    """GPUs as EGL and torch show them, and the truth."""

    found: list[Device]
    gpu: Gpu
    visible: list[int]
    """The physical GPUs that the mask shows, in torch's order."""
    mask: str | None
    """CUDA_VISIBLE_DEVICES"""
    right: Device


def device_of(number: int, report: str, visible: list[int]) -> Device:
    """Physical GPU `number` as EGL shows it, at an index to be set."""
    masked = visible.index(number) if number in visible else None  # the query fails for a GPU that the mask hides
    ordinal = {"everything": masked, "masked": masked, "unmasked": number}.get(report)
    uuid = uuid_of(number) if report in ("everything", "uuid") else None
    pci = pci_of(number) if report in ("everything", "pci") else None
    return Device(-1, NVIDIA if report != "pci" else NVIDIA[1:], None, ordinal, uuid, pci)


@st.composite
def machines(draw: Callable[..., Any]) -> tuple[Machine, str]:
    """A machine, and the way in which its devices report themselves."""
    count = draw(st.integers(1, 8))
    report = draw(st.sampled_from(REPORTS))
    kind = draw(st.sampled_from(["none", "numbers", "uuids", "prefixes"]))
    visible = list(range(count))
    if kind != "none":
        visible = draw(st.permutations(visible))[: draw(st.integers(1, count))]
    texts = {
        "numbers": [str(number) for number in visible],
        "uuids": ["GPU-" + dashed(uuid_of(number)) for number in visible],
        "prefixes": [f"GPU-{uuid_of(number)[:4]}" for number in visible],
    }.get(kind)
    mask = None
    if texts is not None:
        hidden = next((number for number in range(count) if number not in visible), 0)
        mask = draw(st.sampled_from([",", " , "])).join(texts) + draw(st.sampled_from(["", f",-1,{hidden}", ",x"]))
    ordinal = draw(st.integers(0, len(visible) - 1))
    number = visible[ordinal]
    wanted = Gpu(
        ordinal,
        "NVIDIA H100",
        uuid_of(number) if draw(st.booleans()) else None,
        pci_of(number) if draw(st.booleans()) else None,
    )
    devices = [device_of(one, report, visible) for one in range(count)]
    right = devices[number]
    devices += [Device(-1, SOFTWARE, None, None)] * draw(st.integers(0, 2))
    devices += [Device(-1, (), None, None)] * draw(st.integers(0, 1))  # a display controller
    order = draw(st.permutations(range(len(devices))))
    found = [replace(devices[place], index=index) for index, place in enumerate(order)]
    return Machine(found, wanted, visible, mask, replace(right, index=order.index(number))), report


def candidates(machine: Machine) -> list[Device]:
    with pytest.MonkeyPatch.context() as patch:  # as a program does: the mask is in the environment
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if machine.mask is not None:
            patch.setenv("CUDA_VISIBLE_DEVICES", machine.mask)
        return match(machine.gpu, machine.found)


def knows_numbering(machine: Machine, report: str) -> bool:
    """Whether only one reading of the ordinals is possible, or the likelier of two is the right one."""
    if report in ("everything", "masked"):
        return True
    if report != "unmasked":
        return False
    if machine.visible[machine.gpu.ordinal] == machine.gpu.ordinal:
        return True
    physical = sum("EGL_NV_device_cuda" in device.extensions for device in machine.found)
    return "GPU-" not in (machine.mask or "") and len(machine.visible) < physical


@settings(max_examples=600)
@given(machines())
def test_the_right_device_is_found(case: tuple[Machine, str]) -> None:
    machine, report = case
    result = candidates(machine)
    known = {
        "uuid": machine.gpu.uuid is not None and machine.right.uuid is not None,
        "pci": machine.gpu.pci is not None and machine.right.pci is not None,
    }
    assert machine.right in result
    assert len(result) == len({device.index for device in result})
    assert not any(device.software for device in result)
    for device in result:
        if device != machine.right:
            assert not (known["uuid"] and device.uuid is not None)
            assert not (known["pci"] and device.pci is not None)
    named = machine.mask is not None and "GPU-" in machine.mask and machine.right.uuid is not None
    if any(known.values()) or named or knows_numbering(machine, report):
        assert result[0] == machine.right
    elif report == "unmasked" and "GPU-" not in (machine.mask or ""):
        assert machine.right in result[:2]


@given(machines(), st.integers(0, 2**16 - 1))
def test_devices_that_do_not_answer_are_kept_unless_another_is_proved(case: tuple[Machine, str], silent: int) -> None:
    machine, _ = case
    machine.found = [
        Device(device.index, (), None, None) if silent >> device.index & 1 and not device.software else device
        for device in machine.found
    ]
    result = candidates(machine)
    assert machine.found[machine.right.index] in result
    assert all(device in result for device in machine.found if not device.extensions)
    assert not any(device.software for device in result)


@given(machines())
def test_a_mig_instance_is_found_by_its_address(case: tuple[Machine, str]) -> None:
    """Its UUID is its own, so that it shows nothing to be another GPU."""
    machine, _ = case
    machine.gpu = replace(machine.gpu, name="NVIDIA H100 MIG 1g.10gb", uuid="f" * 32)
    machine.mask = None if machine.mask is None else "MIG-" + dashed("f" * 32)
    result = candidates(machine)
    if machine.gpu.pci is not None and machine.right.pci is not None:
        assert result[0] == machine.right
        assert [device.pci for device in result if device.pci is not None] == [machine.gpu.pci]
    else:
        assert len(result) == sum(not device.software for device in machine.found)


def nvidia(index: int, ordinal: int | None = None, uuid: str | None = None, pci: str | None = None) -> Device:
    return Device(index, NVIDIA, None, ordinal, uuid, pci)


def indices(result: list[Device]) -> list[int]:
    return [device.index for device in result]


def test_the_order() -> None:
    found = [
        Device(0, SOFTWARE, None, None),
        Device(1, (), None, None),
        Device(2, (), None, None),
        nvidia(3),
        nvidia(4, ordinal=2),
        nvidia(5, ordinal=3),
        nvidia(6, ordinal=1),
        Device(7, ("EGL_EXT_device_drm",), "/dev/dri/card0", None, None, pci_of(5)),
        nvidia(8, pci=pci_of(5)),
        nvidia(9, uuid=uuid_of(5)),
        nvidia(10, ordinal=1, uuid=uuid_of(6)),
        nvidia(11, ordinal=1, pci=pci_of(6)),
    ]
    wanted = Gpu(1, "NVIDIA H100", uuid_of(5), pci_of(5))
    # UUID; PCI address, CUDA's driver first; ordinal behind the mask; before it; another; none; not CUDA's driver
    assert indices(match(wanted, found, "0,3,4,5")) == [9, 8, 7, 6, 5, 4, 3, 1, 2]
    # Two entries show no device 3, so EGL counts without the mask.
    assert indices(match(wanted, found, "0,3")) == [9, 8, 7, 5, 6, 4, 3, 1, 2]


def test_either_identity_is_enough() -> None:
    """Two drivers may disagree on one GPU's UUID, and a sandbox may renumber the bus."""
    wanted = Gpu(0, "NVIDIA H100", uuid_of(1), pci_of(1))
    found = [
        nvidia(0, uuid=uuid_of(2), pci=pci_of(1)),
        nvidia(1, uuid=uuid_of(1), pci=pci_of(2)),
        nvidia(2, uuid=uuid_of(3)),
        nvidia(3, uuid=uuid_of(2), pci=pci_of(2)),
        nvidia(4, pci=pci_of(1)[:-1] + "4"),  # torch does not tell the function of a virtual one
    ]
    assert indices(match(wanted, found, "")) == [1, 0, 4]


def test_a_foreign_uuid_excludes_nothing() -> None:
    """Mesa's drivers make UUIDs of their own: with none equal to torch's, none is a certain no."""
    found = [Device(0, ("EGL_EXT_device_persistent_id",), None, None, uuid_of(2)), nvidia(1, uuid=uuid_of(3))]
    assert indices(match(Gpu(0, "AMD Instinct", uuid_of(1), None), found)) == [1, 0]


@pytest.mark.parametrize(
    ("visible", "ordinal", "first"),
    [
        ("5,3", 1, 3),
        (" 5 , 3", 1, 3),
        ("+5,3 ", 0, 5),
        ("5gpu,3rd", 1, 3),
        ("5,3,-1,6", 1, 3),
        # What the mask cannot mean says nothing: the ordinal is taken as it is.
        ("5,-1,3", 1, 1),
        ("5,x,3", 1, 1),
        ("5,,3", 1, 1),
        ("5,3,5", 1, 1),
        ("5,05,3", 2, 2),
        ("", 0, 0),
        ("-1", 0, 0),
        ("NoDevFiles", 0, 0),
        ("GPU-12,3", 1, 3),
        ("MIG-1234,3", 1, 3),
        ("GPU-,3", 1, 1),
    ],
)
def test_the_mask_is_read_as_cuda_reads_it(visible: str, ordinal: int, first: int) -> None:
    found = [nvidia(index, ordinal=7 - index) for index in range(8)]
    assert match(Gpu(ordinal, "NVIDIA H100", None, None), found, visible)[0].cuda_ordinal == first


def test_a_uuid_in_the_mask_names_the_device() -> None:
    found = [nvidia(index, ordinal=index, uuid=uuid_of(index)) for index in range(4)]
    older = Gpu(1, "NVIDIA A100", None, None)  # from a torch that knows no UUID
    for entry in (dashed(uuid_of(3)).upper(), uuid_of(3)[:3], dashed(uuid_of(3))[:11]):
        assert indices(match(older, found, f"GPU-{uuid_of(0)},GPU-{entry}")) == [3, 1, 0, 2]
    # The GPU of a MIG instance, as older drivers name it.
    parent = f"MIG-GPU-{dashed(uuid_of(2))}/1/0"
    assert indices(match(older, found, f"MIG-GPU-{dashed(uuid_of(2))}/2/0,{parent}"))[0] == 2
    # An instance's own UUID is the beginning of no GPU's.
    assert indices(match(older, found, f"0,MIG-{dashed(uuid_of(2))}"))[0] == 1
    # A GPU named twice voids the mask.
    assert indices(match(older, found, f"GPU-{uuid_of(2)},GPU-{uuid_of(3)},GPU-{uuid_of(2)}"))[0] == 1
    # A UUID of torch's own is surer than the mask, which may have been changed since.
    known = replace(older, uuid=uuid_of(2))
    assert indices(match(known, found, f"0,GPU-{uuid_of(3)}")) == [2]


def test_the_mask_given_goes_before_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [nvidia(index, ordinal=index) for index in range(4)]
    wanted = Gpu(0, "NVIDIA H100", None, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert match(wanted, found)[0].index == 2
    assert match(wanted, found, "3")[0].index == 3
    assert match(wanted, found, "")[0].index == 0


def refusal(wanted: Gpu, found: list[Device]) -> str:
    with pytest.raises(GLUnavailableError) as error:
        match(wanted, found)
    return str(error.value)


def test_each_refusal_says_why_and_what_to_do() -> None:
    wanted = Gpu(3, "NVIDIA H100", uuid_of(3), pci_of(3))
    driver = (
        "libnvidia-gl",
        "NVIDIA_DRIVER_CAPABILITIES=graphics,compute,utility",
        "10_nvidia.json",
        "backend='torch'",
    )
    nothing = refusal(wanted, [])
    software = refusal(wanted, [Device(0, SOFTWARE, None, None), Device(1, SOFTWARE, None, 3, uuid_of(3), pci_of(3))])
    others = refusal(
        wanted, [nvidia(0, uuid=uuid_of(1), pci=pci_of(1)), Device(1, SOFTWARE, None, None), nvidia(2, pci=pci_of(2))]
    )
    for message in (nothing, software, others):
        assert f"CUDA device 3 (NVIDIA H100, PCI {pci_of(3)}, UUID {uuid_of(3)})" in message
        assert "backend='torch'" in message
    assert "no device" in nothing
    assert "software only (llvmpipe)" in software and "no device" not in software
    assert all(part in nothing and part in software for part in driver)
    assert f"all other GPUs (0: PCI {pci_of(1)}, UUID {uuid_of(1)}; 2: PCI {pci_of(2)})" in others
    assert "/dev/nvidia" in others and "libnvidia-gl" not in others
    assert "CUDA device 0 (Tesla)," in refusal(Gpu(0, "Tesla", None, None), [])


@pytest.mark.parametrize(
    ("properties", "uuid", "pci"),
    [
        ({}, None, None),
        ({"uuid": "GPU-" + dashed(uuid_of(9)).upper()}, uuid_of(9), None),
        ({"uuid": dashed(uuid_of(9))}, uuid_of(9), None),
        ({"uuid": "MIG-" + dashed(uuid_of(9))}, uuid_of(9), None),
        ({"uuid": SimpleNamespace()}, None, None),
        ({"uuid": dashed("0" * 32)}, None, None),
        ({"uuid": uuid_of(9)[1:]}, None, None),
        ({"pci_domain_id": 0, "pci_bus_id": 0x65, "pci_device_id": 0}, None, "0000:65:00.0"),
        ({"pci_domain_id": 0x1A2B3, "pci_bus_id": 0xC, "pci_device_id": 0x1F}, None, "1a2b3:0c:1f.0"),
        ({"pci_domain_id": 0, "pci_bus_id": 0, "pci_device_id": 0}, None, None),  # not on a PCI bus
        ({"pci_domain_id": 0, "pci_bus_id": 0x65}, None, None),
    ],
)
def test_what_torch_knows(
    monkeypatch: pytest.MonkeyPatch, properties: dict[str, Any], uuid: str | None, pci: str | None
) -> None:
    asked = []

    def get(ordinal: int) -> SimpleNamespace:
        asked.append(ordinal)
        return SimpleNamespace(name="NVIDIA H100", **properties)

    monkeypatch.setattr(torch.cuda, "get_device_properties", get)
    assert gpu(2) == Gpu(2, "NVIDIA H100", uuid, pci)
    assert asked == [2]


NEEDS = {0x3233: "EGL_EXT_device_drm", 0x3377: "EGL_EXT_device_drm_render_node", 0x323A: "EGL_NV_device_cuda"}


@dataclass
class Refused:
    """Written where the answer goes, by a query that fails all the same."""

    value: Any


class FakeEGL:
    """An EGL whose devices answer from tables {name: value}; one that is asked what it has no extension for fails."""

    def __init__(self, *tables: dict[int, Any]) -> None:
        self.tables = tables
        self.error = 0x3000
        self.lists = True
        # Real C functions, so that what is passed is what ctypes would pass to EGL's.
        binary = ctypes.CFUNCTYPE(
            ctypes.c_uint, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p
        )
        attribute = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        self.device_binary: Any = binary(self._binary)
        self.device_attribute: Any = attribute(self._attribute)
        self.device_string: Any = self._text

    def _look_up(self, handle: int, name: int, extension: str | None) -> Any:
        table = self.tables[handle - 1]
        if extension is not None and extension not in (table.get(0x3055) or b"").decode(errors="replace").split():
            self.error = 0xBAD
            return None
        answer = table.get(name)
        if answer is None or isinstance(answer, Refused):
            self.error = 0x3004  # EGL_BAD_ATTRIBUTE
        return answer

    def query_devices(self, room: int, handles: Any, count: Any) -> int:
        count._obj.value = len(self.tables)
        if handles is None:
            return 1
        if not self.lists:
            self.error = 0x3003
            return 0
        handles[:room] = range(1, room + 1)
        return 1

    def _text(self, handle: int, name: int) -> bytes | None:
        self._forget()
        return self._look_up(handle, name, NEEDS.get(name))

    def _attribute(self, handle: int, name: int, value: int) -> int:
        self._forget()
        answer = self._look_up(handle, name, NEEDS[name])
        if answer is not None:
            ctypes.c_ssize_t.from_address(value).value = getattr(answer, "value", answer)
        return answer is not None and not isinstance(answer, Refused)

    def _binary(self, handle: int, name: int, room: int, value: int, size: int) -> int:
        self._forget()
        answer = self._look_up(handle, name, "EGL_EXT_device_persistent_id")
        if answer is not None:
            digits = getattr(answer, "value", answer)
            ctypes.memmove(value, digits, min(room, len(digits)))
            ctypes.c_int.from_address(size).value = len(digits)
        return answer is not None and not isinstance(answer, Refused)

    def _forget(self) -> None:
        """As eglGetError does: it tells of the last call only. What should never have been asked is kept."""
        if self.error != 0xBAD:
            self.error = 0x3000

    def get_error(self) -> int:
        assert self.error != 0xBAD, "a device was asked what its extensions do not allow"
        error, self.error = self.error, 0x3000
        return error


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /sys/class/drm with two cards, a render node, a card that is on no PCI bus, and a broken link."""
    drm = tmp_path / "class" / "drm"
    for node, target in {
        "card0": "pci0000:00/0000:00:01.0/0000:65:00.0",
        "renderD128": "pci0000:00/0000:00:01.0/0000:65:00.0",
        "card1": "pci10000:e0/10000:e1:00.0",
        "card2": "platform/vkms",
    }.items():
        (tmp_path / "devices" / target).mkdir(parents=True, exist_ok=True)
        (drm / node).mkdir(parents=True)
        (drm / node / "device").symlink_to(tmp_path / "devices" / target)
    (drm / "card3").mkdir()
    (drm / "card3" / "device").symlink_to("device")
    monkeypatch.setattr(egl, "_SYSFS_DRM", str(drm))
    return drm


def listed(monkeypatch: pytest.MonkeyPatch, fake: FakeEGL) -> list[Device]:
    monkeypatch.setattr(egl, "_egl", lambda: fake)
    found = enumerate_devices()
    assert fake.error == 0x3000, "an error is left for the caller's next eglGetError"
    return found


def test_a_device_says_all_it_can(monkeypatch: pytest.MonkeyPatch, sysfs: Path) -> None:
    names = b"EGL_NV_device_cuda EGL_EXT_device_drm EGL_EXT_device_drm_render_node EGL_EXT_device_persistent_id"
    full = {
        0x3055: names,
        0x3233: b"/dev/dri/card1",
        0x3377: b"/dev/dri/renderD128",
        0x323A: 5,
        0x335C: bytes.fromhex(uuid_of(4)),
    }
    extensions = tuple(names.decode().split())
    headless = {**full, 0x3233: None}
    software = {0x3055: b"EGL_MESA_device_software"}
    assert listed(monkeypatch, FakeEGL(full, headless, software)) == [
        Device(0, extensions, "/dev/dri/card1", 5, uuid_of(4), "10000:e1:00.0"),
        Device(1, extensions, None, 5, uuid_of(4), "0000:65:00.0"),
        Device(2, ("EGL_MESA_device_software",), None, None, None, None),
    ]


def test_a_device_that_cannot_answer_says_nothing(monkeypatch: pytest.MonkeyPatch, sysfs: Path) -> None:
    names = b"EGL_NV_device_cuda EGL_EXT_device_drm EGL_EXT_device_drm_render_node EGL_EXT_device_persistent_id"
    short, zero = b"\x12" * 8, bytes(16)
    found = listed(
        monkeypatch,
        FakeEGL(
            {0x3055: None},
            {
                0x3055: b"EGL_\xff",
                0x3233: b"/dev/dri/card0",
                0x323A: 3,
                0x335C: b"\x12" * 16,
                0x3377: b"/dev/dri/card0",
            },
            {0x3055: names},
            {0x3055: names, 0x323A: -1, 0x335C: short},
            {0x3055: names, 0x323A: 0, 0x335C: zero, 0x3233: b"/dev/dri/card2", 0x3377: b"/dev/dri/renderD128"},
            {0x3055: names, 0x3233: b"/dev/dri/card3"},
            {0x3055: names, 0x3233: b"/dev/dri/card77"},
            {0x3055: names, 0x3233: b"\xfe"},
            {0x3055: names, 0x3233: b"", 0x323A: Refused(3), 0x335C: Refused(b"\x12" * 16)},
        ),
    )
    assert [device.index for device in found] == list(range(9))
    assert [device.extensions[:1] for device in found[:3]] == [(), ("EGL_\ufffd",), ("EGL_NV_device_cuda",)]
    assert [device.cuda_ordinal for device in found] == [None, None, None, None, 0, None, None, None, None]
    assert [device.uuid for device in found] == [None] * 9
    assert [device.pci for device in found] == [None, None, None, None, "0000:65:00.0", None, None, None, None]
    assert [device.drm_file for device in found[4:]] == [
        "/dev/dri/card2",
        "/dev/dri/card3",
        "/dev/dri/card77",
        "\ufffd",
        None,
    ]


def test_an_egl_without_the_queries(monkeypatch: pytest.MonkeyPatch, sysfs: Path) -> None:
    table = {
        0x3055: b"EGL_NV_device_cuda EGL_EXT_device_drm EGL_EXT_device_persistent_id",
        0x3233: b"/dev/dri/card0",
        0x323A: 1,
        0x335C: b"\x12" * 16,
    }
    fake = FakeEGL(table)
    fake.device_attribute = fake.device_binary = None
    (device,) = listed(monkeypatch, fake)
    assert (device.cuda_ordinal, device.uuid, device.pci) == (None, None, "0000:65:00.0")
    fake.device_string = None
    assert listed(monkeypatch, fake) == [Device(0, (), None, None)]


def test_a_sysfs_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, sysfs: Path) -> None:
    def refuse(path: str) -> str:
        raise PermissionError(path)

    table = {0x3055: b"EGL_EXT_device_drm", 0x3233: b"/dev/dri/card0"}
    assert listed(monkeypatch, FakeEGL(table))[0].pci == "0000:65:00.0"
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "realpath", refuse)
        found = listed(monkeypatch, FakeEGL(table))
    assert [(device.drm_file, device.pci) for device in found] == [("/dev/dri/card0", None)]


def test_devices_that_are_counted_and_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeEGL({0x3055: b""})
    fake.lists = False
    monkeypatch.setattr(egl, "_egl", lambda: fake)
    with pytest.raises(GLUnavailableError, match="0x3003"):
        enumerate_devices()


def test_the_query_is_loaded_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: dict[str, tuple[Any, ...]] = {}
    monkeypatch.setattr(egl._EGL, "_extension", lambda self, name, *types: loaded.setdefault(name, types))
    fresh = egl._EGL()
    number, pointer = ctypes.c_int, ctypes.c_void_p
    assert loaded["eglQueryDeviceBinaryEXT"] == (ctypes.c_uint, pointer, number, number, pointer, pointer)
    assert fresh.device_binary is loaded["eglQueryDeviceBinaryEXT"]
